from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from eval.significance import bootstrap_intervals, holm, incomplete_beta, randomisation_test, t_test


@pytest.mark.parametrize(
    ("a", "b", "x"),
    [
        (2, 3, 0.4),
        (0.5, 0.5, 0.2),
        (0.5, 0.5, 0.9),
        (3490, 0.5, 0.999),
        (3490, 0.5, 0.9),
        (5, 0.5, 0.01),
        (5e5, 0.5, 0.9999),
    ],
)
def test_incomplete_beta_equals_scipy(a: float, b: float, x: float) -> None:
    assert incomplete_beta(a, b, x) == pytest.approx(special.betainc(a, b, x), rel=1e-7)


@pytest.mark.parametrize("x", [0.0, 1.0])
def test_the_ends_of_incomplete_beta(x: float) -> None:
    assert incomplete_beta(2, 3, x) == x


@pytest.mark.parametrize("queries", [2, 3, 10, 200, 7000])
def test_t_test_equals_scipy(queries: int) -> None:
    differences = np.random.default_rng(queries).normal(0.1, 1, queries)
    assert t_test(differences) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, rel=1e-7)


def test_t_test_without_spread() -> None:
    assert t_test(np.zeros(5)) == 1
    assert t_test(np.array([0.5])) == 1
    assert t_test(np.full(5, 0.5)) == 0


@pytest.mark.parametrize("differences", [[1.0, 1.0, 1.0], [0.5, 0.0, -0.25, 0.5, 1.0], [0.1, 0.2, -0.3], [0.0, 0.0]])
def test_few_queries_are_tested_exactly(differences: list[float]) -> None:
    values = np.array(differences)
    expected = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=False
    ).pvalue
    assert randomisation_test(values) == pytest.approx(expected)


def test_many_queries_are_tested_by_drawing() -> None:
    differences = np.random.default_rng(0).normal(0.1, 1, 200)
    p = randomisation_test(differences, resamples=20_000)
    # For so many queries the t test gives nearly the same p.
    assert p == pytest.approx(t_test(differences), abs=0.01)
    assert randomisation_test(differences, resamples=20_000) == p
    assert randomisation_test(differences, resamples=20_000, seed=1) != p
    # Never zero, whatever the difference: the observed signs are one of the choices.
    assert randomisation_test(np.ones(200), resamples=999) == 1 / 1000


def test_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        ((low, high),) = bootstrap_intervals(generator.normal(0, 1, (60, 1)), resamples=500, confidence=0.8)
        covered += low <= 0 <= high
    assert 0.7 < covered / 200 < 0.9


def test_bootstrap_equals_scipy() -> None:
    values = np.random.default_rng(3).exponential(1, (300, 2))
    ours = bootstrap_intervals(values, resamples=20_000, confidence=0.9)
    for column, (low, high) in enumerate(ours):
        theirs = stats.bootstrap(
            (values[:, column],), np.mean, n_resamples=20_000, confidence_level=0.9, method="percentile", rng=1
        ).confidence_interval
        assert low == pytest.approx(theirs.low, abs=0.005) and high == pytest.approx(theirs.high, abs=0.005)


def test_bootstrap_draws_do_not_depend_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).random((30, 1))
    whole = bootstrap_intervals(values, resamples=100)
    monkeypatch.setattr("eval.significance._DRAWS_AT_ONCE", 70)
    assert bootstrap_intervals(values, resamples=100).tolist() == whole.tolist()


def test_holm() -> None:
    # Worked by hand: sorted .005 * 4, .01 * 3, .03 * 2, .04 * 1, each at least the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
