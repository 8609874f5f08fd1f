"""Is a difference more than chance? Bootstrap intervals, paired tests, and Holm's correction.

All of it works on one value per query; the numbers drawn depend on the seed and on the order of the values,
which the callers keep sorted by query id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_DRAWS_AT_ONCE = 4_000_000
_MOST_TERMS = 100_000
_TOLERANCE = 1e-12  # sums that differ by rounding alone are equal


def bootstrap_intervals(
    values: np.ndarray, *, resamples: int = 10_000, confidence: float = 0.95, seed: int = 42
) -> np.ndarray:
    """Return percentile intervals of the mean over queries (Efron and Tibshirani 1993, section 13.3).

    Args:
        values: shape (queries, columns); the columns share the resamples.
        resamples: how often the queries are drawn anew, with replacement.
        confidence: share of the resampled means that the interval holds.
        seed: of the draws.

    Returns:
        Lower and upper ends, shape (columns, 2).
    """
    generator = np.random.default_rng(seed)
    queries, columns = values.shape
    means = np.empty((resamples, columns))
    step = max(1, _DRAWS_AT_ONCE // queries)
    for start in range(0, resamples, step):
        drawn = generator.integers(0, queries, (min(step, resamples - start), queries), dtype=np.int32)
        for column in range(columns):
            means[start : start + step, column] = values[:, column][drawn].mean(axis=1)
    tail = (1 - confidence) / 2
    return np.quantile(means, (tail, 1 - tail), axis=0).T


def randomisation_test(differences: np.ndarray, *, resamples: int = 10_000, seed: int = 42) -> float:
    """Return the two-sided p of Fisher's paired randomisation test on the mean (Smucker et al., CIKM 2007).

    Under the null hypothesis each query's difference may as well have the other sign. All choices of signs are
    tried where they are no more than ``resamples``; else as many are drawn, and p = (1 + extreme) / (1 + drawn).

    Args:
        differences: shape (queries,).
        resamples: how many choices of signs.
        seed: of the draws.
    """
    changed = differences[differences != 0]
    if not len(changed):
        return 1.0
    observed = abs(changed.sum()) - _TOLERANCE
    if len(changed) < 60 and 2 ** len(changed) <= resamples:
        choices = np.arange(2 ** len(changed))[:, None] >> np.arange(len(changed)) & 1
        return float(np.mean(_is_extreme(choices, changed, observed)))
    generator = np.random.default_rng(seed)
    step = max(1, _DRAWS_AT_ONCE // len(changed))
    extreme = 0
    for start in range(0, resamples, step):
        flips = generator.integers(0, 2, (min(step, resamples - start), len(changed)), dtype=np.int8)
        extreme += int(np.count_nonzero(_is_extreme(flips, changed, observed)))
    return (1 + extreme) / (1 + resamples)


def _is_extreme(flips: np.ndarray, changed: np.ndarray, observed: float) -> np.ndarray:
    # Flipping the sign of a difference takes it away twice.
    sums = changed.sum() - 2 * (flips.astype(np.float64) @ changed)
    return np.abs(sums) >= observed


def t_test(differences: np.ndarray) -> float:
    """Return the two-sided p of the paired t test; 1 when nothing differs or there is one query only.

    Args:
        differences: shape (queries,).
    """
    freedom = len(differences) - 1
    mean = float(differences.mean())
    if freedom < 1 or mean == 0:
        return 1.0
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    if error == 0:
        return 0.0
    t = mean / error
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number: Holm's step-down method (1979), in the given order."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for step, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - step) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b) by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - incomplete_beta(b, a, 1 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(logarithm) / a * _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Evaluate 1 / (1 + d1 / (1 + d2 / (1 + ...))) by Lentz's method, the coefficients as in DLMF 8.17.23."""
    above, below = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = below
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            above = 1 + coefficient / above
            below = 1 / (1 + coefficient * below)
            value *= above * below
        if abs(above * below - 1) < 1e-15:
            break
    return value
