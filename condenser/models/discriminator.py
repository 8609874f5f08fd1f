"""ELECTRA's discriminator: a Transformer with one logit per token, new or from the weights of ELECTRA or BERT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import BertConfig, BertForMaskedLM, ElectraConfig, ElectraForPreTraining

from condenser.models.backbone import SIZES, check_keys, load_weights
from condenser.talk import say

_CLASSES = {ElectraConfig: ElectraForPreTraining, BertConfig: BertForMaskedLM}
# What a BERT configuration says of a model that ELECTRA's says in the same words.
_SHARED_SETTINGS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size",
    "initializer_range", "layer_norm_eps", "pad_token_id",
)  # fmt: skip


def new_discriminator(size: str, vocabulary_size: int, max_length: int, pad_token_id: int) -> ElectraForPreTraining:
    """Return a discriminator of a size in `SIZES` with random weights from torch's generator."""
    sizes = SIZES[size]
    config = ElectraConfig(
        vocab_size=vocabulary_size,
        embedding_size=sizes["hidden_size"],
        max_position_embeddings=max(512, max_length),
        pad_token_id=pad_token_id,
        **sizes,
    )
    return ElectraForPreTraining(config)


def load_discriminator(name: str | Path) -> tuple[ElectraForPreTraining, list[nn.Parameter]]:
    """Load a discriminator in float32 from a folder or by hub name.

    BERT differs from an ELECTRA whose embeddings are as wide as its states in nothing but the names: its encoder is
    taken as it is.

    Args:
        name: an ELECTRA discriminator, or any ELECTRA or BERT encoder: then its head is a new one, with a line that
            says so.

    Returns:
        The discriminator, and the parameters of its head if that is fresh.

    Raises:
        UserError: what `condenser.models.backbone.load_weights` raises, or weights that lack parts of the encoder.
    """
    model, missing, unexpected = load_weights(name, _CLASSES, ("electra", "bert"))
    encoder = {f"{model.base_model_prefix}.{parameter}" for parameter, _ in model.base_model.named_parameters()}
    check_keys(name, model, missing & encoder, unexpected)
    if model.config.model_type == "bert":
        model = _from_bert(model)
    elif missing <= encoder:
        return model, []
    say(f"{name}: no discriminator's head in these weights; a new one is started")
    return model, list(model.discriminator_predictions.parameters())


def _from_bert(bert: Any) -> ElectraForPreTraining:
    settings = {name: getattr(bert.config, name) for name in _SHARED_SETTINGS}
    model = ElectraForPreTraining(ElectraConfig(embedding_size=bert.config.hidden_size, **settings))
    model.electra.load_state_dict(bert.bert.state_dict())
    return model
