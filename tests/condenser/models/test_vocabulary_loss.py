"""The vocabulary's loss against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from condenser.models.vocabulary_loss import cross_entropies


def case(dtype: torch.dtype, biased: bool = True) -> tuple[list[Tensor], Tensor]:
    """States, weights and perhaps a bias that want gradients, and labels, one of them twice."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 4), (9, 4), (9,)] if biased else [(5, 4), (9, 4)]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    return tensors, torch.tensor([3, 0, 8, 3, 5])


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_losses_and_gradients_are_those_of_all_logits(dtype: torch.dtype, tolerance: float, biased: bool) -> None:
    tensors, labels = case(dtype, biased)
    bias = tensors[2] if biased else None
    ours = cross_entropies(tensors[0], tensors[1], bias, labels)
    theirs = functional.cross_entropy(functional.linear(tensors[0], tensors[1], bias), labels, reduction="none")
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    factors = torch.tensor([0.5, 2.0, 0.0, -1.0, 3.0], dtype=dtype)  # each row's loss may count as it likes
    for mine, exact in zip(*(torch.autograd.grad(one @ factors, tensors) for one in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, exact, rtol=tolerance, atol=tolerance)


def test_a_graph_may_be_gone_through_twice() -> None:
    tensors, labels = case(torch.float64)
    losses = cross_entropies(*tensors, labels)
    first, second = (torch.autograd.grad(losses.sum(), tensors, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_asked_is_no_loss_and_no_gradient() -> None:
    (states, weight, bias), labels = case(torch.float32)
    losses = cross_entropies(states[:0], weight, bias, labels[:0])
    gradients = torch.autograd.grad(losses.sum(), [weight, bias])
    assert losses.shape == (0,) and not any(gradient.any() for gradient in gradients)


def test_half_precision_rounds_products_and_nothing_else() -> None:
    """The weights' gradients come back in float32, near the exact ones, and no cast of theirs outlives the call."""
    tensors, labels = case(torch.float32)
    exact = torch.autograd.grad(cross_entropies(*tensors, labels).sum(), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = cross_entropies(*tensors, labels)
        again = functional.linear(tensors[0], tensors[1])
    assert losses.dtype == torch.float32
    for mine, wanted in zip(torch.autograd.grad(losses.sum(), tensors), exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, wanted, rtol=0.02, atol=0.02)
    assert torch.autograd.grad(again.sum(), tensors[1])[0].any()
