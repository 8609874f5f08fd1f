"""The study of negatives at toy length: every arm makes a cell, and cells that are there are passed over."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.command import run_script
from tests.conftest import WORDS
from tests.retrieval.test_check import write

ARMS = ["lexical", "none", "bm25", "mined", "fused"]


def words_of(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(count))


def study(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("recipe_study.py", *words)


@pytest.mark.slow
def test_every_arm_makes_a_cell_once(tmp_path: Path, tiny_bert: Path) -> None:
    folder = write(
        tmp_path / "data",
        passages={f"p{i}": f"{words_of(i, 3)} {words_of(i + 9, 8)}" for i in range(40)},
        queries={f"q{i}": words_of(i, 3) for i in range(16)},
        train=[(f"q{i}", f"p{i}", 1) for i in range(8)],
        dev=[(f"q{i}", f"p{i}", 1) for i in range(8, 12)],
    )
    (folder / "qrels" / "test.tsv").write_text("".join(f"q{i}\tp{i}\t1\n" for i in range(12, 16)))
    words = ["--quick", "--collections", folder, "--start", f"tiny={tiny_bert}", "--seeds", "1"]
    words += ["--output", tmp_path / "results", "--work", tmp_path / "work"]
    first = study(*words)
    assert first.returncode == 0, first.stderr
    names = {"data--lexical-0.json"} | {f"data-tiny-{arm}-1.json" for arm in ARMS[1:]}
    assert {file.name for file in (tmp_path / "results").iterdir()} == names
    cell = json.loads((tmp_path / "results" / "data-tiny-mined-1.json").read_text())
    assert set(cell["test"]) == set(cell["dev"]) == {"MRR@10", "nDCG@10", "R@100"}
    lines = [line.split() for line in first.stdout.splitlines()[2:]]
    assert [line[1 if "lexical" in line else 2] for line in lines[: len(ARMS)]] == ARMS
    assert [(line[2], line[4]) for line in lines[len(ARMS) :]] == [
        ("bm25", "none"), ("mined", "none"), ("fused", "mined"), ("fused", "lexical"),
    ]  # fmt: skip

    (tmp_path / "results" / "data-tiny-fused-1.json").unlink()
    again = study(*words)
    assert again.stdout == first.stdout
    assert "steps done" not in again.stderr and again.stderr.count("results/data") == len(names) - 1
