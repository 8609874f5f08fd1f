"""The one exception that means: the user can mend this."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

# A message may quote what a file holds: a line of megabytes, or what would steer a terminal.
_LONGEST_PART = 400
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class UserError(Exception):
    """Bad input, told in one line: where, what was found and expected, and what to do.

    Args:
        what: what is wrong, with the value found and the value expected.
        where: file, ``file:line`` or folder; None if the fault has no place.
        hint: what to do about it.
    """

    exit_status = 2
    report: str | None = None
    """What was found out all the same: the command prints it to stdout before the line."""

    def __init__(self, what: str, where: str | Path | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f" ({_shortened(self.hint)})" if self.hint else ""
        return _CONTROL.sub(" ", f"{place}{_shortened(self.what)}{advice}")

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str | None, str | None]]:
        return type(self), (self.what, self.where, self.hint)


class RunFailed(UserError):
    """A run that began well and cannot go on, told in one line: numbers ran away, or memory ran out."""

    exit_status = 1


def _shortened(text: str) -> str:
    half = _LONGEST_PART // 2
    return text if len(text) <= _LONGEST_PART else f"{text[:half]} ... {text[-half:]}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, with the second where it ends in a colon; its kind where that lacks.

    A KeyError's text is the key alone, which says nothing.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if not text:
        return type(error).__name__
    return f"no {text} is known here" if isinstance(error, KeyError) else text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, or None when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def sample(names: Iterable[str], count: int = 3) -> str:
    """Join the first ``count`` names for a message, and say that there are more."""
    shown = list(names)
    more = ", ..." if len(shown) > count else ""
    return ", ".join(repr(name) for name in shown[:count]) + more
