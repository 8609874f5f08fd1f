"""The verb ``index``: what it builds, and that what FAISS would crash on is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from condenser.errors import UserError
from retrieval.index import Index
from retrieval.index_build import build_index
from retrieval.options import IndexOptions
from retrieval.vectors import vectors_file
from tests.retrieval.test_index import MakeVectors, build, naive, names

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("shard_size", [1000, 7])
def test_a_flat_folder_holds_the_vectors_and_is_mapped(
    tmp_path: Path, make_vectors: MakeVectors, shard_size: int
) -> None:
    matrix = RNG.normal(size=(50, 6)).astype("f4")
    vectors = make_vectors(matrix, names(50), shard_size=shard_size)
    folder = build(tmp_path, vectors)
    for number, start in enumerate(range(0, 50, shard_size)):
        np.testing.assert_array_equal(np.load(vectors_file(folder, number)), matrix[start : start + shard_size])
        assert vectors_file(folder, number).samefile(vectors_file(vectors, number)), "shards are linked, not copied"
    assert not list(folder.glob("*.faiss"))
    assert Index.load(folder).search(matrix[:5], 3) == Index(names(50), matrix).search(matrix[:5], 3)


@pytest.mark.parametrize("factory", ["IVF8,Flat", "HNSW16", "SQ8", "PCA6,IVF4,Flat", "IVF4,PQ4x4"])
def test_factory_strings_are_built_and_find_near_passages(
    tmp_path: Path, make_vectors: MakeVectors, factory: str
) -> None:
    matrix = RNG.normal(size=(600, 8)).astype("f4")
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    folder = build(tmp_path, make_vectors(matrix, names(600), shard_size=250), factory)
    nprobe = 4 if "IVF" in factory else None
    hits = Index.load(folder, nprobe=nprobe).search(matrix[:100], 10)
    expected = naive(matrix, names(600), matrix[:100], 10)
    shared = [
        len({hit.passage_id for hit in found} & {name for name, _ in best})
        for found, best in zip(hits, expected, strict=True)
    ]
    assert np.mean(shared) > 3, f"recall of {factory} is near chance"


def test_the_same_seed_builds_the_same_index(tmp_path: Path, make_vectors: MakeVectors) -> None:
    vectors = make_vectors(RNG.normal(size=(400, 8)), names(400))
    options = IndexOptions(vectors=str(vectors), factory="IVF4,Flat", output=str(tmp_path / "one"))
    one = build_index(options)
    two = build_index(IndexOptions(vectors=str(vectors), factory="IVF4,Flat", output=str(tmp_path / "two")))
    assert (one / "index-00000.faiss").read_bytes() == (two / "index-00000.faiss").read_bytes()


@pytest.mark.parametrize(
    ("count", "factory", "line"),
    [
        (51, "IVF64,Flat", "--factory 'IVF64,Flat' has 64 clusters, but there are 51 vectors to train on"),
        (51, "PQ4", "PQ4 learns 256 codes per piece, but there are 51 vectors to train on (use PQ4x5, SQ8 or Flat)"),
        (
            51,
            "IVF2,PQ4x6",
            "PQ4x6 learns 64 codes per piece, but there are 51 vectors to train on (use PQ4x5, SQ8 or Flat)",
        ),
        (51, "OPQ2,PQ2x4", "OPQ2 learns 256 codes per piece, but there are 51 vectors to train on (leave it out)"),
        (51, "RQ2x8", "Number of training points (51) should be at least as large as number of clusters (256)"),
        (51, "PQ3", "PQ3 cuts vectors of 8 numbers into 3 pieces, and 8 is no multiple of 3 (use 2 or 4 pieces)"),
        (
            51,
            "PCA6,PQ4x4",
            "PQ4x4 cuts vectors of 6 numbers into 4 pieces, and 6 is no multiple of 4 (use 3 or 6 pieces)",
        ),
        (51, "Flt", "could not parse index string Flt (did you mean Flat? FAISS's factory strings look like"),
        (51, "", "could not parse index string"),
        (51, "HNSW0", "a count in it is too small"),
        (51, "HNSW1", "a count in it is too small"),
        (51, "IVF2_HNSW1,Flat", "a count in it is too small"),
        (51, "IVF0,Flat", "a count in it is too small"),
        (51, "PCA16,Flat", "PCA matrix cannot output 16 dimensions from 8"),
        (51, "IDMap,Flat", "add does not make sense with IndexIDMap"),
        (51, "IDMap2,HNSW8", "standalone codec not implemented for this type of index"),
        (51, "NSG8", "standalone codec not implemented for this type of index"),
    ],
)
def test_what_cannot_be_built_is_refused(
    tmp_path: Path, make_vectors: MakeVectors, count: int, factory: str, line: str
) -> None:
    """Case B45 and its relatives: one line, and nothing written."""
    vectors = make_vectors(RNG.normal(size=(count, 8)), names(count))
    with pytest.raises(UserError) as caught:
        build(tmp_path, vectors, factory)
    assert line in str(caught.value)
    assert not any(word in str(caught.value) for word in ("\n", ".cpp", "faiss::", "failed"))
    assert not list(tmp_path.glob("index*"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"float16": True}, "--float16 is for GPUs, --device is cpu"),
        ({"training_size": 9}, "--training_size does not apply to a Flat index, which is not trained"),
        ({"training_size": 9, "factory": "HNSW8"}, "--training_size does not apply to a HNSW8 index"),
    ],
)
def test_options_without_an_effect_are_refused(
    tmp_path: Path, make_vectors: MakeVectors, changes: dict[str, Any], line: str
) -> None:
    vectors = make_vectors(RNG.normal(size=(51, 8)), names(51))
    with pytest.raises(UserError, match=line):
        build_index(IndexOptions(vectors=str(vectors), output=str(tmp_path / "index"), **changes))
    assert not list(tmp_path.glob("index*"))


def test_few_vectors_per_cluster_are_a_warning_only(
    tmp_path: Path, make_vectors: MakeVectors, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case B45."""
    build(tmp_path, make_vectors(RNG.normal(size=(51, 8)), names(51)), "IVF8,Flat")
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "warning: 51 vectors for 8 clusters are fewer than 39 per cluster: they will be poor ones",
        "indexed 51 vectors of 8 numbers, IVF8,Flat, inner product",
    ]


def test_few_vectors_per_code_are_told_once_and_in_our_words(
    tmp_path: Path, make_vectors: MakeVectors, capfd: pytest.CaptureFixture[str]
) -> None:
    """FAISS itself would say so for each piece, and for each round of a rotation."""
    build(tmp_path, make_vectors(RNG.normal(size=(400, 8)), names(400)), "OPQ2,IVF2,PQ2,RFlat")
    assert capfd.readouterr().err.splitlines() == [
        "warning: 400 vectors for 256 codes per piece are fewer than 39 per code",
        "indexed 400 vectors of 8 numbers, OPQ2,IVF2,PQ2,RFlat, inner product",
    ]


def test_vectors_of_queries_or_none_at_all_are_refused(tmp_path: Path, make_vectors: MakeVectors) -> None:
    """Case R43 among them."""
    with pytest.raises(UserError, match="holds query vectors, expected passages"):
        build(tmp_path, make_vectors(np.ones((2, 3)), names(2), name="queries", kind="query"))
    with pytest.raises(UserError, match="holds no vectors, expected at least one"):
        build(tmp_path, make_vectors(np.ones((0, 3)), [], name="none"))
