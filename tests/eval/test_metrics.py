from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from condenser.errors import UserError
from eval import RunArrays, evaluate
from eval.metrics import parse_metric

PASSAGES = ["a", "b", "B", "aa", "10", "9", "ä", "東", "\U0001f600", "z"]
SCORES = [0.0, -0.0, 1.0, 1.0 + 1e-9, 0.1, 0.1 + 1e-3, -2.5, 3e38, 16777216.0, 16777217.0, float("inf")]

# our name -> trec_eval's
MEASURES = {
    "MRR": "recip_rank",
    "MAP": "map",
    "MAP@3": "map_cut_3",
    "nDCG": "ndcg",
    "nDCG@3": "ndcg_cut_3",
    "nDCG@10": "ndcg_cut_10",
    "R@2": "recall_2",
    "R": "set_recall",
    "R@100": "recall_100",
    "P@3": "P_3",
    "P@100": "P_100",
    "Success@1": "success_1",
    "Success@5": "success_5",
}
ASKED = {name.replace("_cut_", "_cut.") if "cut" in name else name for name in MEASURES.values()}

judgements = st.dictionaries(
    st.sampled_from(["q1", "q2", "q3"]),
    st.dictionaries(st.sampled_from(PASSAGES), st.integers(-2, 3), max_size=8),
    min_size=1,
)
runs = st.dictionaries(
    st.sampled_from(["q1", "q2", "q3", "q4"]),
    st.dictionaries(st.sampled_from(PASSAGES), st.sampled_from(SCORES) | st.floats(-5, 5), max_size=10),
)


def as_arrays(run: dict[str, dict[str, float]]) -> RunArrays:
    width = max(map(len, run.values()), default=0)
    rows = np.full((len(run), width), -1)
    scores = np.full((len(run), width), -3.4e38, dtype=np.float32)
    for place, hits in enumerate(run.values()):
        rows[place, : len(hits)] = [PASSAGES.index(name) for name in hits]
        scores[place, : len(hits)] = np.array(list(hits.values()), dtype=np.float64).astype(np.float32)
    return RunArrays(list(run), rows, scores, PASSAGES)


def as_file(run: dict[str, dict[str, float]], path: Path) -> Path:
    lines = [f"{query} Q0 {name} 1 {score!r} t\n" for query, hits in run.items() for name, score in hits.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.mark.filterwarnings("ignore:overflow encountered")
@given(qrels=judgements, run=runs, level=st.sampled_from([1, 2]))
def test_every_source_equals_trec_eval(
    tmp_path_factory: pytest.TempPathFactory,
    qrels: dict[str, dict[str, int]],
    run: dict[str, dict[str, float]],
    level: int,
) -> None:
    measured = {query for query, grades in qrels.items() if max(grades.values(), default=0) >= level}
    if not measured or not qrels.keys() & run.keys():
        return
    # pytrec_eval cannot take an empty ranking or an empty judgement: there every value is 0 by definition.
    judged = {query: grades for query, grades in qrels.items() if query in measured}
    retrieved = {query: hits for query, hits in run.items() if hits}
    expected = pytrec_eval.RelevanceEvaluator(judged, ASKED, relevance_level=level).evaluate(retrieved)
    path = as_file(run, tmp_path_factory.getbasetemp() / "run.trec")
    sources = [run, as_arrays(run)]
    # a file has no place for a query without hits
    sources += [path] if qrels.keys() & retrieved.keys() else []
    for source in sources:
        result = evaluate(qrels, source, list(MEASURES), relevance_level=level)
        assert result.query_ids == sorted(measured)
        for name, theirs in MEASURES.items():
            wanted = [expected.get(query, {}).get(theirs, 0.0) for query in result.query_ids]
            np.testing.assert_allclose(result.per_query[name], wanted, rtol=0, atol=1e-9, err_msg=name)
            assert math.isclose(result.means[name], sum(wanted) / len(wanted), abs_tol=1e-9)


def measured(qrels: str | Path | dict[str, dict[str, int]], run: object, metrics: str, level: int = 1) -> list[float]:
    result = evaluate(qrels, run, metrics.split(), relevance_level=level)  # type: ignore[arg-type]
    return [round(mean, 6) for mean in result.means.values()]


def test_ties_go_to_the_greater_id(cases: Path) -> None:  # case B52
    for name, expected in (("run1.txt", [1.0, 1.0]), ("run2.txt", [0.5, 0.63093])):
        assert measured(cases / "52" / "qrels.txt", cases / "52" / name, "MRR nDCG") == expected


def test_cut_and_uncut(cases: Path) -> None:  # case B54
    for name in ("run.msmarco.tsv", "run.trec"):
        assert measured(cases / "54" / "qrels.txt", cases / "54" / name, "MRR@10 MRR") == [0.444444, 0.474747]


def test_recall_capped_recall_success_are_three_things(cases: Path) -> None:  # case B56
    metrics = "R@1 R@10 R_cap@1 R_cap@10 MRR@1 Success@1"
    assert measured(cases / "56" / "qrels.txt", cases / "56" / "run.txt", metrics) == [0.05, 0.5, 1, 1, 1, 1]


def test_linear_and_exponential_gain(cases: Path) -> None:  # case B57
    qrels, run = cases / "57" / "qrels.txt", cases / "57" / "run.txt"
    assert measured(qrels, run, "nDCG@10 nDCG_exp@10") == [0.688529, 0.589705]


def test_relevance_level(cases: Path) -> None:  # case B58
    qrels, run = cases / "58" / "qrels.txt", cases / "58" / "run.txt"
    assert measured(qrels, run, "MRR R@10 MAP nDCG@10") == [1.0, 0.666667, 0.555556, 0.420004]
    assert measured(qrels, run, "MRR R@10 MAP nDCG@10", level=2) == [0.333333, 0.5, 0.166667, 0.420004]


def test_judged_share() -> None:
    qrels = {"q1": {"a": 1, "b": 0}, "q2": {"a": 1}}
    run = {"q1": {"a": 3.0, "x": 2.0, "b": 1.0}, "q2": {}}
    result = evaluate(qrels, run, ["Judged@1", "Judged@2", "Judged@10"])
    assert [values.tolist() for values in result.per_query.values()] == [[1, 0], [0.5, 0], [2 / 3, 0]]


def test_names_and_their_cousins() -> None:
    assert [parse_metric(name).name for name in ("mrr@10", "RR", "recall@5", "Hit@1", "AP", "precision@3")] == [
        "MRR@10",
        "MRR",
        "R@5",
        "Success@1",
        "MAP",
        "P@3",
    ]
    assert evaluate({"q1": {"a": 1}}, {"q1": {"a": 1.0}}, ["Recall@5"])["recall@5"] == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nDGC@10", "unknown metric 'nDGC@10' (did you mean nDCG@10?)"),
        ("xyzzy", "unknown metric 'xyzzy' (known are MRR, R, R_cap, Success, nDCG, nDCG_exp, MAP, P, Judged)"),
        ("MRR@", "metric 'MRR@': the cut is '', expected a whole number from 1 on"),
        ("MRR@0", "metric 'MRR@0': the cut is '0', expected a whole number from 1 on"),
        ("P", "metric 'P' needs a cut (for example P@10)"),
    ],
)
def test_wrong_names(name: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_metric(name)
    assert str(caught.value) == line


def test_a_grade_too_high_for_a_power() -> None:
    with pytest.raises(UserError, match="grade 1001 is too high for nDCG_exp"):
        evaluate({"q1": {"a": 1001}}, {"q1": {"a": 1.0}}, ["nDCG_exp@10"])
