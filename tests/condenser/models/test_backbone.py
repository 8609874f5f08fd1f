"""Every family behind the same face: its states, its head layers, its vocabulary head, what is kept and said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM

from condenser.errors import UserError
from condenser.models.backbone import FAMILIES, Backbone, load_backbone
from condenser.models.condenser import CondenserModel
from tests.condenser.families import tiny_folder, tiny_model

IDS = torch.tensor([[2, 17, 44, 9, 61, 85, 30, 21, 12, 3], [2, 33, 4, 77, 50, 3, 0, 0, 0, 0]])
MASK = (IDS != 0).long()
STARTS = torch.tensor([0, 10])
LABELS = torch.full_like(IDS, -100)
LABELS[0, [2, 5, 8]] = torch.tensor([70, 71, 72])
LABELS[1, 3] = 73

every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_states_begin_with_the_embeddings_and_end_with_the_last_layer(family: str) -> None:
    lm = tiny_model(family)
    states = Backbone(lm).hidden_states(IDS, MASK)
    assert len(states) == 4 and {state.shape for state in states} == {(2, 10, 32)}
    assert torch.equal(states[-1], lm.base_model(IDS, attention_mask=MASK).last_hidden_state)
    changed = IDS.clone()
    changed[0, 4] = 62
    moved = (Backbone(lm).hidden_states(changed, MASK)[0] - states[0]).abs().sum(dim=2)
    assert moved[0, 4] > 0 and moved.count_nonzero() == 1, "no token has seen another one in the first states"


@every_family
def test_vocabulary_logits_are_the_models_own(family: str) -> None:
    backbone = Backbone(tiny_model(family))
    logits = backbone.vocabulary_logits(backbone.hidden_states(IDS, MASK)[-1])
    torch.testing.assert_close(logits, backbone.lm(IDS, attention_mask=MASK).logits)


@every_family
def test_head_layers_are_of_the_familys_own_kind(family: str) -> None:
    """With the model's own weights in them they give the model's own last states, padding or not."""
    settings = {"layer_types": ["full_attention"] * 3} if family == "modernbert" else {}
    backbone = Backbone(tiny_model(family, **settings))
    own = backbone.lm.get_submodule(FAMILIES[family].layers)
    layers = backbone.new_layers(3).eval()
    assert all(type(layer) is type(own[0]) for layer in layers[:3])
    weights = {f"{number}.{name}": value for number in range(3) for name, value in own[number].state_dict().items()}
    if family == "modernbert":
        layers[0].attn_norm = nn.Identity()  # the model's first layer reads embeddings that are normalised already
        weights["3.weight"] = backbone.lm.model.final_norm.weight
    layers.load_state_dict(weights)
    for mask in (MASK, None):
        states = backbone.hidden_states(IDS, mask)
        real = MASK == 1 if mask is not None else torch.ones_like(MASK) == 1
        ours = backbone.run_layers(layers, states[0], mask)
        torch.testing.assert_close(ours[real], states[-1][real], rtol=1e-5, atol=1e-5)


@every_family
def test_new_head_layers_start_as_the_model_does(family: str) -> None:
    backbone = Backbone(tiny_model(family))
    for name, parameter in backbone.new_layers(2).named_parameters():
        if parameter.dim() == 2:
            assert 0.01 < parameter.std() < 0.4, name  # initializer_range is 0.2, and less for ModernBERT's outputs
        else:
            assert set(parameter.tolist()) == ({1.0} if name.endswith("weight") else {0.0}), name
    assert len(backbone.new_layers(0)) == 0


@every_family
def test_text_behind_the_padding_changes_nothing(family: str) -> None:
    model = CondenserModel(Backbone(tiny_model(family)), head_layers=2, skip_from=1).eval()
    other = IDS.clone()
    other[1, 6:] = 40
    heads = [model.head_states(model.backbone.hidden_states(ids, MASK), MASK, STARTS)[1, :6] for ids in (IDS, other)]
    torch.testing.assert_close(heads[0], heads[1])


@every_family
@pytest.mark.parametrize("late_mlm", [False, True])
@pytest.mark.parametrize(("skip_from", "head_layers"), [(0, 1), (1, 2), (3, 2)])
def test_every_parameter_has_a_gradient(family: str, skip_from: int, head_layers: int, late_mlm: bool) -> None:
    """Case B29: several processes need no search for parameters without one."""
    backbone = Backbone(tiny_model(family))
    model = CondenserModel(backbone, head_layers=head_layers, skip_from=skip_from, late_mlm=late_mlm)
    sum(model(IDS, MASK, LABELS).losses.values()).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@every_family
def test_masked_positions_alone_give_the_loss_over_all_logits(family: str) -> None:
    model = CondenserModel(Backbone(tiny_model(family)), head_layers=1, skip_from=1)
    losses = model(IDS, MASK, LABELS).losses
    whole = model.backbone.lm(IDS, attention_mask=MASK, labels=LABELS).loss * 4
    torch.testing.assert_close(losses["late_mlm"], whole)
    states = model.backbone.hidden_states(IDS, MASK)
    logits = model.backbone.vocabulary_logits(model.head_states(states, MASK, STARTS))
    whole = nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum")
    torch.testing.assert_close(losses["head_mlm"], whole)


@every_family
def test_both_losses_fall_on_repeated_data(family: str) -> None:
    model = CondenserModel(Backbone(tiny_model(family, initializer_range=0.02)), head_layers=2, skip_from=1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen: list[dict[str, float]] = []
    for _ in range(40):
        losses = model(IDS, MASK, LABELS).losses
        seen.append({name: loss.item() for name, loss in losses.items()})
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    for name in ("head_mlm", "late_mlm"):
        assert seen[-1][name] < 0.5 * seen[0][name]


@every_family
def test_saved_folder_opens_without_a_missing_or_unexpected_key(family: str, tmp_path: Path) -> None:
    model = CondenserModel(Backbone(tiny_model(family)), head_layers=2, skip_from=1).eval()
    model.save(tmp_path)
    _, report = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    pooler = {"add_pooling_layer": False} if family in ("bert", "roberta") else {}
    encoder, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True, **pooler)
    assert not report["missing_keys"]
    assert all(model.backbone.in_head(key) for key in report["unexpected_keys"])
    states = model.backbone.hidden_states(IDS, MASK)[-1]
    torch.testing.assert_close(encoder.eval()(IDS, attention_mask=MASK).last_hidden_state, states)

    other = CondenserModel(load_backbone(tmp_path)[0], head_layers=2, skip_from=1).eval()
    other.load_head(tmp_path)
    for name, loss in model(IDS, MASK, LABELS).losses.items():
        torch.testing.assert_close(other(IDS, MASK, LABELS).losses[name], loss)


@every_family
def test_decoder_and_word_embeddings_stay_one_tensor(family: str, tmp_path: Path) -> None:
    """Case B33, also where an older tool stored the tensor twice."""
    lm = tiny_model(family)
    expected = lm(IDS, attention_mask=MASK).logits
    lm.save_pretrained(tmp_path)
    decoder = next(name for name, module in lm.named_modules() if module is lm.get_output_embeddings())
    rewrite(tmp_path, lambda weights: weights | twice(lm, decoder))
    backbone, fresh = load_backbone(tmp_path)
    loaded = backbone.lm.eval()
    assert not fresh
    torch.testing.assert_close(loaded(IDS, attention_mask=MASK).logits, expected, rtol=1e-6, atol=1e-6)

    before = loaded.get_input_embeddings().weight.detach().clone()
    model = CondenserModel(backbone, head_layers=1, skip_from=1)
    sum(model(IDS, MASK, LABELS).losses.values()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert not torch.equal(loaded.get_output_embeddings().weight, before)


def twice(lm: Any, decoder: str) -> dict[str, Tensor]:
    embeddings = lm.get_input_embeddings().weight.detach().clone()
    return {f"{decoder}.weight": embeddings, f"{decoder}.bias": lm.get_output_embeddings().bias.detach().clone()}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


def old_norm_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    named = {}
    for name, value in weights.items():
        for new, written in old.items():
            name = name.replace(new, written)
        named[name] = value
    return named


def with_position_ids(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"bert.embeddings.position_ids": torch.arange(64)[None]}


@pytest.mark.parametrize("change", [old_norm_names, with_position_ids, lambda weights: weights])
def test_old_names_load_to_the_same_model(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B32."""
    lm = tiny_model("bert")
    lm.save_pretrained(tmp_path)
    capsys.readouterr()
    rewrite(tmp_path, change)
    backbone, fresh = load_backbone(tmp_path)
    assert not fresh and capsys.readouterr().err == ""
    torch.testing.assert_close(backbone.lm.eval()(IDS).logits, lm(IDS).logits)


