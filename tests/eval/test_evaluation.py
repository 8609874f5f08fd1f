from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from condenser.errors import UserError
from eval import evaluate
from eval.evaluation import mean_intervals
from eval.runs import load_run


def test_import_of_the_package_loads_nothing() -> None:
    code = (
        "import sys, eval, eval.options\n"
        "assert 'numpy' not in sys.modules\n"
        "from eval import evaluate, compare, load_run, load_qrels, write_run, RunArrays\n"
        "assert not {'torch', 'scipy', 'pandas', 'transformers'} & set(sys.modules)\n"
        "assert not hasattr(eval, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_the_mean_is_over_judged_queries(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:  # cases B8, B53
    result = evaluate(cases / "53" / "qrels.txt", cases / "53" / "run.txt", ["MRR@10"])
    assert dict(zip(result.query_ids, result.per_query["MRR@10"].tolist(), strict=True)) == {
        "q1": 1,
        "q2": 0.5,
        "q3": 0,
    }
    assert result["MRR@10"] == 0.5
    assert str(result).startswith(
        "queries: judged 3, in run 3, both 2; judged but not in run 1 (count as 0), "
        "in run but not judged 1 (ignored), nothing relevant 0 (left out)\n"
    )
    assert "warning: 1 judged query is not in the run and counted as 0: 'q3'\n" in capsys.readouterr().err


def test_queries_without_anything_relevant_are_left_out_and_counted() -> None:  # case R14
    result = evaluate({"q1": {"a": 1}, "q2": {"a": 0}, "q3": {}}, {"q1": {"a": 1.0}, "q2": {"a": 1.0}}, ["MRR@10"])
    assert result.means == {"MRR@10": 1.0} and result.query_ids == ["q1"]
    assert "nothing relevant 2 (left out)" in str(result)


def test_the_wrong_judgements(capsys: pytest.CaptureFixture[str]) -> None:  # case B59
    result = evaluate({f"q{number}": {"a": 1} for number in range(10)}, {"q3": {"a": 1.0}})
    assert str(result).startswith("queries: judged 10, in run 1, both 1;")
    assert capsys.readouterr().err == (
        "warning: 9 judged queries are not in the run and counted as 0: 'q0', 'q1', 'q2', ...\n"
        "warning: only 1 of 10 judged queries are in the run (below 90%): are these the judgements for this run?\n"
    )


def test_judged_passages_outside_the_corpus(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:  # cases B7, R13
    result = evaluate(
        cases / "7" / "qrels.txt", load_run(cases / "7" / "run.txt"), ["R@10", "nDCG@10"], corpus={"d1", "d2"}
    )
    assert {name: round(mean, 6) for name, mean in result.means.items()} == {"R@10": 0.5, "nDCG@10": 0.613147}
    assert "\npassages: judged 2, of them not in the corpus 1\n" in str(result)
    assert capsys.readouterr().err == (
        "warning: 1 of 2 judged passages is not in the corpus ('d_gone'): recall cannot reach 100 %\n"
    )


def test_a_dataframe_of_queries() -> None:
    frame = evaluate({"q1": {"a": 1}, "q2": {"a": 1}}, {"q1": {"a": 1.0}, "q2": {}}, ["MRR@10", "R@5"]).to_dataframe()
    assert frame.to_dict("index") == {"q1": {"MRR@10": 1.0, "R@5": 1.0}, "q2": {"MRR@10": 0.0, "R@5": 0.0}}
    assert frame.index.name == "query"


def test_intervals_hold_the_mean_and_repeat() -> None:
    qrels = {f"q{number}": {"a": 1} for number in range(40)}
    run = {query_id: {"a": 1.0} if number % 4 else {"b": 1.0} for number, query_id in enumerate(qrels)}
    result = evaluate(qrels, run, ["MRR@10"])
    low, high = mean_intervals(result)["MRR@10"]
    # normal approximation: .75 +- 1.96 * sqrt(.75 * .25 / 40)
    assert low == pytest.approx(0.616, abs=0.03) and high == pytest.approx(0.884, abs=0.03)
    assert mean_intervals(result) == mean_intervals(evaluate(qrels, dict(reversed(run.items())), ["MRR@10"]))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"relevance_level": 0}, "relevance level is 0, expected 1 or more"),
        ({"relevance_level": 2}, "no judged query has a passage of grade 2 or more"),
    ],
)
def test_what_is_refused(options: dict[str, int], line: str) -> None:
    with pytest.raises(UserError) as caught:
        evaluate({"q1": {"a": 1}}, {"q1": {"a": 1.0}}, **options)  # type: ignore[arg-type]
    assert str(caught.value) == line
