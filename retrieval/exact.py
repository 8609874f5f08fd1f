"""Exact search: inner products with every stored vector, block by block, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
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
_PAIRS_AT_ONCE = 128  # scored again; neither should their vectors
_THIN_OUT_AT = 4
_SAMPLE_EVERY = 8  # of so many panels, one


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

    def _fetch_blas(self, queries: np.ndarray, count: int, *, sample: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Multiply panels of vectors with all queries; what passes a query's threshold is kept.

        With ``sample``, panels spread over all vectors come first. Of these so few candidates are kept that most
        likely ``count`` of all vectors reach the worst of them, but few more. Queries where that is wrong are
        searched again without.
        """
        columns = np.ascontiguousarray(queries.T)
        width = len(queries)
        tile = int(np.clip(_SMALL_PRODUCT // (width * self.dimension), 64, _TILE_ROWS)) if width <= 32 else _TILE_ROWS
        panel = tile * max(1, _PANEL // (tile * width))
        places = [(number, row) for number, shard in enumerate(self.shards) for row in range(0, len(shard), panel)]
        sampled = places[::_SAMPLE_EVERY] if sample and len(places) > 2 * _SAMPLE_EVERY else []
        likely = count / _SAMPLE_EVERY  # of the best are in the sample; the margin is more than four deviations
        best = Best(width, min(count, int(likely + 4 * likely**0.5) + 4) if sampled else count)
        products, passed = np.empty((panel, width), dtype=np.float32), np.empty((panel, width), dtype=bool)
        for step, (number, row) in enumerate(sampled + sorted(set(places) - set(sampled))):
            if step == len(sampled):
                best.count = count
            block = self.shards[number][row : row + panel]
            _multiply(block, columns, tile, products[: len(block)])
            best.offer(int(self._starts[number]) + row, products[: len(block)], passed[: len(block)])
        scores, rows = best.result()
        short = np.flatnonzero((rows < 0).any(axis=1)) if sampled and count <= len(self) else np.empty(0, dtype=int)
        if len(short):
            scores[short], rows[short] = self._fetch_blas(queries[short], count, sample=False)
        return scores, rows

    def _fetch_faiss(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        from retrieval.faiss_index import load_faiss

        faiss = load_faiss()
        # Release 1.15.1 multiplies without BLAS as long as queries x dimension is below 128,000, which is up to
        # twelve times slower; only for few queries is it the faster way.
        faiss.cvar.distance_compute_blas_threshold = _FEW_QUERIES * self.dimension
        best = Best(len(queries), count)
        for start, block in self.blocks(_FAISS_ROWS):
            block = np.ascontiguousarray(block)
            scores, rows = faiss.knn(queries, block, min(count, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
            best.add(scores, np.where(rows >= 0, rows + start, -1))
        return best.result()


class Best:
    """The best candidates of each query so far, thinned out when they are many.

    Args:
        queries: how many.
        count: candidates kept of each.
    """

    def __init__(self, queries: int, count: int) -> None:
        self.count = count
        self._queries = queries
        self._threshold = np.full(queries, -np.inf, dtype=np.float32)
        # Flat, as they come: of each its score and its place, which is row x queries + query.
        self._scores, self._places = [np.empty(0, dtype=np.float32)], [np.empty(0, dtype=np.int64)]
        self._waiting = 0

    def offer(self, start: int, products: np.ndarray, passed: np.ndarray) -> None:
        """Take what is good enough of ``products`` (rows, queries), whose first row is number ``start``.

        ``passed`` is memory of the same shape to work in: asking the system for more takes longer than comparing.
        """
        if self._waiting == 0 and len(products) > self.count:
            worst = np.partition(np.ascontiguousarray(products.T), -self.count, axis=1)[:, -self.count]
            self._threshold = np.nextafter(worst, np.float32(-np.inf))
        np.greater(products, self._threshold, out=passed)
        places = np.flatnonzero(passed)
        self._take(products.reshape(-1)[places], places + start * self._queries)

    def add(self, scores: np.ndarray, rows: np.ndarray) -> None:
        """Take what is good enough of ``scores`` and ``rows``, each (queries, m); row -1 is none."""
        query, column = np.nonzero((scores > self._threshold[:, None]) & (rows >= 0))
        self._take(scores[query, column], rows[query, column] * self._queries + query)

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(scores, rows)``, each (queries, count), in no order; -inf and -1 where there are fewer."""
        filled = np.arange(self.count) < self._thin_out()[:, None]
        scores = np.full(filled.shape, -np.inf, dtype=np.float32)
        rows = np.full(filled.shape, -1, dtype=np.int64)
        scores[filled], rows[filled] = self._scores[0], self._places[0] // self._queries
        return scores, rows

    def _take(self, scores: np.ndarray, places: np.ndarray) -> None:
        self._scores.append(scores)
        self._places.append(places)
        self._waiting += len(scores)
        if self._waiting > _THIN_OUT_AT * self.count * self._queries:  # for memory, and so that thresholds rise
            self._thin_out()

    def _thin_out(self) -> np.ndarray:
        """Keep the best of each query, in the order of queries; return how many each has."""
        scores, places = np.concatenate(self._scores), np.concatenate(self._places)
        query = places % self._queries
        # Numbers of 16 bits are sorted by counting.
        order = np.argsort(query.astype(np.uint16 if self._queries <= 1 << 16 else np.int64), kind="stable")
        ends = np.cumsum(np.bincount(query, minlength=self._queries)).tolist()
        kept = [order[start:end] for start, end in pairwise([0, *ends])]
        for number, mine in enumerate(kept):
            if len(mine) >= self.count:
                best = np.argpartition(scores[mine], -self.count)[-self.count :]
                kept[number] = mine[best]
                self._threshold[number] = scores[mine[best[0]]]
        order = np.concatenate(kept)
        self._scores, self._places, self._waiting = [scores[order]], [places[order]], len(order)
        return np.array([len(mine) for mine in kept])


def _multiply(block: np.ndarray, columns: np.ndarray, tile: int, out: np.ndarray) -> None:
    """Write the products of a block's vectors and all queries to ``out``, by tiles of so many vectors."""
    whole = len(block) // tile * tile
    np.matmul(block[:whole].reshape(-1, tile, len(columns)), columns, out=out[:whole].reshape(-1, tile, out.shape[1]))
    np.matmul(block[whole:], columns, out=out[whole:])


def longest(blocks: Iterator[np.ndarray]) -> float:
    """Return the length of the longest vector in blocks of them; 0 when there is none.

    Raises:
        UserError: a vector with a number that is not finite: it would hide its passage, and others behind it.
    """
    found, rows = 0.0, 0
    for block in blocks:
        squares = np.einsum("nd,nd->n", block, block)
        bad = np.flatnonzero(~np.isfinite(squares))
        if len(bad):
            raise UserError(f"the vector in row {rows + bad[0]:,} is not finite", hint="make the vectors anew")
        found, rows = max(found, float(squares.max(initial=0))), rows + len(block)
    return float(np.sqrt(found))


def _gpu_if_there() -> str:
    """Return ``cuda`` where the system shows a GPU that torch can use; else torch, slow to come, is not asked."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _has_faiss() -> bool:
    from importlib.util import find_spec

    return find_spec("faiss") is not None
