"""The little language in which one says which queries to keep: figures compared with numbers, and, or and not."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np

from condenser.boolean import BooleanReader
from condenser.errors import UserError, nearest, sample

NAME = re.compile(r"[^\W\d][\w.]*")
"""What a figure may be called, but for and, or and not."""

OPERATORS = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}

_WORDS = ("and", "or", "not")
_OPERATOR = re.compile("|".join(sorted(OPERATORS, key=len, reverse=True)))
_NUMBER = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![\w.])")
_QUANTILE = re.compile(r"q([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?![\w.])")
_WHERE = "--keep"


@dataclass(frozen=True)
class Comparison:
    """A figure compared with a number, or with one of its own quantiles.

    Attributes:
        name: of the figure.
        operator: one of `OPERATORS`.
        value: the number; with ``quantile`` a share from 0 to 1, 0.5 for the median.
        quantile: whether it is one.
        place: the character, from 1, at which the name stands.
    """

    name: str
    operator: str
    value: float
    quantile: bool = False
    place: int = 1

    def __str__(self) -> str:
        return f"{self.name} {self.operator} {'q' if self.quantile else ''}{repr(self.value).removesuffix('.0')}"


@dataclass(frozen=True)
class Joined:
    """Conditions of which all or one must hold (``and``, ``or``), or one that must not (``not``)."""

    kind: Literal["and", "or", "not"]
    parts: tuple[Condition, ...]


Condition = Comparison | Joined


def read_condition(expression: str) -> Condition:
    """Read an expression; nothing of it is ever run as code.

    - ``gain >= 1.5``: a figure's name, one of ``>= > <= < == !=``, a number;
    - ``gain >= q0.5``: a quantile of that figure over all queries in place of the number;
    - ``A and B``, ``A or B``, ``not A``, ``( )``: ``not`` binds closest, ``or`` loosest.

    Raises:
        UserError: what cannot be read, with its place, what stands there and what was expected.
    """
    return _Reader(expression).read()


def comparisons_of(condition: Condition) -> Iterator[Comparison]:
    """Yield the comparisons of a condition from left to right."""
    if isinstance(condition, Comparison):
        yield condition
    else:
        for part in condition.parts:
            yield from comparisons_of(part)


def check_names(condition: Condition, figures: Mapping[str, np.ndarray]) -> None:
    """Raise UserError for a name that no figure has; the nearest is named."""
    for one in comparisons_of(condition):
        if one.name not in figures:
            raise unknown_figure(one.name, figures, f"{_WHERE}: character {one.place}")


def unknown_figure(name: str, figures: Mapping[str, np.ndarray], where: str) -> UserError:
    """Return the error that no figure has this name."""
    close = nearest(name, figures)
    hint = f"did you mean {close}?" if close else f"figures here: {', '.join(sorted(figures))}"
    return UserError(f"no figure is called {name!r}", where, hint)


def check_figure_name(name: str, where: str) -> None:
    """Raise UserError for a figure whose name no expression could hold."""
    if not NAME.fullmatch(name) or name in _WORDS:
        expected = "expected a letter or _ first, then letters, digits, _ and dots, and not and, or, not"
        raise UserError(f"a figure is called {sample([name])}, {expected}", where)


def meets(condition: Condition, figures: Mapping[str, np.ndarray]) -> np.ndarray:
    """Say which queries meet a condition.

    Args:
        condition: what is asked of them.
        figures: (queries,) float64 by name, NaN where a query has none: no comparison holds there. Quantiles are
            those of the others, between two neighbours on the line that joins them.

    Returns:
        (queries,) bool.
    """
    if isinstance(condition, Comparison):
        return _compared(condition, figures[condition.name])
    parts = (meets(part, figures) for part in condition.parts)
    if condition.kind == "not":
        return ~next(parts)
    return reduce(np.logical_and if condition.kind == "and" else np.logical_or, parts)


def threshold(comparison: Comparison, figure: np.ndarray) -> float:
    """Return the number that a comparison compares with; NaN for a quantile of a figure that nothing has."""
    if not comparison.quantile:
        return comparison.value
    present = figure[~np.isnan(figure)]
    return float(np.quantile(present, comparison.value)) if len(present) else float("nan")


def _compared(comparison: Comparison, figure: np.ndarray) -> np.ndarray:
    holds: np.ndarray = OPERATORS[comparison.operator](figure, threshold(comparison, figure))
    return holds & ~np.isnan(figure)  # else a missing figure would be unequal to every number


class _Reader(BooleanReader[Condition]):
    where = _WHERE
    behind_word = r"(?![\w.])"
    missing_bracket = "and, or, or a closing bracket"

    def joined(self, word: Literal["and", "or", "not"], parts: tuple[Condition, ...]) -> Condition:
        return Joined(word, parts)

    def read_one(self) -> Comparison:
        """Read a comparison."""
        self.skip_blanks()
        start = self.place
        name = self.take(NAME)
        if name is None or name.group() in _WORDS:
            self.place = start
            raise self.error("the name of a figure, not or an opening bracket")
        compared = self.take(_OPERATOR)
        if compared is None:
            raise self.error(f"one of {' '.join(OPERATORS)}")
        value, quantile = self._read_value()
        return Comparison(name.group(), compared.group(), value, quantile, start + 1)

    def _read_value(self) -> tuple[float, bool]:
        self.skip_blanks()
        start = self.place
        share = self.take(_QUANTILE)
        found = share or self.take(_NUMBER)
        value = float(found.group(1)) if found else math.inf
        if math.isinf(value) or (share and value > 1):
            self.place = start
            raise self.error("a number, or q and a share from 0 to 1 such as q0.5, the median")
        return value, share is not None
