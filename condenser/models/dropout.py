"""Dropout that costs a CPU little: of states, and of attention weights.

PyTorch draws one number of its generator for each value and keeps a float for each until the backward pass. Here a call
draws a single number, the seed of a faster generator (SFC64), and the backward pass draws the same mask again from it.
Whoever replays torch's random state, a checkpoint or gradient caching, replays these masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LEVELS = 2**16  # a value is dropped where 16 random bits fall below a threshold: probabilities are multiples of this


@dataclass(frozen=True)
class _Masks:
    """A sequence of masks that begins anew at each `draw`.

    Attributes:
        seed: of the generator.
        dropped: how many of `_LEVELS` levels are dropped.
    """

    seed: int
    dropped: int

    @property
    def scale(self) -> float:
        """What kept values are multiplied by, so that means stay."""
        return _LEVELS / (_LEVELS - self.dropped)

    def draw(self) -> _Draw:
        """Return the sequence from its beginning."""
        return _Draw(np.random.SFC64(self.seed), self.dropped - _LEVELS // 2)


@dataclass(frozen=True)
class _Draw:
    bits: np.random.SFC64
    threshold: int

    def __call__(self, like: Tensor) -> Tensor:
        """Return the next mask, of a tensor's shape and type: 1 where a value is kept, 0 where it is dropped."""
        numbers = self.bits.random_raw(-(-like.numel() // 4))
        drawn = torch.from_numpy(numbers.view(np.int16))[: like.numel()].view(like.shape)
        # a comparison that writes numbers is several times faster than one whose truth values are turned into them
        mask = torch.empty(like.shape, dtype=like.dtype)
        return torch.ge(drawn, self.threshold, out=mask)


def masks_of(probability: float, like: Tensor) -> _Masks | None:
    """Return masks for one call, drawing their seed from torch's generator; None where PyTorch's dropout must serve.

    Args:
        probability: that a value is dropped.
        like: what it is dropped from; taken are float32 and float64 on a CPU.
    """
    dropped = round(probability * _LEVELS)
    if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64) or not 0 < dropped < _LEVELS:
        return None
    return _Masks(int(torch.randint(2**63 - 1, ())), dropped)


class Dropout(nn.Dropout):
    """`nn.Dropout`, cheaper on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Drop values in training; see `nn.Dropout`."""
        # compiled code has dropout inside its loops already
        masks = masks_of(self.p, input) if self.training and not torch.compiler.is_compiling() else None
        if masks is None:
            return super().forward(input)
        dropped: Tensor = _Dropped.apply(input, masks)
        return dropped


def cheapen(model: nn.Module) -> None:
    """Put `Dropout` in the place of each `nn.Dropout` of a model."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout  # keeps what others hold on to: hooks, and the module itself


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, masks: _Masks) -> Tensor:
        ctx.masks = masks
        return masks.draw()(states).mul_(states).mul_(masks.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.masks.draw()(gradient).mul_(gradient).mul_(ctx.masks.scale), None


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float, masks: _Masks) -> Tensor:
    """Attend within each text, some of the attention weights being dropped; on a CPU.

    The weights are computed again in the backward pass, text by text: they never leave the processor's cache, and no
    graph holds them.

    Args:
        query: (heads, tokens, width), the texts one after the other; so are ``key`` and ``value``.
        key: see ``query``.
        value: see ``query``.
        lengths: tokens of each text.
        scale: what scores are multiplied by.
        masks: from `masks_of`.

    Returns:
        (tokens, heads, width).
    """
    mixed: Tensor = _Attended.apply(query, key, value, lengths, scale, masks)
    return mixed


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float, masks: _Masks
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scale, ctx.masks = lengths, scale, masks
        mixed = _rows_like(query)
        draw = masks.draw()
        for q, k, v, out in _by_text(lengths, query, key, value, mixed):
            weights = _weights(q, k, scale)
            out.copy_(_product(weights.mul_(draw(weights)), v, masks.scale))
        return mixed.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        gradients = [_rows_like(query) for _ in range(3)]
        draw = ctx.masks.draw()
        parts = _by_text(ctx.lengths, query, key, value, gradient.transpose(0, 1), *gradients)
        for q, k, v, pull, for_q, for_k, for_v in parts:
            weights = _weights(q, k, ctx.scale)
            mask = draw(weights)
            for_v.copy_(_product((weights * mask).transpose(1, 2), pull, ctx.masks.scale))
            pulled = _product(pull, v.transpose(1, 2), ctx.masks.scale).mul_(mask)
            pulled = torch._softmax_backward_data(pulled, weights, -1, weights.dtype)
            for_q.copy_(_product(pulled, k, ctx.scale))
            for_k.copy_(_product(pulled.transpose(1, 2), q, ctx.scale))
        return *gradients, None, None, None


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    scores = _product(query, key.transpose(1, 2), scale)
    return torch.softmax(scores, -1, out=scores)


def _product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """Return ``left @ right * factor``, batch by batch."""
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=factor)


def _rows_like(states: Tensor) -> Tensor:
    """Return an empty tensor of the shape (heads, tokens, width) that lies in memory token by token."""
    heads, tokens, width = states.shape
    return states.new_empty(tokens, heads, width).transpose(0, 1)


def _by_text(lengths: Sequence[int], *states: Tensor) -> Any:
    return zip(*(one.split(lengths, dim=1) for one in states), strict=True)
