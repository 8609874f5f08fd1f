"""How a span is corrupted for the objectives to repair: one implementation for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from condenser.corpus.tokens import SpanTokens
from condenser.options import RandomTokens

IGNORED = -100
_SEEDS = 2**62
_ROUNDING = 1e-9  # a share of 0.15 of 20 tokens may come out above 3


class Corrupted(NamedTuple):
    """A span to repair.

    Attributes:
        ids: int64 (n,).
        labels: int64 (n,), the token that stood there where one was chosen, else -100.
        seed: of what a generator will put in the place of the chosen tokens.
    """

    ids: np.ndarray
    labels: np.ndarray
    seed: int = 0


@dataclass(frozen=True)
class MaskingPolicy:
    """Which tokens are chosen, and what becomes of them; as it stands, BERT's corruption in whole words.

    Attributes:
        mask_id: the id of the mask token.
        replacements: ids that a random replacement is drawn from.
        special: ids that are never chosen: what stands for an unknown word teaches nothing.
        probability: share of the tokens that are chosen.
        whole_words: choose words, not single tokens.
        round_up: of single tokens, choose the next whole number of them, not the nearest.
        masked: share of the chosen tokens that become the mask token.
        random: share of them that become a random token; the others stay as they are.
        generator: a generator will draw what stands in their place, and each span has a seed for that.
    """

    mask_id: int
    replacements: np.ndarray
    special: np.ndarray
    probability: float = 0.15
    whole_words: bool = True
    round_up: bool = False
    masked: float = 0.8
    random: float = 0.1
    generator: bool = False


def masking_policy(
    vocabulary_size: int, special: Sequence[int], *, mask_id: int, probability: float, random_tokens: RandomTokens
) -> MaskingPolicy:
    """Return the corruption for a vocabulary.

    Args:
        vocabulary_size: ids are below it.
        special: ids of the special tokens.
        mask_id: the id of the mask token.
        probability: share of the tokens that are chosen.
        random_tokens: "ordinary" draws replacements from all but the special tokens, "all" from the
            whole vocabulary, as the original Condenser code does.
    """
    vocabulary = np.arange(vocabulary_size)
    replacements = vocabulary if random_tokens == "all" else np.setdiff1d(vocabulary, special)
    return MaskingPolicy(mask_id, replacements, np.asarray(special, np.int64), probability)


def corrupt(span: SpanTokens, policy: MaskingPolicy, rng: np.random.Generator) -> Corrupted:
    """Choose about ``probability`` of the tokens and corrupt them; see `choose_words` and `choose_tokens`.

    Special tokens, and words with one in them, are never chosen. Each chosen token becomes the mask token, a random
    token or stays: in BERT 80, 10 and 10 % (Devlin et al. 2019, section 3.1).
    """
    ids = span.ids.astype(np.int64)
    labels = np.full(len(ids), IGNORED, np.int64)
    ordinary = ~np.isin(ids, policy.special)
    if policy.whole_words:
        chosen = choose_words(span.word_starts, policy.probability, rng, ordinary)
    else:
        chosen = choose_tokens(ordinary, policy.probability, rng, round_up=policy.round_up)
    labels[chosen] = ids[chosen]
    draw = rng.random(len(chosen))
    ids[chosen[draw < policy.masked]] = policy.mask_id
    replaced = chosen[(draw >= policy.masked) & (draw < policy.masked + policy.random)]
    ids[replaced] = rng.choice(policy.replacements, size=len(replaced))
    return Corrupted(ids, labels, int(rng.integers(_SEEDS)) if policy.generator else 0)


def choose_tokens(
    ordinary: np.ndarray, probability: float, rng: np.random.Generator, *, round_up: bool = False
) -> np.ndarray:
    """Return the ascending positions of ``max(1, round(n * probability))`` different tokens, fewer if there are fewer.

    Args:
        ordinary: bool (n,), False on tokens that are never chosen.
        probability: share of the n tokens.
        rng: what decides.
        round_up: choose the next whole number in place of the nearest.
    """
    positions = np.flatnonzero(ordinary)
    wanted = len(ordinary) * probability
    nearest = math.ceil(wanted - _ROUNDING) if round_up else round(wanted)
    count = min(len(positions), max(1, nearest))
    return np.sort(rng.choice(positions, size=count, replace=False))


def find_words(word_starts: np.ndarray, ordinary: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return where words begin and how many tokens they have, without words that hold a special token.

    A token at position 0 begins a word even if the span was cut inside one.

    Args:
        word_starts: bool (n,).
        ordinary: bool (n,), False on special tokens; None when there are none.
    """
    length = len(word_starts)
    begins = np.flatnonzero(word_starts)
    if length and (len(begins) == 0 or begins[0] != 0):
        begins = np.concatenate([[0], begins])
    sizes = np.diff(begins, append=length)
    if ordinary is None or ordinary.all():
        return begins, sizes
    whole = np.logical_and.reduceat(ordinary, begins)
    return begins[whole], sizes[whole]


def choose_words(
    word_starts: np.ndarray, probability: float, rng: np.random.Generator, ordinary: np.ndarray | None = None
) -> np.ndarray:
    """Return the ascending token positions of randomly chosen whole words; arguments as of `find_words`.

    Words are taken in random order and passed over when they would overshoot the budget of
    ``max(1, round(n * probability))`` tokens; when none fits, the shortest word drawn first is taken, so that every
    span with an ordinary word asks for at least one token.
    """
    begins, sizes = find_words(word_starts, ordinary)
    if not len(begins):
        return np.zeros(0, np.int64)
    left = max(1, round(len(word_starts) * probability))
    order = rng.permutation(len(begins))
    taken = []
    for word in order.tolist():
        size = sizes[word]
        if size <= left:
            taken.append(word)
            left -= size
            if not left:
                break
    if not taken:
        taken = [order[np.argmin(sizes[order])]]
    return np.concatenate([np.arange(begins[word], begins[word] + sizes[word]) for word in sorted(taken)])
