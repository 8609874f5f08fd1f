"""The models and gradients that the reference implementation left behind, for the tests that compare with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM

from condenser.models.backbone import Backbone
from condenser.models.condenser import CondenserModel

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def reference_model(golden: Path, family: str, settings: dict, dtype: str) -> CondenserModel:
    """Build the golden model: reference names are lm.* (backbone) and c_head.* (head)."""
    folder = golden / "condenser" / f"ckpt_{family}"
    lm = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(folder))
    if family == "bert":
        state = load_file(golden / "condenser" / "bert_full_state.safetensors")
        backbone = {name.removeprefix("lm."): value for name, value in state.items() if name.startswith("lm.")}
    else:
        backbone = load_file(folder / "model.safetensors")
        state = torch.load(folder / "model.pt", weights_only=True)
    report = lm.load_state_dict(backbone, strict=False)
    assert all("position_ids" in key for key in report.unexpected_keys)
    assert all("decoder" in key for key in report.missing_keys)
    lm.tie_weights()
    model = CondenserModel(
        Backbone(lm),
        head_layers=settings["n_head_layers"],
        skip_from=settings["skip_from"],
        late_mlm=settings["late_mlm"],
    )
    head = {name.removeprefix("c_head."): value for name, value in state.items() if name.startswith("c_head.")}
    wanted = model.head.state_dict()
    model.head.load_state_dict({name: head[name] for name in wanted})
    return model.to(getattr(torch, dtype)).train()


def reference_name(name: str) -> str:
    return name.removeprefix("backbone.") if name.startswith("backbone.") else "c_" + name


def assert_gradients(
    model: CondenserModel, norms: dict[str, float], exact: dict[str, Tensor], tolerance: float
) -> None:
    gradients = {reference_name(name): parameter.grad for name, parameter in model.named_parameters()}
    for name, norm in norms.items():
        if name not in gradients:  # the reference lists the tied decoder twice
            assert "decoder" in name
        elif norm is None:
            assert gradients[name] is None
        else:
            # a key's bias has no gradient but for rounding
            assert gradients[name].norm().item() == pytest.approx(norm, rel=tolerance, abs=tolerance / 100)
    for name, expected in exact.items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(gradients[name].double(), expected, rtol=tolerance, atol=tolerance * scale)
