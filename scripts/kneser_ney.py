"""The interpolated Kneser-Ney bigram: what a neural language model should be better than."""

from __future__ import annotations

import numpy as np

from condenser.corpus.streams import TextFrame, TokenDocuments


class KneserNeyBigram:
    """p(w | v) = max(c(v w) - D, 0) / c(v) + D N(v .) / c(v) * p(w), with N counting kinds of pairs.

    p(w) is discounted in the same way from N(. w), the number of words that w was seen behind, and interpolated with
    the uniform distribution, so that every word has a probability. D = n1 / (n1 + 2 n2), n1 and n2 being the pairs
    that were seen once and twice (Chen and Goodman 1999).

    Args:
        documents: the training text; each document begins and ends with the frame's tokens.
        frame: the tokens around a document; the first is given and never asked for.
        vocabulary_size: entries of the vocabulary.
    """

    def __init__(self, documents: TokenDocuments, frame: TextFrame, vocabulary_size: int) -> None:
        self._frame, self._size = frame, vocabulary_size
        left, right = self._pairs(documents)
        self._keys, self._counts = np.unique(left * vocabulary_size + right, return_counts=True)
        left, right = np.divmod(self._keys, vocabulary_size)
        self._total = np.bincount(left, weights=self._counts, minlength=vocabulary_size)
        self._kinds = np.bincount(left, minlength=vocabulary_size)
        self._discount = _discount(self._counts)
        behind = np.bincount(right, minlength=vocabulary_size)
        discount = _discount(behind)
        left_over = discount * np.count_nonzero(behind) / behind.sum()
        self._unigram = np.maximum(behind - discount, 0) / behind.sum() + left_over / vocabulary_size

    def probabilities(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return p(right | left) of pairs of tokens, elementwise."""
        keys = left * self._size + right
        place = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        count = np.where(self._keys[place] == keys, self._counts[place], 0)
        total = np.maximum(self._total[left], 1)
        interpolated = np.maximum(count - self._discount, 0) + self._discount * self._kinds[left] * self._unigram[right]
        return np.where(self._total[left] > 0, interpolated / total, self._unigram[right])

    def nll(self, documents: TokenDocuments) -> float:
        """Return the negative log-probability of documents, their ends included, in nats."""
        return float(-np.log(self.probabilities(*self._pairs(documents))).sum())

    def _pairs(self, documents: TokenDocuments) -> tuple[np.ndarray, np.ndarray]:
        """Return each token and the one before it."""
        lengths = documents.lengths + 2
        starts = np.cumsum(lengths) - lengths
        text = np.full(lengths.sum(), self._frame.end, np.int64)
        text[starts] = self._frame.start
        inside = np.ones(len(text), bool)
        inside[starts] = inside[starts + lengths - 1] = False
        text[inside] = documents.tokens
        asked = np.ones(len(text), bool)
        asked[starts] = False
        return text[:-1][asked[1:]], text[1:][asked[1:]]


def _discount(counts: np.ndarray) -> float:
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return once / (once + 2 * twice) if once else 0.0
