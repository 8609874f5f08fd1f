"""Pseudo-relevance feedback: a query moves towards the passages that it finds first, and searches again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from retrieval.exact import ExactVectors
from retrieval.index import Index
from retrieval.recall import exact_twin


def rocchio(
    queries: np.ndarray,
    passages: np.ndarray,
    found: np.ndarray,
    *,
    alpha: float = 1.0,
    beta: float = 0.5,
    normalize: bool = False,
) -> np.ndarray:
    """Return alpha * query + beta * mean of the passages that the query found.

    Rocchio's formula over vectors, with what is found first taken for relevant (Li et al., Pseudo Relevance Feedback
    with Deep Language Models and Dense Retrievers, TOIS 2023).

    Args:
        queries: (q, dimension).
        passages: (q, n, dimension), the first n of each query.
        found: (q, n), which of them are there; a query without any stays as it is, but for alpha.
        alpha: weight of the query.
        beta: weight of the passages.
        normalize: scale what comes out to length 1.

    Returns:
        float32 (q, dimension).
    """
    counts = np.maximum(found.sum(axis=1), 1)[:, None]
    mean = np.where(found[:, :, None], passages.astype(np.float64), 0).sum(axis=1) / counts
    moved = alpha * queries.astype(np.float64) + beta * mean
    if normalize:
        moved /= np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return moved.astype(np.float32)


class Feedback:
    """Moves queries towards the first passages that an index finds for them.

    The passages' vectors are those that are stored: an approximate index finds them, and those it was made from move
    the queries. They come out of length 1 where the encoder makes them so.

    Args:
        index: what is searched.
        passages: how many of the first count.
        weight: of their mean, beside the query with weight 1.
        ignore_self: a hit whose id is the query's own does not count.

    Raises:
        UserError: an approximate index whose vectors are gone or have changed.
    """

    def __init__(self, index: Index, passages: int, weight: float, *, ignore_self: bool = False) -> None:
        self.index = index
        self.passages = passages
        self.weight = weight
        self.ignore_self = ignore_self
        self._exact = index if index.exact else exact_twin(index)
        self._store = cast(ExactVectors, self._exact.store)

    def __call__(self, query_ids: Sequence[str], queries: np.ndarray) -> np.ndarray:
        """Return the queries (q, dimension) as they search again."""
        rows, _ = self.index.search_rows(queries, min(self.passages + self.ignore_self, len(self.index)))
        if self.ignore_self:
            own = [
                [row >= 0 and self.index.ids[row] == name for row in some]
                for name, some in zip(query_ids, rows.tolist(), strict=True)
            ]
            rows = np.where(own, -1, rows)
        # The first that are left, in their order.
        rows = np.take_along_axis(rows, np.argsort(rows < 0, axis=1, kind="stable"), axis=1)[:, : self.passages]
        found = rows >= 0
        vectors = np.zeros((*rows.shape, self.index.dimension), dtype=np.float32)
        vectors[found] = stored_vectors(self._store, self._stored_rows(rows[found]))
        normalize = bool(self.index.facts.get("normalize"))
        return rocchio(queries, vectors, found, beta=self.weight, normalize=normalize)

    def _stored_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return where the passages of the index's ``rows`` lie among the stored vectors."""
        if self._exact is self.index:
            return rows
        names = [self.index.ids[row] for row in rows.tolist()]
        wanted, dead = set(names), set(self._exact.deleted.tolist())
        places = {name: row for row, name in enumerate(self._exact.ids) if name in wanted and row not in dead}
        return np.array([places[name] for name in names], dtype=np.int64)


def stored_vectors(store: ExactVectors, rows: np.ndarray) -> np.ndarray:
    """Return the float32 vectors (n, dimension) of rows (n,)."""
    starts = np.cumsum([0, *map(len, store.shards)])
    shards = np.searchsorted(starts, rows, side="right") - 1
    vectors = np.empty((len(rows), store.dimension), dtype=np.float32)
    for number in np.unique(shards).tolist():
        here = shards == number
        vectors[here] = store.shards[number][rows[here] - starts[number]]
    return vectors
