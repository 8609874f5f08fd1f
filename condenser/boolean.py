"""What the little languages have in common: and, or, not and brackets around what a language asks for."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Generic, Literal, TypeVar

from condenser.errors import UserError

DEEPEST = 50
"""Brackets and nots in one another."""

Expression = TypeVar("Expression")


class BooleanReader(ABC, Generic[Expression]):
    """Reads an expression from left to right; not binds closest, or loosest.

    Attributes:
        text: what is read.
        place: the next character, from 0.
        where: what errors call the expression.
        behind_word: what stands behind and, or and not, as a pattern that takes nothing.
        missing_bracket: what is expected where a bracket is not closed.
    """

    where: str
    behind_word = r"\b"
    missing_bracket = "a closing bracket"

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0

    def read(self) -> Expression:
        """Return the whole expression; UserError with the place of what cannot be read."""
        expression = self._read_or(0)
        self.skip_blanks()
        if self.place < len(self.text):
            raise self.error("and, or, or the end")
        return expression

    @abstractmethod
    def read_one(self) -> Expression:
        """Read what stands between the joining words."""

    @abstractmethod
    def joined(self, word: Literal["and", "or", "not"], parts: tuple[Expression, ...]) -> Expression:
        """Return what a word makes of its parts."""

    def take(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Go behind a pattern, blanks before it aside, if it is next."""
        self.skip_blanks()
        found = re.compile(pattern).match(self.text, self.place)
        if found:
            self.place = found.end()
        return found

    def skip_blanks(self) -> None:
        """Go on to what is no blank."""
        while self.place < len(self.text) and self.text[self.place].isspace():
            self.place += 1

    def error(self, expected: str) -> UserError:
        """Return the error that something else was expected here."""
        self.skip_blanks()
        rest = self.text[self.place : self.place + 20]
        found = repr(rest) if rest else "the end"
        return UserError(f"character {self.place + 1}: found {found}, expected {expected}", self.where)

    def _read_or(self, depth: int) -> Expression:
        return self._read_joined("or", depth)

    def _read_joined(self, word: Literal["and", "or"], depth: int) -> Expression:
        parts = []
        while True:
            parts.append(self._read_joined("and", depth) if word == "or" else self._read_part(depth))
            if not self.take(word + self.behind_word):
                return parts[0] if len(parts) == 1 else self.joined(word, tuple(parts))

    def _read_part(self, depth: int) -> Expression:
        if depth > DEEPEST:
            raise self.error(f"at most {DEEPEST} brackets and nots in one another")
        if self.take("not" + self.behind_word):
            return self.joined("not", (self._read_part(depth + 1),))
        if self.take(r"\("):
            expression = self._read_or(depth + 1)
            if not self.take(r"\)"):
                raise self.error(self.missing_bracket)
            return expression
        return self.read_one()
