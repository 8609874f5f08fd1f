"""Lucene's BM25 where Java and Pyserini are there, and the line that says what is missing where they are not."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eval.evaluation import evaluate
from eval.runs import load_run
from retrieval.cli import main
from retrieval.collections import open_collection

MISSING = [name for name in ("pyserini", "jnius") if importlib.util.find_spec(name) is None]
MISSING += [] if shutil.which("java") else ["Java"]
needs_lucene = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c/qrels").mkdir(parents=True)
    texts = {"7": "red fishes", "007": "red", "8": "fishing", "9": " ", "é": "naïve café"}
    lines = [json.dumps({"_id": name, "title": "", "text": text}) for name, text in texts.items()]
    (tmp_path / "c/corpus.jsonl").write_text("\n".join(lines))
    (tmp_path / "c/queries.jsonl").write_text('{"_id": "q", "text": "fish red"}\n{"_id": "r", "text": "the café"}\n')
    (tmp_path / "c/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t7\t1\nr\té\t1\n")
    return tmp_path


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: a virtual machine stays in a process for good."""
    return subprocess.run([sys.executable, "-m", "retrieval.cli", *words], capture_output=True, text=True, check=False)


@needs_lucene
@pytest.mark.slow
def test_an_index_and_a_search_without_one_give_the_same_run(folder: Path) -> None:
    """A passage without text is passed over; ids stay as they are; stdout holds the result alone."""
    collection, index, runs = str(folder / "c"), str(folder / "index"), [str(folder / f"{n}.trec") for n in (1, 2)]
    built = command("bm25", "index", "--engine", "lucene", "--collection", collection, "--output", index)
    assert (built.returncode, built.stdout) == (0, f"{index}\n"), built.stderr
    assert "lucene: 1 passages without text were passed over\n" in built.stderr
    for words, run in ((["--index", index], runs[0]), (["--engine", "lucene"], runs[1])):
        done = command("bm25", "search", *words, "--collection", collection, "--split", "test", "--output", run)
        assert (done.returncode, done.stdout) == (0, f"{run}\n"), done.stderr
    assert Path(runs[0]).read_bytes() == Path(runs[1]).read_bytes()
    hits = load_run(runs[0])
    assert list(hits["q"]) == ["7", "007", "8"] and list(hits["r"]) == ["é"]
    # By Lucene's formula: N = 4, df = 2 for each word; lengths 2, 1, 1, 2; k1 = .9, b = .4.
    assert hits["q"]["7"] == pytest.approx(2 * 0.6931 / (1 + 0.9 * (0.6 + 0.4 * 2 / 1.5)), abs=1e-3)
    assert json.loads(Path(f"{runs[0]}.json").read_text())["engine"] == "lucene"
    words = ["--index", index, "--engine", "bm25s", "--collection", collection, "--output", str(folder / "no.trec")]
    wrong = command("bm25", "search", *words)
    assert wrong.returncode == 2
    assert f"{index}: was built with engine lucene, --engine is bm25s (leave the option out, or" in wrong.stderr


@needs_lucene
def test_a_java_that_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(folder / "nowhere"))
    words = ["--engine", "lucene", "--collection", str(folder / "c"), "--output", str(folder / "index")]
    done = command("bm25", "index", *words)
    assert done.returncode == 2
    assert "condenser: error: --engine lucene: Java does not start: Unable to find libjvm.so" in done.stderr


@needs_lucene
@pytest.mark.slow
def test_figures_on_real_text(tmp_path: Path) -> None:
    """Other words than bm25s with its stemmer and stop words, but much the same figures."""
    run = tmp_path / "run.trec"
    words = ["--engine", "lucene", "--collection", "medquad", "--split", "dev", "--k", "100", "--output", str(run)]
    assert command("bm25", "search", *words).returncode == 0
    result = evaluate(open_collection("medquad").qrels("dev"), run, ["MRR@10", "nDCG@10", "R@100"])
    assert list(result.means.values()) == pytest.approx([0.424, 0.503, 0.856], abs=0.002)


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("java", "--engine lucene needs Java, and there is none here ("),
        ("jnius_config", "--engine lucene needs jnius_config, which is not installed (pip install --no-deps pyserini"),
    ],
)
def test_what_is_missing_is_named(
    folder: Path, missing: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    (folder / "bin").mkdir()
    monkeypatch.setenv("PATH", str(folder / "bin"))
    if missing != "java":
        (folder / "bin/java").touch(mode=0o755)
        monkeypatch.setitem(sys.modules, missing, None)
    words = ["bm25", "index", "--engine", "lucene", "--collection", str(folder / "c"), "--output", str(folder / "i")]
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"condenser: error: {line}")
    assert sorted(entry.name for entry in folder.iterdir()) == ["bin", "c"]
