"""Starting the command in a process of its own, from a dataclass of options, and stopping it; starting scripts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrieval.stages import Stage, command_line

ROOT = Path(__file__).parents[1]


def start(
    verb: str,
    options: Any,
    *,
    processes: int = 1,
    limit: int | None = None,
    group: bool = False,
    **variables: str,
) -> subprocess.Popen[bytes]:
    """Start ``condenser VERB``; stderr is a pipe.

    Args:
        verb: what to run.
        options: the verb's dataclass.
        processes: more than one train together.
        limit: the most bytes that a file may have.
        group: give it and what it starts a process group of their own.
        variables: environment variables.
    """
    words = shlex.split(command_line(Stage(verb, options)))[1:]
    command = [sys.executable, "-m", "retrieval.cli", *words]
    if processes > 1:
        together = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, "-m", *together, *command[1:]]
    if limit is not None:
        command = ["prlimit", f"--fsize={limit}", *command]
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stderr=subprocess.PIPE,
        start_new_session=group,
    )


def run_script(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/NAME`` on one thread and return what became of it."""
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, words)]
    return subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )


def run(verb: str, options: Any, **settings: Any) -> str:
    """Run the command to its end, which must be a good one, and return what it said."""
    process = start(verb, options, **settings)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said.decode()
    return said.decode()


def stop_after(times: int, place: str = "step-done") -> Callable[[str], None]:
    """Return a fault point that interrupts a run when it has come to a place so many times."""
    done = 0

    def fault_point(name: str) -> None:
        nonlocal done
        done += name == place
        if done == times and name == place:
            raise KeyboardInterrupt

    return fault_point
