"""Dropout on a CPU: what is kept, how often, and that one number of torch's generator decides it all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from condenser.models.dropout import Dropout, attend, cheapen, masks_of

WIDTH = 4


def test_kept_values_are_scaled_and_the_rest_is_zero() -> None:
    torch.manual_seed(1)
    states = torch.ones(1000, 203, requires_grad=True)
    dropped = Dropout(0.1)(states)
    assert dropped.detach().unique().tolist() == [0, pytest.approx(1 / 0.9, rel=1e-4)]
    share = (dropped == 0).float().mean().item()
    assert share == pytest.approx(0.1, abs=0.004)  # six standard deviations
    assert dropped.mean().item() == pytest.approx(1, abs=0.005)
    dropped.sum().backward()
    assert torch.equal(states.grad, dropped.detach())


def test_torchs_random_state_decides_and_moves_on() -> None:
    states, layer = torch.ones(7, 5), Dropout(0.5)
    torch.manual_seed(1)
    first, second = layer(states), layer(states)
    torch.manual_seed(1)
    with torch.no_grad():
        again = layer(states)
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize(("probability", "wanted"), [(0.0, 1.0), (1.0, 0.0)])
def test_none_and_all_are_dropped(probability: float, wanted: float) -> None:
    assert torch.equal(Dropout(probability)(torch.ones(3)), torch.full((3,), wanted))
    assert torch.equal(Dropout(0.5).eval()(torch.ones(3)), torch.ones(3))


def test_half_precision_is_left_to_pytorch() -> None:
    assert masks_of(0.1, torch.ones(3, dtype=torch.bfloat16)) is None
    assert Dropout(0.5)(torch.ones(400, dtype=torch.bfloat16)).unique().tolist() == [0, 2]


def test_a_models_dropout_is_exchanged_in_place() -> None:
    inner = nn.Dropout(0.3)
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(inner))
    names = list(model.state_dict())
    cheapen(model)
    assert type(inner) is Dropout and inner.p == 0.3 and list(model.state_dict()) == names


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_attention_and_its_gradients_are_those_of_the_plain_formula(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    lengths = [3, 1, 7]
    states = [torch.randn(11, 2, WIDTH, dtype=dtype).transpose(0, 1).requires_grad_() for _ in range(3)]
    masks = masks_of(0.3, states[0])
    assert masks is not None
    ours, naive = attend(*states, lengths, 0.4, masks), naive_attention(states, lengths, masks.draw(), masks.scale)
    torch.testing.assert_close(ours, naive, rtol=tolerance, atol=tolerance)
    pull = torch.randn_like(ours)
    for mine, exact in zip(*(torch.autograd.grad(one, states, pull) for one in (ours, naive)), strict=True):
        torch.testing.assert_close(mine, exact, rtol=tolerance, atol=tolerance)


def naive_attention(states: list[Tensor], lengths: list[int], draw: object, scale: float) -> Tensor:
    mixed = []
    for query, key, value in zip(*(one.split(lengths, dim=1) for one in states), strict=True):
        weights = torch.softmax(0.4 * query @ key.transpose(1, 2), -1)
        mixed.append(weights * draw(weights) * scale @ value)  # type: ignore[operator]
    return torch.cat(mixed, dim=1).transpose(0, 1)
