"""What is printed: tables for people, Markdown for papers, JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from condenser.files import dump_json

if TYPE_CHECKING:
    from eval.answers import AnswerRecall
    from eval.comparison import Change, Comparison
    from eval.evaluation import Evaluation
    from eval.msmarco import OfficialScore
    from eval.options import Format
    from eval.ranks import Counts
    from eval.sts import Sts

_LONGEST_TEXT = 100


class Table(NamedTuple):
    """Cells as text; the first column goes to the left, the others to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def render(self, *, markdown: bool = False) -> str:
        """Lay the table out in columns, or as Markdown."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        header, *rows = (
            [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
            for cells in (self.header, *self.rows)
        )
        if not markdown:
            return "\n".join("  ".join(line).rstrip() for line in (header, *rows))
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in (header, rule, *rows))
        return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


class Report(NamedTuple):
    """One result in both shapes: what JSON holds, and the lines and tables that people read."""

    values: dict[str, Any]
    parts: list[str | Table]

    def render(self, form: Format = "text") -> str:
        """Return the report as ``text``, ``markdown`` or ``json``."""
        if form == "json":
            return dump_json(self.values).decode().rstrip("\n")
        markdown = form == "markdown"
        blocks = [part if isinstance(part, str) else part.render(markdown=markdown) for part in self.parts]
        return "\n\n".join(blocks)


def evaluation_report(
    result: Evaluation, *, intervals: Mapping[str, tuple[float, float]] | None = None, per_query: bool = False
) -> Report:
    """Report an evaluation: counts, rule, means, and each query's values on request."""
    from eval.evaluation import RULE

    values: dict[str, Any] = {"counts": result.counts._asdict(), "metrics": result.means, "order": RULE}
    head = counts_line(result.counts)
    if result.absent is not None:
        values["counts"] |= {"judged_passages": result.judged_passages, "not_in_corpus": len(result.absent)}
        head += f"\npassages: judged {result.judged_passages:,}, of them not in the corpus {len(result.absent):,}"
    header = ["metric", "mean"]
    rows = [[name, f"{mean:.4f}"] for name, mean in result.means.items()]
    if intervals:
        values["intervals"] = {name: list(ends) for name, ends in intervals.items()}
        header.append("95 % interval")
        rows = [[*row, "{:.4f} to {:.4f}".format(*intervals[row[0]])] for row in rows]
    parts: list[str | Table] = [f"{head}\norder: {RULE}", Table(header, rows)]
    if per_query:
        columns = {name: column.tolist() for name, column in result.per_query.items()}
        values["per_query"] = {
            query_id: {name: column[place] for name, column in columns.items()}
            for place, query_id in enumerate(result.query_ids)
        }
        lines = [
            [query_id, *(f"{value:.4f}" for value in some.values())] for query_id, some in values["per_query"].items()
        ]
        parts.append(Table(["query", *columns], lines))
    return Report(values, parts)


def counts_line(counts: Counts) -> str:
    """Say how judgements and run meet."""
    return (
        f"queries: judged {counts.judged:,}, in run {counts.in_run:,}, both {counts.both:,}; "
        f"judged but not in run {counts.judged_not_in_run:,} (count as 0), "
        f"in run but not judged {counts.in_run_not_judged:,} (ignored), "
        f"nothing relevant {counts.nothing_relevant:,} (left out)"
    )


def official_report(score: OfficialScore) -> Report:
    """Report what the official MS MARCO script says."""
    from eval.msmarco import RULE

    values = {
        "counts": {"judged": score.judged, "in_run": score.queries_ranked},
        "metrics": {"MRR@10": score.mrr_at_10},
        "order": RULE,
        "quirks": score.quirks,
    }
    head = f"queries: judged {score.judged:,}, in run {score.queries_ranked:,}\norder: {RULE}"
    rows = [["MRR @10", str(score.mrr_at_10)], ["QueriesRanked", str(score.queries_ranked)]]
    return Report(values, [head, Table(["metric", "value"], rows)])


