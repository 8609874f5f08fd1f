"""The verbs evaluate and compare, as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.runs import load_run, write_run
from retrieval.cli import main


@pytest.fixture()
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.trec"
    path.write_text("q1 Q0 d2 1 2.0 t\nq1 Q0 d1 2 1.0 t\nq2 Q0 d3 1 1.0 t\n")
    return path


@pytest.fixture()
def qrels(tmp_path: Path) -> Path:
    path = tmp_path / "qrels.tsv"
    path.write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td3\t2\n")
    return path


@pytest.fixture()
def collection(tmp_path: Path) -> Path:
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    passages = {"d1": "Paris is the capital", "d2": "of France", "d3": "a river of Paris"}
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": name, "title": "T", "text": text}) + "\n" for name, text in passages.items())
    )
    queries = [
        {"_id": "q1", "text": "capital?", "answers": ["paris"]},
        {"_id": "q2", "text": "river?", "answers": ["Seine", "France"]},
    ]
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td3\t2\nq2\tgone\t1\n")
    return folder


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, str]:
    """Run a command that must succeed; return what it printed and what it said."""
    assert main([str(word) for word in words]) == 0
    heard = capsys.readouterr()
    return heard.out, heard.err


def ask_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    return json.loads(ask(capsys, *words, "--json")[0])


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command that must fail as bad input does: status 2, nothing on stdout, one line on stderr."""
    assert main([str(word) for word in words]) == 2
    heard = capsys.readouterr()
    assert heard.out == "" and heard.err.count("\n") == 1
    return heard.err.removeprefix("condenser: error: ").rstrip("\n")


def test_a_run_in_three_forms(capsys: pytest.CaptureFixture[str], qrels: Path, run: Path) -> None:
    words = ["evaluate", "--qrels", qrels, "--run", run]
    out, err = ask(capsys, *words)
    assert err == ""
    assert out.startswith("queries: judged 2, in run 2, both 2;")
    assert out.endswith("metric     mean\nMRR@10   0.7500\nnDCG@10  0.8155\nR@100    1.0000\n")
    assert "| MRR@10  | 0.7500 |\n" in ask(capsys, *words, "--format", "markdown")[0]
    values = ask_json(capsys, *words, "--metrics", "MAP", "P@1", "--intervals", "--per_query")
    assert values["metrics"] == {"MAP": 0.75, "P@1": 0.5}
    assert values["intervals"]["P@1"] == [0.0, 1.0]
    assert values["per_query"]["q1"] == {"MAP": 0.5, "P@1": 0.0}


def test_a_collection_gives_judgements_and_the_corpus(
    capsys: pytest.CaptureFixture[str], collection: Path, run: Path
) -> None:
    values = ask_json(capsys, "evaluate", "--collection", collection, "--run", run)
    assert values["metrics"]["R@100"] == 0.75
    assert values["counts"]["not_in_corpus"] == 1
    _, err = ask(capsys, "evaluate", "--collection", collection, "--run", run)
    assert err == "warning: 1 of 3 judged passages is not in the corpus ('gone'): recall cannot reach 100 %\n"


def test_options_reach_the_metrics(capsys: pytest.CaptureFixture[str], cases: Path, tmp_path: Path) -> None:
    words = [
        "evaluate",
        "--qrels",
        cases / "51" / "qrels.txt",
        "--run",
        cases / "51" / "run.txt",
        "--metrics",
        "MRR@10",
    ]
    assert ask_json(capsys, *words)["metrics"] == {"MRR@10": 0.75}
    assert ask_json(capsys, *words, "--ignore_self")["metrics"] == {"MRR@10": 1.0}
    words = ["evaluate", "--qrels", cases / "58" / "qrels.txt", "--run", cases / "58" / "run.txt", "--metrics", "R@10"]
    assert ask_json(capsys, *words, "--relevance_level", "2")["metrics"] == {"R@10": 0.5}
    twice = tmp_path / "twice.trec"
    twice.write_text("q1 Q0 x 1 2.0 t\nq1 Q0 d2 2 1.0 t\nq1 Q0 d2 3 3.0 t\n")
    words = ["evaluate", "--qrels", cases / "51" / "qrels.txt", "--run", twice, "--metrics", "MRR@10"]
    assert "stands more than once" in refusal(capsys, *words)
    assert ask_json(capsys, *words, "--duplicates", "best")["metrics"] == {"MRR@10": 0.5}


