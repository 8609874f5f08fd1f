"""The command: every slip of the pen is answered in one line, and options arrive as they were written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from condenser.errors import UserError
from condenser.options import Objective
from retrieval import cli
from retrieval.cli import main, parse_options
from retrieval.options import FinetuneOptions
from retrieval.verbs import VERBS, load

ROOT = Path(__file__).parents[2]
BM25 = ["bm25", "--collection", "medquad", "--output", "run.trec"]
FINETUNE = ["--encoder", "e", "--collection", "c", "--output", "o"]


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail as bad input does: status 2, nothing on stdout, one line on stderr."""
    assert main(words) == 2
    heard = capsys.readouterr()
    assert heard.out == ""
    assert heard.err.startswith("condenser: error: ") and heard.err.count("\n") == 1
    return heard.err.removeprefix("condenser: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["dta"], "unknown verb 'dta' (did you mean data?)"),
        (["lm", "trian"], f"lm wants one of {', '.join(v for v in VERBS if v[:3] == 'lm ')} (did you mean lm train?)"),
        (["queries", "--help"], f"queries wants one of {', '.join(v for v in VERBS if v[:8] == 'queries ')}"),
        (["querys", "generte"], "unknown verb 'querys' (did you mean queries generate?)"),
        (["xyzzy"], "unknown verb 'xyzzy' (condenser --help lists the verbs)"),
        ([*BM25, "--colection", "x"], "unknown option --colection (did you mean --collection?)"),
        ([*BM25, "--out=x"], "unknown option --out (did you mean --output?)"),
        ([*BM25, "--xyzzy"], "unknown option --xyzzy (see --help)"),
        ([*BM25, "-k", "3"], "unknown option -k (did you mean --k?)"),
        ([*BM25, "extra"], "unexpected argument 'extra' (options start with --)"),
        ([*BM25, "--k", "five"], "--k is 'five', expected a whole number"),
        ([*BM25, "--k", "1.5"], "--k is '1.5', expected a whole number"),
        ([*BM25, "--b", "x"], "--b is 'x', expected a number"),
        ([*BM25, "--k"], "--k: expected one argument"),
        (["data", "--json", "maybe"], "--json is 'maybe', expected true or false"),
        (
            ["bm25", "--output", "o"],
            "--collection is missing: a folder or file in a known format, or the name of an embedded collection",
        ),
        (
            ["pretrain", "--objective", "mml"],
            f"--objective is 'mml', expected one of {', '.join(get_args(Objective))}",
        ),
        (["evaluate", "--metrics"], "--metrics: expected at least one argument"),
        (["finetune", "--max_steps", "1.5"], "--max_steps is '1.5', expected a whole number"),
        # An option of Tevatron's that misses its s, and a number that ran into the next option.
        (
            ["check", "--colection", "c"],
            "unknown option --colection (write the collection without an option's name before it)",
        ),
        (["finetune", "--negatves", "3"], "unknown option --negatves (did you mean --negatives?)"),
        ([*BM25, "--output", "\udcff.trec"], "argument '\\udcff.trec' is not UTF-8 (rename the file)"),
        (["finetune", "--epochs", "53--workers", "2"], "--epochs is '53--workers', expected a number"),
    ],
)
def test_wrong_command_lines(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B30 and others."""
    assert answer(words, capsys) == line


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("colection: x\n", "unknown option --colection (did you mean --collection?)"),
        ("k: five\n", "--k is 'five', expected a whole number"),
        ("nested: {a: 1}\n", "unknown option --nested.a (see --help)"),
        ("- a\n", "--config holds no YAML mapping of options: Unexpected config: - a"),
        ("", "--config holds no YAML mapping of options: Unexpected config:"),
        ("output: o\nk: null\n", "--k is null, expected a whole number"),
        ("a: &a [*a]\n", "--config holds YAML that contains itself"),
        ("output: null\n", "--output is missing: run file to write: .trec, .tsv (MS MARCO) or .json"),
    ],
)
def test_wrong_config_files(tmp_path: Path, content: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(content)
    assert answer(["bm25", "--collection", "medquad", "--config", str(tmp_path / "c.yaml")], capsys) == line


def test_config_that_is_no_yaml_or_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("k: [\n")
    assert answer(["bm25", "--config", str(tmp_path / "c.yaml")], capsys).startswith("--config holds no YAML mapping")
    assert answer(["bm25", "--config", "nope.yaml"], capsys).endswith("nope.yaml: no such file")


def test_config_of_another_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_bytes("output: caf\u00e9\n".encode("latin-1"))
    words = ["bm25", "--config", str(tmp_path / "c.yaml")]
    assert answer(words, capsys) == "--config holds no YAML text: invalid continuation byte"


def test_a_name_that_no_disk_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["evaluate", "--run", "x", "--qrels", "a" * 300], capsys).endswith(": File name too long")


def test_a_nul_in_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text('collection: a\noutput: "a\\0b"\n')
    line = "--output holds a NUL character (write it as text without one)"
    assert answer(["bm25", "--config", str(tmp_path / "c.yaml")], capsys) == line


def test_a_number_for_a_list_in_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("weights: 3\n")
    line = "--config gives one value to an option that takes a list (write [one, two])"
    assert answer(["finetune", "--config", str(tmp_path / "c.yaml")], capsys) == line


def test_text_for_a_list_in_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("metrics: MRR@10\n")
    line = "--config gives one value to an option that takes a list (write [one, two])"
    assert answer(["evaluate", "--config", str(tmp_path / "c.yaml")], capsys) == line


def test_options_from_a_file_and_flags_over_them(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("collection: '007'\noutput: a\nk: 5\nb: 0.5\n")
    options = parse_options("bm25", ["--config", str(tmp_path / "c.yaml"), "--k", "7"])
    assert (options.collection, options.output, options.k, options.b, options.k1) == ("007", "a", 7, 0.5, 0.9)


def test_dashes_are_accepted() -> None:
    options = parse_options("finetune", [*FINETUNE, "--max-steps", "3", "--learning-rate=1e-3", "--no-normalize"])
    assert (options.max_steps, options.learning_rate, options.normalize) == (3, 1e-3, False)


@pytest.mark.parametrize(
    "text", ["query: ", "# x", "null", "007", "true", "[1]", "{title}", "- x", "1e3", "'q'", "a--b"]
)
def test_text_arrives_as_it_was_written(text: str) -> None:
    """A prompt is no YAML."""
    assert parse_options("finetune", [*FINETUNE, f"--query_prompt={text}"]).query_prompt == text


def test_defaults_are_those_of_the_dataclass() -> None:
    assert parse_options("finetune", FINETUNE) == FinetuneOptions(encoder="e", collection=["c"], output="o")


def test_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["help"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if line.startswith("  ")] == [verb.split()[0] for verb in VERBS]


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_option_of_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for name in load(VERBS[verb].options).__dataclass_fields__:
        assert name in VERBS[verb].positional or f"--{name.rstrip('_')} " in shown


def fail_with(error: BaseException) -> Any:
    def stage(options: Any) -> None:
        raise error

    return stage


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("is empty", "a.tsv:3"), 2, "condenser: error: a.tsv:3: is empty\n"),
        (KeyboardInterrupt(), 130, "condenser: interrupted; run the same command again to go on\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            1,
            "condenser: error: /x/y: No space left on device (0.5 GiB free there)\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/y"),
            1,
            "condenser: error: /x/y: Permission denied\n",  # how much is free has nothing to do with it
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "condenser: error: No space left on device\n"),
    ],
)
def test_exit_status(
    error: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("retrieval.collections.list_collections", fail_with(error))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**29))
    assert main(["data"]) == status
    assert capsys.readouterr().err == line


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "retrieval.collections.list_collections", fail_with(OSError(errno.EBADF, "Bad file descriptor"))
    )
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["data"])


def test_status_of_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "retrieval.cli"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    wrong = subprocess.run(
        [*command, "dta"], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    with subprocess.Popen(
        [*command, "data"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as unheard:
        assert unheard.stdout is not None and unheard.stderr is not None
        unheard.stdout.close()
        assert unheard.stderr.read() == b""
    assert unheard.returncode == 141


def test_output_is_utf8_under_any_locale(tmp_path: Path) -> None:
    """Case B9."""
    code = (
        "import retrieval.collections as c, retrieval.cli as cli; c.list_collections = lambda options: 'na\\u00efve'; "
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code} raise SystemExit(cli.main(['data']))"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0"},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "naïve\n".encode())


def test_sigterm_ends_any_verb_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "load", lambda place: load(place) if "Options" in place else lambda options: kill())

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    assert main(["data"]) == 143
    assert capsys.readouterr().err == "condenser: terminated; run the same command again to go on\n"
    assert signal.getsignal(signal.SIGTERM) is before
