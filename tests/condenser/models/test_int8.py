"""8-bit linear layers against exact arithmetic on the same rounded numbers, and against the layer in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from condenser.models.int8 import Int8Linear, is_available, scaled_rows
from condenser.models.packed import packed_forward_of
from tests.condenser.models.test_packed import config, model_of, one_by_one, texts

pytestmark = pytest.mark.skipif(not is_available(), reason="this build of PyTorch has no 8-bit products")


def inputs(rows: int = 5, width: int = 64) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]  # rows of very different sizes


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("vnni", [True, False])
def test_products_of_rounded_numbers_are_exact(bias: bool, vnni: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if vnni and not torch.cpu._is_vnni_supported():
        pytest.skip("products of full 8-bit numbers need VNNI")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    rows, linear = inputs(), nn.Linear(64, 48, bias=bias)
    steps = 127 if vnni else 63
    largest = rows.abs().amax(1, keepdim=True)
    scale = linear.weight.detach().abs().amax(1) / 127
    whole = (
        torch.round(rows / largest * steps).double() @ torch.round(linear.weight.detach() / scale[:, None]).double().T
    )
    expected = whole * scale * largest / steps + (linear.bias.detach() if bias else 0)
    torch.testing.assert_close(Int8Linear(linear)(scaled_rows(rows)).double(), expected, rtol=1e-4, atol=1e-5)


def test_each_row_keeps_its_accuracy_beside_larger_ones() -> None:
    rows, linear = inputs(), nn.Linear(64, 48, bias=False)
    with torch.no_grad():
        exact = linear(rows)
    error = (Int8Linear(linear)(scaled_rows(rows)) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.02


def test_a_row_of_zeros_gives_the_bias() -> None:
    linear = nn.Linear(64, 48)
    torch.testing.assert_close(Int8Linear(linear)(scaled_rows(torch.zeros(2, 64)))[0], linear.bias.detach())


def test_states_come_near_the_models_and_do_not_depend_on_the_batch() -> None:
    model = model_of(config("bert"))
    token_ids = texts([3, 20, 20, 41])
    forward = packed_forward_of(model, int8=True)
    assert forward is not None
    states, _ = forward(token_ids)
    expected = torch.cat(one_by_one(model, token_ids))
    assert nn.functional.cosine_similarity(states, expected).min() > 0.99
    assert not torch.allclose(states, expected, atol=1e-5), "these are rounded"
    alone = torch.cat([forward([ids])[0] for ids in token_ids])
    torch.testing.assert_close(states, alone, atol=1e-6, rtol=0)


def test_weights_are_copies() -> None:
    linear, rows = nn.Linear(64, 48), scaled_rows(inputs())
    rounded = Int8Linear(linear)
    before = rounded(rows)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    assert torch.equal(rounded(rows), before)
