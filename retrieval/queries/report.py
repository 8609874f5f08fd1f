"""What `queries filter` writes for people: how many queries went where, what kind they are, and examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import NamedTuple

import numpy as np

from eval.report import Table
from retrieval.queries.figures import Columns, passages_of_text

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
WORD_SHARES = (0.1, 0.5, 0.9)

_LONGEST_QUERY, _LONGEST_PASSAGE = 200, 240
_MARKUP = re.compile(r"([\\`*_<>\[\]])")


class Step(NamedTuple):
    """What one step dropped, and how many queries were left."""

    name: str
    dropped: int
    left: int


@dataclass(frozen=True)
class Spread:
    """A figure of many queries: the values at `SHARES` of them, and how many have none; no values when all lack it."""

    values: tuple[float, ...]
    missing: int


@dataclass(frozen=True)
class Summary:
    """A set of queries in numbers.

    Attributes:
        queries: how many.
        passages: for how many passages.
        words: length in words: the mean, then what 10, 50 and 90 % have at most.
        full_overlap: share of the queries whose words all stand in their passages.
        mean_overlap: of those that have words besides stop words; None where none has.
        repeated: queries whose text some other passage has, too.
        figures: by name.
    """

    queries: int
    passages: int
    words: tuple[float, float, float, float]
    full_overlap: float
    mean_overlap: float | None
    repeated: int
    figures: Mapping[str, Spread]


class Example(NamedTuple):
    """A query with its passage; ``reason`` says why it was dropped."""

    query_id: str
    query: str
    passage_id: str
    title: str
    text: str
    reason: str = ""


def summarise(columns: Columns, rows: np.ndarray) -> Summary:
    """Return the numbers of the queries at ``rows``, a mask of at least one."""
    overlap, words = columns.overlap[rows], columns.words[rows]
    known = overlap[~np.isnan(overlap)]
    passages = columns.passages[rows]
    return Summary(
        queries=len(passages),
        passages=len(np.unique(passages)),
        words=(float(words.mean()), *np.quantile(words, WORD_SHARES).tolist()),
        full_overlap=float((overlap == 1).mean()),
        mean_overlap=float(known.mean()) if len(known) else None,
        repeated=int((passages_of_text(columns.texts[rows], passages) > 1).sum()),
        figures={name: _spread(column[rows]) for name, column in columns.figures.items()},
    )


def _spread(column: np.ndarray) -> Spread:
    present = column[~np.isnan(column)]
    values = np.quantile(present, SHARES).tolist() if len(present) else []
    return Spread(tuple(values), len(column) - len(present))


def report(
    *,
    source: str,
    settings: Mapping[str, str],
    steps: Sequence[Step],
    alone: Sequence[tuple[str, int, int]],
    written: Summary,
    kept: Summary,
    kept_examples: Sequence[Example],
    dropped_examples: Sequence[Example],
) -> str:
    """Return the report in Markdown.

    Args:
        source: the name of the folder with all that was written.
        settings: what was asked for, in words.
        steps: in their order; the first drops nothing.
        alone: each comparison of the condition, how many queries meet it alone and how many lack its figure.
        written: all queries.
        kept: those that are left.
        kept_examples: some of these.
        dropped_examples: some of the others.
    """
    asked = [f"- {name}: {value}" for name, value in settings.items()]
    parts: list[str | Table] = ["# Written queries, filtered", "\n".join([f"- from: `{source}`", *asked])]
    rows = [[step.name, f"{step.dropped:,}", f"{step.left:,}"] for step in steps]
    parts += ["## Step by step", Table(["step", "dropped", "left"], rows)]
    if alone:
        parts.append("Each comparison of the condition alone, over the queries that came to it:")
        counts = [[f"`{name}`", f"{met:,}", f"{missing:,}"] for name, met, missing in alone]
        parts.append(Table(["comparison", "met by", "figure missing"], counts))
    parts += ["## Written and kept", _sides(written, kept)]
    parts += ["## Figures", "Quantiles; missing: queries that have no such figure.", _figures(written, kept)]
    for title, examples in (("Kept", kept_examples), ("Dropped", dropped_examples)):
        if examples:
            parts += [f"## {title}, at random", "\n".join(_example(one) for one in examples)]
    return "\n\n".join(part if isinstance(part, str) else part.render(markdown=True) for part in parts) + "\n"


def _sides(written: Summary, kept: Summary) -> Table:
    def row(name: str, of: Iterable[str]) -> list[str]:
        return [name, *of]

    sides = (written, kept)
    rows = [
        row("queries", (f"{one.queries:,}" for one in sides)),
        row("passages with a query", (f"{one.passages:,}" for one in sides)),
        row("words, mean", (f"{one.words[0]:.1f}" for one in sides)),
        *(
            row(f"words, {share:.0%} have at most", (f"{one.words[place]:g}" for one in sides))
            for place, share in enumerate(WORD_SHARES, 1)
        ),
        row("overlap, mean", ("-" if one.mean_overlap is None else f"{one.mean_overlap:.3f}" for one in sides)),
        row("overlap of 1", (f"{one.full_overlap:.1%}" for one in sides)),
        row("text written for other passages, too", (f"{one.repeated:,}" for one in sides)),
    ]
    return Table(["", "written", "kept"], rows)


def _figures(written: Summary, kept: Summary) -> Table:
    rows = []
    for name in written.figures:
        for kind, one in (("written", written.figures[name]), ("kept", kept.figures[name])):
            values = [f"{value:.4g}" for value in one.values] or ["-"] * len(SHARES)
            rows.append([f"`{name}`, {kind}", *values, f"{one.missing:,}"])
    return Table(["figure", *(f"{share:.0%}" for share in SHARES), "missing"], rows)


def _example(example: Example) -> str:
    title = f"**{_plain(example.title, _LONGEST_PASSAGE)}** " if example.title.strip() else ""
    reason = f" ({_plain(example.reason, _LONGEST_QUERY)})" if example.reason else ""
    query = _plain(example.query, _LONGEST_QUERY) or "(blank)"
    passage = f"{title}{_plain(example.text, _LONGEST_PASSAGE)}".strip()
    return f"- {_plain(example.query_id, _LONGEST_QUERY)}{reason}: {query}\n    - {passage}"


def _plain(text: str, longest: int) -> str:
    """Return a text on one line, of which Markdown makes nothing."""
    return _MARKUP.sub(r"\\\1", shorten(text, longest, placeholder=" ..."))
