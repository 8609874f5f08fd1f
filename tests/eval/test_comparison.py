from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from condenser.errors import UserError
from eval import RunArrays, compare, write_run

QRELS = {f"q{number}": {"a": 1} for number in range(8)}
BASE = {query_id: {"a": 1.0, "b": 2.0} for query_id in QRELS}  # 0.5 everywhere
# better for q0 to q4, worse for q5 and q6, the same for q7
OTHER = {
    query_id: {"a": 3.0} if number < 5 else {"b": 2.0} if number < 7 else {"a": 1.0, "b": 2.0}
    for number, query_id in enumerate(QRELS)
}


def test_wins_and_tests() -> None:
    result = compare(QRELS, BASE, {"other": OTHER}, ["MRR@10", "R@10"])
    rank, recall = result.differences
    assert (rank.run, rank.metric, rank.base_mean, rank.mean) == ("other", "MRR@10", 0.5, 5.5 / 8)
    assert (rank.wins, rank.ties, rank.losses) == (5, 1, 2)
    assert (recall.wins, recall.ties, recall.losses) == (0, 6, 2)
    assert rank.difference == pytest.approx(1.5 / 8)
    assert rank.low < rank.difference < rank.high
    differences = np.array([0.5] * 5 + [-0.5] * 2 + [0])
    assert rank.p_t == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    # of the 2^7 choices of signs, those with at most 2 or at least 5 minus signs
    assert rank.p_randomisation == pytest.approx(2 * (1 + 7 + 21) / 2**7)
    assert recall.p_randomisation == 0.5
    assert rank.p_randomisation_holm == pytest.approx(2 * rank.p_randomisation)


def test_holm_runs_over_all_runs_and_metrics() -> None:
    result = compare(QRELS, BASE, {"x": OTHER, "y": OTHER, "z": BASE}, ["MRR@10"])
    p = result.differences[0].p_t
    assert [row.p_t for row in result.differences] == [p, p, 1.0] and p < 0.3
    assert [row.p_t_holm for row in result.differences] == pytest.approx([3 * p, 3 * p, 1.0])


def test_the_queries_that_changed_most() -> None:
    other = OTHER | {"q6": {"c": 1.0, "b": 0.5, "a": 0.1}}  # a third instead of half
    result = compare(QRELS, BASE, {"other": other}, ["MRR@10"], changed=7)
    assert [change.query_id for change in result.changes] == ["q0", "q1", "q2", "q3", "q4", "q5", "q6"]
    first, last = result.changes[0], result.changes[-1]
    assert (first.base_value, first.value, first.base_top, first.top) == (0.5, 1.0, "b", "a")
    assert (last.base_top, last.top) == ("b", "c") and last.value == pytest.approx(1 / 3)
    assert len(compare(QRELS, BASE, {"other": other}, ["MRR@10"], changed=2).changes) == 2
    assert compare(QRELS, BASE, {"other": BASE}, ["MRR@10"]).changes == []


def test_files_dicts_and_arrays_give_one_result(tmp_path: Path) -> None:
    path = tmp_path / "other.trec"
    write_run(path, ((query_id, sorted(hits.items())) for query_id, hits in OTHER.items()))
    rows = np.array([[0, -1]] * 5 + [[1, -1]] * 2 + [[1, 0]])
    scores = np.array([[3.0, -9.0]] * 5 + [[2.0, -9.0]] * 2 + [[2.0, 1.0]])
    arrays = RunArrays(list(QRELS), rows, scores, ["a", "b"])
    results = [compare(QRELS, BASE, {"other": source}) for source in (OTHER, path, arrays, tuple(arrays))]
    assert all(result.differences == results[0].differences for result in results)
    assert all(result.changes == results[0].changes for result in results)


def test_the_own_passage_is_never_first_when_ignored() -> None:
    base = {"q1": {"q1": 9.0, "a": 1.0}}
    result = compare({"q1": {"a": 1}}, base, {"other": {"q1": {"b": 2.0, "a": 1.0}}}, ["MRR@10"], ignore_self=True)
    assert result.changes[0].base_top == "a"


def test_the_report() -> None:
    text = str(compare(QRELS, BASE, {"other": OTHER}, ["MRR@10"], base_name="bm25", changed=1))
    assert "differences from bm25, 10,000 resamples; p in brackets: Holm's correction for 1 test\n" in text
    assert "Queries that changed most from bm25 to other, by MRR@10:\n\n- q0: 0.5000 -> 1.0000\n" in text
    assert "    - bm25 puts first b\n    - other puts first a" in text


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"runs": {}}, "there is no run to compare with the base"),
        ({"resamples": 10}, "10 resamples are too few, expected 100 or more"),
        ({"changed": -1}, "-1 changed queries cannot be shown"),
        ({"confidence": 1.0}, "confidence is 1.0, expected a number between 0 and 1"),
    ],
)
def test_what_is_refused(options: dict[str, object], line: str) -> None:
    with pytest.raises(UserError) as caught:
        compare(QRELS, BASE, **({"runs": {"other": OTHER}} | options))  # type: ignore[arg-type]
    assert str(caught.value) == line
