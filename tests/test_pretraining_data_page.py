"""docs/pretraining-data.md tells the truth: its commands are run, and say what it says they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of the console blocks with the lines under it."""
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for command in block.removeprefix("$ ").split("\n$ "):
            first, *said = command.strip("\n").split("\n")
            yield first, said


@pytest.mark.slow
def test_commands_say_what_the_page_says(tmp_path: Path) -> None:
    shim = tmp_path / "bin" / "condenser"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m retrieval.cli "$@"\n')
    shim.chmod(0o755)
    environment = os.environ | {"PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    found = list(commands((ROOT / "docs/pretraining-data.md").read_text()))
    assert len(found) >= 8
    for command, expected in found:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if not re.search(r"\d+[smh]\d* left", line)]
        assert lines == expected, command
