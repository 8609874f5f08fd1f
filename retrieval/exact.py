"""Exact search: inner products with every stored vector, block by block, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from condenser.errors import UserError
from retrieval.vectors import Matrix

Backend = Literal["auto", "numpy", "faiss", "torch"]

# Up to so many multiplications OpenBLAS multiplies without first copying the vectors into another order, which for
# few queries takes longer than the product itself.
_SMALL_PRODUCT = 800_000
_TILE_ROWS = 1024
_PANEL = 1 << 16  # inner products looked at together: they should not leave the cache
_FEW_QUERIES = 4  # for fewer, FAISS's own loops beat any matrix product
_FAISS_ROWS = 1 << 16
_PAIRS_AT_ONCE = 512
_THIN_OUT_AT = 2.5


class Store(Protocol):
    """What an index fetches candidates from: vectors searched exactly, or a FAISS index."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""

    def __len__(self) -> int: ...

    def fetch(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best ``(scores, rows)``, each (q, count), in no order; -inf and -1 where there are no more."""

    def rescore(self, queries: np.ndarray, query: np.ndarray, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return the final scores of pairs (``query[i]``, ``rows[i]``) that were fetched with ``scores``."""

    def rounding(self, queries: np.ndarray) -> np.ndarray:
        """Bound, per query, how far a fetched score may be from the final one."""


class ExactVectors:
    """Stored vectors, searched exactly.

    The final score of a passage is the float64 inner product of the float32 vectors, as float32. It depends on the
    query and the passage alone: shards, batches, threads, devices and backends do not show in it.

    Args:
        shards: matrices (rows, dimension) in the order of their rows; see `retrieval.vectors.Matrix`.
        dimension: length of a vector.
        backend: ``numpy`` multiplies with BLAS; ``faiss`` uses `faiss.knn`; ``torch`` is for GPUs; ``auto`` is torch
            on a GPU, else numpy, with FAISS's loops for very few queries where it is installed.
        device: ``cpu``, ``cuda`` for all GPUs that are visible, or ``auto``.
        float16: on a GPU, keep the vectors in half the memory; scores stay exact.
        max_norm: length of the longest vector; None reads all of them when it is first needed.
    """

    def __init__(
        self,
        shards: Sequence[Matrix],
        dimension: int,
        *,
        backend: Backend = "auto",
        device: str = "cpu",
        float16: bool = False,
        max_norm: float | None = None,
    ) -> None:
        if device == "auto":
            device = _gpu_if_there() if backend in ("auto", "torch") else "cpu"
        if device != "cpu" and backend not in ("auto", "torch"):
            raise UserError(f"--backend {backend} searches on the CPU", hint="on a GPU use --backend torch")
        self.shards = list(shards)
        self.dimension = dimension
        self.backend = "torch" if device != "cpu" else backend
        self._starts = np.cumsum([0, *map(len, self.shards)])
        self._torch: Any = None
        if self.backend == "torch":
            from retrieval.exact_torch import TorchBlocks

            self._torch = TorchBlocks(self.shards, dimension, device, float16=float16)
        self._given_norm = max_norm

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def max_norm(self) -> float:
        """Length of the longest vector."""
        return longest(block for _, block in self.blocks()) if self._given_norm is None else self._given_norm

    def blocks(self, rows: int = 8192) -> Iterator[tuple[int, np.ndarray]]:
        """Yield ``(first row, float32 vectors)`` over all vectors, at most ``rows`` at a time."""
        for first, shard in zip(self._starts.tolist(), self.shards, strict=False):
            for start in range(0, len(shard), rows):
                yield first + start, shard[start : start + rows]

    def fetch(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best ``(scores, rows)``, each (q, count), in no order; -inf and -1 where there are no more."""
        if self._torch is not None:
            found: tuple[np.ndarray, np.ndarray] = self._torch.fetch(queries, count)
            return found
        if self.backend == "faiss" or (self.backend == "auto" and len(queries) < _FEW_QUERIES and _has_faiss()):
            return self._fetch_faiss(queries, count)
        return self._fetch_blas(queries, count)

    def rescore(self, queries: np.ndarray, query: np.ndarray, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return the final scores of the pairs (``query[i]``, ``rows[i]``).

        Products of float32 are exact in float64, and each row is summed in the same order wherever it stands: equal
        passages get equal scores.
        """
        final = np.empty(len(rows), dtype=np.float32)
        wide = queries.astype(np.float64)
        order = np.argsort(rows, kind="stable")  # as they lie on the disk
        bounds = np.searchsorted(rows[order], self._starts)
        for number, shard in enumerate(self.shards):
            for start in range(bounds[number], bounds[number + 1], _PAIRS_AT_ONCE):
                some = order[start : min(start + _PAIRS_AT_ONCE, bounds[number + 1])]
                vectors = shard[rows[some] - self._starts[number]].astype(np.float64)
                final[some] = np.vecdot(vectors, wide[query[some]])
        return final

    def rounding(self, queries: np.ndarray) -> np.ndarray:
        """Bound the error of a float32 inner product of each query with any vector, in whatever order it is summed."""
        unit, smallest = (self.dimension + 1) * 2.0**-24, 0.0
        if self._torch is not None and self._torch.halved:
            unit += 2.0**-11  # float16 has 11 bits,
            smallest = np.sqrt(self.dimension) * 2.0**-25  # and ends at 2^-24
        return (unit * self.max_norm + smallest) * np.linalg.norm(queries.astype(np.float64), axis=1)

    def _fetch_blas(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Multiply tiles of vectors with all queries; what passes a query's threshold is kept."""
        columns = np.ascontiguousarray(queries.T)
        width = len(queries)
        tile = int(np.clip(_SMALL_PRODUCT // (width * self.dimension), 64, _TILE_ROWS)) if width <= 32 else _TILE_ROWS
        panel = tile * max(1, _PANEL // (tile * width))
        best = Best(width, count, panel)
        products = np.empty((panel, width), dtype=np.float32)
        for start, block in self.blocks(panel):
            for first in range(0, len(block), tile):
                np.matmul(block[first : first + tile], columns, out=products[first : min(first + tile, len(block))])
            best.offer(start, products[: len(block)])
        return best.result()

    def _fetch_faiss(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        from retrieval.faiss_index import load_faiss

        faiss = load_faiss()
        # Release 1.15.1 multiplies without BLAS as long as queries x dimension is below 128,000, which is up to
        # twelve times slower; only for few queries is it the faster way.
        faiss.cvar.distance_compute_blas_threshold = _FEW_QUERIES * self.dimension
        best = Best(len(queries), count, max(count, _PANEL // len(queries)))
        for start, block in self.blocks(_FAISS_ROWS):
            block = np.ascontiguousarray(block)
            scores, rows = faiss.knn(queries, block, min(count, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
            best.add(scores, np.where(rows >= 0, rows + start, -1))
        return best.result()


class Best:
    """The best candidates of each query so far, in two arrays that are thinned out when they are full.

    Args:
        queries: how many.
        count: candidates kept of each.
        most: how many more may come in one call.
    """

    def __init__(self, queries: int, count: int, most: int) -> None:
        self._count = count
        self._scores = np.full((queries, count + max(count, most)), -np.inf, dtype=np.float32)
        self._rows = np.full(self._scores.shape, -1, dtype=np.int64)
        self._filled = np.zeros(queries, dtype=np.int64)
        self._threshold = np.full(queries, -np.inf, dtype=np.float32)
        self._passed = np.empty((most, queries), dtype=bool)

    def offer(self, start: int, products: np.ndarray) -> None:
        """Take what is good enough of ``products`` (rows, queries), whose first row is number ``start``."""
        if not self._filled.any():
            self.add(products.T, np.broadcast_to(np.arange(start, start + len(products)), products.T.shape))
            return
        # Into memory that is there already: asking the system for more takes longer than comparing.
        np.greater(products, self._threshold, out=self._passed[: len(products)])
        passed = np.flatnonzero(self._passed[: len(products)])
        if not len(passed):
            return
        row = passed // len(self._filled)
        query = passed - row * len(self._filled)
        new = np.bincount(query, minlength=len(self._filled))
        if (self._filled + new).max() > self._scores.shape[1]:
            self._thin_out()
            self.offer(start, products)  # with higher thresholds, and room for all
            return
        # By query, and so that numbers of 16 bits are sorted by counting.
        order = np.argsort(query.astype(np.uint16) if len(new) < 1 << 16 else query, kind="stable")
        row, query = row[order], query[order].astype(np.int64, copy=False)
        place = np.arange(len(row)) + np.repeat(self._filled - np.cumsum(new) + new, new)
        place += query * self._scores.shape[1]
        self._scores.reshape(-1)[place] = products.reshape(-1)[passed[order]]
        self._rows.reshape(-1)[place] = row + start
        self._filled += new
        if self._filled.mean() > _THIN_OUT_AT * self._count:  # so that thresholds rise early
            self._thin_out()

    def add(self, scores: np.ndarray, rows: np.ndarray) -> None:
        """Take all candidates of ``scores`` and ``rows``, each (queries, m)."""
        if self._filled.max(initial=0) + scores.shape[1] > self._scores.shape[1]:
            self._thin_out()
        start = int(self._filled.max(initial=0))
        stop = start + scores.shape[1]
        self._scores[:, start:stop], self._rows[:, start:stop] = scores, rows
        self._filled[:] = stop
        if start == 0:
            self._thin_out()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(scores, rows)``, each (queries, count), in no order; -inf and -1 where there are fewer."""
        self._thin_out()
        return self._scores[:, : self._count], self._rows[:, : self._count]

    def _thin_out(self) -> None:
        width = int(self._filled.max(initial=0))
        if width <= self._count:
            return
        scores = self._scores[:, :width]
        # Values are parted ten times faster than places are.
        worst = np.partition(scores, width - self._count, axis=1)[:, width - self._count, None]
        kept = scores >= worst
        if (kept.sum(axis=1) > self._count).any():  # several are equal to the worst: the first ones of them stay
            better, equal = scores > worst, scores == worst
            kept = better | (equal & (equal.cumsum(axis=1) <= self._count - better.sum(axis=1, keepdims=True)))
        places = np.nonzero(kept)[1].reshape(-1, self._count)
        scores = np.take_along_axis(scores, places, axis=1)
        self._rows[:, : self._count] = np.take_along_axis(self._rows, places, axis=1)
        self._scores[:, : self._count], self._scores[:, self._count : width] = scores, -np.inf
        self._rows[:, self._count : width] = -1
        self._filled[:] = self._count
        self._threshold = worst[:, 0]


def longest(blocks: Iterator[np.ndarray]) -> float:
    """Return the length of the longest vector in blocks of them; 0 when there is none."""
    return max((float(np.sqrt(np.einsum("nd,nd->n", block, block).max(initial=0))) for block in blocks), default=0.0)


def _gpu_if_there() -> str:
    """Return ``cuda`` where the system shows a GPU that torch can use; else torch, slow to come, is not asked."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _has_faiss() -> bool:
    from importlib.util import find_spec

    return find_spec("faiss") is not None
