"""Vectors on disk: what is written is what is read, and a pair that does not fit does not load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from condenser.errors import UserError
from condenser.manifest import MANIFEST
from retrieval.vectors import Shard, Store, Vectors, check_same_space, read_ids, read_shard, to_int8, write_shard

MATRIX = np.arange(15, dtype=np.float32).reshape(5, 3)
IDS = ["007", "7", "a b", "line\nend", "naïve ☃"]


@pytest.mark.parametrize("shard_size", [1, 2, 5])
def test_ids_and_rows_come_back_in_order(make_vectors: Callable[..., Path], shard_size: int) -> None:
    vectors = Vectors.load(make_vectors(MATRIX, IDS, shard_size=shard_size))
    assert vectors.ids == IDS
    np.testing.assert_array_equal(vectors.matrix(), MATRIX)
    assert all(isinstance(shard.codes, np.memmap) for shard in vectors.shards)


def test_ids_and_vectors_of_different_counts_do_not_load(tmp_path: Path) -> None:
    """Case B37: both counts and both files are named."""
    write_shard(tmp_path, 0, MATRIX, Shard(IDS, 0))
    (tmp_path / "ids-00000.json").write_text(json.dumps({"ids": IDS[:-1], "cut": 0}))
    with pytest.raises(UserError, match=r"vectors-00000.npy: has 5 vectors, but .*ids-00000.json has 4 ids"):
        read_shard(tmp_path, 0, 3)


def reseal(folder: Path, name: str) -> None:
    """Give a changed file a true entry in the manifest, as if it had always been so."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name]["bytes"] = (folder / name).stat().st_size
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("known_to_the_manifest", [False, True])
def test_an_id_lost_or_a_vector_added_does_not_load(
    make_vectors: Callable[..., Path], known_to_the_manifest: bool
) -> None:
    """Case B37: both counts and both files are named, and what to do."""
    folder = make_vectors(MATRIX, IDS, shard_size=3)
    ids = folder / "ids-00001.json"
    whole = ids.read_bytes()
    ids.write_text(json.dumps({"ids": IDS[3:4], "cut": 0}))
    if known_to_the_manifest:
        reseal(folder, ids.name)
    with pytest.raises(UserError) as caught:
        Vectors.load(folder)
    assert str(caught.value) == (
        f"{folder / 'vectors-00001.npy'}: has 2 vectors, but {ids} has 1 ids "
        "(run the command that made the folder again: it makes only this shard anew)"
    )
    ids.write_bytes(whole)
    np.save(folder / "vectors-00001.npy", np.ones((3, 3), dtype=np.float32))
    with pytest.raises(UserError, match=r"vectors-00001\.npy: has 3 vectors, but .*ids-00001\.json has 2 ids"):
        Vectors.load(folder)


def test_a_changed_file_does_not_load(make_vectors: Callable[..., Path]) -> None:
    """Case R40: sizes are always compared, contents when asked."""
    folder = make_vectors(MATRIX, IDS, shard_size=3)
    ids = folder / "ids-00001.json"
    ids.write_text(json.dumps({"ids": ["x", "y"], "cut": 0}))
    with pytest.raises(UserError, match=r"ids-00001\.json: has \d+ bytes, the manifest says \d+ \(run the command"):
        Vectors.load(folder)
    reseal(folder, ids.name)
    assert Vectors.load(folder).ids == [*IDS[:3], "x", "y"]
    with pytest.raises(UserError, match=r"ids-00001\.json: contents differ from the manifest's sha256 \(run the"):
        Vectors.load(folder, verify=True)
    (folder / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"no manifest\.json here; expected a vectors folder"):
        Vectors.load(folder)


def test_missing_shards_are_named_by_number(make_vectors: Callable[..., Path]) -> None:
    """Case R40."""
    folder = make_vectors(MATRIX, IDS, shard_size=1)
    (folder / "ids-00001.json").unlink()
    with pytest.raises(UserError, match=r"vectors: shard 1 of 5 is missing: there is no ids-00001\.json \(run the com"):
        Vectors.load(folder)
    (folder / "vectors-00003.npy").unlink()
    with pytest.raises(UserError, match=r"vectors: shards 1, 3 of 5 are missing: there is no ids-00001\.json"):
        Vectors.load(folder)


