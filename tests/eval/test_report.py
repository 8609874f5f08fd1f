from __future__ import annotations

import json

from eval import compare, evaluate
from eval.evaluation import mean_intervals
from eval.report import Table, Texts, comparison_report, evaluation_report

QRELS = {"q|1": {"a": 1}, "q2": {"a": 1}}
RUN = {"q|1": {"a": 1.0}, "q2": {"b": 1.0}}


def test_tables() -> None:
    table = Table(["metric", "x"], [["a|b", "1.0000"], ["longer", "2"]])
    assert table.render() == "metric       x\na|b     1.0000\nlonger       2"
    assert table.render(markdown=True) == (
        "| metric |      x |\n| ------ | -----: |\n| a\\|b    | 1.0000 |\n| longer |      2 |"
    )


def test_an_evaluation_in_three_forms() -> None:
    result = evaluate(QRELS, RUN, ["MRR@10"])
    report = evaluation_report(result, intervals=mean_intervals(result), per_query=True)
    assert report.render().endswith(
        "metric    mean     95 % interval\nMRR@10  0.5000  0.0000 to 1.0000\n\n"
        "query  MRR@10\nq2     0.0000\nq|1    1.0000"
    )
    assert "| MRR@10 | 0.5000 | 0.0000 to 1.0000 |" in report.render("markdown")
    values = json.loads(report.render("json"))
    assert values["metrics"] == {"MRR@10": 0.5} and values["intervals"] == {"MRR@10": [0.0, 1.0]}
    assert values["per_query"] == {"q2": {"MRR@10": 0.0}, "q|1": {"MRR@10": 1.0}}
    assert values["counts"]["judged"] == 2 and values["order"].startswith("score as float32 descending")


def test_texts_of_the_queries_that_changed() -> None:
    result = compare(QRELS, RUN, {"new": {"q|1": {"a": 1.0}, "q2": {"a": 1.0}}}, ["MRR@10"], base_name="old")
    texts = Texts({"q2": "why  so\nmany?"}, {"a": "word " * 40})
    report = comparison_report(result, texts=texts)
    assert '- q2 "why so many?": 0.0000 -> 1.0000\n    - old puts first b (no text)\n    - new puts first a "word' in (
        report.render()
    )
    (change,) = json.loads(report.render("json"))["changes"]
    assert (
        change["query"] == "why  so\nmany?" and change["top_text"] == "word " * 40 and change["base_top_text"] is None
    )


def test_a_query_that_finds_nothing() -> None:
    text = str(compare(QRELS, RUN, {"new": {"q|1": {}, "q2": {"b": 1.0}}}, ["MRR@10"], base_name="old"))
    assert "- q|1: 1.0000 -> 0.0000\n    - old puts first a\n    - new finds nothing" in text
