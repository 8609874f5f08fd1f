"""Gradient checkpointing: the same gradients, dropout included, and a refusal where a family lacks it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MPNetConfig, MPNetModel

from condenser.errors import UserError
from retrieval.encoder import Encoder, EncoderConfig
from retrieval.recompute import recompute_layers

TEXTS = ["the cat in the city", "old river bank", "a queen and a king and a doctor"]


def gradients(encoder: Encoder, *, calls: list[int]) -> dict[str, torch.Tensor]:
    """Return the gradients of one step with dropout, and count the layers' forward passes."""
    encoder.train()
    hooks = [
        layer.attention.register_forward_hook(lambda *_: calls.append(1))
        for model in (encoder.model, encoder.query_model)
        for layer in model.encoder.layer
    ]
    torch.manual_seed(1)
    queries = encoder(*encoder.pad(encoder.tokenize(TEXTS, "query")), kind="query")
    passages = encoder(*encoder.pad(encoder.tokenize(TEXTS, "passage")))
    torch.nn.functional.cross_entropy(queries @ passages.T, torch.arange(3)).backward()
    for hook in hooks:
        hook.remove()
    return {name: one.grad for name, one in encoder.named_parameters() if one.grad is not None}


def test_gradients_are_equal_with_dropout(tiny_bert: Path) -> None:
    plain, recomputing = (Encoder.load(tiny_bert, untied=True) for _ in range(2))
    assert plain.model.config.hidden_dropout_prob > 0
    recompute_layers(recomputing)
    once: list[int] = []
    twice: list[int] = []
    expected, found = gradients(plain, calls=once), gradients(recomputing, calls=twice)
    assert len(twice) == 2 * len(once), "each layer of both towers runs a second time"
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def test_the_saved_folder_does_not_know(tiny_bert: Path, tmp_path: Path) -> None:
    for name in ("plain", "recomputing"):
        encoder = Encoder.load(tiny_bert)
        if name == "recomputing":
            recompute_layers(encoder)
        encoder.save(tmp_path / name, "")
    for file in (tmp_path / "plain").iterdir():
        assert file.is_dir() or (tmp_path / "recomputing" / file.name).read_bytes() == file.read_bytes()


def test_a_family_without_it_is_refused(tiny_bert: Path) -> None:
    tokenizer = Encoder.load(tiny_bert).tokenizer
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = MPNetModel(MPNetConfig(vocab_size=len(tokenizer), max_position_embeddings=200, **sizes))
    with pytest.raises(UserError, match="--gradient_checkpointing: mpnet models do not have it"):
        recompute_layers(Encoder(model, tokenizer, EncoderConfig()))
