"""The loss over a vocabulary: of its logits one copy is made, which turns into their gradient in place.

PyTorch's own cross-entropy keeps logits, their log-softmax and its gradient: for each token asked for three times as
many numbers as the vocabulary has entries, the largest tensors of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@torch.compiler.disable
def cross_entropies(states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Return the cross-entropies (n,) of ``states @ weight.T + bias``.

    Under autocast the products are of its type, the softmax float32.

    Args:
        states: (n, dim).
        weight: (vocabulary, dim).
        bias: (vocabulary,), or None.
        labels: (n,).
    """
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    if dtype == torch.float16:  # in which gradients that the loss's scale has not reached yet would vanish
        logits = functional.linear(states, weight, bias)
        return functional.cross_entropy(logits.float(), labels, reduction="none")
    losses: Tensor = _CrossEntropies.apply(states, weight, bias, labels, dtype)
    return losses


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dtype: torch.dtype
    ) -> Tensor:
        # autocast would remember casts of the weights made here, where they have no graph
        with torch.autocast(states.device.type, enabled=False):
            typed = [None if one is None else one.to(dtype) for one in (states, weight, bias)]
            logits = functional.linear(*typed)  # type: ignore[arg-type]
        wide = logits if dtype == torch.float64 else logits.float()  # float32 stays the tensor it is
        torch.log_softmax(wide, -1, out=wide)
        losses = -wide.gather(1, labels[:, None])[:, 0]
        if any(ctx.needs_input_grad):
            # softmax less one where the label is
            wide.exp_().scatter_add_(1, labels[:, None], wide.new_full((len(labels), 1), -1.0))
            ctx.save_for_backward(states, weight, wide.to(dtype))
            ctx.has_bias = bias is not None
        return losses

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, slopes = ctx.saved_tensors
        scaled = (states * factors[:, None]).to(slopes.dtype)
        of_states = (slopes @ weight.to(slopes.dtype)) * factors[:, None]
        of_weight = slopes.T @ scaled
        of_bias = (slopes.T @ factors.to(slopes.dtype)).to(weight.dtype) if ctx.has_bias else None
        return of_states.to(states.dtype), of_weight.to(weight.dtype), of_bias, None, None
