"""The packed forward against the models' own, at every length and in any mixture."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, CamembertConfig, MPNetConfig, XLMRobertaConfig

from condenser.models import packed
from condenser.models.packed import packed_forward_of
from tests.condenser.families import NO_DROPOUT, SIZE, config_of

VOCABULARY, LONGEST, PADDING = 120, 60, 1


def config(family: str, **others: Any) -> Any:
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": PADDING} | others
    if family in ("xlm-roberta", "camembert"):
        kind = XLMRobertaConfig if family == "xlm-roberta" else CamembertConfig
        return kind(**SIZE, **NO_DROPOUT, **common, initializer_range=0.2)
    return config_of(family, VOCABULARY, **common)


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    with torch.no_grad():  # so that biases, norms and the padding token's own embedding play a part too
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def texts(lengths: list[int]) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(4, VOCABULARY) for _ in range(length)] for length in lengths]


def one_by_one(model: Any, token_ids: list[list[int]]) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in token_ids]


def assert_equal_states(model: Any, token_ids: list[list[int]]) -> None:
    expected = one_by_one(model, token_ids)
    forward = packed_forward_of(model)
    assert forward is not None
    states, lengths = forward(token_ids)
    assert lengths.tolist() == [len(ids) for ids in token_ids]
    torch.testing.assert_close(states, torch.cat(expected), atol=1e-5, rtol=0)
    for rows, place in (("cls", 0), ("last", -1)):
        states, _ = forward(token_ids, rows)
        torch.testing.assert_close(states, torch.stack([one[place] for one in expected]), atol=1e-5, rtol=0)


FAMILIES = ["bert", "electra", "roberta", "xlm-roberta", "camembert", "distilbert"]


@pytest.mark.parametrize("how", ["runs", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_models_own(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "padded":  # what a GPU does
        monkeypatch.setattr(packed, "_attend_by_runs", packed._attend_padded)
    model = model_of(config(family))
    assert_equal_states(model, texts(list(range(1, LONGEST + 1))))
    assert_equal_states(model, texts([7, 7, 7, 1, 1, 30, 2, LONGEST, 7, 1]))
    assert_equal_states(model, texts([9, 9, 9]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padding_token_within_a_text_is_a_token(family: str) -> None:
    assert_equal_states(model_of(config(family)), [[2, 9, PADDING, 8, 3], [PADDING], [2, PADDING, PADDING, 5, 6]])


@pytest.mark.parametrize("activation", ["relu", "gelu_new", "gelu_python", "gelu_10", "silu"])
def test_other_activations(activation: str) -> None:
    assert_equal_states(model_of(config("bert", hidden_act=activation)), texts([3, 5, 5]))


def test_weights_are_read_at_each_call() -> None:
    model = model_of(config("bert"))
    forward = packed_forward_of(model)
    assert forward is not None
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.mul_(2)
    model.load_state_dict({name: tensor * 1.1 for name, tensor in model.state_dict().items()}, assign=True)
    token_ids = texts([4, 6])
    torch.testing.assert_close(forward(token_ids)[0], torch.cat(one_by_one(model, token_ids)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    model, token_ids = model_of(config("bert")), texts([4, 4, 17])
    expected = torch.cat(one_by_one(model, token_ids))
    forward = packed_forward_of(model.to(dtype))
    assert forward is not None
    states, _ = forward(token_ids)
    assert states.dtype == dtype
    assert torch.nn.functional.cosine_similarity(states.float(), expected).min() > 0.99


def test_training_is_left_alone() -> None:
    """No dropout, whatever the model's mode, and no graph."""
    dropped = config("bert")
    dropped.hidden_dropout_prob = 0.5
    model = model_of(dropped).train()
    forward, token_ids = packed_forward_of(model), texts([4, 6])
    assert forward is not None
    states, _ = forward(token_ids)
    assert not states.requires_grad and model.training
    torch.testing.assert_close(states, torch.cat(one_by_one(model.eval(), token_ids)), atol=1e-5, rtol=0)


class Wrapped(nn.Module):
    """A linear layer with an adapter around it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + 1


def with_adapter(model: Any) -> Any:
    attention = model.encoder.layer[1].attention.self
    attention.query = Wrapped(attention.query)
    return model


UNKNOWN = {
    "ModernBERT's rotary positions": lambda: model_of(config_of("modernbert", VOCABULARY)),
    "MPNet's relative positions": lambda: model_of(MPNetConfig(vocab_size=VOCABULARY, **SIZE)),
    "relative positions": lambda: model_of(config("bert", position_embedding_type="relative_key")),
    "a decoder": lambda: model_of(config("bert", is_decoder=True)),
    "an adapter": lambda: with_adapter(model_of(config("bert"))),
    "no model": lambda: nn.Linear(2, 2),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_it_does_not_know_is_left_to_the_model(what: str) -> None:
    assert packed_forward_of(UNKNOWN[what]()) is None


def test_vectors_depend_on_their_text_alone_and_come_out_the_same_twice() -> None:
    forward, token_ids = packed_forward_of(model_of(config("bert"))), texts([3, 3, 20, 41, 7, 41])
    assert forward is not None
    together = nn.functional.normalize(forward(token_ids, "cls")[0])
    alone = nn.functional.normalize(torch.cat([forward([ids], "cls")[0] for ids in token_ids]))
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    assert torch.equal(together, nn.functional.normalize(forward(token_ids, "cls")[0]))
