"""Feedback against the formula written out, over exact and approximate indexes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eval.runs import load_run
from retrieval.cli import main
from retrieval.exact import ExactVectors
from retrieval.feedback import Feedback, rocchio, stored_vectors
from retrieval.index import Index
from retrieval.index_build import build_index
from retrieval.options import IndexOptions
from retrieval.vectors import Matrix

MakeVectors = Callable[..., Path]


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def vectors(seed: int, count: int, dimension: int = 8) -> np.ndarray:
    return unit(np.random.default_rng(seed).normal(size=(count, dimension)))


PASSAGES, QUERIES = vectors(5, 60), vectors(6, 3)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0.5), (0.4, 0.6), (1, 0)])
def test_rocchio_is_the_formula(alpha: float, beta: float, normalize: bool) -> None:
    queries, passages = vectors(0, 3), vectors(1, 12).reshape(3, 4, 8)
    found = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)
    moved = rocchio(queries, passages, found, alpha=alpha, beta=beta, normalize=normalize)
    assert moved.dtype == np.float32
    for query, some, there, got in zip(queries, passages, found, moved, strict=True):
        mean = some[there].mean(axis=0) if there.any() else np.zeros(8)
        wanted = alpha * query + beta * mean
        wanted = wanted / np.linalg.norm(wanted) if normalize else wanted
        assert got == pytest.approx(wanted, abs=1e-6)


def test_a_query_that_its_passages_cancel_stays_finite() -> None:
    query = np.array([[1.0, 0.0]], dtype=np.float32)
    moved = rocchio(query, -query[:, None, :], np.ones((1, 1), dtype=bool), beta=1, normalize=True)
    assert (moved == 0).all()


def naive(queries: np.ndarray, passages: np.ndarray, count: int, weight: float) -> np.ndarray:
    best = np.argsort(-(queries @ passages.T), axis=1, kind="stable")[:, :count]
    return queries + weight * passages[best].mean(axis=1)


@pytest.mark.parametrize("normalize", [False, True])
def test_an_exact_index(normalize: bool) -> None:
    passages, queries = vectors(2, 40), vectors(3, 5)
    index = Index([f"p{n}" for n in range(40)], passages, facts={"normalize": normalize})
    moved = Feedback(index, 3, 0.7)([f"q{n}" for n in range(5)], queries)
    wanted = naive(queries, passages, 3, 0.7)
    assert moved == pytest.approx(unit(wanted) if normalize else wanted, abs=1e-6)


def test_more_passages_than_there_are() -> None:
    passages, queries = vectors(2, 3), vectors(3, 2)
    moved = Feedback(Index(["a", "b", "c"], passages), 10, 1.0)(["q", "r"], queries)
    assert moved == pytest.approx(queries + passages.mean(axis=0), abs=1e-6)


def test_the_query_itself_does_not_count() -> None:
    """Its own vector is its best hit, and would only hold it where it is."""
    passages = vectors(4, 20)
    index = Index([f"p{n}" for n in range(20)], passages)
    moved = Feedback(index, 2, 0.5, ignore_self=True)(["p7"], passages[7:8])
    best = [row for row in np.argsort(-(passages @ passages[7])) if row != 7][:2]
    assert moved[0] == pytest.approx(passages[7] + 0.5 * passages[best].mean(axis=0), abs=1e-6)


@pytest.fixture()
def folder(make_vectors: MakeVectors, tmp_path: Path) -> Path:
    """Vectors of passages in several shards and of queries, normalised, with an exact and an approximate index."""
    make_vectors(PASSAGES, [f"p{n}" for n in range(60)], name="p", shard_size=25, normalize=True)
    make_vectors(QUERIES, ["q0", "p1", "q2"], name="q", kind="query", normalize=True)
    for factory in ("Flat", "HNSW8"):
        build_index(IndexOptions(vectors=str(tmp_path / "p"), factory=factory, output=str(tmp_path / factory)))
    return tmp_path


@pytest.mark.parametrize("index", ["Flat", "HNSW8", "p"])
def test_the_search_is_that_of_the_moved_queries(index: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An approximate index takes the vectors that it was made from; what was done stands beside the run."""
    output = folder / "run.trec"
    words = ["--index", str(folder / index), "--queries", str(folder / "q"), "--k", "7", "--output", str(output)]
    assert main(["search", *words, "--feedback", "4", "--feedback-weight", "0.8"]) == 0
    assert "k 7, moved towards the first 4 passages by 0.8\n" in capsys.readouterr().err
    moved = unit(naive(QUERIES, PASSAGES, 4, 0.8))
    for query_id, query in zip(["q0", "p1", "q2"], moved, strict=True):
        hits = load_run(output)[query_id]
        best = np.argsort(-(PASSAGES @ query))[:7]
        assert list(hits) == [f"p{row}" for row in best]
        assert list(hits.values()) == pytest.approx((PASSAGES @ query)[best], abs=1e-6)
    made_by = json.loads(Path(f"{output}.json").read_text())
    assert (made_by["feedback"], made_by["feedback_weight"]) == (4, 0.8)


def test_an_index_that_was_added_to(folder: Path, make_vectors: MakeVectors) -> None:
    """A passage that was replaced counts with its new vector, a deleted one not at all."""
    index = Index.load(folder / "HNSW8")
    index.delete(["p3"])
    index.add(make_vectors(QUERIES[:1], ["p5"], name="new", normalize=True), replace=True)
    (row,) = [row for row, name in enumerate(index.ids) if name == "p5" and row not in index.deleted]
    feedback = Feedback(index, 1, 1.0)
    assert index.search_rows(QUERIES[:1], 1)[0][0, 0] == row
    assert feedback(["q0"], QUERIES[:1]) == pytest.approx(QUERIES[:1], abs=1e-6)


def test_vectors_that_are_gone_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "p").rename(folder / "elsewhere")
    output = folder / "run.trec"
    words = ["--queries", str(folder / "q"), "--feedback", "4", "--output", str(output)]
    assert main(["search", "--index", str(folder / "HNSW8"), *words]) == 2
    line = f"condenser: error: {folder / 'p'}: the vectors that this index was made from are gone"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert not output.exists()
    assert main(["search", "--index", str(folder / "Flat"), *words]) == 0


def test_stored_vectors_are_found_in_any_shard_and_type() -> None:
    halves = [Matrix(PASSAGES[:20]), Matrix(PASSAGES[20:].astype(np.float16))]
    rows = np.array([59, 0, 20, 19, 20])
    got = stored_vectors(ExactVectors(halves, 8), rows)
    assert got.dtype == np.float32
    assert got == pytest.approx(PASSAGES[rows], abs=1e-3)
    assert stored_vectors(ExactVectors(halves, 8), np.empty(0, dtype=np.int64)).shape == (0, 8)
