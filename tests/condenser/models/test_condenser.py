"""Condenser's losses and gradients against numbers from the reference implementation."""

from __future__ import annotations

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
from tests.reference_numbers import golden_json

CASES = {
    (family, name): case
    for family in ("bert", "roberta")
    for name, case in golden_json(f"condenser/{family}_expected.json")["cases"].items()
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("family", "case"), CASES)
def test_losses_and_gradients_equal_the_reference(golden: Path, family: str, case: str, dtype: str) -> None:
    folder, expected = golden / "condenser", CASES[family, case]
    model = reference_model(golden, family, expected, dtype)
    batch = load_file(folder / f"{family}_batch.safetensors")
    out = model(**batch)
    masked = (batch["labels"] != -100).sum()
    total = sum(out.losses.values()) / masked
    total.backward()

    numbers, tolerance = expected[dtype], TOLERANCE[dtype]
    assert set(out.losses) == ({"head_mlm", "late_mlm"} if expected["late_mlm"] else {"head_mlm"})
    model.late_mlm = True  # the reference gives this loss also where it does not count
    for name, loss in model(**batch).losses.items():
        assert (loss / masked).item() == pytest.approx(numbers[f"{name}_loss"], rel=tolerance)
    assert total.item() == pytest.approx(numbers["total_loss"], rel=tolerance)
    exact = {}
    if dtype == "float64":
        gradients = load_file(folder / f"{family}_grads_f64.safetensors")
        exact = {k.removeprefix(f"{case}."): v for k, v in gradients.items() if k.startswith(f"{case}.")}
        assert exact or case in ("skip0_head2_late1", "skip4_head2_late1")  # norms only
    assert_gradients(model, numbers["grad_l2_norms"], exact, tolerance)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_head_states_equal_the_reference(golden: Path, family: str) -> None:
    folder = golden / "condenser"
    batch = load_file(folder / f"{family}_batch.safetensors")
    real = batch["attention_mask"] == 1
    expected = load_file(folder / f"{family}_head_hidden_f64.safetensors")
    cases = {name.rpartition("_late")[0]: case for (of, name), case in CASES.items() if of == family}
    assert {f"{name}.head_hidden" for name in cases} == set(expected)
    for name, case in cases.items():
        model = reference_model(golden, family, case, "float64")
        states = model.backbone.hidden_states(batch["input_ids"], batch["attention_mask"])
        starts = torch.arange(len(real)) * real.shape[1]
        ours = model.head_states(states, batch["attention_mask"], starts)[real]
        torch.testing.assert_close(ours, expected[f"{name}.head_hidden"][real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["plain", "contrastive_only", "mlm_only"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_cocondenser_equals_the_reference(golden: Path, dtype: str, case: str) -> None:
    folder = golden / "cocondenser"
    expected = golden_json("cocondenser/expected.json")
    model = reference_model(golden, "bert", expected, dtype)
    batch = load_file(folder / "batch.safetensors")
    out = model(batch["input_ids"], batch["attention_mask"], batch["labels"])
    masked = (batch["labels"] != -100).sum()
    parts = {name: loss / masked for name, loss in out.losses.items()}
    parts["contrastive"] = span_contrastive_loss(out.cls)
    wanted = {"plain": set(parts), "contrastive_only": {"contrastive"}, "mlm_only": {"head_mlm", "late_mlm"}}[case]
    total = sum(parts[name] for name in wanted)
    total.backward()

    numbers, tolerance = expected["cases"][dtype][case], TOLERANCE[dtype]
    assert total.item() == pytest.approx(numbers["total_loss" if case == "plain" else "loss"], rel=tolerance)
    if case == "plain":
        for name, part in parts.items():
            assert part.item() == pytest.approx(numbers[f"{name}_loss"], rel=tolerance)
        others = (out.cls @ out.cls.T).fill_diagonal_(-torch.inf)
        naive = torch.nn.functional.cross_entropy(others, torch.tensor(numbers["co_target"]))
        assert parts["contrastive"].item() == pytest.approx(naive.item(), rel=tolerance)
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
