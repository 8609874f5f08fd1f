"""Whole-word masking: counts, shares and what may never happen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from condenser.corpus.batches import Frame, collate, window
from condenser.corpus.corruption import Corrupted, MaskingPolicy, choose_tokens, choose_words, corrupt
from condenser.corpus.tokens import SpanTokens

MASK = 103
POLICY = MaskingPolicy(mask_id=MASK, replacements=np.arange(200, 300), special=np.array([MASK]))


def span_of(word_sizes: list[int]) -> SpanTokens:
    starts = np.concatenate([[True] + [False] * (size - 1) for size in word_sizes])
    return SpanTokens(np.arange(1000, 1000 + len(starts), dtype=np.int32), starts)


def test_words_are_masked_whole_and_the_budget_is_kept() -> None:
    span = span_of([1, 3, 2, 1, 1, 4, 2, 1, 1, 2, 1, 1])
    word = np.cumsum(span.word_starts)
    for seed in range(300):
        chosen = choose_words(span.word_starts, 0.15, np.random.default_rng(seed))
        assert 1 <= len(chosen) <= round(20 * 0.15)
        for number in np.unique(word[chosen]):
            assert set(np.flatnonzero(word == number)) <= set(chosen)


def test_a_single_long_word_is_still_asked_for() -> None:
    assert choose_words(span_of([5]).word_starts, 0.15, np.random.default_rng(0)).tolist() == [0, 1, 2, 3, 4]


def test_the_shortest_word_is_taken_when_none_fits() -> None:
    for seed in range(20):
        chosen = choose_words(span_of([4, 2, 4]).word_starts, 0.1, np.random.default_rng(seed))
        assert chosen.tolist() == [4, 5]


def test_a_span_cut_inside_a_word_begins_one() -> None:
    starts = np.array([False, False, True])
    words = {tuple(choose_words(starts, 0.7, np.random.default_rng(seed)).tolist()) for seed in range(50)}
    assert words == {(0, 1), (2,)}


def test_an_empty_span_asks_for_nothing() -> None:
    empty = SpanTokens(np.zeros(0, np.int32), np.zeros(0, bool))
    assert len(corrupt(empty, POLICY, np.random.default_rng(0)).ids) == 0


def test_shares_of_masked_random_and_kept_tokens() -> None:
    span = span_of([1] * 100)
    rows = [corrupt(span, POLICY, np.random.default_rng(seed)) for seed in range(1000)]
    ids, labels = np.stack([row.ids for row in rows]), np.stack([row.labels for row in rows])
    asked = labels != -100
    assert asked.mean() == pytest.approx(0.15)
    assert np.array_equal(labels[asked], np.broadcast_to(span.ids, ids.shape)[asked])
    assert np.array_equal(ids[~asked], np.broadcast_to(span.ids, ids.shape)[~asked])
    chosen = ids[asked]
    assert (chosen == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (chosen < 300).mean() - (chosen == MASK).mean() == pytest.approx(0.1, abs=0.02)
    assert (chosen >= 1000).mean() == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("share", [1.0, 0.85])
def test_electras_corruption_has_no_random_words(share: float) -> None:
    """Case B16: [MASK] on all chosen tokens as in the paper, or on 85 % as in the released code; single tokens."""
    policy = MaskingPolicy(MASK, np.arange(0), np.array([MASK, 1007]), whole_words=False, masked=share, random=0.0)
    span = span_of([4] * 20)
    rows = [corrupt(span, policy, np.random.default_rng(seed)) for seed in range(1000)]
    chosen = np.stack([row.ids[row.labels != -100] for row in rows])
    assert chosen.shape == (1000, 12)  # 15 % of 80, no position twice
    assert (chosen == MASK).mean() == pytest.approx(share, abs=0.01)
    asked = np.stack([row.labels for row in rows]) != -100
    assert np.array_equal(np.stack([row.ids for row in rows])[~asked], np.broadcast_to(span.ids, asked.shape)[~asked])
    assert np.isin(chosen, [MASK, *span.ids]).all() and not asked[:, 7].any()
    assert asked.sum(0)[:7] == pytest.approx(1000 * 12 / 79, rel=0.3)


@pytest.mark.parametrize(("ordinary", "probability", "count"), [("1111", 0.01, 1), ("1001", 1.0, 2), ("00", 0.5, 0)])
def test_single_tokens_are_chosen_once_each(ordinary: str, probability: float, count: int) -> None:
    flags = np.array([flag == "1" for flag in ordinary])
    chosen = choose_tokens(flags, probability, np.random.default_rng(0))
    assert len(chosen) == count == len(set(chosen.tolist())) and flags[chosen].all()


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (6, 1), (7, 2), (20, 3), (21, 4), (100, 15), (126, 19)])
def test_single_tokens_are_rounded_up_where_that_is_asked(tokens: int, count: int) -> None:
    assert len(choose_tokens(np.ones(tokens, bool), 0.15, np.random.default_rng(0), round_up=True)) == count


def test_seeds_are_drawn_behind_the_masks() -> None:
    span = span_of([1, 2, 3] * 10)
    plain, seeded = (
        corrupt(span, dataclasses.replace(POLICY, generator=generator), np.random.default_rng(5))
        for generator in (False, True)
    )
    assert np.array_equal(plain.ids, seeded.ids) and plain.seed == 0 != seeded.seed


def test_masks_depend_on_the_generator_alone() -> None:
    span = span_of([1, 2, 3] * 10)
    first, again = (corrupt(span, POLICY, np.random.default_rng([1, 2])) for _ in range(2))
    assert np.array_equal(first.ids, again.ids) and np.array_equal(first.labels, again.labels)


def test_collate_frames_and_pads() -> None:
    rows = [Corrupted(np.array([7, 8, 9]), np.array([-100, 8, -100])), Corrupted(np.array([5]), np.array([5]))]
    batch = collate(rows, Frame(cls_id=1, sep_id=2, pad_id=0))
    assert batch.input_ids.tolist() == [[1, 7, 8, 9, 2], [1, 5, 2, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 8, -100, -100], [-100, 5, -100, -100, -100]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.weight == 2
    assert collate(rows[:1], Frame(1, 2, 0)).attention_mask is None


def test_one_window_serves_ids_and_word_starts() -> None:
    span = span_of([2] * 30)
    for seed in range(50):
        cut = window(span, 9, np.random.default_rng(seed))
        offset = int(cut.ids[0]) - 1000
        assert len(cut.ids) == 9
        assert np.array_equal(cut.ids, span.ids[offset : offset + 9])
        assert np.array_equal(cut.word_starts, span.word_starts[offset : offset + 9])
