"""What training is judged by on the way: dev queries against passages, a run reranked, or the order of scored pairs."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from condenser.errors import RunFailed, UserError, sample
from condenser.talk import Meter, say, warn
from eval.evaluation import evaluate
from eval.runs import RunArrays
from eval.sts import correlate
from retrieval.collections import Collection
from retrieval.records import Passage, Query, batched

if TYPE_CHECKING:
    from retrieval.cross_encoder import CrossEncoder
    from retrieval.encoder import Encoder

_MRR_CUTOFF, _RECALL_CUTOFF = 10, 100
_PASSAGES_AT_ONCE = 4096
_QUERIES_AT_ONCE = 512


class DevSearch:
    """A search of a split's queries over a pool of passages, or over the whole corpus.

    A pool is smaller than the corpus, so its figures are higher than test figures: they serve to compare checkpoints
    only. Of the corpus, one block of texts is in memory at a time, and the ids.

    Args:
        collection: gives queries, judgements and passages.
        split: whose queries; those without a positive, or without a text, are left out and counted.
        pool: passages to search: all positives, filled up with a sample; 0 searches the whole corpus.
        seed: of the sample.

    Raises:
        UserError: no query of the split has a positive; and what reading the collection raises.
    """

    def __init__(self, collection: Collection, split: str, *, pool: int, seed: int) -> None:
        self._collection = collection
        qrels = collection.qrels(split)
        self._queries = _answerable(collection, split)
        self._qrels = {query.id: qrels[query.id] for query in self._queries}
        if len(self._queries) < len(qrels):
            warn(f"{len(qrels) - len(self._queries):,} queries of {split} have no positive or no text and are left out")
        self._passages: list[Passage] | None = None
        store = collection.lookup()
        ids = list(store)
        positives = {passage for grades in self._qrels.values() for passage, grade in grades.items() if grade > 0}
        absent = sorted(positives.difference(ids))
        if absent:
            warn(f"{len(absent):,} positives of {split} are not in the corpus and count as not found: {sample(absent)}")
        if pool and pool < len(ids):
            chosen = _sample(ids, positives, pool, seed)
            ids = [passage_id for passage_id in ids if passage_id in chosen]
            self._passages = [store[passage_id] for passage_id in ids]
        self._prefix = "dev" if self._passages is None else "dev_pool"
        by_id = sorted(range(len(ids)), key=ids.__getitem__)  # code points and UTF-8 bytes sort alike
        self._sorted_ids = [ids[row] for row in by_id]
        self._places = np.empty(len(ids), np.uint32)
        self._places[by_id] = np.arange(len(ids), dtype=np.uint32)

    def __call__(self, encoder: Encoder) -> dict[str, float]:
        """Return MRR@10 and recall@100, in the one order of rankings.

        Training's random state and mode are left as they were: nothing is drawn, and `Encoder` puts the mode back.

        Raises:
            RunFailed: the encoder gives vectors that are not numbers.
        """
        result = evaluate(
            self._qrels, self._search(encoder), (f"MRR@{_MRR_CUTOFF}", f"R@{_RECALL_CUTOFF}"), name="the dev search"
        )
        return {
            f"{self._prefix}_mrr@{_MRR_CUTOFF}": result[f"MRR@{_MRR_CUTOFF}"],
            f"{self._prefix}_recall@{_RECALL_CUTOFF}": result[f"R@{_RECALL_CUTOFF}"],
        }

    def _search(self, encoder: Encoder) -> RunArrays:
        queries = _finite(encoder.encode_queries([query.text for query in self._queries]))
        best = np.empty((len(queries), 0), np.uint64)
        with Meter("dev search", len(self._places), "passages") as meter:
            for block in self._blocks():
                vectors = _finite(encoder.encode_passages(block))
                places = self._places[meter.done : meter.done + len(block)]
                parts = []
                for start in range(0, len(queries), _QUERIES_AT_ONCE):
                    some = slice(start, start + _QUERIES_AT_ONCE)
                    keys = np.concatenate([best[some], _keys(queries[some] @ vectors.T, places)], axis=1)
                    parts.append(_largest(keys, _RECALL_CUTOFF))
                best = np.concatenate(parts)
                meter.advance(len(block))
        rows, scores = _places_and_scores(best)
        return RunArrays([query.id for query in self._queries], rows, scores, self._sorted_ids)

    def _blocks(self) -> Iterator[list[Passage]]:
        passages = self._collection.passages() if self._passages is None else self._passages
        return batched(passages, _PASSAGES_AT_ONCE)


class DevRerank:
    """The first hits of a split's queries in the order that a cross-encoder gives them.

    Texts of the hits are in memory, each once.

    Args:
        collection: gives queries, judgements and passages.
        split: whose queries; those without a positive, or without a text, are left out.
        run: a run file; None searches with BM25.
        depth: hits of each query.
        queries: how many queries, a fixed sample; 0 takes all.
        seed: of the sample.

    Raises:
        UserError: no query of the split has a positive, a run without any of them, a hit that is not in the corpus.
    """

    def __init__(
        self, collection: Collection, split: str, *, run: str | None, depth: int, queries: int, seed: int
    ) -> None:
        asked = _answerable(collection, split)
        if queries and queries < len(asked):
            rows = np.random.default_rng([seed, 1]).choice(len(asked), queries, replace=False)
            asked = [asked[row] for row in np.sort(rows).tolist()]
        qrels = collection.qrels(split)
        self._qrels = {query.id: qrels[query.id] for query in asked}
        hits = _bm25_hits(collection, asked, depth) if run is None else _run_hits(run, self._qrels, depth)
        self._hits = {query.id: hits.get(query.id, []) for query in asked}
        store = collection.lookup()
        distinct = dict.fromkeys(passage for found in self._hits.values() for passage in found)
        absent = [passage for passage in distinct if passage not in store]
        if absent:
            raise UserError(f"{len(absent):,} hits are not in the corpus, such as {sample(absent)}", run)
        self._texts = {query.id: query.text for query in asked}
        self._passages = {passage: store[passage] for passage in distinct}
        before = self._figure({one: {p: -float(r) for r, p in enumerate(found)} for one, found in self._hits.items()})
        name = "BM25" if run is None else run
        say(f"dev: the first {depth:,} hits of {name} for {len(asked):,} queries, MRR@10 {before:.4f} as they come")

    def __call__(self, cross: CrossEncoder) -> dict[str, float]:
        """Return MRR@10 of the hits in the order of their scores; training's random state is left as it was.

        Raises:
            RunFailed: the cross-encoder gives scores that are not numbers.
        """
        pairs = [(query, passage) for query, found in self._hits.items() for passage in found]
        texts = [(self._texts[query], cross.passage_text(self._passages[passage])) for query, passage in pairs]
        tokens = cross.tokenize(texts)
        with Meter("dev rerank", len(pairs), "pairs") as meter:
            scores = _finite(cross.score_tokens(tokens, on_batch=meter.advance), "scores")
        run: dict[str, dict[str, float]] = {query: {} for query in self._hits}
        for (query, passage), score in zip(pairs, scores.tolist(), strict=True):
            run[query][passage] = score
        return {f"dev_rerank_mrr@{_MRR_CUTOFF}": self._figure(run)}

    def _figure(self, run: dict[str, dict[str, float]]) -> float:
        metric = f"MRR@{_MRR_CUTOFF}"
        return evaluate(self._qrels, run, (metric,), name="the dev run")[metric]


class DevPairs:
    """The order of a split's scored pairs: Spearman's correlation with the cosines of their vectors.

    Args:
        collection: gives the pairs.
        split: which.

    Raises:
        UserError: fewer than two pairs, or all of one score.
    """

    def __init__(self, collection: Collection, split: str) -> None:
        self._pairs = collection.scored_pairs(split)
        if len({pair.score for pair in self._pairs}) < 2:
            raise UserError(
                f"split {split!r} has {len(self._pairs):,} scored pairs and no two scores: nothing to correlate",
                collection.folder,
            )

    def __call__(self, encoder: Encoder) -> dict[str, float]:
        """Return Spearman's correlation; both texts are encoded as queries, as in training."""
        first = _finite(encoder.encode_queries([pair.first for pair in self._pairs]))
        second = _finite(encoder.encode_queries([pair.second for pair in self._pairs]))
        result = correlate(first, second, [pair.score for pair in self._pairs])
        return {"dev_spearman": result.spearman_cosine}


