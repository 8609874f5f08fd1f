"""Runs against a base run: differences with intervals, paired tests, and the queries that changed most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from condenser.errors import UserError
from eval.evaluation import DEFAULT_METRICS, Evaluation, evaluate
from eval.ranks import best_first
from eval.runs import Duplicates, RunArrays, load_qrels, load_run
from eval.significance import bootstrap_intervals, holm, randomisation_test, t_test

RunSource = str | Path | Mapping[str, Mapping[str, float]] | RunArrays

_EQUAL = 1e-9  # values that differ by rounding alone are a tie


class Difference(NamedTuple):
    """One metric of one run against the base; p values also corrected over the whole comparison (Holm)."""

    run: str
    metric: str
    base_mean: float
    mean: float
    difference: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int
    p_randomisation: float
    p_randomisation_holm: float
    p_t: float
    p_t_holm: float


class Change(NamedTuple):
    """One query whose value changed, with the passage that stands first in either run (None: no hit)."""

    run: str
    query_id: str
    base_value: float
    value: float
    base_top: str | None
    top: str | None


class Comparison(NamedTuple):
    """All runs against the base; ``changes`` are by the first metric, the greatest first, run by run."""

    base: str
    base_evaluation: Evaluation
    differences: list[Difference]
    changes: list[Change]
    confidence: float
    resamples: int

    def __str__(self) -> str:
        from eval.report import comparison_report

        return comparison_report(self).render()


def compare(
    qrels: str | Path | Mapping[str, Mapping[str, int]],
    base: RunSource,
    runs: Mapping[str, RunSource],
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    base_name: str = "base",
    relevance_level: int = 1,
    ignore_self: bool = False,
    duplicates: Duplicates = "refuse",
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 42,
    changed: int = 10,
) -> Comparison:
    """Compare runs with a base, query by query.

    Args:
        qrels: judgements, as a file or as query id -> passage id -> grade.
        base: the run that the others are measured against.
        runs: name -> run.
        metrics: names as in `eval.metrics.parse_metric`; the first one says which queries changed most.
        base_name: how the base is called in the report.
        relevance_level: as in `eval.evaluation.evaluate`.
        ignore_self: as there.
        duplicates: as there.
        resamples: bootstrap samples, and sign choices of the randomisation test.
        confidence: of the intervals of the differences.
        seed: of both.
        changed: how many changed queries to list for each run.

    Raises:
        UserError: no run to compare, numbers out of range, and what evaluating a run raises.
    """
    if not runs:
        raise UserError("there is no run to compare with the base")
    if resamples < 100:
        raise UserError(f"{resamples} resamples are too few, expected 100 or more")
    if not 0 < confidence < 1:
        raise UserError(f"confidence is {confidence}, expected a number between 0 and 1")
    if changed < 0:
        raise UserError(f"{changed} changed queries cannot be shown")
    if not isinstance(qrels, Mapping):
        qrels = load_qrels(qrels)

    def measured(run: RunSource, name: str) -> Evaluation:
        return evaluate(
            qrels,
            run,
            metrics,
            relevance_level=relevance_level,
            ignore_self=ignore_self,
            duplicates=duplicates,
            name=name,
        )

    base_evaluation = measured(base, base_name)
    differences: list[Difference] = []
    changes: list[Change] = []
    for name, run in runs.items():
        evaluation = measured(run, name)
        differences += _differences(name, base_evaluation, evaluation, resamples, confidence, seed)
        most = _most_changed(base_evaluation, evaluation, changed)
        tops = [_tops(source, [change[0] for change in most], ignore_self, duplicates) for source in (base, run)]
        changes += [Change(name, *change, tops[0].get(change[0]), tops[1].get(change[0])) for change in most]
    return Comparison(base_name, base_evaluation, _corrected(differences), changes, confidence, resamples)


def _differences(
    name: str, base: Evaluation, other: Evaluation, resamples: int, confidence: float, seed: int
) -> list[Difference]:
    by_query = {metric: other.per_query[metric] - values for metric, values in base.per_query.items()}
    columns = np.stack(list(by_query.values()), axis=1)
    columns[np.abs(columns) < _EQUAL] = 0
    intervals = bootstrap_intervals(columns, resamples=resamples, confidence=confidence, seed=seed)
    rows = []
    for place, metric in enumerate(by_query):
        difference = columns[:, place]
        wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
        p_randomisation = randomisation_test(difference, resamples=resamples, seed=seed)
        p_t = t_test(difference)
        rows.append(
            Difference(
                run=name,
                metric=metric,
                base_mean=base.means[metric],
                mean=other.means[metric],
                difference=float(difference.mean()),
                low=float(intervals[place, 0]),
                high=float(intervals[place, 1]),
                wins=wins,
                ties=len(difference) - wins - losses,
                losses=losses,
                p_randomisation=p_randomisation,
                p_randomisation_holm=p_randomisation,
                p_t=p_t,
                p_t_holm=p_t,
            )
        )
    return rows


def _corrected(differences: list[Difference]) -> list[Difference]:
    by_randomisation = holm([row.p_randomisation for row in differences])
    by_t = holm([row.p_t for row in differences])
    return [
        row._replace(p_randomisation_holm=p_randomisation, p_t_holm=p_t)
        for row, p_randomisation, p_t in zip(differences, by_randomisation, by_t, strict=True)
    ]


def _most_changed(base: Evaluation, other: Evaluation, count: int) -> list[tuple[str, float, float]]:
    metric = next(iter(base.per_query))
    before, after = base.per_query[metric], other.per_query[metric]
    order = np.argsort(-np.abs(after - before), kind="stable")[:count]
    return [
        (base.query_ids[place], float(before[place]), float(after[place]))
        for place in order.tolist()
        if abs(after[place] - before[place]) > _EQUAL
    ]


def _tops(source: RunSource, query_ids: list[str], ignore_self: bool, duplicates: Duplicates) -> dict[str, str]:
    if isinstance(source, tuple):
        source = RunArrays(*source).as_run()
    run = source if isinstance(source, Mapping) else load_run(source, duplicates=duplicates, only=set(query_ids))
    tops = {}
    for query_id in query_ids:
        ranked = [name for name in best_first(run.get(query_id, {})) if not (ignore_self and name == query_id)]
        if ranked:
            tops[query_id] = ranked[0]
    return tops
