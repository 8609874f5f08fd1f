"""What micro-batches add up to: one mean over the step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from condenser.training.contrastive import span_contrastive_loss
from condenser.training.steps import accumulate


@dataclass
class Rows:
    """Rows of a micro-batch; ``weight`` counts what its summed loss is over."""

    rows: Tensor
    weight: float

    def to(self, device: torch.device) -> Rows:
        return self


def contrastive(model: nn.Module, batch: Rows, *, share: float, fraction: float) -> dict[str, Tensor]:
    return {"contrastive": span_contrastive_loss(model(batch.rows)) * fraction}


def test_accumulated_contrastive_losses_are_averaged() -> None:
    """Case B25: weights after a step of 0.1 are w - 0.1 x mean(g1, g2); the other micro-batch gives no negatives."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    batches = [Rows(torch.randn(4, 3, dtype=torch.float64), 1.0) for _ in range(2)]
    apart = [span_contrastive_loss(model(batch.rows)) for batch in batches]
    gradients = [torch.autograd.grad(loss, model.weight)[0] for loss in apart]
    wanted = model.weight.detach() - 0.1 * (gradients[0] + gradients[1]) / 2
    losses = accumulate(contrastive)(model, batches, Accelerator(cpu=True))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.weight.detach(), wanted, rtol=1e-12, atol=1e-12)
    assert losses["contrastive"].item() == pytest.approx((apart[0] + apart[1]).item() / 2, rel=1e-12)


def summed(model: nn.Module, batch: Rows, *, share: float, fraction: float) -> dict[str, Tensor]:
    return {"masked": model(batch.rows).sum() * share}


def test_accumulated_token_losses_are_the_mean_over_tokens(cases: Path) -> None:
    """Case B26: neither a mean of means nor a sum."""
    setup = json.loads((cases / "26" / "setup.json").read_text())["micro_batches"]
    expected = json.loads((cases / "26" / "expected.json").read_text())["token_mean"]
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    batches = [
        Rows(torch.full((one["labelled_tokens"], 1), one["mean_loss"], dtype=torch.float64), one["labelled_tokens"])
        for one in setup
    ]
    losses = accumulate(summed)(model, batches, Accelerator(cpu=True))
    assert losses["masked"].item() == pytest.approx(expected) == model.weight.grad.item()
