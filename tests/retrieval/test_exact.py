"""Exact search: every backend, shard size, batch and store gives the same scores, in memory that does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from condenser.errors import UserError
from retrieval.exact import Backend, Best, ExactVectors
from retrieval.exact_torch import fits, stored_bytes
from retrieval.index import Index
from retrieval.vectors import Matrix, to_int8

RNG = np.random.default_rng(11)
BACKENDS: tuple[Backend, ...] = ("auto", "numpy", "faiss", "torch")
MakeVectors = Callable[..., Path]


def kept_as(store: str, matrix: np.ndarray) -> Matrix:
    if store == "int8":
        return Matrix(*to_int8(matrix))
    return Matrix(matrix.astype(store))


def index_of(matrix: Matrix, shard_size: int, backend: Backend = "auto", **settings: bool) -> Index:
    count, dimension = matrix.shape
    shards = [
        Matrix(matrix.codes[start : start + shard_size], scales_of(matrix, start, shard_size))
        for start in range(0, count, shard_size)
    ]
    ids = [f"p{number}" for number in range(count)]
    return Index(ids, ExactVectors(shards, dimension, backend=backend, **settings))


def scales_of(matrix: Matrix, start: int, size: int) -> np.ndarray | None:
    return None if matrix.scales is None else matrix.scales[start : start + size]


@pytest.mark.parametrize("store", ["float32", "float16", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_shard_or_batch_shows_in_scores(store: str, backend: Backend) -> None:
    matrix = kept_as(store, RNG.normal(size=(1200, 33)).astype("f4"))
    matrix.codes[[5, 600, 1199]] = matrix.codes[17]
    if matrix.scales is not None:
        matrix.scales[[5, 600, 1199]] = matrix.scales[17]
    queries = RNG.normal(size=(70, 33)).astype("f4")
    queries[3] = matrix[17:18][0]
    wide = matrix[:].astype(np.float64) @ queries.astype(np.float64).T
    expected = [
        sorted(((np.float32(score), f"p{row}") for row, score in enumerate(column)), reverse=True)[:20]
        for column in wide.T
    ]
    for shard_size in (1200, 431, 30):
        index = index_of(matrix, shard_size, backend)
        together = index.search(queries, 20)
        assert [[hit[0] for hit in hits] for hits in together] == [[name for _, name in hits] for hits in expected]
        assert [hits for start in range(0, 70, 7) for hits in index.search(queries[start : start + 7], 20)] == together
        assert index.search(queries[:1], 20) == together[:1]


def test_half_the_memory_on_the_device_leaves_the_scores_exact() -> None:
    """Rounded vectors only propose: near ties that float16 cannot tell apart come out in the right order."""
    matrix = 1 + RNG.normal(size=(800, 16)).astype("f4") * 1e-4
    queries = RNG.normal(size=(9, 16)).astype("f4")
    halved = index_of(Matrix(matrix), 300, "torch", float16=True)
    assert halved.search(queries, 10) == index_of(Matrix(matrix), 300).search(queries, 10)


def test_more_candidates_than_a_tile_and_ties_at_every_threshold() -> None:
    matrix = RNG.integers(0, 2, size=(2500, 3)).astype("f4")
    queries = RNG.integers(0, 2, size=(20, 3)).astype("f4")
    runs = [
        index_of(Matrix(matrix), size, backend).search(queries, 600) for size in (2500, 700) for backend in BACKENDS
    ]
    assert all(run == runs[0] for run in runs)
    best = sorted(((score, f"p{row}") for row, score in enumerate((matrix @ queries[0]).tolist())), reverse=True)
    assert runs[0][0] == [(name, score) for score, name in best[:600]]


def test_a_sample_that_promises_too_much_costs_time_not_hits() -> None:
    """Each query's best lie close together, in panels of the sample or between them."""
    centres = RNG.normal(size=(60, 8)).astype("f4")
    matrix = np.repeat(centres, 1000, axis=0) + 0.1 * RNG.normal(size=(60_000, 8)).astype("f4")
    for queries in (centres, centres[:5]):
        index = index_of(Matrix(matrix), 1000, "numpy")
        found = index.search_rows(queries, 300)
        expected = index_of(Matrix(matrix), 60_000, "faiss").search_rows(queries, 300)
        np.testing.assert_array_equal(found, expected)


