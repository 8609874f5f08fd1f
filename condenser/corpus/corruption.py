"""How a span is corrupted for the objectives to repair: one implementation for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from condenser.corpus.tokens import SpanTokens

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
        replacements: ids that a random replacement is drawn from; special tokens are left out.
        probability: share of the tokens that are chosen.
    """

    mask_id: int
    replacements: np.ndarray
    probability: float = 0.15


def mask_whole_words(span: SpanTokens, policy: MaskingPolicy, rng: np.random.Generator) -> Corrupted:
    """Choose whole words until about ``probability`` of the tokens are chosen, and corrupt them.

    Words are taken in random order and passed over when they would overshoot the budget of
    ``max(1, round(n * probability))`` tokens; when none fits, the shortest word drawn first is
    taken, so that every span asks for at least one token. Each chosen token becomes the mask token
    (80 %), a random token (10 %) or stays (10 %), as in BERT (Devlin et al. 2019, section 3.1).
    """
    ids = span.ids.astype(np.int64)
    labels = np.full(len(ids), IGNORED, np.int64)
    chosen = choose_words(span.word_starts, policy.probability, rng)
    labels[chosen] = ids[chosen]
    draw = rng.random(len(chosen))
    ids[chosen[draw < _MASKED]] = policy.mask_id
    replaced = chosen[(draw >= _MASKED) & (draw < _MASKED + _RANDOM)]
    ids[replaced] = rng.choice(policy.replacements, size=len(replaced))
    return Corrupted(ids, labels)


def choose_words(word_starts: np.ndarray, probability: float, rng: np.random.Generator) -> np.ndarray:
    """Return the ascending token positions of randomly chosen whole words.

    A token at position 0 begins a word even if the span was cut inside one.
    """
    length = len(word_starts)
    if length == 0:
        return np.zeros(0, np.int64)
    begins = np.flatnonzero(word_starts)
    if len(begins) == 0 or begins[0] != 0:
        begins = np.concatenate([[0], begins])
    sizes = np.diff(begins, append=length)
    budget = max(1, round(length * probability))
    order = rng.permutation(len(begins))
    taken, left = [], budget
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
