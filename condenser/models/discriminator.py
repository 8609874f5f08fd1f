"""ELECTRA's discriminator: a Transformer with one logit per token, new or from the weights of ELECTRA or BERT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, ElectraConfig, ElectraForPreTraining

from condenser.errors import UserError, first_line, sample
from condenser.hub import local_folder, quiet_transformers
from condenser.models.backbone import SIZES
from condenser.talk import say
from condenser.weights import check_config, check_shapes, check_weights, weight_files

_HEAD = "discriminator_predictions."
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


def load_discriminator(name: str | Path) -> tuple[ElectraForPreTraining, bool]:
    """Load a discriminator in float32 from a folder or by hub name.

    BERT differs from an ELECTRA whose embeddings are as wide as its states in nothing but the names: its encoder is
    taken as it is.

    Args:
        name: an ELECTRA discriminator, or any ELECTRA or BERT encoder: then its head is a new one, with a line that
            says so.

    Returns:
        The discriminator, and whether its head is fresh.

    Raises:
        UserError: no such folder, missing or damaged weights, another family, weights that lack parameters of the
            encoder or have layers that the configuration lacks.
    """
    folder = local_folder(name)
    check_config(folder)
    check_weights(folder)
    tensors: dict[str, Tensor] | None = None
    try:
        with quiet_transformers():
            config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if config.model_type == "bert":
                config = ElectraConfig(
                    embedding_size=config.hidden_size, **{key: getattr(config, key) for key in _SHARED_SETTINGS}
                )
                tensors = _renamed(folder)
            if config.model_type != "electra":
                raise UserError(f"model family {config.model_type!r} cannot become ELECTRA, expected electra or bert")
            model, report = ElectraForPreTraining.from_pretrained(
                folder if tensors is None else None,
                config=config,
                state_dict=tensors,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except UserError as error:
        raise UserError(error.what, name) from None
    except Exception as error:  # transformers, safetensors and the hub raise many kinds
        raise UserError(f"weights could not be loaded: {first_line(error)}", name) from None
    check_shapes(report["mismatched_keys"], name)
    missing = sorted(key for key in report["missing_keys"] if not key.endswith("position_ids"))
    beyond = sorted(key for key in report["unexpected_keys"] if key.startswith("electra.encoder."))
    fresh = any(key.startswith(_HEAD) for key in missing)
    if lacking := [key for key in missing if not key.startswith(_HEAD)]:
        raise UserError(f"weights lack {len(lacking)} parameters, such as {sample(lacking, 2)}", name)
    if beyond:
        raise UserError(
            f"weights have {len(beyond)} parameters beyond the {config.num_hidden_layers} layers of config.json, "
            f"such as {sample(beyond, 2)}",
            name,
            "the number of layers there is not that of these weights",
        )
    if fresh:
        say(f"{name}: no discriminator's head in these weights; a new one is started")
    return model, fresh


def _renamed(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a BERT's encoder by ELECTRA's names."""
    tensors = {}
    for file in weight_files(folder):
        for name, tensor in load_file(file).items():
            inner = name.removeprefix("bert.")
            if inner.startswith(("embeddings.", "encoder.")):
                inner = inner.replace(".gamma", ".weight").replace(".beta", ".bias")
                tensors[f"electra.{inner}"] = tensor
    return tensors
