from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from condenser.errors import UserError
from eval.ranks import JudgedRanks, best_first, judged_ranks
from eval.runs import RunArrays, load_qrels, load_run

QRELS = {"q1": {"d2": 1}, "q2": {"d3": 1}}
RUN = {"q1": {"q1": 9.0, "d2": 8.0}, "q2": {"d3": 7.0, "q1": 6.0}}
ARRAYS = RunArrays(["q1", "q2"], np.array([[0, 1], [2, 0]]), np.array([[9.0, 8.0], [7.0, 6.0]]), ["q1", "d2", "d3"])
TREC = "q1 Q0 q1 1 9.0 t\nq1 Q0 d2 2 8.0 t\nq2 Q0 d3 1 7.0 t\nq2 Q0 q1 2 6.0 t\n"


def by_query(ranks: JudgedRanks) -> dict[str, list[int]]:
    return {query_id: ranks.rank[ranks.query == place].tolist() for place, query_id in enumerate(ranks.query_ids)}


@pytest.fixture(params=["dicts", "arrays", "file", "file-not-together"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    if request.param.startswith("file"):
        lines = TREC.splitlines(keepends=True)
        path = tmp_path / "run.trec"
        path.write_text("".join(lines[::2] + lines[1::2] if "not" in request.param else lines))
        return path
    return RUN if request.param == "dicts" else ARRAYS


def test_the_query_as_its_own_hit(source: object) -> None:  # case B51
    kept = judged_ranks(QRELS, source)  # type: ignore[arg-type]
    assert by_query(kept) == {"q1": [2], "q2": [1]}
    assert kept.depth.tolist() == [2, 2]
    left_out = judged_ranks(QRELS, source, ignore_self=True)  # type: ignore[arg-type]
    # for q2 the passage q1 stays
    assert by_query(left_out) == {"q1": [1], "q2": [1]}
    assert left_out.depth.tolist() == [1, 2]


def test_counts(source: object) -> None:
    qrels = {"q2": {"d3": 0, "x": 1}, "q3": {"d3": 1}, "q4": {"d3": 0}, "q5": {}}
    ranks = judged_ranks(qrels, source)  # type: ignore[arg-type]
    assert ranks.query_ids == ["q2", "q3"]
    assert by_query(ranks) == {"q2": [1, 0], "q3": [0]}
    assert ranks.grade.tolist() == [0, 1, 1]
    assert ranks.depth.tolist() == [2, 0]
    assert ranks.counts._asdict() == {
        "judged": 4,
        "in_run": 2,
        "both": 1,
        "nothing_relevant": 2,
        "judged_not_in_run": 3,
        "in_run_not_judged": 1,
    }
    assert ranks.missing == ["q3", "q4", "q5"]


def test_nothing_in_common_shows_both_sides(source: object) -> None:  # case R15
    with pytest.raises(UserError) as caught:
        judged_ranks({f"t{number}": {"d2": 1} for number in range(5)}, source)  # type: ignore[arg-type]
    line = "judgements and run have no query in common: judged are 't0', 't1', 't2', ...; in the run 'q1', 'q2'"
    assert str(caught.value).removeprefix(f"{source}: ") == f"{line} (are these the judgements of another split?)"


def test_ties_in_every_source(cases: Path) -> None:  # case B52
    qrels = load_qrels(cases / "52" / "qrels.txt")
    for name, rank in (("run1.txt", 1), ("run2.txt", 2)):
        path = cases / "52" / name
        run = load_run(path)
        (hits,) = run.values()
        arrays = RunArrays(["1"], np.array([[0, 1]]), np.array([list(hits.values())]), list(hits))
        for some in (path, run, arrays):
            assert by_query(judged_ranks(qrels, some))["1"] == [
                0 if "a" not in hits else 2,
                rank,
                0 if "c" not in hits else 1,
            ]


def test_python_numbers_of_any_kind() -> None:  # case B60
    run = {"q1": {"a": 2, "b": np.float32(3), "c": torch.tensor(1.0), "d": np.int64(4), "e": True}}
    qrels = {"q2": {}, "q1": {name: np.int64(1) for name in "abcd"}, "q3": {"a": True}}
    ranks = judged_ranks(qrels, run)  # type: ignore[arg-type]
    assert by_query(ranks) == {"q1": [3, 2, 5, 1], "q3": [0]}


def test_arrays_of_any_kind() -> None:
    run = RunArrays(["q1"], torch.tensor([[1, 0]]), torch.tensor([[2.0, 1.0]]), ["a", "b"])  # type: ignore[arg-type]
    qrels = {"q1": {"a": 1, "b": 1, "c": 1}}
    assert by_query(judged_ranks(qrels, run)) == {"q1": [2, 1, 0]}
    assert by_query(judged_ranks(qrels, tuple(run))) == {"q1": [2, 1, 0]}  # type: ignore[arg-type]


def test_more_pairs_than_are_compared_at_once() -> None:
    generator = np.random.default_rng(0)
    names = [f"d{number}" for number in range(50)]
    rows = np.stack([generator.permutation(50)[:30] for _ in range(60)])
    scores = generator.integers(0, 9, rows.shape).astype(np.float32)
    run = RunArrays([f"q{number}" for number in range(60)], rows, scores, names)
    qrels = {query_id: {name: 1 for name in names} for query_id in run.query_ids}
    assert by_query(judged_ranks(qrels, run)) == by_query(judged_ranks(qrels, run.as_run()))


@pytest.mark.parametrize(
    ("qrels", "run", "line"),
    [
        ({"q1": {"d1": 0.5}}, RUN, "grade 0.5 of query 'q1', passage 'd1': expected a whole number"),
        ({"q1": {"d1": 2**31}}, RUN, "grade 2147483648 of query 'q1', passage 'd1': expected a whole number"),
        ({1: {"d1": 1}}, RUN, "query id 1 in the judgements is int, expected str"),
        ({"q1": {1: 1}}, RUN, "passage id 1 in the judgements is int, expected str"),
        (QRELS, {"q1": {1: 1.0}}, "id 1 in the run is int, expected str"),
        (QRELS, {"q1": {"d1": "high"}}, "a score of query 'q1' in the run is not a number"),
        (QRELS, {"q1": {"d1": None}}, "a score of query 'q1' in the run is NaN, which has no place in an order"),
        (
            QRELS,
            {"q1": {"d1": float("nan")}},
            "a score of query 'q1' in the run is NaN, which has no place in an order",
        ),
        (
            QRELS,
            RunArrays(["q1"], np.array([[0, 0]]), np.array([[2.0, 1.0]]), ["d2"]),
            "a passage stands more than once in a ranking (duplicates='best' keeps the better score)",
        ),
        (
            QRELS,
            RunArrays(["q1"], np.array([[0, 1]]), np.array([[2.0, np.nan]]), ["d2", "d1"]),
            "a score is NaN, which has no place in an order",
        ),
        (
            QRELS,
            RunArrays(["q1"], np.array([[3]]), np.array([[2.0]]), ["d2"]),
            "a hit is row 3, but there are 1 passage ids",
        ),
        (
            QRELS,
            RunArrays(["q1"], np.array([[0]]), np.array([[2.0, 1.0]]), ["d2"]),
            "rows have shape (1, 1), scores (1, 2), and there are 1 query ids "
            "(expected two arrays of shape (queries, k))",
        ),
        (
            QRELS,
            RunArrays(["q1", "q1"], np.array([[0], [0]]), np.array([[2.0], [1.0]]), ["d2"]),
            "a query id stands twice in the run",
        ),
    ],
)
def test_what_is_refused(qrels: object, run: object, line: str) -> None:
    with pytest.raises(UserError) as caught:
        judged_ranks(qrels, run)  # type: ignore[arg-type]
    assert str(caught.value) == line


def test_the_best_of_duplicates_in_arrays() -> None:
    run = RunArrays(["q1"], np.array([[0, 1, 1, -1]]), np.array([[2.0, 1.0, 3.0, -9.0]]), ["a", "b"])
    ranks = judged_ranks({"q1": {"a": 1, "b": 1}}, run, duplicates="best")
    assert by_query(ranks) == {"q1": [2, 1]}
    assert ranks.depth.tolist() == [2]


def test_best_first() -> None:
    assert best_first({"a": 1.0, "B": 1.0, "ä": 1.0 + 1e-9, "c": 2.0}) == ["c", "ä", "a", "B"]
