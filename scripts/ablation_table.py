"""Tables from the cells of scripts/ablation.py: means of each arm, and paired differences between arms."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eval.report import Table
from eval.significance import bootstrap_intervals, holm, randomisation_test

METRICS = ["MRR@10", "nDCG@10", "R@100"]
COMPARED = [
    ("mlm", "none"),
    ("condenser", "none"),
    ("condenser", "mlm"),
    ("condenser+generator", "condenser"),
    ("mlm+contrastive", "mlm"),
    ("condenser+cocondenser", "condenser"),
    ("condenser+cocondenser", "mlm+contrastive"),
    ("condenser+cocondenser", "none"),
]

Results = list[dict[str, Any]]


def tables(results: Results) -> Iterator[str | Table]:
    """Yield headings and tables, those of one collection and start together."""
    groups: dict[tuple[str, str], Results] = {}
    for one in results:
        groups.setdefault((Path(one["collection"]).name, one["start"]), []).append(one)
    for (collection, start), cells in groups.items():
        queries, passages = cells[0]["pool"]["queries"], cells[0]["pool"]["passages"]
        yield f"{collection}, start {start}: {queries:,} test queries over a pool of {passages:,} passages"
        for metric in ("MRR@10", "R@100"):
            yield means(cells, metric)
        if compared := differences(cells, "MRR@10"):
            yield (
                "Differences in MRR@10 of the means over seeds, with 95 % intervals over queries; * p < .05 by paired "
                "randomisation, corrected for all differences of the table (Holm)"
            )
            yield compared
        if cells[0]["note"]:
            yield f"{start} {cells[0]['note']}: differences between arms are fair, the figures are no clean baseline."


def means(cells: Results, metric: str) -> Table:
    """Return a metric by arm and share of the labels: mean over seeds ± their standard deviation."""
    percents = sorted({cell["percent"] for cell in cells})
    rows = []
    for arm in dict.fromkeys(cell["arm"] for cell in cells):
        row = [arm]
        for percent in percents:
            values = [cell["means"][metric] for cell in cells if (cell["arm"], cell["percent"]) == (arm, percent)]
            spread = f" ± {_short(statistics.stdev(values))}" if len(values) > 1 else ""
            row.append(f"{_short(statistics.mean(values))}{spread}" if values else "")
        rows.append(row)
    return Table([metric, *(f"{percent} %" for percent in percents)], rows)


def differences(cells: Results, metric: str) -> Table | None:
    """Return arm against arm, each query's values averaged over the seeds first; None when no two can be compared."""
    percents = sorted({cell["percent"] for cell in cells})
    found: dict[tuple[str, int], tuple[str, float]] = {}
    for percent in percents:
        for arm, base in COMPARED:
            values, base_values = (_by_query(cells, one, percent, metric) for one in (arm, base))
            if values is None or base_values is None:
                continue
            change = values - base_values
            low, high = bootstrap_intervals(change[:, None])[0]
            words = f"{_signed(change.mean())} [{_signed(low)}, {_signed(high)}]"
            found[f"{arm} - {base}", percent] = words, randomisation_test(change)
    if not found:
        return None
    corrected = dict(zip(found, holm([p for _, p in found.values()]), strict=True))
    rows = [
        [name, *(_marked(found, corrected, name, percent) for percent in percents)]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    return Table(["difference", *(f"{percent} %" for percent in percents)], rows)


def _by_query(cells: Results, arm: str, percent: int, metric: str) -> np.ndarray | None:
    """Return each query's value, averaged over the seeds there are; None without a cell."""
    chosen = [cell for cell in cells if (cell["arm"], cell["percent"]) == (arm, percent)]
    if not chosen:
        return None
    return np.mean([np.array(cell["per_query"][metric].split(), float) for cell in chosen], axis=0)


def _marked(
    found: dict[tuple[str, int], tuple[str, float]], corrected: dict[tuple[str, int], float], name: str, percent: int
) -> str:
    if (name, percent) not in found:
        return ""
    return found[name, percent][0] + ("*" if corrected[name, percent] < 0.05 else "")


def _short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("0.", ".")
