"""The verb ``queries label``: queries with positives and mined negatives to a teacher's scores, and to GPL's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from condenser.artifacts import Workspace, refuse_overwriting, result_config
from condenser.errors import UserError, sample
from condenser.files import atomic_write, parse_record, read_lines
from condenser.manifest import MANIFEST, fingerprint, identity, load_manifest
from condenser.talk import Meter, say, warn
from eval.runs import Qrels
from retrieval.collections import Collection, open_collection
from retrieval.formats.files import FileCollection
from retrieval.formats.negatives import read_negatives
from retrieval.pair_scores import PairScorer
from retrieval.passages import PassageStore, hash64
from retrieval.queries.options import QueriesLabelOptions
from retrieval.queries.pool import QUERIES, check_id, write_corpus
from retrieval.readers import query_of
from retrieval.records import Query
from retrieval.sources import PACKED_SUFFIXES, json_suffix

KIND = "labelled queries"
HARD_NEGATIVES, MARGINS = "hard-negatives.jsonl", "gpl-training-data.tsv"


class Labelled(NamedTuple):
    """A query and the passages that are scored with it.

    Attributes:
        query_id: the query.
        positives: with their grades.
        negatives: by miner; one may have been found by several.
    """

    query_id: str
    positives: dict[str, int]
    negatives: dict[str, list[str]]

    @property
    def all_negatives(self) -> list[str]:
        """The negatives of all miners, each once."""
        return list(dict.fromkeys(one for found in self.negatives.values() for one in found))

    @property
    def asked(self) -> list[str]:
        """The passages, positives first."""
        return [*self.positives, *self.all_negatives]


@dataclass
class _LeftOut:
    """What no pair was made of, and why: ids of queries and of passages."""

    queries: dict[str, list[str]] = field(default_factory=dict)
    passages: dict[str, dict[str, None]] = field(default_factory=dict)
    positives_among_negatives: int = 0

    def query(self, query_id: str, why: str) -> None:
        self.queries.setdefault(why, []).append(query_id)

    def passage(self, passage_id: str, why: str) -> None:
        self.passages.setdefault(why, {})[passage_id] = None


def label(options: QueriesLabelOptions) -> Path:
    """Score queries with their positives and with mined negatives by a cross-encoder.

    Never a negative is a judged positive of its query, a passage that is not in the corpus, or one without a text. Of
    each miner's file the first ``max_negatives`` that are left count. Queries without a positive or without a negative
    are left out, and counted. A killed run goes on after its last block of pairs.

    Returns:
        A folder: the collection of the labelled queries in BEIR's layout, with ``negatives/`` and ``scores/``, which
        `finetune --loss margin_mse` takes as it is; ``hard-negatives.jsonl`` and ``gpl-training-data.tsv`` (query,
        positive, negative, margin), which the GPL package reads. Margins are the positive's score less the negative's
        and may be below zero. Each query has a line for each positive with each negative; they stand in rounds of one
        line of each query in an order drawn anew, because that package trains in the order of the file.

    Raises:
        UserError: files of negatives for other queries, or two of one name; a model that is no cross-encoder; a folder
            of ours whose files were changed; an id that no line of scores can hold; no query left; what reading the
            collection raises.
        RunFailed: a score that is not a number.
    """
    files = _miners(options.negatives_file)
    refuse_overwriting(options.output, options.collection, options.cross_encoder, *options.negatives_file)
    if (Path(options.collection) / MANIFEST).is_file():  # made by one of our verbs: its files must be what they were
        load_manifest(options.collection, verify=True)
    collection = open_collection(options.collection, options.format)
    inputs = {"collection": collection.fingerprint(), "cross_encoder": identity(options.cross_encoder)}
    inputs |= {f"negatives of {name}": fingerprint(file) for name, file in files.items()}
    queries = {query.id: query for query in collection.queries(options.split)}
    qrels = collection.qrels(options.split)
    mined = {name: _mined(file, qrels, options.split) for name, file in files.items()}
    left_out = _LeftOut()
    tasks = list(_tasks(queries, qrels, mined, collection.lookup(), options.max_negatives, left_out))
    for name in (name for task in tasks for name in (task.query_id, *task.asked)):
        check_id(name, options.collection)
    _tell_left_out(left_out, len(tasks), options)
    del mined
    # Imported here, because mistakes up to here should show at once.
    from retrieval.cross_encoder import CrossEncoder
    from retrieval.encoder import resolve_device
    from retrieval.precision import resolve_dtype

    dtype = resolve_dtype(options.dtype, resolve_device(options.device))
    config = result_config(options) | {"dtype": dtype, "miners": list(files)}
    with Workspace(options.output, KIND, config=config, inputs=inputs, resumable=True) as workspace:
        if workspace.done:
            return workspace.output
        model, length = options.cross_encoder, options.max_length
        judge = CrossEncoder.load(model, device=options.device, max_length=length, dtype=dtype)
        texts = {task.query_id: queries[task.query_id].text for task in tasks}
        scorer = PairScorer(judge, texts, collection.lookup(), workspace.scratch, options.batch_tokens)
        scores, pairs, cut = [], 0, 0
        with Meter("queries label", sum(len(task.asked) for task in tasks), "pairs") as meter:
            for _, own, too_long in scorer.score(tasks, meter):
                scores.append(own)
                pairs += len(own)
                cut += too_long
        _write(workspace.path, collection, queries, tasks, scores, options)
        facts = {
            "queries": len(tasks),
            "pairs": pairs,
            "pairs_cut": cut,
            "left_out": {why: len(ids) for why, ids in left_out.queries.items()},
            "miners": {name: sum(len(task.negatives[name]) for task in tasks) for name in files},
            "max_length": judge.config.max_length,
            "query_max_length": judge.config.query_max_length,
            "cross_encoder": model,
            "collection": options.collection,
        }
        output = workspace.commit(facts)
    say(
        f"labelled {len(tasks):,} queries, {pairs:,} pairs, {cut:,} of them cut to fit {judge.config.max_length} tokens"
    )
    return output


def _miners(paths: Sequence[str]) -> dict[str, Path]:
    """Return files of negatives by what they are called without folder and suffix."""
    found: dict[str, Path] = {}
    for path in map(Path, paths):
        name = path.with_suffix("").stem if path.suffix in PACKED_SUFFIXES else path.stem
        if name in found:
            raise UserError(f"is called {name!r}, as is {found[name]}", path, "name files by their miners")
        found[name] = path
    return found


def _mined(file: Path, qrels: Qrels, split: str) -> dict[str, list[str]]:
    found = read_negatives(file, qrels)
    if not found:
        raise UserError("holds no negatives", file, "give a file of `condenser mine`")
    if not found.keys() & qrels.keys():
        raise UserError(f"none of its {len(found):,} queries is judged in split {split!r}: {sample(found)}", file)
    return found


def _tasks(
    queries: Iterable[str],
    qrels: Qrels,
    mined: Mapping[str, Mapping[str, Sequence[str]]],
    passages: PassageStore,
    most: int,
    left_out: _LeftOut,
) -> Iterator[Labelled]:
    """Yield the queries that have a positive and a negative, and note what is left out."""
    usable: dict[str, str] = {}  # why not; empty where it is

    def is_usable(passage: str) -> bool:
        if passage not in usable:
            absent = passage not in passages
            usable[passage] = "not in the corpus" if absent else "blank" if passages.is_blank(passage) else ""
        if usable[passage]:
            left_out.passage(passage, usable[passage])
        return not usable[passage]

    for query_id in queries:
        right = {passage: grade for passage, grade in qrels[query_id].items() if grade > 0}
        positives = {passage: grade for passage, grade in right.items() if is_usable(passage)}
        negatives = {}
        for name, found in mined.items():
            given = dict.fromkeys(found.get(query_id, ()))
            wrong = [passage for passage in given if passage not in right]
            left_out.positives_among_negatives += len(given) - len(wrong)
            negatives[name] = [passage for passage in wrong if is_usable(passage)][:most]
        if not positives:
            left_out.query(query_id, "without a positive")
        elif not any(negatives.values()):
            left_out.query(query_id, "without a negative")
        else:
            yield Labelled(query_id, positives, negatives)


def _tell_left_out(left_out: _LeftOut, kept: int, options: QueriesLabelOptions) -> None:
    """Warn of what is left out; UserError when that is all."""
    reasons = ", ".join(f"{len(ids):,} {why} ({sample(ids)})" for why, ids in left_out.queries.items())
    if not kept:
        raise UserError(f"no query of split {options.split!r} can be labelled: {reasons}", options.collection)
    dropped = sum(map(len, left_out.queries.values()))
    if dropped:
        warn(f"kept {kept:,} of {kept + dropped:,} queries, left out {dropped:,}: {reasons}")
    for why, ids in left_out.passages.items():
        warn(f"left out {len(ids):,} positives and negatives: {why} ({sample(ids)})")
    if left_out.positives_among_negatives:
        warn(f"left out {left_out.positives_among_negatives:,} negatives that are judged positives of their query")


def _write(
    folder: Path,
    collection: Collection,
    queries: Mapping[str, Query],
    tasks: Sequence[Labelled],
    scores: Sequence[np.ndarray],
    options: QueriesLabelOptions,
) -> None:
    split = options.split.replace("/", "-")  # ir_datasets' may hold one
    write_corpus(collection, folder)
    kept = {task.query_id for task in tasks}
    with atomic_write(folder / QUERIES) as stream:
        stream.writelines(_query_lines(collection, options.split, queries, kept))
    with atomic_write(folder / f"qrels/{split}.tsv") as stream:
        stream.write("query-id\tcorpus-id\tscore\n")
        for task in tasks:
            stream.writelines(f"{task.query_id}\t{one}\t{grade}\n" for one, grade in task.positives.items())
    with atomic_write(folder / f"negatives/{split}.jsonl") as stream:
        stream.writelines(_line({"query_id": task.query_id, "negatives": task.all_negatives}) for task in tasks)
    with atomic_write(folder / f"scores/{split}.tsv") as stream:
        for task, own in zip(tasks, scores, strict=True):
            stream.writelines(
                f"{task.query_id}\t{one}\t{score!s}\n" for one, score in zip(task.asked, own, strict=True)
            )
    with atomic_write(folder / HARD_NEGATIVES) as stream:
        for task in tasks:
            stream.write(_line({"qid": task.query_id, "pos": list(task.positives), "neg": task.negatives}))
    with atomic_write(folder / MARGINS) as stream:
        stream.writelines(_margins(tasks, scores, options.seed))


def _query_lines(collection: Collection, split: str, queries: Mapping[str, Query], kept: set[str]) -> Iterator[str]:
    """Yield the lines of the kept queries: as they stand where they stand in one file of JSON lines."""
    layout = collection.layout if isinstance(collection, FileCollection) else None
    files = [] if layout is None else [layout.queries[split]] if split in layout.queries else [*layout.queries.values()]
    if len(files) != 1 or not json_suffix(files[0]):
        for query in queries.values():
            if query.id in kept:
                answers = {"answers": list(query.answers)} if query.answers else {}
                yield _line({"_id": query.id, "text": query.text} | answers)
        return
    for number, line in read_lines(files[0]):
        if not line.strip():
            continue
        where = f"{files[0]}:{number}"
        if query_of(parse_record(line, where), where).id in kept:
            yield f"{line}\n"


def _margins(tasks: Sequence[Labelled], scores: Sequence[np.ndarray], seed: int) -> Iterator[str]:
    """Yield a line for each positive of each query with each of its negatives, in rounds; see `label`."""
    pairs = [len(task.positives) * (len(own) - len(task.positives)) for task, own in zip(tasks, scores, strict=True)]
    orders = [
        np.random.default_rng([seed, hash64(task.query_id)]).permutation(count).astype(np.int32)
        for task, count in zip(tasks, pairs, strict=True)
    ]
    left = np.array(pairs)
    for turn in range(int(left.max())):
        those = np.flatnonzero(left > turn)
        for number in np.random.default_rng([seed, turn]).permutation(those).tolist():
            task, own = tasks[number], scores[number]
            right, wrong = divmod(int(orders[number][turn]), len(own) - len(task.positives))
            wrong += len(task.positives)
            asked = task.asked
            # Of the numbers as they stand in the file of scores, so that both say the same to the last digit.
            margin = float(str(own[right])) - float(str(own[wrong]))
            yield f"{task.query_id}\t{asked[right]}\t{asked[wrong]}\t{margin!r}\n"


def _line(record: dict[str, Any]) -> str:
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode()
