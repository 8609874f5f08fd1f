"""`evaluate`: judgements and a run in, numbers out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from condenser.errors import UserError, sample
from condenser.talk import warn
from eval.metrics import measure, parse_metric
from eval.ranks import Counts, judged_ranks
from eval.runs import Duplicates, RunArrays, load_qrels

DEFAULT_METRICS = ("MRR@10", "nDCG@10", "R@100")
RULE = (
    "score as float32 descending, ties by passage id descending (trec_eval); "
    "mean over judged queries with a relevant passage"
)

_EXPECTED_SHARE = 0.9


@dataclass(frozen=True)
class Evaluation:
    """Means and per-query values of some metrics.

    Attributes:
        means: metric name -> mean over ``query_ids``.
        query_ids: the queries in the means, sorted.
        per_query: metric name -> values, shape (queries,).
        counts: how judgements and run meet.
        absent: judged passages that are not in the corpus; None when no corpus was given.
        judged_passages: how many passages are judged.
    """

    means: dict[str, float]
    query_ids: list[str]
    per_query: dict[str, np.ndarray]
    counts: Counts
    absent: list[str] | None = None
    judged_passages: int = 0

    def __getitem__(self, metric: str) -> float:
        return self.means[parse_metric(metric).name]

    def __str__(self) -> str:
        from eval.report import evaluation_report

        return evaluation_report(self).render()

    def to_dataframe(self) -> Any:
        """Return the per-query values as a pandas DataFrame: one row per query, one column per metric."""
        import pandas  # type: ignore[import-untyped, unused-ignore]

        return pandas.DataFrame(self.per_query, index=pandas.Index(self.query_ids, name="query"))


def evaluate(
    qrels: str | Path | Mapping[str, Mapping[str, int]],
    run: str | Path | Mapping[str, Mapping[str, float]] | RunArrays,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    relevance_level: int = 1,
    ignore_self: bool = False,
    duplicates: Duplicates = "refuse",
    corpus: Collection[str] | None = None,
    name: str = "the run",
) -> Evaluation:
    """Measure a run.

    Args:
        qrels: judgements, as a file or as query id -> passage id -> grade.
        run: a file, query id -> passage id -> score, or `eval.runs.RunArrays` straight from a search.
        metrics: names as in `eval.metrics.parse_metric`.
        relevance_level: lowest grade that counts as relevant; nDCG takes the grades themselves.
        ignore_self: leave out the hit whose id is the query's own id (ArguAna, Quora).
        duplicates: a passage twice in one ranking: ``refuse``, or keep its ``best`` score.
        corpus: ids of all passages; judged passages outside it are counted.
        name: how warnings call the run.

    Raises:
        UserError: as `eval.ranks.judged_ranks`, `eval.metrics.parse_metric` and the readers do.
    """
    wanted = [parse_metric(name) for name in metrics]
    if relevance_level < 1:
        raise UserError(f"relevance level is {relevance_level}, expected 1 or more")
    if not isinstance(qrels, Mapping):
        qrels = load_qrels(qrels)
    ranks = judged_ranks(qrels, run, relevance_level=relevance_level, ignore_self=ignore_self, duplicates=duplicates)
    if not ranks.query_ids:
        raise UserError(f"no judged query has a passage of grade {relevance_level} or more")
    per_query = {metric.name: measure(metric, ranks, relevance_level=relevance_level) for metric in wanted}
    judged = {passage_id for grades in qrels.values() for passage_id in grades}
    absent = None if corpus is None else sorted(judged - set(corpus))
    _warn(ranks.counts, ranks.missing, absent, len(judged), name)
    return Evaluation(
        means={name: float(values.mean()) for name, values in per_query.items()},
        query_ids=ranks.query_ids,
        per_query=per_query,
        counts=ranks.counts,
        absent=absent,
        judged_passages=len(judged),
    )


def mean_intervals(
    result: Evaluation, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 42
) -> dict[str, tuple[float, float]]:
    """Return a bootstrap interval of each metric's mean, the queries drawn anew with replacement."""
    from eval.significance import bootstrap_intervals

    columns = np.stack(list(result.per_query.values()), axis=1)
    ends = bootstrap_intervals(columns, resamples=resamples, confidence=confidence, seed=seed).tolist()
    return {name: (low, high) for name, (low, high) in zip(result.per_query, ends, strict=True)}


def _warn(counts: Counts, missing: list[str], absent: list[str] | None, judged_passages: int, name: str) -> None:
    if missing:
        count = f"{len(missing):,} judged " + ("query is" if len(missing) == 1 else "queries are")
        warn(f"{count} not in {name} and counted as 0: {sample(missing)}")
    if counts.both < _EXPECTED_SHARE * counts.judged:
        warn(
            f"only {counts.both:,} of {counts.judged:,} judged queries are in {name} (below {_EXPECTED_SHARE:.0%}): "
            "are these the judgements for this run?"
        )
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        warn(
            f"{len(absent):,} of {judged_passages:,} judged passages {verb} not in the corpus ({sample(absent)}): "
            "recall cannot reach 100 %"
        )
