"""Discriminators from the weights of ELECTRA and BERT: the same states, a head that is there or is new."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel, ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from condenser.errors import UserError
from condenser.models.discriminator import load_discriminator, new_discriminator

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IDS = torch.tensor([[2, 7, 8, 9, 3], [2, 5, 3, 0, 0]])


def states(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=(IDS != 0).long()).last_hidden_state  # type: ignore[operator]


def test_a_published_discriminator_comes_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ElectraForPreTraining(ElectraConfig(vocab_size=40, embedding_size=8, **SIZES)).save_pretrained(tmp_path)
    capsys.readouterr()
    model, fresh = load_discriminator(tmp_path)
    assert fresh == [] and not capsys.readouterr().err
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())


def test_a_generator_gives_its_encoder_and_a_new_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = ElectraForMaskedLM(ElectraConfig(vocab_size=40, embedding_size=8, **SIZES))
    generator.save_pretrained(tmp_path)
    model, fresh = load_discriminator(tmp_path)
    assert len(fresh) == 4 and "no discriminator's head" in capsys.readouterr().err
    assert torch.equal(states(model.electra), states(generator.electra))


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_bert_gives_the_same_states(tmp_path: Path, tiny_bert: Path, prefix: str) -> None:
    folder = tiny_bert
    if not prefix:
        folder = tmp_path
        BertModel(BertConfig(vocab_size=40, **SIZES), add_pooling_layer=True).save_pretrained(folder)
    model, fresh = load_discriminator(folder)
    assert {id(one) for one in fresh} == {id(one) for one in model.discriminator_predictions.parameters()}
    assert torch.equal(states(model.electra), states(AutoModel.from_pretrained(folder)))
    model.save_pretrained(tmp_path / "again")
    assert load_discriminator(tmp_path / "again")[1] == []


def test_other_weights_are_refused(tmp_path: Path) -> None:
    model = ElectraForPreTraining(ElectraConfig(vocab_size=40, embedding_size=8, **SIZES))
    model.save_pretrained(tmp_path / "short")
    file = tmp_path / "short/model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "layer.1.output.dense" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weights lack 2 parameters, such as 'electra\.encoder\.layer\.1"):
        load_discriminator(tmp_path / "short")
    third = {k.replace("layer.1.", "layer.2."): v.clone() for k, v in tensors.items() if "layer.1." in k}
    save_file(tensors | third, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"16 parameters beyond the 2 layers of config\.json"):
        load_discriminator(tmp_path / "short")

    from transformers import DistilBertConfig, DistilBertModel

    DistilBertModel(DistilBertConfig(vocab_size=40, dim=16, n_layers=1, n_heads=2, hidden_dim=32)).save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(
        UserError, match="other: model family 'distilbert' is not supported, expected one of electra, bert"
    ):
        load_discriminator(tmp_path / "other")


def test_new_ones_have_the_sizes_of_the_other_objectives() -> None:
    model = new_discriminator("tiny", 50, 600, 0)
    assert (model.config.hidden_size, model.config.embedding_size, model.config.num_hidden_layers) == (128, 128, 2)
    assert (model.config.max_position_embeddings, model.config.pad_token_id) == (600, 0)
