"""Copying from what was read: a pointer into the passage beside the vocabulary (See et al. 2017)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from condenser.models.half import at_least_float32

_KEY_SIZE = 128
_NEXT_AT_FIRST = 3.0  # a place behind the token just read begins at about twenty times the weight of another


class Copies(NamedTuple):
    """What a pointer says of the next tokens.

    Attributes:
        gate: (rows, n), log-odds of a token of the vocabulary's against a copied one.
        weights: (rows, n, length), which place is copied, if one is; 0 at places that are never copied.
    """

    gate: Tensor
    weights: Tensor


class Pointer(nn.Module):
    """Says how likely the next token is one of the passage's, and at which place it stands.

    The probability of a word w is g P(w) + (1 - g) sum_{s: x_s = w} a_s, with P of the vocabulary,
    g = sigmoid(u f + v) and a = softmax_s(Q f K m_s / sqrt d + b [x_{s-1} = y]), b = r f + t: f are the features of
    a step, m_s the state of the passage's token x_s, y the token read last. A word is copied piece by piece, so a
    place is worth more when the token before it is the one that was just written; b says when that counts.

    Args:
        width: length of the features.
        states: length of the passage's states.
    """

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, _KEY_SIZE)
        self.key = nn.Linear(states, _KEY_SIZE, bias=False)
        self.next = nn.Linear(width, 1)
        nn.init.constant_(self.next.bias, _NEXT_AT_FIRST)
        self.gate = nn.Linear(width, 1)

    def forward(self, features: Tensor, read: Tensor, keys: Tensor, ids: Tensor, barred: Tensor) -> Copies:
        """Point into the passages.

        Args:
            features: (rows, n, width).
            read: (rows, n), the tokens read last.
            keys: (rows, length, d), K m_s.
            ids: (rows, length), the passages' tokens.
            barred: (rows, length) bool, places that are never copied. Where all are, the vocabulary has it all.
        """
        before = torch.cat([torch.full_like(ids[:, :1], -1), ids[:, :-1]], dim=1)
        follows = self.next(features) * (before[:, None] == read[:, :, None])
        scores = at_least_float32(self.query(features) @ keys.transpose(1, 2)) / math.sqrt(_KEY_SIZE) + follows
        hidden = barred[:, None]
        # not minus infinity: of a row with no place left that would make a softmax of nothing
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        gate = at_least_float32(self.gate(features)[..., 0])
        return Copies(gate.masked_fill(barred.all(1)[:, None], torch.inf), weights)


def with_copies(written: Tensor, gate: Tensor, copied: Tensor) -> Tensor:
    """Return log(g p + (1 - g) c) of words.

    Args:
        written: log p, what the vocabulary says of each.
        gate: log-odds of g.
        copied: c, the weight of all places where it stands.
    """
    smallest = torch.finfo(copied.dtype).tiny
    return torch.logaddexp(logsigmoid(gate) + written, logsigmoid(-gate) + copied.clamp(min=smallest).log())


def first_places(ids: Tensor) -> Tensor:
    """Return for each place of the passages (rows, length) the first at which the same token stands."""
    ordered, order = ids.sort(dim=1, stable=True)
    places = torch.arange(ids.shape[1], device=ids.device)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group_start = torch.where(begins, places, 0).cummax(1).values
    return torch.empty_like(order).scatter(1, order, order.gather(1, group_start))


def all_with_copies(written: Tensor, copies: Copies, ids: Tensor, first: Tensor) -> Tensor:
    """Return log-probabilities (rows, vocabulary) of the next token, copies counted.

    Args:
        written: (rows, vocabulary), what the vocabulary says.
        copies: of one step each, n = 1.
        ids: (rows, length), the passages' tokens.
        first: (rows, length), see `first_places`.
    """
    gate, weights = copies.gate, copies.weights[:, 0]
    # a word that stands at several places gets the same number from each of them
    copied = torch.zeros_like(weights).scatter_add(1, first, weights).gather(1, first)
    mixed = with_copies(written.gather(1, ids), gate, copied)
    return (written + logsigmoid(gate)).scatter(1, ids, mixed.to(written.dtype))
