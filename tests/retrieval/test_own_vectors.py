"""Vectors of other programs: the same folder whatever the numbers' type and order, and no bad row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from condenser.errors import UserError
from retrieval.index import Index
from retrieval.index_build import build_index
from retrieval.options import IndexOptions
from retrieval.own_vectors import import_vectors
from retrieval.vectors import Vectors

MATRIX = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float16).astype(np.float64)
IDS = [f"p{n}" for n in range(100)]


def forms(folder: Path) -> dict[str, Any]:
    np.save(folder / "rows.npy", MATRIX)
    return {
        "float64": MATRIX,
        "float32": MATRIX.astype(np.float32),
        "float16": MATRIX.astype(np.float16),
        "Fortran order": np.asfortranarray(MATRIX),
        "every other row of a larger one": np.repeat(MATRIX, 2, axis=0)[::2],
        "list of lists": MATRIX.tolist(),
        "memory map": np.load(folder / "rows.npy", mmap_mode="r"),
        "file": folder / "rows.npy",
    }


def test_every_form_of_the_same_numbers_gives_the_same_folder(tmp_path: Path) -> None:
    """Case B48."""
    made = {}
    for name, matrix in forms(tmp_path).items():
        folder = import_vectors(matrix, IDS, tmp_path / name, made_by="elsewhere", shard_size=30)
        made[name] = {file.name: file.read_bytes() for file in folder.iterdir()}
        vectors = Vectors.load(folder, verify=True)
        assert vectors.ids == IDS and [len(shard) for shard in vectors.shards] == [30, 30, 30, 10]
        np.testing.assert_array_equal(vectors.matrix(), MATRIX)
    assert all(files == made["float64"] for files in made.values())


@pytest.mark.parametrize("store", ["float32", "float16", "int8"])
def test_they_are_indexed_and_searched(tmp_path: Path, store: Any) -> None:
    vectors = import_vectors(MATRIX, IDS, tmp_path / "vectors", made_by="elsewhere", store=store)
    index = Index.load(build_index(IndexOptions(vectors=str(vectors), output=str(tmp_path / "index"))))
    found = [hits[0].passage_id for hits in index.search(MATRIX / np.linalg.norm(MATRIX, axis=1, keepdims=True), 1)]
    expected = [IDS[row] for row in (MATRIX / np.linalg.norm(MATRIX, axis=1, keepdims=True) @ MATRIX.T).argmax(axis=1)]
    agreed = sum(one == other for one, other in zip(found, expected, strict=True))
    assert agreed == 100 if store != "int8" else agreed >= 95


def test_ids_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("007\n7\na b\n")
    folder = import_vectors([[1.0, 2.0]] * 3, tmp_path / "ids.txt", tmp_path / "out", made_by="x", kind="query")
    vectors = Vectors.load(folder)
    assert vectors.ids == ["007", "7", "a b"]
    assert (vectors.facts["kind"], vectors.facts["encoder"], vectors.facts["dimension"]) == ("query", "x", 2)


def spoilt(row: int, value: float) -> np.ndarray:
    matrix = MATRIX.copy()
    matrix[row, 3] = value
    return matrix


@pytest.mark.parametrize(
    ("matrix", "line"),
    [
        (spoilt(42, np.nan), "the matrix: row 42 (id 'p42') is not finite as float32"),
        (spoilt(0, -np.inf), "the matrix: row 0 (id 'p0') is not finite as float32"),
        (spoilt(99, 1e60), "the matrix: row 99 (id 'p99') is not finite as float32"),
        (
            MATRIX.astype(np.int64),
            "the matrix: is int64 of shape 100 x 8, expected rows of float32, float64 or float16",
        ),
        (MATRIX.astype(object), "the matrix: is object of shape 100 x 8, expected rows of float32"),
        (MATRIX[0], "the matrix: is float64 of shape 8, expected rows"),
        (MATRIX[:, :0], "the matrix: has 100 rows of no numbers"),
        ([[1.0, 2.0], [1.0]], "the matrix: row 1 has another length than row 0, which has 2 numbers"),
        ([[1.0, 2.0], [1.0, "x"]], "the matrix: row 1 holds something else than numbers"),
        (MATRIX[:99], "the matrix: has 99 rows, but the list of ids has 100 ids"),
    ],
)
def test_what_is_no_matrix_of_finite_numbers_is_refused_by_row(tmp_path: Path, matrix: Any, line: str) -> None:
    """Case R20."""
    with pytest.raises(UserError) as caught:
        import_vectors(matrix, IDS, tmp_path / "out", made_by="x")
    assert str(caught.value).startswith(line) and not list(tmp_path.iterdir())


def test_a_file_of_objects_is_not_opened(tmp_path: Path) -> None:
    """Case R22."""
    np.save(tmp_path / "rows.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"rows\.npy: is not a whole \.npy matrix"):
        import_vectors(tmp_path / "rows.npy", ["a"], tmp_path / "out", made_by="x")


@pytest.mark.parametrize(
    ("ids", "line"),
    [
        ("a\nb\na\n", "ids.txt:3: id 'a' stands already at"),
        ("a\n\nb\n", "ids.txt:2: id is an empty string"),
        (["a", "b", "a"], "the list of ids, row 2: id 'a' stands already at the list of ids, row 0"),
        (["a", None, "b"], "the list of ids, row 1: id is None, expected a string"),
    ],
)
def test_bad_ids_are_refused_by_line(tmp_path: Path, ids: Any, line: str) -> None:
    if isinstance(ids, str):
        (tmp_path / "ids.txt").write_text(ids)
        ids = tmp_path / "ids.txt"
    with pytest.raises(UserError) as caught:
        import_vectors(MATRIX[:3], ids, tmp_path / "out", made_by="x")
    assert line in str(caught.value) and not (tmp_path / "out").exists()
