"""The study of reranking at toy length: it runs to its end, and a second time does no more than print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import run_script
from tests.retrieval.test_check import write
from tests.test_recipe_study import words_of


@pytest.mark.slow
def test_the_study_runs_once(tmp_path: Path, tiny_bert: Path) -> None:
    folder = write(
        tmp_path / "data",
        passages={f"p{i}": f"{words_of(i, 3)} {words_of(i + 9, 8)}" for i in range(20)},
        queries={f"q{i}": words_of(i, 3) for i in range(12)},
        train=[(f"q{i}", f"p{i}", 1) for i in range(6)],
        dev=[(f"q{i}", f"p{i}", 1) for i in range(6, 9)],
    )
    (folder / "qrels" / "test.tsv").write_text("".join(f"q{i}\tp{i}\t1\n" for i in range(9, 12)))
    words = ["--quick", "--collection", folder, "--start", tiny_bert, "--work", tmp_path / "work"]
    seen = []
    for _ in range(2):
        done = run_script("rerank_study.py", *words)
        assert done.returncode == 0, done.stderr
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    assert done.stderr.count("up to date") == 6
    assert {name: seen[0][name] for name in ("dev", "test", "depth")} == {
        name: seen[1][name] for name in ("dev", "test", "depth")
    }
    assert seen[0]["test"]["MRR@10"] > 0