def test_the_official_rules(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text("1\t0\t11\t1\n2\t0\t22\t1\n")
    (tmp_path / "run").write_text("1\t5\t1\n1\t11\t4\n")
    words = ["evaluate", "--official", "msmarco", "--qrels", tmp_path / "qrels", "--run", tmp_path / "run"]
    out, err = ask(capsys, *words)
    assert "MRR @10        0.125\nQueriesRanked      1\n" in out and "official MS MARCO passage script" in out
    assert err == (
        "warning: ranks have gaps or repeat for 1 query ('1'); the last line wins, an empty place is passage 0\n"
    )
    assert ask_json(capsys, *words)["metrics"] == {"MRR@10": 0.125}


def test_answers_from_a_run_and_from_dpr(
    capsys: pytest.CaptureFixture[str], collection: Path, run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "dpr.json"
    words = ["evaluate", "--answers", "--run", run, "--collection", collection, "--depths", "1", "2"]
    values = ask_json(capsys, *words, "--output", output)
    assert values == {
        "counts": {"passages": 3, "questions": 2, "without_answers": 0},
        "match": "string",
        "metrics": {"top-1": 0.0, "top-2": 0.5},
    }
    assert [[hit["has_answer"] for hit in entry["ctxs"]] for entry in json.loads(output.read_text())] == [
        [False, True],
        [False],
    ]
    out, _ = ask(capsys, "evaluate", "--answers", "--run", output, "--depths", "1", "2")
    assert out.endswith("accuracy    mean\ntop-1     0.0000\ntop-2     0.5000\n")
    assert out.startswith("questions: 2, without answers 0 (count as 0); passages: 3; match: string\n")


def test_similarity_of_sentences(capsys: pytest.CaptureFixture[str], tiny_bert: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "sts.tsv"
    pairs.write_text("the cat\tthe cat\t5\nthe dog\tthe river bank\t1\nwhat is fever\tthe king and queen\t0\n")
    values = ask_json(capsys, "evaluate", "--sts", pairs, "--encoder", tiny_bert, "--device", "cpu")
    assert values["counts"] == {"pairs": 3}
    # the first pair is one sentence twice: cosine 1, above the other two
    assert values["metrics"]["spearman_cosine"] >= 0.5
    assert set(values["metrics"]) == {"spearman_cosine", "pearson_cosine", "spearman_dot", "pearson_dot"}


def test_comparison(
    capsys: pytest.CaptureFixture[str], collection: Path, qrels: Path, run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.trec.gz"
    write_run(other, [("q1", [("d1", 2.0), ("d2", 1.0)]), ("q2", [("d3", 1.0)])])
    values = ask_json(capsys, "compare", run, other, "--qrels", qrels, "--metrics", "MRR@10", "--resamples", "200")
    (row,) = values["differences"]
    assert (row["run"], row["difference"], row["wins"], row["ties"]) == ("other", 0.25, 1, 1)
    (change,) = values["changes"]
    assert (change["query_id"], change["base_top"], change["top"]) == ("q1", "d2", "d1")
    out, _ = ask(capsys, "compare", run, other, "--collection", collection)
    assert '- q1 "capital?": 0.5000 -> 1.0000\n    - run puts first d2 "T of France"\n' in out
    assert "| run" in ask(capsys, "compare", run, other, "--qrels", qrels, "--format", "markdown")[0]


def test_runs_of_one_name_go_by_their_paths(capsys: pytest.CaptureFixture[str], qrels: Path, run: Path) -> None:
    other = run.with_suffix(".json")
    other.write_text(json.dumps(load_run(run)))
    values = ask_json(capsys, "compare", run, other, "--qrels", qrels)
    assert values["base"] == str(run) and values["differences"][0]["run"] == str(other)


def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], qrels: Path, run: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    # case R15
    (tmp_path / "other").write_text("t1 0 d1 1\n")
    assert refusal(capsys, "evaluate", "--qrels", tmp_path / "other", "--run", run) == (
        f"{run}: judgements and run have no query in common: judged are 't1'; in the run 'q1', 'q2' "
        "(are these the judgements of another split?)"
    )
    # case R43: an empty run is a run, but nothing can be measured
    (tmp_path / "empty").write_text("")
    assert refusal(capsys, "evaluate", "--qrels", qrels, "--run", tmp_path / "empty") == (
        f"{tmp_path}/empty: judgements and run have no query in common: judged are 'q1', 'q2'; in the run none "
        "(are these the judgements of another split?)"
    )
    assert refusal(capsys, "evaluate", "--run", run) == (
        "--qrels is missing: a file of judgements (or name a --collection and a --split)"
    )
    assert refusal(capsys, "evaluate", "--qrels", qrels) == "--run is missing: the run to measure"
    assert refusal(capsys, "evaluate", "--qrels", qrels, "--run", run, "--metrics", "nDCG@ten") == (
        "metric 'nDCG@ten': the cut is 'ten', expected a whole number from 1 on"
    )
    assert refusal(capsys, "evaluate", "--answers", "--official", "msmarco", "--run", run) == (
        "--official and --answers do not go together (choose one)"
    )
    assert refusal(capsys, "evaluate", "--answers", "--run", run) == (
        "--collection is missing: texts and answers of the run (or give DPR's result json as --run)"
    )
    assert refusal(capsys, "evaluate", "--qrels", qrels, "--run", run, "--output", "x") == (
        "--output goes with --answers (the report goes to stdout: condenser evaluate ... > FILE)"
    )
    assert refusal(capsys, "evaluate", "--sts", qrels) == (
        "--encoder is missing: what turns the sentences of --sts into vectors"
    )
    assert refusal(capsys, "evaluate", "--official", "msmarco", "--run", run) == (
        "--qrels is missing: the official rules take a file of judgements"
    )
    assert refusal(capsys, "compare", run, run, "--qrels", qrels) == f"a run is given twice: {run}"
    assert refusal(capsys, "compare", run, tmp_path / "other.trec", "--qrels", qrels).startswith(
        f"{tmp_path}/other.trec: no such file"
    )
    # what is not written to stdout is not written elsewhere either
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "other", "qrels.tsv", "run.trec"]


def test_evaluation_is_light(qrels: Path, run: Path) -> None:
    code = (
        "import sys\n"
        "from retrieval.cli import main\n"
        f"assert main(['evaluate', '--qrels', {str(qrels)!r}, '--run', {str(run)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'faiss', 'datasets', 'scipy', 'pandas', 'regex', 'pytrec_eval'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, stdout=subprocess.DEVNULL)
