"""The rules of the house: who may import whom, what stays light, and what our source never does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrieval.verbs import VERBS, load

ROOT = Path(__file__).parents[1]
PACKAGES = ("condenser", "eval", "retrieval")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

MAY_IMPORT = {
    "condenser": {"condenser"},
    "eval": {"eval", "condenser"},
    "retrieval": {"retrieval", "eval", "condenser"},
}
EVAL_MAY_IMPORT = {f"condenser.{name}" for name in ("errors", "files", "artifacts", "manifest", "talk", "options")}
# Rooms of condenser in the order in which they may see each other: a room sees those on its own line and above.
ROOMS = [
    {
        "errors",
        "talk",
        "files",
        "artifacts",
        "manifest",
        "sharing",
        "options",
        "boolean",
        "lm_options",
        "score_options",
        "hub",
        "weights",
        "faults",
    },
    {"corpus"},
    {"models"},
    {"training", "decoding"},
    {"objectives"},
    {"pretrain", "lm", "score", "scorer", "interop"},
]
LIGHT = [
    *(package for package in PACKAGES),
    *(f"{package}.options" for package in PACKAGES),
    *(f"condenser.{name}" for name in ("errors", "files", "artifacts", "manifest", "talk", "hub", "weights")),
    *(f"eval.{file.stem}" for file in sorted((ROOT / "eval").glob("*.py")) if file.stem != "__init__"),
    *(f"retrieval.{name}" for name in ("check", "cli", "verbs", "records", "readers", "collections")),
]
HEAVY = {"torch", "transformers", "tokenizers", "datasets", "faiss", "accelerate", "pandas", "sentence_transformers"}
# Only these know what is inside transformers' models; all others take its public names.
KNOW_TRANSFORMERS = {
    "condenser/models/backbone.py",
    "condenser/models/packed.py",
    "condenser/models/unpadded.py",
    "condenser/decoding/generators.py",
}
MAY_READ_PICKLES = {"condenser/interop.py"}
MAY_PRINT = {"condenser/talk.py", "retrieval/cli.py"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
ROOMED = [file for file in SOURCES if ROOT / "condenser" in file.parents and file != ROOT / "condenser/__init__.py"]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(file: Path) -> Iterator[str]:
    """Yield the full name of each module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            # `from condenser import errors` imports a module too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module in PACKAGES)


def calls(file: Path) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call with the dotted name of what is called."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def room(module: str) -> int:
    """Return which of ROOMS a module of condenser belongs to."""
    found = [number for number, room in enumerate(ROOMS) if module.split(".")[1] in room]
    assert found, f"{module} belongs to no room: give it a line in ROOMS"
    return found[0]


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 20
    assert {file.relative_to(ROOT).parts[0] for file in SOURCES} == set(PACKAGES)


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_import_direction(file: Path) -> None:
    package = file.relative_to(ROOT).parts[0]
    for module in imports(file):
        if module.split(".")[0] not in PACKAGES:
            continue
        assert module.split(".")[0] in MAY_IMPORT[package], f"{package} may not import {module}"
        if package == "eval" and module.startswith("condenser."):
            assert ".".join(module.split(".")[:2]) in EVAL_MAY_IMPORT, f"eval may not import {module}"


@pytest.mark.parametrize("file", ROOMED, ids=name_of)
def test_rooms_of_condenser_never_look_back(file: Path) -> None:
    own = room(".".join(file.relative_to(ROOT).with_suffix("").parts))
    for module in imports(file):
        if module.startswith("condenser."):
            assert room(module) <= own, f"{module} stands above {name_of(file)}"


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_transformers_internals_stay_in_their_files(file: Path) -> None:
    inside = {module for module in imports(file) if module.startswith("transformers.")} - {"transformers.utils"}
    assert not inside or name_of(file) in KNOW_TRANSFORMERS


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_source_never_runs_what_it_reads(file: Path) -> None:
    if name_of(file) not in MAY_READ_PICKLES:
        assert not {module.split(".")[0] for module in imports(file)} & PICKLES
    for node, called in calls(file):
        where = f"{name_of(file)}:{node.lineno}: {called}"
        assert called not in {"eval", "exec", "compile", "os.system", "os.popen"}, where
        assert called not in {"yaml.load", "yaml.unsafe_load"}, where
        settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load":
            assert name_of(file) in MAY_READ_PICKLES and settings.get("weights_only") == "True", where
        assert settings.get("shell", "False") == "False", where
        assert settings.get("allow_pickle", "False") == "False", where
        assert settings.get("trust_remote_code", "False") == "False", where


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_source_neither_prints_nor_asserts(file: Path) -> None:
    """Bad input is a UserError; what a stage says goes through talk.py, what it returns through the command."""
    for node in ast.walk(ast.parse(file.read_text())):
        assert not isinstance(node, ast.Assert), f"{name_of(file)}:{node.lineno}: assert"
    if name_of(file) not in MAY_PRINT:
        assert "print" not in {called for _, called in calls(file)}


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_annotations_are_not_evaluated(file: Path) -> None:
    text = file.read_text()
    assert not text.strip() or "from __future__ import annotations" in text


def loaded_after(code: str, folder: Path) -> set[str]:
    """Run code in a new process and return the top-level modules that it loaded."""
    script = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=folder
    )
    return set(done.stdout.splitlines()[-1].split())


def test_light_modules_load_nothing_heavy(tmp_path: Path) -> None:
    loaded = loaded_after("\n".join(f"import {module}" for module in LIGHT), tmp_path)
    assert set(PACKAGES) <= loaded
    assert not loaded & HEAVY


def test_light_verbs_load_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "qrels.tsv").write_text("q\t0\td\t1\n")
    (tmp_path / "run.trec").write_text("q Q0 d 1 1.0 x\n")
    lines = ["from retrieval.cli import main", "assert main(['data']) == 0", "assert main(['evalute']) == 2"]
    lines += ["assert main(['evaluate', '--qrels', 'qrels.tsv', '--run', 'run.trec']) == 0"]
    assert not loaded_after("\n".join(lines), tmp_path) & HEAVY


@pytest.mark.parametrize("verb", VERBS)
def test_help_takes_under_half_a_second_of_processor_time(verb: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "retrieval.cli", *verb.split(), "--help"]
    with (tmp_path / "help").open("w") as shown:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=shown, cwd=tmp_path)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert "--config" in (tmp_path / "help").read_text()
    assert usage.ru_utime + usage.ru_stime < 0.5


@pytest.mark.parametrize("verb", VERBS)
def test_function_of_a_verb_is_there(verb: str) -> None:
    assert callable(load(VERBS[verb].function))
