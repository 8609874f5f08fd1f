"""Passages come and go: what is deleted is never found, what is added is, and a killed update leaves a whole index."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from condenser.errors import UserError
from condenser.manifest import load_manifest
from retrieval.index import Index
from retrieval.index_build import build_index
from retrieval.options import IndexOptions, UpdateOptions
from retrieval.updates import change_index, update
from retrieval.vectors import Vectors
from tests import command

RNG = np.random.default_rng(5)
MakeVectors = Callable[..., Path]
FACTORIES = ["Flat", "IVF4,Flat", "HNSW16", "SQ8", "PQ4x4,RFlat"]


def names(start: int, stop: int) -> list[str]:
    return [f"p{number}" for number in range(start, stop)]


@pytest.fixture()
def matrix() -> np.ndarray:
    matrix = RNG.normal(size=(400, 8)).astype("f4")
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


@pytest.fixture()
def build(tmp_path: Path, make_vectors: MakeVectors) -> Callable[..., Path]:
    """Index 300 passages in three shards."""

    def make(matrix: np.ndarray, factory: str = "Flat", **facts: object) -> Path:
        vectors = make_vectors(matrix[:300], names(0, 300), name=f"first-{factory}", shard_size=100, **facts)
        return build_index(
            IndexOptions(vectors=str(vectors), factory=factory, output=str(tmp_path / f"index-{factory}"))
        )

    return make


def load(folder: Path) -> Index:
    factory = load_manifest(folder)["facts"]["factory"]
    parameters = {"IVF4,Flat": {"nprobe": 4}, "HNSW16": {"ef_search": 400}, "PQ4x4,RFlat": {"k_factor": 100}}
    return Index.load(folder, **parameters.get(factory, {}))


def ids(index: Index, queries: np.ndarray, k: int) -> list[list[str]]:
    return [[hit[0] for hit in hits] for hits in index.search(queries, k)]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("compact", [False, True])
def test_an_updated_index_finds_what_a_new_one_would(
    tmp_path: Path,
    make_vectors: MakeVectors,
    build: Callable[..., Path],
    matrix: np.ndarray,
    factory: str,
    compact: bool,
) -> None:
    """The nearest of every query are deleted: k hits come all the same."""
    folder = build(matrix, factory)
    queries = matrix[:5]
    near = sorted({name for found in ids(load(folder), queries, 30) for name in found})
    more = make_vectors(matrix[300:], names(300, 400), name="more", shard_size=60)
    change_index(folder, add=more, delete=near)
    if compact:
        change_index(folder, compact=True)
    index = load(folder)
    assert len(index) == 400 - len(near) and (len(index.deleted) == 0) == compact
    found = index.search(queries, 50)
    live = [number for number in range(400) if f"p{number}" not in near]
    scores = matrix[live].astype(np.float64) @ matrix[:5].T.astype(np.float64)
    best = [[f"p{live[row]}" for row in np.argsort(-column)[:50]] for column in scores.T]
    for hits, expected in zip(found, best, strict=True):
        assert len(hits) == 50 and not {hit[0] for hit in hits} & set(near)
        assert len({hit[0] for hit in hits} & set(expected)) >= (45 if factory in ("SQ8", "HNSW16") else 50)
    assert len(index.search(queries, 1000)[0]) == len(index), "every live passage once"


def test_compacting_gives_back_files_and_rows(
    build: Callable[..., Path], make_vectors: MakeVectors, matrix: np.ndarray
) -> None:
    folder = build(matrix)
    change_index(folder, delete=[*names(100, 200), "p7"], compact=True)
    facts = load_manifest(folder, verify=True)["facts"]
    assert facts["count"] == 299 - 100 and [number for number, _ in facts["parts"]] == [3, 2]
    assert sorted(file.name for file in folder.glob("vectors-*")) == ["vectors-00002.npy", "vectors-00003.npy"]
    assert ids(load(folder), matrix[8:9], 1) == [["p8"]]


@pytest.mark.parametrize("store", ["float16", "int8"])
def test_rows_stay_as_they_are_kept(
    tmp_path: Path, build: Callable[..., Path], make_vectors: MakeVectors, matrix: np.ndarray, store: str
) -> None:
    """Vectors of two types may stand in one index, and compacting changes none."""
    from condenser.artifacts import Workspace
    from retrieval.vectors import Shard, write_shard

    folder = build(matrix)
    more = make_vectors(matrix[300:], names(300, 400), name="more")
    facts = load_manifest(more)["facts"]
    with Workspace(tmp_path / "small", "vectors", config={}, inputs={}) as workspace:
        write_shard(workspace.path, 0, matrix[300:], Shard(names(300, 400), 0), store)  # type: ignore[arg-type]
        small = workspace.commit(facts | {"dtype": store})
    change_index(folder, add=small, delete=["p0"])
    before = load(folder).search(matrix[300:302], 20)
    assert before[0][0][0] == "p300" and before[0][0][1] == pytest.approx(1, abs=0.02)
    change_index(folder, delete=["p399", "p1"], compact=True)
    after = [hit for hit in load(folder).search(matrix[300:302], 20)[0] if hit[0] in {name for name, _ in before[0]}]
    assert after == [hit for hit in before[0] if hit[0] not in ("p399", "p1")][: len(after)]


def test_an_id_that_is_there_is_refused_or_replaced(
    build: Callable[..., Path], make_vectors: MakeVectors, matrix: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build(matrix, "SQ8")
    again = make_vectors(-matrix[298:302], names(298, 302), name="again")
    before = sorted(folder.iterdir())
    with pytest.raises(UserError) as caught:
        change_index(folder, add=again)
    assert str(caught.value) == (
        f"{again}: 2 of the ids to add are in this index already: 'p298', 'p299' "
        "(--replace puts the new passages in their place)"
    )
    assert sorted(folder.iterdir()) == before
    index = load(folder).add(again, replace=True)
    assert capsys.readouterr().err.splitlines()[-1] == "4 added, 2 replaced: 302 passages, 2 deleted rows kept"
    assert ids(index, -matrix[298:299], 1) == [["p298"]]
    assert len(index) == 302 and len(index.search(matrix[:1], 302)[0]) == 302
    index.delete(["p298"])
    assert ids(index, -matrix[298:299], 1) != [["p298"]]
    change_index(folder, compact=True)
    assert sorted(load(folder).ids) == sorted(set(names(0, 302)) - {"p298"})


def test_what_was_deleted_can_come_again(
    build: Callable[..., Path], make_vectors: MakeVectors, matrix: np.ndarray
) -> None:
    folder = build(matrix)
    change_index(folder, delete=["p5"])
    change_index(folder, add=make_vectors(-matrix[5:6], ["p5"], name="again"))
    assert ids(load(folder), -matrix[5:6], 1) == [["p5"]] and len(load(folder)) == 300


def test_what_cannot_be_done_is_refused(
    tmp_path: Path, build: Callable[..., Path], make_vectors: MakeVectors, matrix: np.ndarray
) -> None:
    folder = build(matrix)
    with pytest.raises(UserError, match="give at least one of --add, --delete and --compact"):
        update(UpdateOptions(index=str(folder)))
    with pytest.raises(UserError, match="--replace goes with --add"):
        update(UpdateOptions(index=str(folder), compact=True, replace=True))
    with pytest.raises(UserError, match=r"none of the 2 ids to delete is in this index: 'x', 'y'"):
        change_index(folder, delete=["x", "y"])
    with pytest.raises(
        UserError, match=r"encoder fingerprint is 'aaaa' in the index .* but 'bbbb' in the vectors to add"
    ):
        change_index(folder, add=make_vectors(matrix[:2], ["a", "b"], name="other", encoder_fingerprint="bbbb"))
    with pytest.raises(UserError, match="id 'a' stands twice"):
        change_index(folder, add=make_vectors(matrix[:2], ["a", "a"], name="twice"))
    with pytest.raises(UserError, match=r"nowhere: no such folder; expected an index folder"):
        change_index(tmp_path / "nowhere", compact=True)
    with pytest.raises(UserError, match="all passages of this index are deleted"):
        change_index(folder, delete=names(0, 300), compact=True)
    with pytest.raises(UserError, match="only an index made by `condenser index` can be changed"):
        Index(["a"], np.ones((1, 2), "f4")).delete(["a"])
    assert len(load(folder)) == 300


def test_a_graph_whose_vectors_are_gone_is_not_compacted(build: Callable[..., Path], matrix: np.ndarray) -> None:
    folder = build(matrix, "HNSW16")
    vectors = Path(load_manifest(folder)["facts"]["sources"][0]["vectors"])
    change_index(folder, delete=["p3"])
    vectors.rename(vectors.with_name("elsewhere"))
    with pytest.raises(UserError, match="the vectors that this index was made from are gone"):
        change_index(folder, compact=True)
    assert len(load(folder)) == 299


def test_the_command_deletes_and_adds(
    tmp_path: Path, build: Callable[..., Path], make_vectors: MakeVectors, matrix: np.ndarray
) -> None:
    folder = build(matrix)
    (tmp_path / "ids.txt").write_text("p1\nnobody\n\np2\n")
    more = make_vectors(matrix[300:], names(300, 400), name="more")
    said = command.run("update", UpdateOptions(index=str(folder), add=str(more), delete=str(tmp_path / "ids.txt")))
    assert said.splitlines() == [
        "warning: 1 of 3 ids to delete are not in this index",
        "2 deleted; 100 added: 398 passages, 2 deleted rows kept",
    ]
    again = IndexOptions(vectors=load_manifest(folder)["facts"]["vectors"], output=str(folder))
    with pytest.raises(UserError, match=r"was made with other settings: updates: '1' -> None"):
        build_index(again)


@pytest.mark.parametrize("factory", ["Flat", "SQ8"])
@pytest.mark.parametrize(("place", "done"), [("index-files-written", False), ("index-manifest-written", True)])
def test_an_index_is_whole_wherever_an_update_is_killed(
    build: Callable[..., Path], make_vectors: MakeVectors, tmp_path: Path, matrix: np.ndarray, factory: str,
    place: str, done: bool,
) -> None:  # fmt: skip
    """Cases R23, R40: the old index or the new one, and the next update clears up."""
    folder = build(matrix, factory)
    (tmp_path / "ids.txt").write_text("p1\np2\n")
    more = make_vectors(matrix[300:], names(300, 400), name="more")
    options = UpdateOptions(index=str(folder), add=str(more), delete=str(tmp_path / "ids.txt"), compact=True)
    process = command.start("update", options, CONDENSER_FAULT=place)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    load_manifest(folder, verify=True)
    assert len(load(folder)) == (398 if done else 300)
    assert (ids(load(folder), matrix[1:2], 1) == [["p1"]]) != done
    change_index(folder, delete=["p3"])
    listed = set(load_manifest(folder, verify=True)["files"]) | {"manifest.json"}
    assert {file.name for file in folder.iterdir()} == listed
    assert len(load(folder)) == (397 if done else 299)


def test_a_list_of_deleted_rows_that_is_damaged_is_refused(build: Callable[..., Path], matrix: np.ndarray) -> None:
    folder = build(matrix)
    change_index(folder, delete=["p1", "p2"])
    file = folder / "deleted-00001.npy"
    np.save(file, np.array([1, 300]))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"][file.name]["bytes"] == file.stat().st_size
    with pytest.raises(UserError, match=r"deleted-00001.npy: holds something else than numbers of rows"):
        Index.load(folder)


def test_an_index_without_passages_says_so(build: Callable[..., Path], matrix: np.ndarray) -> None:
    folder = build(matrix)
    change_index(folder, delete=[f"p{row}" for row in range(len(matrix))])
    with pytest.raises(UserError, match="all passages of this index are deleted: there is nothing to search"):
        load(folder).search(matrix[:1], 5)


@pytest.mark.parametrize("name", ["faiss", "metric"])
def test_facts_that_an_index_needs_are_asked_for(build: Callable[..., Path], matrix: np.ndarray, name: str) -> None:
    folder = build(matrix, factory="HNSW4")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["facts"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"{name} is None, expected"):
        Index.load(folder)


def test_what_the_user_put_beside_an_index_stays(build: Callable[..., Path], matrix: np.ndarray) -> None:
    folder = build(matrix)
    for name in ("README.md", "run.trec.json", "ids.json"):
        (folder / name).write_text("mine")
    (folder / "deleted-00007.npy.tmp-123").touch()
    change_index(folder, delete=["p1"])
    assert all((folder / name).is_file() for name in ("README.md", "run.trec.json", "ids.json"))
    assert not (folder / "deleted-00007.npy.tmp-123").exists()


def test_opened_vectors_are_looked_at_as_those_in_a_folder(
    build: Callable[..., Path], make_vectors: MakeVectors, matrix: np.ndarray
) -> None:
    index = load(build(matrix))
    for name, ids, kind, said in (
        ("q", names(300, 302), "query", "holds query vectors"),
        ("t", ["x", "x"], "passage", "twice"),
    ):
        vectors = Vectors.load(make_vectors(matrix[:2], ids, name=name, kind=kind))
        with pytest.raises(UserError, match=said):
            index.add(vectors)