def without(ending: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: {name: value for name, value in weights.items() if not name.endswith(ending)}


@pytest.mark.parametrize(
    ("lost", "line"),
    [
        (
            "layer.1.output.dense.bias",
            r"weights lack 1 parameters, such as 'bert\.encoder\.layer\.1\.output\.dense\.bias'",
        ),
        ("cls.predictions.transform.dense.bias", r"weights lack 1 parameters, such as 'cls\.predictions\.transform"),
    ],
)
def test_a_lost_parameter_is_named(lost: str, line: str, tmp_path: Path) -> None:
    """Cases B32 and R28; half of a masked-LM head is no head."""
    tiny_model("bert").save_pretrained(tmp_path)
    rewrite(tmp_path, without(lost))
    with pytest.raises(UserError, match=line):
        load_backbone(tmp_path)


@every_family
def test_weights_deeper_or_shallower_than_the_configuration_are_refused(family: str, tmp_path: Path) -> None:
    lm = tiny_model(family)
    lm.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    depth = "n_layers" if family == "distilbert" else "num_hidden_layers"
    for layers, line in (
        (2, r"weights have \d+ parameters beyond the 2 layers of config.json"),
        (4, r"weights lack \d+"),
    ):
        changed = config | {depth: layers}
        if family == "modernbert":
            changed["layer_types"] = ["full_attention"] * layers
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=line):
            load_backbone(tmp_path)