def answers_report(result: AnswerRecall) -> Report:
    """Report top-k accuracy."""
    counts = {
        "questions": len(result.hits),
        "without_answers": result.without_answers,
        "passages": sum(map(len, result.hits)),
    }
    metrics = {f"top-{depth}": share for depth, share in result.accuracy.items()}
    head = (
        f"questions: {counts['questions']:,}, without answers {counts['without_answers']:,} (count as 0); "
        f"passages: {counts['passages']:,}; match: {result.match}"
    )
    rows = [[name, f"{share:.4f}"] for name, share in metrics.items()]
    return Report(
        {"counts": counts, "match": result.match, "metrics": metrics}, [head, Table(["accuracy", "mean"], rows)]
    )


def sts_report(result: Sts) -> Report:
    """Report the correlations of an encoder's similarities with people's."""
    metrics = result._asdict()
    counts = {"pairs": metrics.pop("pairs")}
    rows = [
        [similarity, *(f"{metrics[f'{kind}_{similarity}']:.4f}" for kind in ("spearman", "pearson"))]
        for similarity in ("cosine", "dot")
    ]
    return Report(
        {"counts": counts, "metrics": metrics},
        [f"pairs: {result.pairs:,}", Table(["similarity", "Spearman", "Pearson"], rows)],
    )


class Texts(NamedTuple):
    """Texts by id, of queries and of passages."""

    queries: Mapping[str, str]
    passages: Mapping[str, str]


def comparison_report(result: Comparison, *, texts: Texts | None = None) -> Report:
    """Report a comparison: counts, one row per run and metric, then the queries that changed most."""
    from eval.evaluation import RULE

    values = {
        "base": result.base,
        "counts": result.base_evaluation.counts._asdict(),
        "order": RULE,
        "confidence": result.confidence,
        "resamples": result.resamples,
        "differences": [row._asdict() for row in result.differences],
        "changes": [_change_values(change, texts) for change in result.changes],
    }
    tests = "1 test" if len(result.differences) == 1 else f"{len(result.differences)} tests"
    head = (
        f"{counts_line(result.base_evaluation.counts)}\norder: {RULE}\n"
        f"differences from {result.base}, {result.resamples:,} resamples; p in brackets: Holm's correction for {tests}"
    )
    header = ["run", "metric", result.base, "mean", "difference", f"{result.confidence:.0%} interval"]
    header += ["wins", "ties", "losses", "p (randomisation)", "p (t test)"]
    rows = [
        [
            row.run,
            row.metric,
            f"{row.base_mean:.4f}",
            f"{row.mean:.4f}",
            f"{row.difference:+.4f}",
            f"{row.low:+.4f} to {row.high:+.4f}",
            *map(str, (row.wins, row.ties, row.losses)),
            f"{row.p_randomisation:.4f} ({row.p_randomisation_holm:.4f})",
            f"{row.p_t:.4f} ({row.p_t_holm:.4f})",
        ]
        for row in result.differences
    ]
    parts: list[str | Table] = [head, Table(header, rows)]
    metric = next(iter(result.base_evaluation.means))
    for run, changes in groupby(result.changes, key=lambda change: change.run):
        parts.append(f"Queries that changed most from {result.base} to {run}, by {metric}:")
        parts.append("\n".join(line for change in changes for line in _change_lines(change, result.base, texts)))
    return Report(values, parts)


def _change_values(change: Change, texts: Texts | None) -> dict[str, Any]:
    values = change._asdict()
    if texts is not None:
        values["query"] = texts.queries.get(change.query_id)
        values["base_top_text"] = texts.passages.get(change.base_top or "")
        values["top_text"] = texts.passages.get(change.top or "")
    return values


def _change_lines(change: Change, base: str, texts: Texts | None) -> list[str]:
    query = _quoted(change.query_id, texts.queries) if texts else change.query_id
    lines = [f"- {query}: {change.base_value:.4f} -> {change.value:.4f}"]
    for run, top in ((base, change.base_top), (change.run, change.top)):
        if top is None:
            lines.append(f"    - {run} finds nothing")
        else:
            lines.append(f"    - {run} puts first {_quoted(top, texts.passages) if texts else top}")
    return lines


def _quoted(name: str, texts: Mapping[str, str]) -> str:
    text = texts.get(name)
    return f"{name} (no text)" if text is None else f'{name} "{shorten(text, _LONGEST_TEXT, placeholder=" ...")}"'
