"""What tables of studies over seeds are made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from eval.significance import bootstrap_intervals


def mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean and, of more than one value, the standard deviation between them."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return how far one arm is above another: mean, and 95 % interval by bootstrap over queries.

    Args:
        ours: a value for each query, of each seed; a query's values are averaged over the seeds first.
        theirs: the same of the other arm.
    """
    change = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
    low, high = bootstrap_intervals(change[:, None])[0]
    return float(change.mean()), float(low), float(high)