@every_family
def test_an_encoder_without_vocabulary_head_gets_a_new_one(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lm = tiny_model(family)
    lm.base_model.save_pretrained(tmp_path)
    capsys.readouterr()
    counts = np.arange(120)
    backbone, fresh = load_backbone(tmp_path, counts)
    assert fresh
    said = capsys.readouterr().err
    assert "no masked-LM head in these weights; a new one is started (decoder: the word embeddings" in said
    assert said.count("\n") == 1
    new = backbone.lm
    assert new.get_output_embeddings().weight is new.get_input_embeddings().weight
    torch.testing.assert_close(new.get_input_embeddings().weight, lm.get_input_embeddings().weight)
    wanted = torch.log((torch.arange(120) + 1) / (counts.sum() + 120))
    torch.testing.assert_close(new.get_output_embeddings().bias, wanted)

    with torch.no_grad():  # a state that equals a word's own embedding asks for this word
        new.get_output_embeddings().bias.zero_()
        words = new.get_input_embeddings().weight
        states = new.base_model.embeddings_project(words) if family == "electra" else words
        guesses = backbone.vocabulary_logits(states).argmax(dim=1)
    assert (guesses == torch.arange(120)).float().mean() > 0.6


def test_half_precision_weights_are_trained_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B27: what is stored in 16 bits is said, and never trained in them."""
    tiny_model("bert").to(torch.bfloat16).save_pretrained(tmp_path)
    capsys.readouterr()
    backbone, _ = load_backbone(tmp_path)
    assert capsys.readouterr().err == f"{tmp_path}: weights are stored as bfloat16; trained in float32\n"
    assert {parameter.dtype for parameter in backbone.lm.parameters()} == {torch.float32}


@every_family
def test_saved_encoder_gives_the_cls_state(family: str, tiny_bert: Path, tmp_path: Path) -> None:
    """Case B34: pooling is not asked for anywhere, and is the CLS state."""
    from retrieval.encoder import Encoder

    folder = tiny_folder(family, tiny_bert, tmp_path)
    encoder = Encoder.load(folder)
    ids = encoder.tokenize(["river bank money"], "query")
    state = load_backbone(folder)[0].eval().hidden_states(torch.tensor(ids), None)[-1][0, 0]
    np.testing.assert_allclose(encoder.encode_token_ids(ids)[0], state.detach().numpy(), atol=1e-6)


def test_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="family 'gpt2' is not supported, expected one of bert, roberta, electra"):
        load_backbone(tmp_path)
