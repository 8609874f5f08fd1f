"""The study of what each link of the chain adds, at toy length: cells are made once, and compared."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.command import run_script
from tests.retrieval.test_adapt import TEXT, write_collection

ARMS = ["bm25", "source", "sampled", "labels"]


def study(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("adapt_study.py", *words)


@pytest.mark.slow
def test_arms_make_their_cells_once(tmp_path: Path, tiny_bert: Path) -> None:
    target = write_collection(tmp_path / "target", TEXT, ("test",))
    labelled = write_collection(tmp_path / "labelled", TEXT, ("train", "dev"))
    words = ["--quick", "--target", target, "--labelled", labelled, "--init", tiny_bert, "--seeds", "1"]
    words += ["--output", tmp_path / "results", "--work", tmp_path / "work", "--arms", *ARMS]
    first = study(*words)
    assert first.returncode == 0, first.stderr
    names = {"target-bm25-0.json"} | {f"target-{arm}-1.json" for arm in ARMS[1:]}
    assert {file.name for file in (tmp_path / "results").iterdir()} == names
    cell = json.loads((tmp_path / "results" / "target-labels-1.json").read_text())
    assert set(cell["test"]) == {"MRR@10", "nDCG@10", "R@100"}
    assert 0 < cell["queries"]["kept"] < cell["queries"]["written"]
    assert any(command.startswith("condenser queries label") for command in cell["commands"])
    lines = [line.split() for line in first.stdout.splitlines()]
    assert [line[0] for line in lines[1 : 1 + len(ARMS)]] == ARMS
    pairs = [(line[0], line[2]) for line in lines[1 + len(ARMS) : -1]]
    assert pairs == [(arm, other) for other in ("source", "bm25") for arm in ("sampled", "labels")]

    (tmp_path / "results" / "target-labels-1.json").unlink()
    again = study(*words)
    assert again.stdout == first.stdout and "steps done" not in again.stderr
    other = study(*words, "--bfloat16")
    assert other.returncode == 2 and "was made with other settings" in other.stderr

    words[words.index(tmp_path / "results")] = tmp_path / "plain"
    plain = study(*words[: words.index("--arms")], "--arms", "searched", "--without_pretraining")
    assert plain.returncode == 0, plain.stderr
    cell = json.loads((tmp_path / "plain" / "target-searched-1.json").read_text())
    assert 0 < cell["queries"]["kept"] < cell["queries"]["written"] and cell["settings"]["pretraining"] is False
    assert not any(command.startswith("condenser pretrain") for command in cell["commands"])
