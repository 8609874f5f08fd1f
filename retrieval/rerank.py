"""The first hits of a run in the order that a cross-encoder gives them: the verb ``rerank``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from condenser.artifacts import Workspace, refuse_one_file, refuse_overwriting, result_config
from condenser.errors import UserError, sample
from condenser.files import atomic_write, existing_file, write_json
from condenser.manifest import fingerprint, identity
from condenser.talk import Meter, say, warn
from eval.runs import place_of, write_run
from retrieval.collections import open_collection
from retrieval.mining import rankings_of
from retrieval.options import RerankOptions
from retrieval.pair_scores import PairScorer
from retrieval.records import Hit


class _Task(NamedTuple):
    """A query with its hits, best first, and the passages to score: its first hits, maybe its positives behind them."""

    query_id: str
    hits: Sequence[str]
    asked: list[str]


@dataclass
class _Counts:
    """What is said of a run at the end, and what is found before the model is loaded."""

    queries: int = 0
    pairs: int = 0
    cut: int = 0
    below: int = 0
    other_queries: set[str] = field(default_factory=set)
    missing_queries: list[str] = field(default_factory=list)


def rerank(options: RerankOptions) -> Path:
    """Score the first hits of each query of a run with a cross-encoder, and write the run in their new order.

    Hits below the depth follow in the order they had, so that recall at greater depths stays what it was; their
    scores go down by 1 from the lowest that the cross-encoder gave. ``RUN.json`` says what made the run. Scores are
    kept beside it while the work lasts, and a killed run goes on with them.

    Returns:
        The run file.

    Raises:
        UserError: a model that is no cross-encoder, a query or a passage of the run that the collection lacks, and
            what reading run and collection raises.
    """
    if options.scores is not None and options.split is None:
        raise UserError("--scores needs --split, whose positives are scored too: a teacher compares with them")
    for written in filter(None, (options.output, options.scores)):
        refuse_overwriting(written, options.run, options.model, options.collection)
    refuse_one_file(options.scores, options.output)
    existing_file(options.run)
    job = _Job(options)
    with ExitStack() as stack:
        scores = stack.enter_context(atomic_write(options.scores)) if options.scores else None
        # The rows are made while the file is open: an output that cannot be written is found before the work.
        write_run(options.output, job.rows(scores), tag="rerank")
    write_json(f"{options.output}.json", job.made_by)
    shutil.rmtree(job.work)
    return Path(options.output)


class _Job:
    """Goes through a run block by block."""

    def __init__(self, options: RerankOptions) -> None:
        self.work = Path(f"{options.output}.work")
        self.made_by: dict[str, Any] = {}
        self._options = options
        self._collection = open_collection(options.collection, options.format, skip_bad=options.skip_bad)
        self._queries = {query.id: query.text for query in self._collection.queries(options.split)}
        self._passages = self._collection.lookup()
        self._positives: dict[str, list[str]] = {}
        if options.scores is not None:
            for query, grades in self._collection.qrels(str(options.split)).items():
                right = [passage for passage, grade in grades.items() if grade > 0 and passage in self._passages]
                self._positives[query] = right
        self._counts = _Counts()

    def rows(self, scores: TextIO | None) -> Iterator[tuple[str, list[Hit]]]:
        """Yield each query's hits in their new order, and write the scores of its pairs down."""
        counts = self._counts
        total = self._look_through()
        # Imported here, because mistakes up to here should show at once.
        from retrieval.cross_encoder import CrossEncoder
        from retrieval.encoder import resolve_device
        from retrieval.precision import resolve_dtype

        options = self._options
        dtype = resolve_dtype(options.dtype, resolve_device(options.device))
        inputs = {
            "model": identity(options.model),
            "run": fingerprint(options.run),
            "collection": self._collection.fingerprint(),
        }
        config = result_config(options) | {"dtype": dtype, "positives": scores is not None}
        workspace = Workspace(self.work, "scores of pairs", config=config, inputs=inputs, resumable=True)
        with workspace, Meter("rerank", total, "pairs") as meter:
            judge = CrossEncoder.load(options.model, device=options.device, max_length=options.max_length, dtype=dtype)
            folder = workspace.output if workspace.done else workspace.path
            scorer = PairScorer(judge, self._queries, self._passages, folder, options.batch_tokens)
            for task, own, cut in scorer.score(self._tasks(), meter):
                counts.queries += 1
                counts.pairs += len(own)
                counts.cut += cut
                if scores is not None:
                    pairs = zip(task.asked, own, strict=True)
                    scores.writelines(f"{task.query_id}\t{one}\t{score!s}\n" for one, score in pairs)
                yield task.query_id, self._reordered(task, own)
            if not workspace.done:
                workspace.commit({"pairs": counts.pairs})
        config_of_pairs = {"max_length": judge.config.max_length, "query_max_length": judge.config.query_max_length}
        self.made_by |= {
            "model": options.model,
            "model_fingerprint": inputs["model"],
            "run": options.run,
            "run_fingerprint": inputs["run"],
            "collection": options.collection,
            "split": options.split,
            "depth": options.depth,
            "below": options.below,
            "dtype": dtype,
            **config_of_pairs,
            "queries": counts.queries,
            "pairs": counts.pairs,
            "pairs_cut": counts.cut,
        }
        self._tell(judge.config.max_length)

    def _tasks(self) -> Iterator[_Task]:
        for ranking in rankings_of(self._options.run, None):
            if ranking.query_id in self._queries:
                first = list(ranking.passage_ids[: self._options.depth])
                known = set(first)
                others = [one for one in self._positives.get(ranking.query_id, ()) if one not in known]
                yield _Task(ranking.query_id, ranking.passage_ids, first + others)
            elif self._options.split is None:
                where = place_of(self._options.run, ranking.query_id, ranking.passage_ids[0])
                what = f"query {ranking.query_id!r} is not in {self._options.collection}"
                raise UserError(what, where, "is this a run of another collection?")
            else:
                self._counts.other_queries.add(ranking.query_id)

    def _look_through(self) -> int:
        """Return how many pairs there are to score.

        Raises:
            UserError: a query or passage that is not in the collection, no query of the split.
        """
        present: set[str] = set()
        met: set[str] = set()
        total = 0
        for task in self._tasks():
            for passage in task.asked:
                if passage not in present:
                    if passage not in self._passages:
                        where = place_of(self._options.run, task.query_id, passage)
                        what = f"passage {passage!r} is not in {self._options.collection}"
                        raise UserError(what, where, "is this a run of another collection?")
                    present.add(passage)
            met.add(task.query_id)
            total += len(task.asked)
        if not met:
            which = "the collection" if self._options.split is None else f"split {self._options.split!r}"
            raise UserError(f"holds no query of {which}: {sample(self._queries)}", self._options.run)
        blank = sum(map(self._passages.is_blank, present))
        if blank:
            warn(f"{blank:,} passages have neither title nor text, and are scored so")
        if self._options.split is not None:
            self._counts.missing_queries = [query for query in self._queries if query not in met]
        return total

    def _reordered(self, task: _Task, scores: np.ndarray) -> list[Hit]:
        """Return a query's hits in house order of their new scores, those below the depth behind them."""
        first, rest = task.hits[: self._options.depth], task.hits[self._options.depth :]
        scored = sorted(zip(scores.tolist(), (one.encode() for one in first), strict=False), reverse=True)
        hits = [Hit(passage.decode(), score) for score, passage in scored]
        self._counts.below += len(rest)
        if self._options.below == "keep":
            hits += [Hit(passage, hits[-1].score - place) for place, passage in enumerate(rest, 1)]
        return hits

    def _tell(self, max_length: int) -> None:
        counts, options = self._counts, self._options
        notes = [f"reranked the first {options.depth:,} hits of {counts.queries:,} queries", f"{counts.pairs:,} pairs"]
        notes.append(f"{counts.cut:,} of them cut to fit {max_length} tokens")
        if counts.below:
            kept = "kept behind them" if options.below == "keep" else "dropped"
            notes.append(f"{counts.below:,} hits below {kept}")
        say(", ".join(notes))
        if counts.other_queries:
            say(
                f"left out {len(counts.other_queries):,} queries of the run that split {options.split!r} does not judge"
            )
        if counts.missing_queries:
            missing = counts.missing_queries
            say(f"{len(missing):,} queries of split {options.split!r} are not in the run: {sample(missing)}")
