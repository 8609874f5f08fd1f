"""Vectors on disk: what is written is what is read, and a pair that does not fit does not load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from condenser.artifacts import MANIFEST
from condenser.errors import UserError
from retrieval.vectors import Shard, Vectors, check_same_space, read_ids, read_shard, write_shard

MATRIX = np.arange(15, dtype=np.float32).reshape(5, 3)
IDS = ["007", "7", "a b", "line\nend", "naïve ☃"]


@pytest.mark.parametrize("shard_size", [1, 2, 5])
def test_ids_and_rows_come_back_in_order(make_vectors: Callable[..., Path], shard_size: int) -> None:
    vectors = Vectors.load(make_vectors(MATRIX, IDS, shard_size=shard_size))
    assert vectors.ids == IDS
    np.testing.assert_array_equal(vectors.matrix(), MATRIX)
    assert all(isinstance(shard, np.memmap) for shard in vectors.shards)


def test_ids_and_vectors_of_different_counts_do_not_load(tmp_path: Path) -> None:
    """Case B37: both counts and both files are named."""
    write_shard(tmp_path, 0, MATRIX, Shard(IDS, 0))
    (tmp_path / "ids-00000.json").write_text(json.dumps({"ids": IDS[:-1], "cut": 0}))
    with pytest.raises(UserError, match=r"vectors-00000.npy: has 5 vectors, but .*ids-00000.json has 4 ids"):
        read_shard(tmp_path, 0, 3)


def test_a_changed_or_lost_file_does_not_load(make_vectors: Callable[..., Path]) -> None:
    """Case B37: a manifest guards finished folders by size."""
    folder = make_vectors(MATRIX, IDS, shard_size=3)
    ids = folder / "ids-00001.json"
    ids.write_text(json.dumps({"ids": IDS[3:4], "cut": 0}))
    with pytest.raises(UserError, match=r"ids-00001.json: has \d+ bytes, the manifest says \d+"):
        Vectors.load(folder)
    ids.unlink()
    with pytest.raises(UserError, match=r"ids-00001.json: file listed in the manifest is missing"):
        Vectors.load(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"no manifest.json here; expected a vectors folder"):
        Vectors.load(folder)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is not a whole .npy matrix"),
        (b"not numpy at all", "is not a whole .npy matrix"),
        (None, "is not a whole .npy matrix"),
    ],
)
def test_a_damaged_matrix_is_refused(tmp_path: Path, content: bytes | None, line: str) -> None:
    write_shard(tmp_path, 0, MATRIX, Shard(IDS, 0))
    file = tmp_path / "vectors-00000.npy"
    file.write_bytes(file.read_bytes()[:-4] if content is None else content)
    with pytest.raises(UserError, match=line):
        read_shard(tmp_path, 0, 3)


def test_pickled_arrays_are_not_opened(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, MATRIX, Shard(IDS, 0))
    np.save(tmp_path / "vectors-00000.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"is not a whole .npy matrix"):
        read_shard(tmp_path, 0, 3)


def test_another_dimension_or_type_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, MATRIX, Shard(IDS, 0))
    with pytest.raises(UserError, match=r"is float32 of shape 5 x 3, expected float32 rows of 4"):
        read_shard(tmp_path, 0, 4)
    np.save(tmp_path / "vectors-00000.npy", MATRIX.astype(np.float64))
    with pytest.raises(UserError, match=r"is float64 of shape 5 x 3, expected float32 rows of 3"):
        read_shard(tmp_path, 0, 3)


@pytest.mark.parametrize(
    "content", ["null", "[]", "{", '{"ids": null, "cut": 0}', '{"ids": [1], "cut": 0}', '{"ids": []}']
)
def test_ids_of_another_shape_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "ids-00000.json").write_text(content)
    with pytest.raises(UserError, match=r"ids-00000\.json: (is not a|holds something else than a) list of ids"):
        read_ids(tmp_path / "ids-00000.json")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_never_written(tmp_path: Path, value: float) -> None:
    """Case B40: the text is named by its id."""
    matrix = MATRIX.copy()
    matrix[2, 1] = value
    with pytest.raises(UserError, match=r"the vector of 'a b' is not finite \(1 of 5 in this shard\)"):
        write_shard(tmp_path, 0, matrix, Shard(IDS, 0))
    assert not list(tmp_path.iterdir())


def test_vectors_of_different_encoders_do_not_meet() -> None:
    """Case B41: both values and both paths are named."""
    index = {"dimension": 32, "pooling": "cls", "encoder": "/models/a"}
    with pytest.raises(UserError) as caught:
        check_same_space(index, index | {"dimension": 64, "encoder": "/models/b"})
    assert str(caught.value) == (
        "dimension is 32 in the index (encoder /models/a) but 64 in the queries (encoder /models/b) "
        "(index and queries need the same encoder)"
    )
    with pytest.raises(UserError, match=r"pooling is 'cls' in the index .* but 'mean' in the queries"):
        check_same_space(index, index | {"pooling": "mean"})
    check_same_space(index, index | {"encoder": "/another/copy"})
