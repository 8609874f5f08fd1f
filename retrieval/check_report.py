"""What `check` prints: tables of counts and lengths, and the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eval.report import Report, Table
from retrieval.check_lengths import Lengths
from retrieval.collections import Collection

Level = Literal["error", "warning"]

_SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in a sentence.

    Attributes:
        level: ``error`` where training would refuse.
        kind: a name for programs.
        split: the split it is about; None for the collection.
        count: how many there are.
        samples: the first few.
        text: the sentence.
    """

    level: Level
    kind: str
    split: str | None
    count: int
    samples: list[str]
    text: str


def report(
    collection: Collection,
    splits: Mapping[str, Mapping[str, int]],
    texts: Mapping[str, tuple[int, Lengths]],
    unit: str,
    findings: Sequence[Finding],
) -> Report:
    """Return the report in both shapes.

    Args:
        collection: what was looked at.
        splits: the counts of each split.
        texts: for passages and queries, how many there are and how long they are.
        unit: what lengths are counted in.
        findings: in the order to print them.
    """
    values = {
        "name": collection.name,
        "folder": str(collection.folder),
        **{kind: count for kind, (count, _) in texts.items()},
        "splits": {name: dict(counts) for name, counts in splits.items()},
        "lengths": {"unit": unit, **{kind: _lengths(lengths) for kind, (_, lengths) in texts.items()}},
        "findings": [asdict(finding) for finding in findings],
    }
    counts = ", ".join(f"{count:,} {kind}" for kind, (count, _) in texts.items())
    parts: list[str | Table] = [f"{collection.name} ({collection.folder}): {counts}"]
    if splits:
        parts.append(_split_table(splits))
    parts.append(_length_table({kind: lengths for kind, (_, lengths) in texts.items()}, unit))
    lines = [f"{finding.level}: {finding.text}" for finding in findings]
    parts.append("\n".join(lines) or "nothing to find fault with")
    return Report(values, parts)


def _split_table(splits: Mapping[str, Mapping[str, int]]) -> Table:
    """Lay out the counts; what no split has gets no column, but for queries and judged pairs."""
    kinds = ["queries", "judged_pairs", "positives", "negatives", "teacher_scores", "scored_pairs"]
    shown = [kind for kind in kinds if kind in kinds[:2] or any(counts[kind] for counts in splits.values())]
    rows = [[name, *(f"{counts[kind]:,}" for kind in shown)] for name, counts in splits.items()]
    return Table(["split", *(kind.replace("_", " ") for kind in shown)], rows)


def _length_table(lengths: Mapping[str, Lengths], unit: str) -> Table:
    """Lay out the histogram up to the longest text, and below it the figures that choose a limit."""
    bins = list(zip(*(one.histogram() for one in lengths.values()), strict=True))
    filled = [place for place, row in enumerate(bins) if any(one.count for one in row)]
    rows = []
    for row in bins[: max(filled, default=-1) + 1]:
        edge = f"up to {row[0].up_to:,}" if row[0].up_to is not None else "more"
        rows.append([edge, *(f"{one.count:,}" for one in row)])
    for share in _SHARES:
        rows.append([f"{share:.0%} have at most", *(f"{one.at_most(share):,}" for one in lengths.values())])
    rows.append(["longest", *(f"{one.longest:,}" for one in lengths.values())])
    rows.append(["limit", *(f"{one.limit:,}" for one in lengths.values())])
    rows.append(["over the limit", *(f"{one.over:,} ({one.share_over:.1%})" for one in lengths.values())])
    return Table([f"length in {unit}", *lengths], rows)


def _lengths(lengths: Lengths) -> dict[str, Any]:
    return {
        "histogram": [asdict(one) for one in lengths.histogram()],
        **{f"at_most_{share:.0%}".replace("%", ""): lengths.at_most(share) for share in _SHARES},
        "longest": lengths.longest,
        "limit": lengths.limit,
        "over": lengths.over,
    }
