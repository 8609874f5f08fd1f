"""Case B66: with models in local folders nothing asks the network, and a wrong path is told as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DEAD = "http://127.0.0.1:9"  # the discard port: nobody listens
MODES = {
    "offline": {"HF_HUB_OFFLINE": "1"},
    "dead proxy": {},
}

# Runs one command after the other in one process, for torch takes seconds to come, and notes every way out of it.
SCRIPT = """
import json, socket, sys, time

asked = []
resolve, connect = socket.getaddrinfo, socket.socket.connect


def note(place):
    asked.append(str(place))


def resolving(host, *rest, **more):
    note(host)
    return resolve(host, *rest, **more)


def connecting(self, address):
    note(address)
    return connect(self, address)


socket.getaddrinfo, socket.socket.connect = resolving, connecting
from retrieval.cli import main

done = []
for words in json.loads(sys.argv[1]):
    asked.clear()
    began = time.monotonic()
    status = main(words)
    done.append([status, list(asked), time.monotonic() - began])
    print("done", file=sys.stderr)
print(json.dumps(done))
"""


def run(commands: list[list[str]], mode: str, folder: Path) -> list[tuple[int, list[str], float, str]]:
    """Return each command's status, the places it asked, its seconds and what it said to stderr."""
    variables = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "NO_PROXY")}
    variables |= {name: DEAD for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
    variables |= {"HF_HOME": str(folder / "hub"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        env=variables | MODES[mode], cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stderr.split("done\n")
    results: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return [(*result, said) for result, said in zip(results, told, strict=False)]


@pytest.fixture()
def collection(tmp_path: Path) -> Path:
    """Twelve passages, each the only right one of a query."""
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    rows = range(12)
    for name, word in (("corpus", "the river bank"), ("queries", "where is river")):
        lines = [f'{{"_id": "{name[0]}{row}", "text": "{word} {row}. {word} {row} again."}}\n' for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    for split in ("train", "test"):
        judged = "".join(f"q{row}\tc{row}\t1\n" for row in rows)
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    (folder / "pairs.tsv").write_text("the cat\tthe dog\t4\nred\tblue\t1\nqueen\tking\t3\n")
    return folder


def verbs(model: str, collection: Path, store: str = "spans") -> list[list[str]]:
    """Every command that takes a model folder, in an order in which they find what they read."""
    corpus, few = str(collection / "corpus.jsonl"), ["--batch_size", "4", "--device", "cpu"]
    return [
        ["check", str(collection), "--encoder", model],
        ["spans", "--input", corpus, "--tokenizer", model, "--max_length", "32", "--output", "spans"],
        ["pretrain", "--data", store, "--init", model, "--max_steps", "1", *few, "--output", "pretrained"],
        ["convert", "pretrained", "--to", "reference", "--output", "reference"],
        [
            "finetune",
            "--encoder",
            model,
            "--collection",
            str(collection),
            "--max_steps",
            "1",
            *few,
            "--output",
            "tuned",
        ],
        ["encode", "--encoder", model, "--input", corpus, "--output", "vectors"],
        ["index", "--vectors", "vectors", "--output", "index"],
        ["search", "--index", "index", "--collection", str(collection), "--k", "3", "--output", "run.trec"],
        ["evaluate", "--sts", str(collection / "pairs.tsv"), "--encoder", model],
        ["plan", "--passages", "1000", "--encoder", model],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_local_model_needs_no_network(mode: str, tiny_bert: Path, collection: Path, tmp_path: Path) -> None:
    """Without HF_HUB_OFFLINE, too: behind a dead proxy one question would wait, or fail."""
    commands = verbs(str(tiny_bert), collection)
    for words, (status, asked, _, said) in zip(commands, run(commands, mode, tmp_path), strict=True):
        assert status == 0, said
        assert not asked, f"{words[0]} asked {asked}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_path_is_told_as_one(mode: str, tiny_bert: Path, collection: Path, tmp_path: Path) -> None:
    """What looks like a path is not asked of the hub; what could be a name of the hub fails there, at once."""
    store = ["spans", "--input", str(collection / "corpus.jsonl"), "--tokenizer", str(tiny_bert), "--output", "store"]
    commands = [
        words
        for model in ("./nowhere", "nowhere")
        for words in [*verbs(model, collection, "store"), ["convert", model, "--to", "reference", "--output", "out"]]
        if model in words
    ]
    done = run([store, *commands], mode, tmp_path)[1:]
    for words, (status, asked, seconds, said) in zip(commands, done, strict=True):
        assert status == 2, f"{words}: {said}"
        (line,) = (line for line in said.splitlines() if line.startswith("condenser: error: "))
        assert "nowhere: no such folder" in line, words
        assert seconds < 20
        if "./nowhere" in words:
            assert not asked and "hub" not in line and "onnection" not in line
    assert not [entry for entry in tmp_path.iterdir() if entry.name not in ("collection", "store", "hub")]
