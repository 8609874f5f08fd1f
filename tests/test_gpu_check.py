"""The check of one GPU at toy size on a CPU: every part runs, without the libraries that such a machine may lack."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ["limits", "golden", "replay", "bfloat16", "pretrain", "cocondenser", "encode", "search"]
# Python runs this at its start: it finds five libraries and what they ask for themselves, and no others; the packages
# of this checkout only where the script looks for them.
FIVE_LIBRARIES_ONLY = """
import importlib.metadata, re, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from packaging.requirements import Requirement

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

allowed, asked = set(), ["torch", "transformers", "accelerate", "safetensors", "numpy"]
while asked:
    name = plain(asked.pop())
    if name in allowed:
        continue
    allowed.add(name)
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    needed = [Requirement(line) for line in lines]
    asked += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
owners = importlib.metadata.packages_distributions()
hidden = {name for name, packages in owners.items() if not allowed & {plain(one) for one in packages}}
hidden -= {"condenser", "eval", "retrieval"}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Finder]
"""


def check(*words: str | Path, python_path: Path | None = None) -> tuple[int, dict[str, Any], str]:
    """Run the command at toy size; return its status, its last line and all that it said."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--device", "cpu", "--toy", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.slow
def test_every_part_runs_with_five_libraries(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FIVE_LIBRARIES_ONLY)
    status, result, shown = check("--minutes", "60", python_path=tmp_path)
    assert (status, result["failed"], result["skipped"]) == (0, {}, []), shown
    parts = result["parts"]
    assert list(parts) == PARTS
    assert parts["encode"]["sentence_transformers"] == "not installed"  # it is, but hidden: the others are, too
    assert set(parts["golden"]) == {f"{name}_difference" for name in ("condenser", "cocondenser", "biencoder")}
    assert max(parts["golden"].values()) < 1e-5
    assert parts["replay"]["float32_difference"] < 1e-6 < 0.1 < parts["replay"]["float32_difference_of_other_masks"]
    assert parts["pretrain"]["loss_difference"] < 1e-6
    assert all(value > 0 for name, value in parts["pretrain"].items() if name.endswith(("per_s", "ratio", "mfu")))


@pytest.mark.slow
def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    for family in ("condenser", "cocondenser", "biencoder"):
        shutil.copytree(ROOT / "tests" / "golden" / family, tmp_path / family)
    file = tmp_path / "condenser" / "bert_expected.json"
    expected = json.loads(file.read_text())
    expected["cases"]["skip2_head1_late0"]["float64"]["total_loss"] *= 1.001
    file.write_text(json.dumps(expected))
    words = ["--minutes", "60", "--golden", tmp_path, "--parts", "golden", "encode"]
    status, result, shown = check(*words)
    assert status == 1
    error = "Wrong: condenser skip2_head1_late0, loss is off by 1.0e-03 of its size, expected 1e-04"
    assert result["failed"] == {"golden": error} and f"FAILED: {error}\n" in shown
    encode = result["parts"]["encode"]
    assert encode["sentence_transformers_passages_per_s"] > 0 and encode["smallest_cosine"] > 0.9999


def test_what_does_not_fit_into_the_time_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "gpu_check.py"))
    allowed = {"long": 1000.0, "short": 1.0}
    parts = {"long": lambda: {"rate": 1.0}, "short": lambda: {"rate": 1234.5}}
    found = script["run_parts"](parts, allowed, time.monotonic() + 100, lambda: None)
    assert found == ({"short": {"rate": 1234.5}}, {}, ["long"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "long skipped: 100 s are left, it may take 1000 s".split()
    assert lines[1].split() == ["short", "rate", "1,234"]
