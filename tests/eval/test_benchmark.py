from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_runs_and_ends_with_its_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bench_eval.py", "--quick"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert {"arrays_s", "file_ratio", "dict_vs_pytrec", "answers_s", "startup_s"} <= set(numbers)
    assert all(number > 0 for number in numbers.values())