def test_best_keeps_the_best_whatever_the_order_in_which_they_come() -> None:
    products = RNG.normal(size=(3000, 5)).astype("f4")
    for order in (np.arange(3000), np.argsort(products[:, 0]), np.argsort(-products[:, 0])):
        best = Best(5, 40)
        for start in range(0, 3000, 500):
            best.offer(start, products[order[start : start + 500]], np.empty((500, 5), dtype=bool))
        scores, rows = best.result()
        np.testing.assert_array_equal(np.sort(scores, axis=1), np.sort(products.T, axis=1)[:, -40:])
        np.testing.assert_array_equal(products[order[rows], np.arange(5)[:, None]], scores)


def test_fewer_vectors_than_candidates_leave_places_empty() -> None:
    for backend in BACKENDS:
        store = ExactVectors([Matrix(np.ones((3, 2), "f4"))], 2, backend=backend)
        scores, rows = store.fetch(np.ones((2, 2), "f4"), 5)
        assert sorted(rows[0].tolist()) == [-1, -1, 0, 1, 2]
        assert sorted(scores[0].tolist()) == [-np.inf, -np.inf, 2, 2, 2]


def test_a_gpu_that_is_not_there_is_refused() -> None:
    """Case R30."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match=r"--device cuda: PyTorch finds no GPU here \(use --device cpu\)"):
        ExactVectors([Matrix(np.ones((3, 2), "f4"))], 2, device="cuda")
    with pytest.raises(UserError, match=r"--backend faiss searches on the CPU \(on a GPU use --backend torch\)"):
        ExactVectors([Matrix(np.ones((3, 2), "f4"))], 2, device="cuda", backend="faiss")


def test_memory_on_gpus_is_computed_before_it_is_taken() -> None:
    """Case B49: 1.1 million vectors of 768 numbers."""
    shards = [Matrix(np.broadcast_to(np.float32(0), (550_000, 768)))] * 2
    assert stored_bytes(shards, 768) == 1_100_000 * 768 * 4
    assert stored_bytes(shards, 768, halved=True) == 1_100_000 * 768 * 2
    codes = np.broadcast_to(np.int8(0), (100, 8))
    assert stored_bytes([Matrix(codes, np.ones(100, "f4"))], 8, halved=True) == 100 * (8 + 4)
    assert fits(70, [100]) and not fits(71, [100])
    assert fits(140, [100, 120]) and not fits(150, [100, 120]), "the rows are shared evenly"


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from retrieval.index import Index
index = Index.load(sys.argv[1])
queries = np.random.default_rng(1).normal(size=(200, 64)).astype("f4")
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
rows, scores = index.search_rows(queries, 1000)
np.save(sys.argv[2], np.stack([rows.astype("f8"), scores.astype("f8")]))
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_shards(tmp_path: Path, make_vectors: MakeVectors) -> None:
    """Case B67: 200 queries, k 1000, 40 shards of 2000 vectors, against the same vectors in one shard."""
    matrix = RNG.normal(size=(80_000, 64)).astype("f4")
    ids = [f"p{number}" for number in range(80_000)]
    peaks, found = {}, {}
    # freed blocks go back to the system at once: what glibc keeps of them depends on their order and would be counted
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for shard_size in (80_000, 2000):
        folder = make_vectors(matrix, ids, name=f"in-{shard_size}", shard_size=shard_size)
        output = tmp_path / f"{shard_size}.npy"
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(folder), str(output)],
            cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True, env=os.environ | exact,
        )  # fmt: skip
        peaks[shard_size], found[shard_size] = int(done.stdout), np.load(output)
    assert 0 < peaks[2000] < 1.2 * peaks[80_000]
    np.testing.assert_array_equal(found[2000], found[80_000])


def test_a_vector_that_is_not_finite_is_refused() -> None:
    """Case R20: one in a folder that was edited after it was made."""
    vectors = np.ones((5, 3), np.float32)
    vectors[3, 1] = np.nan
    with pytest.raises(UserError, match="the vector in row 3 is not finite"):
        ExactVectors([Matrix(vectors[:2]), Matrix(vectors[2:])], 3).rounding(np.ones((1, 3), np.float32))
