"""How a span is corrupted for the objectives to repair: one implementation for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from condenser.corpus.tokens import SpanTokens
from condenser.options import RandomTokens

IGNORED = -100
_MASKED, _RANDOM = 0.8, 0.1  # of the chosen tokens; the other tenth stays as it is


class Corrupted(NamedTuple):
    """A span to repair: ``ids`` int64 (n,) and ``labels`` int64 (n,), -100 where nothing is asked."""

    ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class MaskingPolicy:
    """BERT's corruption in whole words.

    Attributes:
        mask_id: the id of the mask token.
        replacements: ids that a random replacement is drawn from.
        special: ids that are never chosen: what stands for an unknown word teaches nothing.
        probability: share of the tokens that are chosen.
    """

    mask_id: int
    replacements: np.ndarray
    special: np.ndarray
    probability: float = 0.15


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


def mask_whole_words(span: SpanTokens, policy: MaskingPolicy, rng: np.random.Generator) -> Corrupted:
    """Choose whole words until about ``probability`` of the tokens are chosen, and corrupt them.

    Words are taken in random order and passed over when they would overshoot the budget of
    ``max(1, round(n * probability))`` tokens; when none fits, the shortest word drawn first is
    taken, so that every span with an ordinary word asks for at least one token. A word with a
    special token in it is never taken. Each chosen token becomes the mask token (80 %), a random
    token (10 %) or stays (10 %), as in BERT (Devlin et al. 2019, section 3.1).
    """
    ids = span.ids.astype(np.int64)
    labels = np.full(len(ids), IGNORED, np.int64)
    chosen = choose_words(span.word_starts, policy.probability, rng, ~np.isin(ids, policy.special))
    labels[chosen] = ids[chosen]
    draw = rng.random(len(chosen))
    ids[chosen[draw < _MASKED]] = policy.mask_id
    replaced = chosen[(draw >= _MASKED) & (draw < _MASKED + _RANDOM)]
    ids[replaced] = rng.choice(policy.replacements, size=len(replaced))
    return Corrupted(ids, labels)


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
    """Return the ascending token positions of randomly chosen whole words; arguments as of `find_words`."""
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
