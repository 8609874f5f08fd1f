"""The verb ``queries filter``: written queries to the best of them, a collection to train on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from condenser.artifacts import Workspace, refuse_overwriting, result_config
from condenser.errors import UserError
from condenser.files import atomic_write, existing_file, read_records
from condenser.manifest import fingerprint
from condenser.options import is_given
from condenser.talk import say
from retrieval.collections import Collection, open_collection
from retrieval.queries.conditions import (
    Condition,
    check_names,
    comparisons_of,
    meets,
    read_condition,
    unknown_figure,
)
from retrieval.queries.figures import SCORES, Columns, read_columns, repeats, tell_replaced
from retrieval.queries.options import QueriesFilterOptions
from retrieval.queries.pool import KIND, QUERIES, check_written, write_corpus, write_qrels, written_in
from retrieval.queries.report import Example, Step, report, summarise

REPORT = "report.md"


@dataclass
class Selection:
    """Which queries are left, and what dropped the others.

    Attributes:
        left: (queries,) bool.
        dropped_by: (queries,) uint8, the place in ``steps`` of the step that dropped a query.
        steps: the first is what was written.
        alone: each comparison, how many of the queries that came to it meet it alone, and how many lack its figure.
    """

    left: np.ndarray
    dropped_by: np.ndarray
    steps: list[Step]
    alone: list[tuple[str, int, int]] = field(default_factory=list)

    def keep(self, chosen: np.ndarray, step: str) -> None:
        """Drop what is not chosen, and say how many of those left these were."""
        dropped = self.left & ~chosen
        self.dropped_by[dropped] = len(self.steps)
        self.left = self.left & chosen
        self.steps.append(Step(step, int(dropped.sum()), int(self.left.sum())))
        say(f"{step}: {self.steps[-1].dropped:,} dropped, {self.steps[-1].left:,} left")


def filter_queries(options: QueriesFilterOptions) -> Path:
    """Keep the written queries that meet a condition, the best of each passage, and no more than are wanted.

    Blank texts and repeats for the same passage go first, then those that fail ``--keep``, those beyond
    ``--per_passage``, those beyond ``--max_queries``. The best have the highest figure ``--by`` (float64), of equals
    the highest id by its bytes; queries without that figure come last.

    Returns:
        A folder of written queries, `retrieval.queries.pool`: the passages, the queries that are left, each with its
        figures in ``metadata.scores``, their qrels, and report.md.

    Raises:
        UserError: a condition that cannot be read, a figure that nothing has, what `read_columns` and
            `Columns.add_scores` raise, or no query left.
    """
    condition = None if options.keep is None else read_condition(options.keep)
    if is_given(options, "by") and options.per_passage is None and options.max_queries is None:
        raise UserError("--by goes with --per_passage or --max_queries: it says which are the best")
    refuse_overwriting(options.output, options.queries, *options.scores)
    folder = Path(options.queries)
    manifest = check_written(folder)
    inputs = {"queries": manifest["fingerprint"]}
    inputs |= {f"scores {i}": fingerprint(existing_file(file)) for i, file in enumerate(options.scores, 1)}
    with Workspace(options.output, KIND, config=result_config(options), inputs=inputs) as workspace:
        if workspace.done:
            return workspace.output
        collection = open_collection(folder, "beir")
        columns = read_columns(folder, collection)
        for file in options.scores:
            tell_replaced(columns.add_scores(file), file)
        selection = select(columns, condition, options)
        write_corpus(collection, workspace.path)
        with atomic_write(workspace.path / QUERIES) as stream:
            stream.writelines(_kept_lines(folder / QUERIES, columns, selection.left))
        write_qrels(workspace.path, ((one.id, one.passage_id) for one in written_in(workspace.path / QUERIES)))
        text = _report(options, condition, collection, columns, selection)
        with atomic_write(workspace.path / REPORT) as stream:
            stream.write(text)
        passages = len(np.unique(columns.passages[selection.left]))
        counts = {"queries": int(selection.left.sum()), "passages": passages, "written": len(columns)}
        workspace.commit({"collection": manifest.get("facts", {}).get("collection"), **counts})
        say(f"kept {counts['queries']:,} of {len(columns):,} queries, for {passages:,} passages")
    return workspace.output


def select(columns: Columns, condition: Condition | None, options: QueriesFilterOptions) -> Selection:
    """Go through the steps.

    Raises:
        UserError: a figure that nothing has; no query left, with how many each comparison alone would leave.
    """
    count = len(columns)
    ranks = options.per_passage is not None or options.max_queries is not None
    if condition is not None:
        check_names(condition, columns.figures)
    if ranks and options.by.removeprefix("-") not in columns.figures:
        raise unknown_figure(options.by.removeprefix("-"), columns.figures, "--by")
    selection = Selection(np.ones(count, bool), np.zeros(count, np.uint8), [Step("written", 0, count)])
    selection.keep(~columns.blank, "blank texts")
    selection.keep(~repeats(columns.texts, columns.passages), "repeats for the same passage")
    if condition is not None:
        _tell_alone(columns, condition, selection)
        selection.keep(meets(condition, columns.figures), "--keep")
    if not selection.left.any():
        alone = ", ".join(f"{name} leaves {met:,}" for name, met, _ in selection.alone)
        what = f"none of the {count:,} queries is left"
        raise UserError(f"{what}; alone, {alone}" if alone else f"{what}: their texts are blank", options.queries)
    if ranks:
        order = _best_first(columns, options.by)
        if options.per_passage is not None:
            chosen = _first_of_each(order[selection.left[order]], columns.passages, options.per_passage)
            selection.keep(chosen, "--per_passage")
        if options.max_queries is not None:
            chosen = np.zeros(count, bool)
            chosen[order[selection.left[order]][: options.max_queries]] = True
            selection.keep(chosen, "--max_queries")
    return selection


def _tell_alone(columns: Columns, condition: Condition, selection: Selection) -> None:
    """Count what each comparison alone would leave, and say which figures are missing for some queries."""
    missing: dict[str, int] = {}
    for text, one in {str(one): one for one in comparisons_of(condition)}.items():
        absent = int((selection.left & np.isnan(columns.figures[one.name])).sum())
        selection.alone.append((text, int((selection.left & meets(one, columns.figures)).sum()), absent))
        if absent:
            missing[one.name] = absent
    if missing:
        told = ", ".join(f"{name} for {absent:,} queries" for name, absent in missing.items())
        say(f"missing: {told}; no comparison holds there")


def _best_first(columns: Columns, by: str) -> np.ndarray:
    """Return the rows in descending order of a figure (ascending with a minus), of equals by id; missing ones last."""
    figure = columns.figures[by.removeprefix("-")]
    place = np.empty(len(columns), np.int64)
    place[np.argsort(columns.ids, kind="stable")] = np.arange(len(columns))
    # NaN is sorted behind all numbers
    return np.lexsort((-place, figure if by.startswith("-") else -figure))


def _first_of_each(order: np.ndarray, passages: np.ndarray, most: int) -> np.ndarray:
    """Choose the first rows of each passage in an order, (queries,) bool."""
    together = order[np.argsort(passages[order], kind="stable")]
    owner = passages[together]
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    rank = np.arange(len(together)) - np.repeat(starts, np.diff(starts, append=len(together)))
    chosen = np.zeros(len(passages), bool)
    chosen[together[rank < most]] = True
    return chosen


def _kept_lines(file: Path, columns: Columns, left: np.ndarray) -> Iterator[str]:
    for row, (_, record) in enumerate(read_records(file)):
        if left[row]:
            record["metadata"][SCORES] = _figures_of(columns, row)
            yield orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode()


def _figures_of(columns: Columns, row: int) -> dict[str, float | None]:
    values = ((name, float(column[row])) for name, column in columns.figures.items())
    return {name: None if np.isnan(value) else value for name, value in values}


def _report(
    options: QueriesFilterOptions,
    condition: Condition | None,
    collection: Collection,
    columns: Columns,
    selection: Selection,
) -> str:
    keep = options.keep and " ".join(options.keep.split())
    asked: dict[str, Any] = {"keep": keep, "per_passage": options.per_passage, "max_queries": options.max_queries}
    if options.per_passage is not None or options.max_queries is not None:
        asked["by"] = options.by
    rng = np.random.default_rng(options.seed)
    examples = {
        kind: _examples(rows, options.examples, rng, condition, collection, columns, selection)
        for kind, rows in (("kept", selection.left), ("dropped", ~selection.left))
    }
    return report(
        source=Path(options.queries).resolve().name,
        settings={f"`--{name}`": f"`{value}`" for name, value in asked.items() if value is not None},
        steps=selection.steps,
        alone=selection.alone,
        written=summarise(columns, np.ones(len(columns), bool)),
        kept=summarise(columns, selection.left),
        kept_examples=examples["kept"],
        dropped_examples=examples["dropped"],
    )


def _examples(
    rows: np.ndarray,
    most: int,
    rng: np.random.Generator,
    condition: Condition | None,
    collection: Collection,
    columns: Columns,
    selection: Selection,
) -> list[Example]:
    """Draw some of the rows of a mask; those that were dropped come with the reason."""
    there = np.flatnonzero(rows)
    drawn = set(rng.choice(there, min(most, len(there)), replace=False).tolist())
    examples = []
    for row, query in enumerate(written_in(collection.folder / QUERIES)):
        if row in drawn:
            passage = collection.lookup()[query.passage_id]
            reason = "" if selection.left[row] else _reason(row, condition, columns, selection)
            examples.append(Example(query.id, query.text, passage.id, passage.title, passage.text, reason))
    return examples


def _reason(row: int, condition: Condition | None, columns: Columns, selection: Selection) -> str:
    step = selection.steps[selection.dropped_by[row]].name
    if step != "--keep" or condition is None:
        return step
    figures = _figures_of(columns, row)
    values = {one.name: figures[one.name] for one in comparisons_of(condition)}
    told = (f"{name} {'missing' if value is None else f'{value:.4g}'}" for name, value in values.items())
    return f"{step}: {', '.join(told)}"