def test_a_stranger_is_named(make_vectors: Callable[..., Path]) -> None:
    folder = make_vectors(MATRIX, IDS)
    (folder / ".DS_Store").touch()
    Vectors.load(folder)
    (folder / "vectors-00007.npy").touch()
    with pytest.raises(UserError, match=r"holds 'vectors-00007\.npy', which does not belong to these vectors"):
        Vectors.load(folder)


def test_facts_that_do_not_fit_the_shards_are_refused(make_vectors: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="fact count is 6, but there are 5 ids"):
        Vectors.load(make_vectors(MATRIX, IDS, name="six", count=6))
    with pytest.raises(UserError, match="fact dtype is 'int4', expected one of float32, float16, int8"):
        Vectors.load(make_vectors(MATRIX, IDS, name="int4", dtype="int4"))


@pytest.mark.parametrize(("store", "tolerance", "size"), [("float32", 0, 4), ("float16", 2e-3, 2), ("int8", 0.02, 1)])
def test_whatever_the_type_float32_comes_out(
    make_vectors: Callable[..., Path], store: Store, tolerance: float, size: int
) -> None:
    matrix = np.random.default_rng(0).standard_normal((10, 1000)).astype(np.float32)
    matrix[4] = 0
    ids = [f"p{n}" for n in range(10)]
    folder = make_vectors(matrix, ids, shard_size=4, dtype=store)
    vectors = Vectors.load(folder, verify=True)
    assert [shard.codes.dtype for shard in vectors.shards] == [np.dtype(store)] * 3
    assert all(isinstance(shard.codes, np.memmap) for shard in vectors.shards)
    np.testing.assert_allclose(vectors.matrix(), matrix, atol=tolerance)
    blocks = list(vectors.blocks(3))
    assert [len(block) for block in blocks] == [3, 1, 3, 1, 2] and {block.dtype for block in blocks} == {MATRIX.dtype}
    np.testing.assert_array_equal(np.concatenate(blocks), vectors.matrix())
    np.testing.assert_array_equal(vectors.shards[1][np.array([3, 0])], vectors.matrix()[[7, 4]])
    taken = sum(file.stat().st_size for file in folder.glob("*.npy"))
    assert matrix.size * size < taken < matrix.size * size * 1.1 + 1000


def test_int8_is_codes_times_the_scale_of_the_row() -> None:
    codes, scales = to_int8(np.array([[2.54, -1.27, 0.004], [0, 0, 0], [-1e-3, 0, 1e-3]], dtype=np.float32))
    np.testing.assert_array_equal(codes, [[127, -64, 0], [0, 0, 0], [-127, 0, 127]])
    np.testing.assert_allclose(scales, [0.02, 0, 1e-3 / 127], rtol=1e-6)


def test_int8_errs_by_half_a_step_at_most() -> None:
    matrix = np.random.default_rng(1).standard_normal((50, 64)).astype(np.float32) * 10.0 ** np.arange(-25, 25)[:, None]
    codes, scales = to_int8(matrix.astype(np.float32))
    errors = np.abs(codes.astype(np.float64) * scales[:, None] - matrix).max(axis=1)
    assert (errors <= scales * 0.5001).all()


def test_a_number_too_large_for_float16_is_never_written(tmp_path: Path) -> None:
    matrix = MATRIX * 6000
    with pytest.raises(
        UserError, match=r"the vector of 'line.*end' has numbers too large for float16 \(2 of 5.*store fl"
    ):
        write_shard(tmp_path, 0, matrix, Shard(IDS, 0), "float16")
    assert not list(tmp_path.iterdir())


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, MATRIX, Shard(IDS, 0), "int8")
    np.save(tmp_path / "scales-00000.npy", np.ones(4, dtype=np.float32))
    with pytest.raises(UserError, match=r"scales-00000\.npy: is float32 of shape 4, expected 5 float32"):
        read_shard(tmp_path, 0, 3, "int8")


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
    with pytest.raises(UserError, match=r"dimension is 32 in the index .* \(encode both with the same --dim\)"):
        same = {"encoder_fingerprint": "ab12"}
        check_same_space(index | same, index | same | {"dimension": 8})
    with pytest.raises(UserError, match="but 8 in the vectors to add"):
        check_same_space(index, index | {"dimension": 8}, "vectors to add")
    check_same_space(index, index | {"encoder": "/another/copy"})
