"""Pyserini's folders against FAISS itself, there and back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from condenser.errors import UserError
from retrieval.cli import main
from retrieval.index import Index
from retrieval.pyserini_index import read_pyserini, write_pyserini
from retrieval.vectors import Vectors

MakeVectors = Callable[..., Path]
MATRIX = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
IDS = [f"doc {n}" for n in range(8)] + ["naïve"]


def theirs(folder: Path, factory: str, ids: str = "\n".join(IDS), metric: int = faiss.METRIC_INNER_PRODUCT) -> Path:
    """Write what Pyserini's encoder writes: a FAISS file and ids."""
    folder.mkdir()
    index = faiss.index_factory(4, factory, metric)
    index.train(MATRIX)
    index.add(MATRIX)
    faiss.write_index(index, str(folder / "index"))
    (folder / "docid").write_text(ids + "\n")
    return folder


@pytest.mark.parametrize("factory", ["Flat", "HNSW4"])
def test_their_index_becomes_our_vectors(factory: str, tmp_path: Path) -> None:
    read = Vectors.load(read_pyserini(theirs(tmp_path / "theirs", factory), tmp_path / "ours", made_by="someone"))
    assert read.ids == IDS and read.facts["encoder"] == "someone"
    np.testing.assert_array_equal(np.concatenate(list(read.blocks())), MATRIX)
    hits = Index.load(tmp_path / "ours").search(MATRIX[:3], 1)
    assert [found[0].passage_id for found in hits] == [IDS[row] for row in np.argmax(MATRIX[:3] @ MATRIX.T, axis=1)]


def test_our_vectors_become_their_index(make_vectors: MakeVectors, tmp_path: Path) -> None:
    folder = write_pyserini(make_vectors(MATRIX, IDS, shard_size=4), tmp_path / "theirs")
    index = faiss.read_index(str(folder / "index"))
    assert isinstance(index, faiss.IndexFlatIP)
    np.testing.assert_array_equal(index.reconstruct_n(0, 9), MATRIX)
    assert (folder / "docid").read_text().splitlines() == IDS
    back = Vectors.load(read_pyserini(folder, tmp_path / "back", made_by="/models/a"))
    assert back.ids == IDS


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"factory": "SQ8"},
            "theirs/index: is of kind IndexScalarQuantizer, expected Flat or HNSW, which keep vectors",
        ),
        ({"factory": "Flat", "metric": faiss.METRIC_L2}, "theirs/index: compares by another metric, expected inner"),
        ({"factory": "Flat", "ids": "a\nb"}, "the matrix: has 9 rows, but {0}/docid has 2 ids"),
        (
            {"factory": "Flat", "ids": "\n".join([*IDS[:8], "doc 0"])},
            "docid:9: id 'doc 0' stands already at {0}/docid:1",
        ),
    ],
)
def test_indexes_that_are_refused(settings: dict[str, str], line: str, tmp_path: Path) -> None:
    folder = theirs(tmp_path / "theirs", **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        read_pyserini(folder, tmp_path / "ours", made_by="someone")
    assert line.format(folder) in str(caught.value)
    assert not (tmp_path / "ours").exists()


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    folder = theirs(tmp_path / "theirs", "Flat")
    (folder / "index").write_bytes((folder / "index").read_bytes()[:60])
    with pytest.raises(UserError, match="theirs/index: is not a whole FAISS index"):
        read_pyserini(folder, tmp_path / "ours", made_by="someone")
    (folder / "docid").unlink()
    with pytest.raises(UserError, match="theirs/docid: no such file"):
        read_pyserini(folder, tmp_path / "ours", made_by="someone")


def test_vectors_that_do_not_fit_are_not_written(make_vectors: MakeVectors, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds query vectors, expected passages"):
        write_pyserini(make_vectors(MATRIX, IDS, name="q", kind="query"), tmp_path / "theirs")
    with pytest.raises(UserError, match=r"id 'a\\nb' does not survive a file of one id on each line"):
        write_pyserini(make_vectors(MATRIX[:1], ["a\nb"], name="odd"), tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_the_command_there_and_back(
    make_vectors: MakeVectors, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes as at the start, and a second time there is nothing to do."""
    given = make_vectors(MATRIX, IDS, shard_size=4)
    there, back, again = (str(tmp_path / name) for name in ("theirs", "back", "again"))
    steps = [
        ["convert", "--to", "pyserini", str(given), "--output", there],
        ["convert", "--from", "pyserini", there, "--made_by", "someone", "--output", back],
        ["convert", "--to", "pyserini", back, "--output", again],
    ]
    for step in steps:
        assert main(step) == 0
        assert capsys.readouterr().out == f"{step[-1]}\n"
        assert main(step) == 0
        assert f"{step[-1]}: up to date\n" in capsys.readouterr().err
    for name in ("index", "docid"):
        assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--from pyserini theirs", "theirs: --made_by is missing: the encoder of these vectors"),
        ("--from pyserini theirs --made_by x --passages theirs", "--passages is for weights; Pyserini's indexes hold"),
        ("--from pyserini theirs --made_by x --late_mlm no", "--late_mlm is for weights; Pyserini's indexes hold"),
        ("--from pyserini theirs --made_by x --to reference", "give exactly one of --from and --to"),
        ("--from transformers theirs --made_by x", "--made_by is for --from pyserini"),
        ("--from pyserini nowhere --made_by x", "nowhere/docid: no such file"),
        ("--to pyserini theirs", "theirs: no manifest.json here; expected a vectors folder"),
        ("--to pyserini theirs --made_by x", "theirs: --made_by is for --from pyserini; these vectors say what made"),
        ("--to pyserinni theirs", "--to is 'pyserinni', expected one of reference, pyserini"),
    ],
)
def test_commands_that_are_refused(
    words: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs(tmp_path / "theirs", "Flat")
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *words.split(), "--output", "ours"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and line in said[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]
