"""Pyserini's topics and judgements by name, from its cache: nothing here is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrieval.cli import main
from tests.retrieval.test_lucene import command, needs_lucene

TOPICS, QRELS = "topics.dl19-passage.txt", "qrels.dl19-passage.txt"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with files of our own making in the place and the layout of those that Pyserini downloads."""
    folder = tmp_path / "home/.cache/anserini/topics-and-qrels"
    folder.mkdir(parents=True)
    (folder / TOPICS).write_text("1113437\tred fishes\n19335\tthe café\n")
    (folder / QRELS).write_text("19335 Q0 é 2\n19335 Q0 7 0\n1113437 Q0 007 1\n1113437 Q0 8 1\n")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Duser.home={tmp_path / 'home'} -Dhttps.proxyHost=127.0.0.1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    texts = {"7": "red fishes", "007": "red", "8": "fishing", "é": "naïve café"}
    lines = [json.dumps({"_id": name, "text": text}) for name, text in texts.items()]
    (tmp_path / "c/corpus.jsonl").write_text("\n".join(lines))
    return folder


@needs_lucene
def test_names_stand_where_files_could(cache: Path) -> None:
    """The same run and the same figures as from files that say the same."""
    (cache / "own.tsv").write_text("19335\tthe café\n1113437\tred fishes\n")
    reports = []
    for queries, qrels in ((str(cache / "own.tsv"), str(cache / QRELS)), ("pyserini:dl19-passage",) * 2):
        run = f"{len(reports)}.trec"
        done = command("bm25", "search", "--collection", "c", "--queries", queries, "--output", run)
        assert (done.returncode, done.stdout) == (0, f"{run}\n"), done.stderr
        done = command("evaluate", "--qrels", qrels, "--run", run, "--metrics", "MRR@10", "--per_query", "--json")
        assert done.returncode == 0, done.stderr
        reports.append(done.stdout)
    assert reports[0] == reports[1] and '"1113437"' in reports[0]
    assert sorted(Path("0.trec").read_text().splitlines()) == sorted(Path("1.trec").read_text().splitlines())


@needs_lucene
def test_what_pyserini_does_not_have_is_one_line(cache: Path) -> None:
    search = ["bm25", "search", "--collection", "c", "--output", "r.trec", "--queries"]
    for words, kind, name in ((["evaluate", "--run", "r.trec", "--qrels"], "qrels", QRELS), (search, "topics", TOPICS)):
        (cache / name).unlink()
        for wrong, line in (
            ("dl19-passge", f"Pyserini knows no {kind} 'dl19-passge' (did you mean pyserini:dl19-passage?)"),
            ("dl19-passage", f"pyserini:dl19-passage is not in Pyserini's cache and cannot be downloaded (put {name} "),
        ):
            done = command(*words, f"pyserini:{wrong}")
            assert done.returncode == 2
            assert done.stderr.splitlines()[-1].startswith(f"condenser: error: {line}")
            assert "\tat " not in done.stderr, "no trace of Java's"
    assert not Path("r.trec").exists()


def test_without_java_the_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["evaluate", "--qrels", "pyserini:dl20-passage", "--run", "r.trec"]) == 2
    assert capsys.readouterr().err.startswith("condenser: error: pyserini:dl20-passage needs Java, and there is none")
