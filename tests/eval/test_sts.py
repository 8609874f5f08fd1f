from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from condenser.errors import UserError
from eval.sts import Pair, correlate, load_pairs, pearson, spearman

PAIRS = [Pair("a b", 'c "d"', 2.5), Pair("e", "f", 0.0)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("three.tsv", 'a b\tc "d"\t2.5\ne\tf\t0\n'),
        ("benchmark.csv", 'news\tf\t2012\t1\t2.5\ta b\tc "d"\nnews\tf\t2012\t2\t0\te\tf\tsource\n\n'),
        ("glue.tsv", 'index\tsentence1\tsentence2\tscore\n0\ta b\tc "d"\t2.5\n1\te\tf\t0\n'),
        ("sick.txt", 'pair_ID\tsentence_A\tsentence_B\trelatedness_score\n1\ta b\tc "d"\t2.5\n2\te\tf\t0\n'),
        (
            "hub.jsonl",
            '{"sentence1": "a b", "sentence2": "c \\"d\\"", "score": 2.5}\n'
            '{"sentence1": "e", "sentence2": "f", "label": 0}\n',
        ),
    ],
)
def test_layouts(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert load_pairs(tmp_path / name) == PAIRS


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("p.tsv", "a\tb\n", ":1: 2 columns, expected 3 (sentence, sentence, score) or names in the first line"),
        ("p.tsv", "a\tb\t1\na\tb\n", ":2: 2 columns, expected at least 3"),
        ("p.tsv", "a\tb\thigh\n", ":1: score is 'high', expected a number"),
        ("p.tsv", "a\tb\tnan\n", ":1: score is 'nan', expected a number"),
        ("p.tsv", "sentence1\ttext\tscore\n", ":1: no column 'sentence2', found 'sentence1', 'text', 'score'"),
        ("p.tsv", "a\tb\t1\n", ": 1 scored pairs, expected two or more"),
        ("p.tsv", "a\tb\t1\nc\td\t1\n", ": all 2 pairs have the score 1.0: nothing to correlate"),
        ("p.jsonl", '{"sentence1": "a", "sentence2": "b"}\n', ":1: no column 'score', found 'sentence1', 'sentence2'"),
        ("p.jsonl", '{"sentence1": "a", "sentence2": 3, "score": 1}\n', ":1: a sentence is not a text"),
        ("p.jsonl", '{"sentence1": "a", "sentence2": "b", "score": null}\n', ":1: score is None, expected a number"),
    ],
)
def test_bad_pairs_are_named(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        load_pairs(tmp_path / name)
    assert str(caught.value) == f"{tmp_path / name}{line}"


def test_correlations_equal_scipy() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.integers(0, 3, (2, 200)).astype(float)
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert pearson(first, second) == pytest.approx(stats.pearsonr(first, second).statistic)


def test_cosine_and_dot_are_told_apart() -> None:
    first = np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]], dtype=np.float32)
    second = np.array([[2.0, 0.0], [3.0, 4.0], [1.0, 0.5]], dtype=np.float32)
    result = correlate(first, second * np.float32(2), [1, 3, 0])
    assert result.pairs == 3
    # dot products 4, 50, 2 rise with the scores; cosines 1, 1, .45 tie
    assert result.spearman_dot == pytest.approx(1)
    assert result.spearman_cosine == pytest.approx(stats.spearmanr([1, 1, 0], [1, 3, 0]).statistic)
    assert result.pearson_dot == pytest.approx(stats.pearsonr([4, 50, 2], [1, 3, 0]).statistic)
    assert result.pearson_cosine == pytest.approx(stats.pearsonr([1, 1, 1 / 5**0.5], [1, 3, 0]).statistic)


def test_vectors_that_say_nothing() -> None:
    ones = np.ones((2, 2), dtype=np.float32)
    with pytest.raises(UserError, match="the vectors of pair 2 have length zero: no cosine"):
        correlate(np.array([[1.0, 0], [0, 0]]), ones, [1, 2])
    with pytest.raises(UserError, match="all similarities are the same: nothing to correlate"):
        correlate(ones, ones, [1, 2])
