"""Cases R22 and R23: whatever lies in a folder, no verb runs it, and none reads outside of the folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.cli import main

pytestmark = pytest.mark.slow


class Hostile:
    """A pickle that touches a file when it is opened."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def as_pickle(canary: Path) -> bytes:
    return pickle.dumps(Hostile(canary))


def as_object_array(canary: Path) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([Hostile(canary)], dtype=object), allow_pickle=True)
    return stream.getvalue()


SMALL = ["--max_steps", "1", "--batch_size", "4", "--device", "cpu"]
CHAIN = """
    spans --input corpus.jsonl --tokenizer bert --max_length 32 --output spans
    pretrain --data spans --init bert {small} --output pretrained
    finetune --encoder pretrained --collection . {small} --output encoder
    encode --encoder encoder --input corpus.jsonl --store int8 --output small
    encode --encoder encoder --input corpus.jsonl --output vectors
    encode --encoder encoder --input queries.jsonl --kind query --output queries
    index --vectors vectors --output flat
    index --vectors vectors --factory IVF2,Flat --output inverted
    update --index flat --delete gone.txt
    update --index inverted --delete gone.txt
"""
# Every verb that reads a folder of ours, with the folder that is damaged.
READERS = {
    "spans": ["pretrain --data spans --init bert {small} --output out"],
    "pretrained": [
        "convert pretrained --to reference --output out",
        "pretrain --data spans --init pretrained {small} --output out",
    ],
    "encoder": [
        "finetune --encoder encoder --collection . {small} --output out",
        "encode --encoder encoder --input queries.jsonl --output out",
        "search --index flat --queries queries.jsonl --output out.trec",
        "evaluate --sts pairs.tsv --encoder encoder",
        "check . --encoder encoder",
    ],
    "small": ["index --vectors small --output out", "search --index small --queries queries --output out.trec"],
    "vectors": ["plan --vectors vectors", "update --index flat --add vectors --replace"],
    "queries": ["search --index flat --queries queries --output out.trec"],
    "flat": ["search --index flat --queries queries --output out.trec", "update --index flat --delete more.txt"],
    "inverted": [
        "search --index inverted --queries queries --output out.trec",
        "update --index inverted --delete more.txt",
        "plan --tune inverted --queries queries --k 2",
    ],
}
EACH = [(folder, words) for folder, commands in READERS.items() for words in commands]


def run(place: Path, words: str) -> int:
    with contextlib.chdir(place):
        return main(words.format(small=" ".join(SMALL)).split())


@pytest.fixture(scope="module")
def made(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every kind there is, made by the command."""
    place = tmp_path_factory.mktemp("made")
    rows = range(24)
    for name, word in (("corpus", "the river bank"), ("queries", "where is river")):
        lines = [f'{{"_id": "{name[0]}{row}", "text": "{word} {row}. {word} {row} again."}}\n' for row in rows]
        (place / f"{name}.jsonl").write_text("".join(lines))
    (place / "qrels").mkdir()
    judged = "".join(f"q{row}\tc{row}\t1\n" for row in rows)
    (place / "qrels" / "train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    (place / "pairs.tsv").write_text("the cat\tthe dog\t4\nred\tblue\t1\nqueen\tking\t3\n")
    (place / "gone.txt").write_text("c3\n")
    (place / "more.txt").write_text("c5\n")
    shutil.copytree(tiny_bert, place / "bert")
    for words in CHAIN.strip().splitlines():
        assert run(place, words) == 0, words
    return place


@pytest.fixture()
def place(made: Path, tmp_path: Path) -> Callable[[], Path]:
    """Give a fresh copy of what was made, as links: files are replaced, never written into."""
    numbers = itertools.count()
    return lambda: Path(shutil.copytree(made, tmp_path / str(next(numbers)), copy_function=os.link))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Put other bytes in the place of a file, with a manifest that knows them."""
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(folder, manifest)


def rewrite(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("folder", "words"), EACH, ids=[words for _, words in EACH])
def test_a_pickle_in_the_place_of_any_file_is_never_opened(
    folder: str,
    words: str,
    made: Path,
    place: Callable[[], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Case R22: with sizes and sums that fit. What a verb does not need may lie there; the rest is one line."""
    canary = tmp_path / "canary"
    refused = 0
    names = json.loads((made / folder / "manifest.json").read_text())["files"]
    arrays = [(name, as_object_array) for name in names if name.endswith(".npy")]
    for name, content in [*((name, as_pickle) for name in names), *arrays]:
        here = place()
        replace(here / folder, name, content(canary))
        capsys.readouterr()
        status = run(here, words)
        said = capsys.readouterr().err
        assert not canary.exists(), name
        assert status in (0, 2), f"{name}: {said}"
        if status == 2:
            refused += 1
            assert said.splitlines()[-1].startswith("condenser: error: "), said
            assert not list(here.glob("out*")), f"{name}: something half written"
        shutil.rmtree(here)
    assert refused


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link"])
@pytest.mark.parametrize(("folder", "words"), EACH, ids=[words for _, words in EACH])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(
    folder: str, words: str, name: str, place: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R23."""
    here = place()
    secret = here / "secret"
    secret.write_bytes(b"secret")
    if name == "link":
        (here / folder / name).symlink_to(secret)
    manifest = json.loads((here / folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    rewrite(here / folder, manifest)
    capsys.readouterr()
    assert run(here, words) == 2
    assert f"manifest lists {name!r}, which lies outside the folder" in capsys.readouterr().err
    assert secret.read_bytes() == b"secret" and not list(here.glob("out*"))


@pytest.mark.parametrize(
    ("folder", "facts"),
    [
        ("inverted", {"faiss": "../inverted.faiss"}),
        ("inverted", {"faiss": 7}),
        ("flat", {"deleted": "../rows.npy"}),
        ("flat", {"parts": [["../../x", "float32"]]}),
        ("flat", {"parts": [[0, "../float32"]]}),
        ("flat", {"parts": "none"}),
        ("vectors", {"shards": -1}),
        ("vectors", {"dtype": "../float32"}),
        ("vectors", {"dtype": ["float32"]}),
    ],
)
def test_facts_that_lead_elsewhere_are_refused(
    folder: str, facts: dict[str, Any], place: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R23: the names that a manifest's facts give, and what stands where a name or number should."""
    here = place()
    for source, target in (("inverted/index-00000.faiss", "inverted.faiss"), ("flat/vectors-00000.npy", "rows.npy")):
        (here / source).rename(here / target)
        os.link(here / target, here / source)
    manifest = json.loads((here / folder / "manifest.json").read_text())
    manifest["facts"] |= facts
    rewrite(here / folder, manifest)
    capsys.readouterr()
    assert run(here, f"search --index {folder} --queries queries --output out.trec") == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"condenser: error: {folder}"), said
