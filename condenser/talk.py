"""What a stage says while it works: to stderr only, so that stdout stays a result to pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

_PLAIN_INTERVAL_S = 15.0


def say(message: str) -> None:
    """Print one line to stderr."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print one warning line to stderr."""
    say(f"warning: {message}")


class Meter:
    """Counts work done and tells the rate and the time left.

    On a terminal one line is redrawn; elsewhere a plain line appears every 15 seconds, so that a
    log file of a long run stays readable.

    Args:
        what: the stage's name at the start of the line.
        total: how much there is to do; None when unknown.
        unit: what is counted, in the plural.
        start: how much an earlier run has done already.
        quiet: say nothing at all (ranks other than the first).
    """

    def __init__(
        self, what: str, total: int | None = None, unit: str = "items", *, start: int = 0, quiet: bool = False
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = self.start = start
        self.quiet = quiet
        self.note = ""
        self._terminal = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and not self.quiet:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count ``count`` more items as done; ``note`` is shown at the end of the line."""
        self.done += count
        self.note = note or self.note
        now = time.monotonic()
        interval = 0.2 if self._terminal else _PLAIN_INTERVAL_S
        if self.quiet or now - self._shown < interval:
            return
        self._shown = now
        line = self._line(now - self._began)
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        else:
            say(line)

    def _line(self, seconds: float) -> str:
        rate = (self.done - self.start) / max(seconds, 1e-9)
        parts = [f"{self.what}: {self.done:,}"]
        if self.total is not None:
            parts[0] += f" of {self.total:,} {self.unit}"
            if rate > 0:
                parts.append(f"{clock((self.total - self.done) / rate)} left")
        else:
            parts[0] += f" {self.unit}"
        parts.insert(1, f"{rate:,.1f} {self.unit}/s")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)


def track(items: Iterable[T], what: str, total: int | None = None, unit: str = "items") -> Iterator[T]:
    """Yield from ``items`` and show how far it has come."""
    with Meter(what, total, unit) as meter:
        for item in items:
            yield item
            meter.advance()


def clock(seconds: float) -> str:
    """Format a duration as ``45s``, ``3m20s`` or ``2h05m``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
