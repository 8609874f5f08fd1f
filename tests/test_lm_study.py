"""The study of language models: the grammar's entropy, the bigram it is set beside, and a short training."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

from condenser.corpus.streams import TextFrame, TokenDocuments
from scripts.kneser_ney import KneserNeyBigram
from scripts.lm_study import entropy_per_token, grammar, write_text

FRAME = TextFrame(0, 1)


def test_the_entropy_is_the_mean_surprise_of_the_texts() -> None:
    draw = random.Random(0)
    texts = [write_text(draw) for _ in range(4000)]
    mean = sum(nll for _, nll in texts) / sum(len(words) + 1 for words, _ in texts)
    assert entropy_per_token() == pytest.approx(mean, rel=0.01)
    assert all(text[0][0] in ("if", "either", "though") and text[0].count("the") == 2 for text in texts)


def test_the_bigram_is_its_formula() -> None:
    """Against counting in words; over all words, every history's probabilities add up to one."""
    texts = [[2, 3, 2, 3, 4], [2, 3], [4, 2], [5]]
    documents = TokenDocuments(np.array(sum(texts, []), np.int32), np.array([0, 5, 7, 9, 10]), 10)  # noqa: RUF017
    bigram = KneserNeyBigram(documents, FRAME, 8)
    pairs = [pair for text in texts for pair in zip([0, *text], [*text, 1], strict=True)]
    counts = {pair: pairs.count(pair) for pair in pairs}
    discount = sum(n == 1 for n in counts.values()) / (
        sum(n == 1 for n in counts.values()) + 2 * sum(n == 2 for n in counts.values())
    )
    behind = {word: len({left for left, right in counts if right == word}) for word in range(8)}
    ones, twos = (sum(n == times for n in behind.values()) for times in (1, 2))
    lower = ones / (ones + 2 * twos)
    seen = sum(n > 0 for n in behind.values())
    nll = 0.0
    for left, right in pairs:
        unigram = (max(behind[right] - lower, 0) + lower * seen / 8) / len(counts)
        total = sum(n for (one, _), n in counts.items() if one == left)
        kinds = sum(one == left for one, _ in counts)
        nll -= math.log((max(counts[left, right] - discount, 0) + discount * kinds * unigram) / total)
    assert bigram.nll(documents) == pytest.approx(nll)
    for left in range(8):  # 6 and 7 were never seen
        assert bigram.probabilities(np.full(8, left), np.arange(8)).sum() == pytest.approx(1)


@pytest.mark.slow
def test_a_short_training_comes_near_the_entropy(tmp_path: Path) -> None:
    """A tenth of the study's steps: within 10 % (the study: within 3 %)."""
    figures = grammar(tmp_path, texts=12_000, steps=300)
    assert figures["true_nll"] == pytest.approx(figures["entropy"], rel=0.02)
    assert -0.01 < figures["lm_nll"] / figures["true_nll"] - 1 < 0.1
