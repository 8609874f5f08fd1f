"""UserError: one line, whatever it is made of, and unharmed by a trip to another process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from condenser.errors import UserError, first_line, nearest, sample


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("is empty"), "is empty"),
        (UserError("is empty", "a.tsv:3"), "a.tsv:3: is empty"),
        (UserError("is empty", Path("a.tsv"), "fill it"), "a.tsv: is empty (fill it)"),
        (UserError("two\nlines"), "two lines"),
        (UserError("found '\x1b[2J\r\u2028'"), "found ' [2J  '"),
        (UserError("x" * 10**6, "a.tsv:1"), f"a.tsv:1: {'x' * 200} ... {'x' * 200}"),
    ],
)
def test_one_line(error: UserError, line: str) -> None:
    assert str(error) == line


def test_survives_the_way_between_processes() -> None:
    """Loader workers hand errors to the main process by reduction and reconstruction, as copy does."""
    error = copy.copy(UserError("is empty", "a.tsv:3", "fill it"))
    assert (error.what, error.where, error.hint) == ("is empty", "a.tsv:3", "fill it")
    assert str(error) == "a.tsv:3: is empty (fill it)"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n one \n two"), "one"),
        (
            ValueError("Validation error for field 'x':\n    TypeError: text"),
            "Validation error for field 'x': TypeError: text",
        ),
        (KeyError("gelu_odd"), "no 'gelu_odd' is known here"),
        (ValueError(), "ValueError"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_line_of_a_foreign_error_that_says_something(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_nearest() -> None:
    assert nearest("colection", ["output", "collection", "k"]) == "collection"
    assert nearest("xyz", ["output", "collection"]) is None
    assert nearest("x", []) is None


def test_sample() -> None:
    assert sample(["a", "b"]) == "'a', 'b'"
    assert sample(iter("abcd")) == "'a', 'b', 'c', ..."
    assert sample({"q": 1, "r": 2}, 1) == "'q', ..."
    assert sample([]) == ""
