"""BM25 in Lucene's variant: the baseline that every dense run is read against, and a source of hard negatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bm25s
import numpy as np
import orjson
import Stemmer

from condenser.artifacts import Workspace, refuse_overwriting, result_config
from condenser.errors import UserError, first_line
from condenser.files import atomic_write_bytes, write_json
from condenser.manifest import fingerprint, load_manifest
from condenser.talk import Meter, say, track
from eval.runs import write_run
from retrieval.collections import open_collection
from retrieval.formats.base import Collection
from retrieval.lucene import LuceneIndex, write_lucene
from retrieval.options import Bm25Engine, Bm25Fields, Bm25IndexOptions, Bm25Options, Bm25SearchOptions
from retrieval.pyserini_sets import find_queries
from retrieval.records import Hit, Passage, Query, batched
from retrieval.vectors import check_ids

K1, B = 0.9, 0.4

_IDS = "ids.json"
_SETTINGS = ("engine", "k1", "b", "fields")
_FACTS = {"passages": int, "engine": str, "k1": float, "b": float, "fields": str}
_LUCENE = "lucene"  # the folder of Lucene's files, and the engine's name
_PASSAGES_AT_ONCE = 10_000
_QUERIES_AT_ONCE = 256


class Bm25Index:
    """An inverted index over passages, with English stop words and the Snowball English stemmer.

    The score of a passage is the sum over the query's words of

        idf * tf / (tf + k1 * (1 - b + b * length / mean length)),   idf = ln(1 + (N - df + 0.5) / (df + 0.5))

    (Lucene's BM25; Kamphuis et al., Which BM25 Do You Mean?, ECIR 2020), in float32. A word that the query
    repeats counts as often as it stands there. Every passage that shares a word with the query is scored.

    Args:
        passage_ids: in descending order of their bytes, so that equal scores come out in house order by position.
        index: bm25s's index, a row for each id.
        facts: how it was made: ``engine``, ``k1``, ``b``, ``fields``.
    """

    def __init__(self, passage_ids: Sequence[str], index: bm25s.BM25, facts: dict[str, Any]) -> None:
        self.passage_ids = passage_ids
        self.facts = facts
        self._index = index

    @classmethod
    def build(
        cls, passages: Collection | Iterable[Passage], *, k1: float = K1, b: float = B, fields: Bm25Fields = "both"
    ) -> Bm25Index:
        """Index a collection, or passages with unique ids; what stays in memory are word numbers, not texts.

        Args:
            passages: what is searched.
            k1: how soon repetitions of a word stop adding to the score.
            b: how much long passages are held back, from 0 to 1.
            fields: what of a passage is searched: title and text, or one of them.

        Raises:
            UserError: k1 or b out of range, no passages, or nothing but stop words in them.
        """
        if not k1 >= 0 or not 0 <= b <= 1:
            raise UserError(f"k1 is {k1} and b is {b}, expected k1 >= 0 and b between 0 and 1")
        source = passages if isinstance(passages, Collection) else None
        if isinstance(passages, Collection):
            passages = passages.passages()
        ids: list[str] = []
        rows: list[list[int]] = []
        vocabulary: dict[str, int] = {}
        for block in batched(track(passages, "bm25 index", unit="passages"), _PASSAGES_AT_ONCE):
            ids += [passage.id for passage in block]
            for words in stems([_searched(passage, fields) for passage in block]):
                rows.append([vocabulary.setdefault(word, len(vocabulary)) for word in words])
        if not ids:
            raise UserError("no passages to search")
        if not vocabulary:
            raise UserError(
                f"none of the {len(ids):,} passages has a word to search for: they are empty or of stop words",
                None if source is None else source.folder,
            )
        order = sorted(range(len(ids)), key=lambda row: ids[row].encode(), reverse=True)
        index = bm25s.BM25(method="lucene", k1=k1, b=b, backend="numpy", csc_backend="numpy")
        index.index(([rows[row] for row in order], vocabulary), create_empty_token=False, show_progress=False)
        return cls([ids[row] for row in order], index, _facts("bm25s", k1, b, fields))

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> Bm25Index:
        """Open a folder made by `condenser bm25 index`; its arrays are memory-mapped.

        Args:
            folder: the index.
            verify: compare the files with their SHA-256 before they are opened.

        Raises:
            UserError: no such folder, an index of Lucene's, a file missing or damaged.
        """
        folder = Path(folder)
        facts = load_manifest(folder, "bm25", verify=verify, facts=_FACTS)["facts"]
        if facts["engine"] != "bm25s":
            raise UserError(f"was built with engine {facts['engine']}, expected bm25s", folder)
        try:
            index = bm25s.BM25.load(folder, mmap=True)
            ids = check_ids(orjson.loads((folder / _IDS).read_bytes()), folder / _IDS)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError) as error:
            raise UserError(
                f"is not an index that bm25s opens ({first_line(error)})", folder, "build it anew"
            ) from None
        if not len(ids) == index.scores["num_docs"] == facts["passages"]:
            raise UserError(f"holds {len(ids):,} ids, but {index.scores['num_docs']} passages", folder, "build it anew")
        return cls(ids, index, {name: facts[name] for name in _SETTINGS})

    def save(self, folder: str | Path) -> None:
        """Write the index into a folder: bm25s's own files, which it opens too, and the ids of the rows."""
        self._index.save(folder, show_progress=False)
        with atomic_write_bytes(Path(folder) / _IDS) as stream:
            stream.write(orjson.dumps(self.passage_ids))

    def __len__(self) -> int:
        return len(self.passage_ids)

    def search(self, queries: Iterable[str], k: int) -> list[list[Hit]]:
        """Return each query's k best passages, in house order (score descending, then passage id descending).

        A passage that shares no word with the query is no hit, so a list may be shorter than k, or empty.
        """
        return [self._best(words, k) for words in stems(list(queries))]

    def _best(self, words: list[str], k: int) -> list[Hit]:
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        found = np.flatnonzero(scores)
        if k < len(found):
            # All that tie with the k-th stay in until they are sorted.
            found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
        best = found[np.argsort(-scores[found], kind="stable")[:k]]
        return [
            Hit(self.passage_ids[row], score) for row, score in zip(best.tolist(), scores[best].tolist(), strict=True)
        ]


def build_bm25(options: Bm25IndexOptions) -> Path:
    """Index the passages of a collection.

    Returns:
        The folder.

    Raises:
        UserError: what the collection lacks, and what `Bm25Index.build` refuses.
    """
    collection = open_collection(options.collection, options.format, skip_bad=options.skip_bad)
    with Workspace(
        options.output,
        "bm25",
        config=result_config(options),
        inputs={"corpus": collection.corpus_fingerprint()},
    ) as workspace:
        if not workspace.done:
            index = _build(collection, options.engine, workspace.path, options.k1, options.b, options.fields)
            if isinstance(index, Bm25Index):
                index.save(workspace.path)
            workspace.commit({**index.facts, "passages": len(index), "collection": collection.name})
            say(f"bm25: {len(index):,} passages indexed")
    return workspace.output


def search_bm25(options: Bm25Options) -> Path:
    """Search the queries judged in a split of a collection over its passages and write the run.

    Returns:
        The run file.

    Raises:
        UserError: what the collection lacks.
    """
    return search_index(
        Bm25SearchOptions(
            collection=options.collection,
            format=options.format,
            split=options.split,
            output=options.output,
            k=options.k,
            k1=options.k1,
            b=options.b,
        )
    )


def search_index(options: Bm25SearchOptions) -> Path:
    """Search an index, or the passages of a collection, and write the run with ``RUN.json``: what made it.

    Returns:
        The run file.

    Raises:
        UserError: options that do not go together, and what reading collection, queries and index raises.
    """
    if options.queries is None and options.collection is None:
        raise UserError("give --queries or --collection")
    if options.index is None and options.collection is None:
        raise UserError("give --index, or the --collection whose passages are searched")
    if options.format != "auto" and options.collection is None:
        raise UserError("--format goes with --collection")
    if options.queries is not None and options.split is not None:
        raise UserError("--split chooses queries of a collection, but --queries is given")
    if options.queries is not None and options.index is not None and options.collection is not None:
        raise UserError("with --index, give one of --queries and --collection")
    refuse_overwriting(options.output, options.index, options.queries, options.collection)
    made_by: dict[str, Any] = {}
    # The rows are made while the file is open: an output that cannot be written is found before the work.
    write_run(options.output, _rows(options, made_by), tag="bm25")
    write_json(f"{options.output}.json", made_by)
    return Path(options.output)


def _rows(options: Bm25SearchOptions, made_by: dict[str, Any]) -> Iterator[tuple[str, list[Hit]]]:
    queries = _queries(options)
    empty = 0
    with _opened(options, made_by) as index, Meter("bm25", len(queries), "queries") as meter:
        if options.k > len(index):
            say(f"k lowered from {options.k:,} to the {len(index):,} passages there are")
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            block = queries[start : start + _QUERIES_AT_ONCE]
            for query, hits in zip(block, index.search([query.text for query in block], options.k), strict=True):
                empty += not hits
                yield query.id, hits
            meter.advance(len(block))
        say(f"bm25: {len(queries):,} queries over {len(index):,} passages, {empty:,} without a hit")
        made_by |= index.facts | {
            "passages": len(index),
            "k": options.k,
            "collection": options.collection,
            "queries": options.queries,
            "split": options.split,
        }


def _queries(options: Bm25SearchOptions) -> list[Query]:
    if options.queries is not None:
        return find_queries(options.queries)
    return list(open_collection(str(options.collection), options.format).queries(options.split))


@contextmanager
def _opened(options: Bm25SearchOptions, made_by: dict[str, Any]) -> Iterator[Bm25Index | LuceneIndex]:
    """Open the index, or make one of the collection's passages that is gone afterwards."""
    if options.index is None:
        collection = open_collection(str(options.collection), options.format)
        made_by["collection_fingerprint"] = collection.fingerprint()
        settings = (
            K1 if options.k1 is None else options.k1,
            B if options.b is None else options.b,
            options.fields or "both",
        )
        with TemporaryDirectory() as scratch:
            yield _build(collection, options.engine or "bm25s", Path(scratch), *settings)
        return
    facts = load_manifest(options.index, "bm25", facts=_FACTS)["facts"]
    for name in _SETTINGS:
        given = getattr(options, name)
        if given is not None and given != facts[name]:
            raise UserError(
                f"was built with {name} {facts[name]}, --{name} is {given}",
                options.index,
                "leave the option out, or build another index",
            )
    made_by |= {"index": options.index, "index_fingerprint": fingerprint(options.index)}
    if facts["engine"] == _LUCENE:
        yield LuceneIndex(Path(options.index) / _LUCENE, {name: facts[name] for name in _SETTINGS})
    else:
        yield Bm25Index.load(options.index)


def _build(
    collection: Collection, engine: Bm25Engine, folder: Path, k1: float, b: float, fields: Bm25Fields
) -> Bm25Index | LuceneIndex:
    """Index a collection; Lucene's files go into ``folder``."""
    if engine == "bm25s":
        return Bm25Index.build(collection, k1=k1, b=b, fields=fields)
    write_lucene(collection.passages(), folder / _LUCENE, partial(_searched, fields=fields))
    return LuceneIndex(folder / _LUCENE, _facts(engine, k1, b, fields))


def _facts(engine: Bm25Engine, k1: float, b: float, fields: Bm25Fields) -> dict[str, Any]:
    return {"engine": engine, "k1": float(k1), "b": float(b), "fields": fields}


def _searched(passage: Passage, fields: Bm25Fields) -> str:
    if fields == "both":
        return passage.whole
    return passage.title if fields == "title" else passage.text


def stems(texts: list[str]) -> list[list[str]]:
    """Return each text's words as they are indexed: without stop words, stemmed, repeats and all."""
    words: list[list[str]] = bm25s.tokenize(
        texts, stopwords="en", stemmer=Stemmer.Stemmer("english"), return_ids=False, show_progress=False
    )
    return words