def _answerable(collection: Collection, split: str) -> list[Query]:
    """Return a split's queries that have a text and a positive."""
    qrels = collection.qrels(split)
    queries = [query for query in collection.queries(split) if max(qrels[query.id].values(), default=0) > 0]
    if not queries:
        raise UserError(f"no query of split {split!r} has a positive", collection.folder)
    return queries


def _run_hits(run: str, wanted: Container[str], depth: int) -> dict[str, list[str]]:
    from retrieval.mining import rankings_of

    hits = {one.query_id: list(one.passage_ids) for one in rankings_of(run, depth) if one.query_id in wanted}
    if not hits:
        raise UserError("holds none of the dev queries", run)
    return hits


def _bm25_hits(collection: Collection, queries: Sequence[Query], depth: int) -> dict[str, list[str]]:
    from retrieval.bm25 import Bm25Index

    index = Bm25Index.build(collection)
    found = index.search([query.text for query in queries], min(depth, len(index)))
    return {query.id: [hit.passage_id for hit in hits] for query, hits in zip(queries, found, strict=True)}


def _sample(ids: Sequence[str], needed: set[str], size: int, seed: int) -> set[str]:
    """Return the needed ids, filled up to ``size`` by a sample of the others."""
    others = [passage_id for passage_id in ids if passage_id not in needed]
    count = min(max(0, size - len(needed)), len(others))
    drawn = np.random.default_rng([seed, 0]).choice(len(others), count, replace=False)
    return needed | {others[row] for row in drawn}


def _finite(numbers: np.ndarray, what: str = "vectors") -> np.ndarray:
    if not np.isfinite(numbers).all():
        raise RunFailed(f"the encoder gives {what} that are not numbers", hint="lower --learning_rate")
    return numbers


def _keys(scores: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return whole numbers that sort as rankings do: by score, equal scores by the place of the id.

    Args:
        scores: (n, m) float32, finite.
        places: (m,) uint32, where each passage's id stands among all ids in ascending order.

    Returns:
        (n, m) uint64: the score in the upper half, the place in the lower one.
    """
    bits = (scores.astype(np.float32) + np.float32(0)).view(np.uint32)  # the sum makes 0.0 of -0.0
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return ascending.astype(np.uint64) << np.uint64(32) | places


def _places_and_scores(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take keys apart again: places (int64) and scores (float32), of the same shape."""
    ascending = (keys >> np.uint64(32)).astype(np.uint32)
    bits = np.where(ascending >> 31, ascending & np.uint32((1 << 31) - 1), ~ascending)
    return (keys & np.uint64((1 << 32) - 1)).astype(np.int64), bits.view(np.float32)


def _largest(keys: np.ndarray, count: int) -> np.ndarray:
    if keys.shape[1] <= count:
        return keys
    return np.partition(keys, keys.shape[1] - count, axis=1)[:, -count:]
