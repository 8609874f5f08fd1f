"""The language of --keep: what it means by a naive evaluation, quantiles, missing figures, and every message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condenser.errors import UserError
from retrieval.queries.conditions import (
    Comparison,
    Joined,
    check_figure_name,
    check_names,
    comparisons_of,
    meets,
    read_condition,
)

NAN = float("nan")
FIGURES = {
    "gain": np.array([1.0, 2.0, 3.0, 4.0, NAN]),
    "roundtrip": np.array([1.0, 101.0, NAN, 2.0, 3.0]),
    "none": np.full(5, NAN),
}


def kept(expression: str) -> list[int]:
    return np.flatnonzero(meets(read_condition(expression), FIGURES)).tolist()


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("gain >= 2", [1, 2, 3]),
        ("gain>2", [2, 3]),
        ("gain <= 2", [0, 1]),
        ("gain < 2", [0]),
        ("gain == 2", [1]),
        ("gain != 2", [0, 2, 3]),
        ("gain > -.5e1", [0, 1, 2, 3]),
        ("gain >= q0.5", [2, 3]),  # 2.5 of 1, 2, 3, 4
        ("gain >= q0", [0, 1, 2, 3]),
        ("gain >= q1.", [3]),
        ("gain <= q.5 and roundtrip <= 3", [0]),
        ("gain == 1 or gain == 4 and roundtrip == 1", [0]),
        ("(gain == 1 or gain == 4) and roundtrip == 2", [3]),
        ("not gain == 1 and roundtrip <= 3", [3, 4]),
        ("not (gain == 1 and roundtrip <= 3)", [1, 2, 3, 4]),
        ("not not gain == 1", [0]),
        ("none < 1 or none >= q0.5 or none != q0.5", []),
        ("not none < 1", [0, 1, 2, 3, 4]),
    ],
)
def test_what_an_expression_keeps(expression: str, rows: list[int]) -> None:
    assert kept(expression) == rows


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "character 1: found the end, expected the name of a figure, not or an opening bracket"),
        ("  and gain > 1", "character 3: found 'and gain > 1', expected the name of a figure"),
        ("gain", "character 5: found the end, expected one of >= > <= < == !="),
        ("gain = 3", "character 6: found '= 3', expected one of"),
        ("gain > q1.5", "character 8: found 'q1.5', expected a number, or q and a share from 0 to 1"),
        ("gain > q0.5 3", "character 13: found '3', expected and, or, or the end"),
        ("gain > q", "character 8: found 'q', expected a number"),
        ("gain > 1e999", "character 8: found '1e999', expected a number"),
        ("gain > 1.2.3", "character 8: found '1.2.3', expected a number"),
        ("gain > nan", "character 8: found 'nan', expected a number"),
        ("gain > 1 and", "character 13: found the end, expected the name of a figure"),
        ("(gain > 1", "character 10: found the end, expected and, or, or a closing bracket"),
        ("gain > 1)", "character 9: found ')', expected and, or, or the end"),
        ("gain > 1 AND gain < 2", "character 10: found 'AND gain < 2', expected and, or, or the end"),
        ("__import__('os')", "character 11: found \"('os')\", expected one of"),
        ("(" * 10_000 + "gain > 1" + ")" * 10_000, "character 52: found '((((((((((((((((((((', expected at most 50"),
        ("not " * 10_000 + "gain > 1", "expected at most 50 brackets and nots in one another"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(expression: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_condition(expression)
    assert str(caught.value).startswith("--keep: character")
    assert message in str(caught.value)


def test_an_unknown_name_is_told_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"--keep: character 14: no figure is called 'gian' \(did you mean gain\?\)"):
        check_names(read_condition("gain > 1 and gian > 2"), FIGURES)
    with pytest.raises(UserError, match="figures here: gain, none, roundtrip"):
        check_names(read_condition("x > 1"), FIGURES)
    check_names(read_condition("gain > 1 and (none > 2 or not roundtrip == 1)"), FIGURES)


@pytest.mark.parametrize("name", ["", "1st", "a b", "not", "a-b", "q(x)"])
def test_a_name_that_no_expression_could_hold_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="a figure is called"):
        check_figure_name(name, "scores.jsonl:1")
    check_figure_name("rank_10.short", "scores.jsonl:1")


def test_thousands_of_comparisons_in_a_row_are_no_depth() -> None:
    assert kept(" or ".join(["gain == 1"] * 5_000)) == [0]


# An oracle: the expression's tree, printed with a bracket around everything or only where needed, and evaluated one
# query at a time by Python itself.

COMPARISONS = st.builds(
    Comparison,
    st.sampled_from(["gain", "roundtrip", "_a.b2", "nothing"]),
    st.sampled_from([">=", ">", "<=", "<", "==", "!="]),
    st.one_of(st.integers(-3, 3).map(float), st.floats(allow_nan=False, allow_infinity=False)),
) | st.builds(
    Comparison,
    st.sampled_from(["gain", "roundtrip", "_a.b2", "nothing"]),
    st.sampled_from([">=", ">", "<=", "<", "==", "!="]),
    st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
    st.just(True),
)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: (
        st.builds(Joined, st.just("not"), st.tuples(inner))
        | st.builds(Joined, st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3).map(tuple))
    ),
    max_leaves=12,
)
STRENGTH = {"or": 0, "and": 1, "not": 2}


def printed(condition: Any, above: int, blanks: Any) -> str:
    if isinstance(condition, Comparison):
        return f"{condition.name}{blanks()}{condition.operator}{blanks()}{str(condition).split()[-1]}"
    strength = STRENGTH[condition.kind]
    # The same word inside is bracketed, too, so that the tree comes back as it was.
    inner = [printed(part, strength + (condition.kind != "not"), blanks) for part in condition.parts]
    text = f"not {inner[0]}" if condition.kind == "not" else f"{blanks()} {condition.kind} ".join(inner)
    return f"({blanks()}{text}{blanks()})" if strength < above else text


def naive(condition: Any, row: dict[str, float], columns: dict[str, list[float]]) -> bool:
    if isinstance(condition, Joined):
        inside = [naive(part, row, columns) for part in condition.parts]
        return {"and": all(inside), "or": any(inside), "not": not inside[0]}[condition.kind]
    value, bound = row[condition.name], condition.value
    if value != value:
        return False
    if condition.quantile:
        ordered = sorted(one for one in columns[condition.name] if one == one)
        place = condition.value * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        bound = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return {
        ">=": value >= bound,
        ">": value > bound,
        "<=": value <= bound,
        "<": value < bound,
        "==": value == bound,
        "!=": value != bound,
    }[condition.operator]


@settings(max_examples=150, deadline=None)
@given(CONDITIONS, st.data())
def test_any_expression_is_read_back_and_means_what_python_says(condition: Any, data: st.DataObject) -> None:
    blanks = lambda: data.draw(st.sampled_from(["", " ", "\t \n"]))  # noqa: E731
    expression = printed(condition, 0, blanks)
    found = read_condition(expression)
    assert [str(one) for one in comparisons_of(found)] == [str(one) for one in comparisons_of(condition)]
    # Whole numbers and quarters: quantiles are exact in both ways of computing them.
    values = st.lists(st.sampled_from([NAN, -2.0, -1.0, 0.0, 1.0, 2.0]), min_size=5, max_size=5)
    columns = {name: data.draw(values) for name in ("gain", "roundtrip", "_a.b2")} | {"nothing": [NAN] * 5}
    rows = [{name: column[place] for name, column in columns.items()} for place in range(5)]
    arrays = {name: np.array(column) for name, column in columns.items()}
    assert meets(found, arrays).tolist() == [naive(condition, row, columns) for row in rows]


@settings(max_examples=300, deadline=None)
@given(
    st.text()
    | st.lists(
        st.sampled_from(["gain", " ", "and", "or", "not", "(", ")", ">=", "<", "=", "q", "0.5", "-", "1", "e", "."])
    ).map("".join)
)
def test_random_text_raises_nothing_but_an_error_of_one_line(text: str) -> None:
    try:
        condition = read_condition(text)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert read_condition(" and ".join(f"({one})" for one in comparisons_of(condition)))
