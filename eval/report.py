"""Tables for people, Markdown for papers, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from condenser.files import dump_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eval.evaluation import Evaluation
    from eval.ranks import Counts


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Lay out a table: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> list[str]:
        return [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]

    if not markdown:
        return "\n".join("  ".join(line(cells)).rstrip() for cells in (header, *rows))
    rule = [
        ("-" if place == 0 else "") + "-" * (width - 1) + ("" if place == 0 else ":")
        for place, width in enumerate(widths)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (line(header), rule, *(line(row) for row in rows)))


def json_text(value: Mapping[str, Any]) -> str:
    """Return indented JSON with sorted keys."""
    return dump_json(value).decode().rstrip("\n")


def counts_text(counts: Counts) -> str:
    """Say in one line how judgements and run meet."""
    return (
        f"queries: judged {counts.judged:,}, in run {counts.in_run:,}, both {counts.both:,}; "
        f"judged but not in run {counts.judged_not_in_run:,} (count as 0), "
        f"in run but not judged {counts.in_run_not_judged:,} (ignored), "
        f"nothing relevant {counts.nothing_relevant:,} (left out)"
    )


def evaluation_text(
    result: Evaluation,
    *,
    intervals: Mapping[str, tuple[float, float]] | None = None,
    per_query: bool = False,
    markdown: bool = False,
) -> str:
    """Lay out an evaluation: counts, rule, means, and each query's values on request."""
    from eval.evaluation import RULE

    header = ["metric", "mean"] + (["95 % interval"] if intervals else [])
    rows = [
        [name, f"{mean:.4f}"] + ([f"{intervals[name][0]:.4f} to {intervals[name][1]:.4f}"] if intervals else [])
        for name, mean in result.means.items()
    ]
    parts = [counts_text(result.counts)]
    if result.absent is not None:
        parts.append(f"passages: judged {result.judged_passages:,}, of them not in the corpus {len(result.absent):,}")
    parts += [f"order: {RULE}", "", table(header, rows, markdown=markdown)]
    if per_query:
        lines = [
            [query_id, *(f"{values[place]:.4f}" for values in result.per_query.values())]
            for place, query_id in enumerate(result.query_ids)
        ]
        parts += ["", table(["query", *result.per_query], lines, markdown=markdown)]
    return "\n".join(parts)


def evaluation_dict(
    result: Evaluation, *, intervals: Mapping[str, tuple[float, float]] | None = None, per_query: bool = False
) -> dict[str, Any]:
    """Return an evaluation as what JSON can hold."""
    from eval.evaluation import RULE

    counts: dict[str, Any] = result.counts._asdict()
    if result.absent is not None:
        counts |= {"judged_passages": result.judged_passages, "judged_passages_not_in_corpus": len(result.absent)}
    report: dict[str, Any] = {"counts": counts, "metrics": result.means, "order": RULE}
    if intervals:
        report["intervals"] = {name: list(interval) for name, interval in intervals.items()}
    if per_query:
        columns = {name: values.tolist() for name, values in result.per_query.items()}
        report["per_query"] = {
            query_id: {name: values[place] for name, values in columns.items()}
            for place, query_id in enumerate(result.query_ids)
        }
    return report
