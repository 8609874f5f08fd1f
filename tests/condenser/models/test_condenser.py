"""Condenser's losses and gradients against numbers from the reference implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM

from condenser.errors import UserError
from condenser.models.backbone import Backbone
from condenser.models.condenser import CondenserModel
from condenser.training.contrastive import span_contrastive_loss
from tests.condenser.reference import TOLERANCE, assert_gradients, reference_model

BERT_CASES = [f"skip{s}_head{h}_late{late}" for s in (2, 3) for h in (1, 2) for late in (0, 1)]
BERT_CASES += ["skip0_head2_late1", "skip4_head2_late1"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("family", "case"), [("bert", c) for c in BERT_CASES] + [("roberta", f"skip2_head2_late{x}") for x in (0, 1)]
)
def test_losses_and_gradients_equal_the_reference(golden: Path, family: str, case: str, dtype: str) -> None:
    folder = golden / "condenser"
    expected = json.loads((folder / f"{family}_expected.json").read_text())["cases"][case]
    model = reference_model(golden, family, expected, dtype)
    batch = load_file(folder / f"{family}_batch.safetensors")
    out = model(batch["input_ids"], batch["attention_mask"], batch["labels"])
    masked = (batch["labels"] != -100).sum()
    total = sum(out.losses.values()) / masked
    total.backward()

    numbers, tolerance = expected[dtype], TOLERANCE[dtype]
    assert (out.losses["head_mlm"] / masked).item() == pytest.approx(numbers["head_mlm_loss"], rel=tolerance)
    if expected["late_mlm"]:
        assert (out.losses["late_mlm"] / masked).item() == pytest.approx(numbers["late_mlm_loss"], rel=tolerance)
    assert total.item() == pytest.approx(numbers["total_loss"], rel=tolerance)
    exact = {}
    if dtype == "float64":
        gradients = load_file(folder / f"{family}_grads_f64.safetensors")
        exact = {k.removeprefix(f"{case}."): v for k, v in gradients.items() if k.startswith(f"{case}.")}
        assert exact or case in ("skip0_head2_late1", "skip4_head2_late1")  # norms only
    assert_gradients(model, numbers["grad_l2_norms"], exact, tolerance)


def test_head_states_equal_the_reference(golden: Path) -> None:
    settings = {"n_head_layers": 2, "skip_from": 2, "late_mlm": True}
    model = reference_model(golden, "bert", settings, "float64")
    batch = load_file(golden / "condenser" / "bert_batch.safetensors")
    states = model.backbone.hidden_states(batch["input_ids"], batch["attention_mask"])
    expected = load_file(golden / "condenser" / "bert_head_hidden_f64.safetensors")["skip2_head2.head_hidden"]
    real = batch["attention_mask"] == 1
    torch.testing.assert_close(
        model.head_states(states, batch["attention_mask"])[real], expected[real], rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("case", ["plain", "contrastive_only", "mlm_only"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_cocondenser_equals_the_reference(golden: Path, dtype: str, case: str) -> None:
    folder = golden / "cocondenser"
    expected = json.loads((folder / "expected.json").read_text())
    model = reference_model(golden, "bert", expected, dtype)
    batch = load_file(folder / "batch.safetensors")
    out = model(batch["input_ids"], batch["attention_mask"], batch["labels"])
    masked = (batch["labels"] != -100).sum()
    parts = {name: loss / masked for name, loss in out.losses.items()}
    parts["contrastive"] = span_contrastive_loss(out.cls)
    wanted = {"plain": set(parts), "contrastive_only": {"contrastive"}, "mlm_only": {"head_mlm", "late_mlm"}}[case]
    sum(parts[name] for name in wanted).backward()

    numbers, tolerance = expected["cases"][dtype][case], TOLERANCE[dtype]
    for name in wanted & {key.removesuffix("_loss") for key in numbers}:
        assert parts[name].item() == pytest.approx(numbers[f"{name}_loss"], rel=tolerance)
    exact = {}
    if dtype == "float64":
        tensors = load_file(folder / "tensors_f64.safetensors")
        torch.testing.assert_close(out.cls, tensors["cls"], rtol=1e-10, atol=1e-10)
        exact = {k.removeprefix(f"{case}."): v for k, v in tensors.items() if k.startswith(f"{case}.")}
    assert_gradients(model, numbers["grad_l2_norms"], exact, tolerance)


def test_sums_of_parts_equal_the_whole(golden: Path) -> None:
    settings = {"n_head_layers": 2, "skip_from": 2, "late_mlm": True}
    model = reference_model(golden, "bert", settings, "float64")
    batch = load_file(golden / "condenser" / "bert_batch.safetensors")
    whole = model(**batch).losses["head_mlm"]
    rows = [model(**{name: value[i : i + 1] for name, value in batch.items()}).losses["head_mlm"] for i in range(6)]
    assert sum(rows).item() == pytest.approx(whole.item(), rel=1e-12)


def test_skip_beyond_the_layers_is_refused(tiny_bert: Path) -> None:
    backbone = Backbone(AutoModelForMaskedLM.from_pretrained(tiny_bert))
    with pytest.raises(UserError, match="--skip_from 3 is beyond the encoder's 2 layers"):
        CondenserModel(backbone, skip_from=3)


def test_saved_folder_is_clean_and_keeps_the_head(tiny_bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = CondenserModel(Backbone(AutoModelForMaskedLM.from_pretrained(tiny_bert)), head_layers=2, skip_from=1)
    model.save(tmp_path)

    lm, report = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert lm.cls.predictions.decoder.weight is lm.bert.embeddings.word_embeddings.weight
    encoder, report = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False, output_loading_info=True)
    assert not report["missing_keys"]
    ids = torch.tensor([[2, 7, 8, 3]])
    torch.testing.assert_close(encoder(ids).last_hidden_state, lm.bert(ids).last_hidden_state)

    torch.manual_seed(2)
    other = CondenserModel(Backbone(lm), head_layers=2, skip_from=1)
    other.load_head(tmp_path)
    for mine, loaded in zip(model.head.parameters(), other.head.parameters(), strict=True):
        assert torch.equal(mine, loaded)
    with pytest.raises(UserError, match="Condenser head has skip_from 1, asked for 0"):
        CondenserModel(Backbone(lm), head_layers=2, skip_from=0).load_head(tmp_path)
