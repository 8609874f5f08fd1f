from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    ModernBertConfig,
    ModernBertModel,
    RobertaConfig,
    RobertaModel,
)

from condenser.models.pooling import pool_texts
from condenser.models.unpadded import prepare, row_of_texts, states_of_texts

SIZE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
DISTIL = {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 40}
CPU = torch.device("cpu")
FAMILIES = {
    "bert": lambda: BertModel(BertConfig(**SIZE, initializer_range=0.3), add_pooling_layer=False),
    "roberta": lambda: RobertaModel(RobertaConfig(**SIZE, initializer_range=0.3), add_pooling_layer=False),
    "electra": lambda: ElectraModel(ElectraConfig(**SIZE, embedding_size=8, initializer_range=0.3)),
    "distilbert": lambda: DistilBertModel(DistilBertConfig(**DISTIL, initializer_range=0.3)),
}


def texts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 50, (length,), generator=generator).tolist() for length in lengths]


def padded_states(model: nn.Module, texts: list[list[int]]) -> Tensor:
    """The naive way: transformers' own model on padded rows, padding taken out of what it gives."""
    pad = model.config.pad_token_id or 0
    longest = max(map(len, texts))
    ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
    mask = torch.arange(longest)[None, :] < torch.tensor([len(text) for text in texts])[:, None]
    states: Tensor = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return states[mask]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(1,), (7, 7, 7), (30, 29, 12, 12, 5, 1), (2, 17, 3)])
def test_states_and_gradients_are_those_of_padded_rows(family: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, texts = FAMILIES[family]().eval(), texts_of(*lengths)
    gradients = []
    results = []
    for way in ("padded", "unpadded"):
        states = padded_states(model, texts) if way == "padded" else states_of_texts(model, texts, CPU)
        weights = torch.linspace(-1, 1, states.numel()).view_as(states)
        model.zero_grad()
        (states * weights).sum().backward()
        results.append(states.detach())
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        assert prepare(model)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(padded_states(model, texts).detach(), results[0], rtol=1e-6, atol=1e-6)


def test_dropout_is_on_in_training() -> None:
    torch.manual_seed(0)
    model, texts = FAMILIES["bert"]().train(), texts_of(9, 4)
    prepare(model)
    first, second = (states_of_texts(model, texts, CPU) for _ in range(2))
    assert not torch.equal(first, second)


def test_attention_weights_are_dropped_too() -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)).train()
    prepare(model)
    first, second = (states_of_texts(model, texts_of(9, 4), CPU) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_in_one_row_has_the_states_it_had(family: str) -> None:
    """Also where the padding token stands in a text, which RoBERTa does not count."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    pad = model.config.pad_token_id or 0
    ids = torch.tensor([[5, pad, 7, 8, 9], [10, 11, pad, pad, pad], [12, 13, 14, pad, pad]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    padded = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert prepare(model)
    row = row_of_texts(model.config, ids, mask)
    states = model(input_ids=row.ids, position_ids=row.positions, text_groups=row.groups).last_hidden_state[0]
    torch.testing.assert_close(states, padded[mask == 1], rtol=1e-5, atol=1e-5)
    assert row.starts.tolist() == [0, 5, 7] and row.unpadded(mask * 3).tolist() == [3] * 10
    whole = row_of_texts(model.config, ids[:1], None)
    torch.testing.assert_close(whole.ids, ids[:1])


def test_long_and_short_texts_are_dropped_from_alike() -> None:
    """Texts from 32 tokens on attend one by one: the mean over many draws comes near the states without dropout."""
    torch.manual_seed(0)
    config = BertConfig(**SIZE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.3)
    model, texts = BertModel(config, add_pooling_layer=False), texts_of(33, 5, 34, 32)
    prepare(model)
    with torch.no_grad():
        exact = states_of_texts(model.eval(), texts, CPU)
        draws = torch.stack([states_of_texts(model.train(), texts, CPU) for _ in range(200)])
    spread = draws.std(0)
    assert spread.split([33, 5, 34, 32])[1].min() > 0 and spread.min() > 0
    assert (draws.mean(0) - exact).abs().max() < 0.2 * exact.abs().mean()


def test_saved_configurations_say_nothing_of_it() -> None:
    model = FAMILIES["bert"]()
    before = model.config.to_json_string()
    prepare(model)
    assert model.config.to_json_string() == before


def test_a_family_with_windows_is_left_alone() -> None:
    model = ModernBertModel(ModernBertConfig(**SIZE, pad_token_id=0, cls_token_id=1, sep_token_id=2))
    before = model.config._attn_implementation
    assert not prepare(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_texts_are_pooled_apart(pooling: str) -> None:
    states = torch.arange(12.0).view(6, 2)
    parts = states.split([3, 1, 2])
    naive = {"cls": [p[0] for p in parts], "last": [p[-1] for p in parts], "mean": [p.mean(0) for p in parts]}
    pooled = pool_texts(states, torch.tensor([3, 1, 2]), pooling)
    torch.testing.assert_close(pooled, torch.stack(naive[pooling]))


def test_means_in_half_precision_are_taken_in_full() -> None:
    states = torch.full((1000, 2), 0.5, dtype=torch.bfloat16)
    torch.testing.assert_close(pool_texts(states, torch.tensor([1000]), "mean"), torch.full((1, 2), 0.5))
