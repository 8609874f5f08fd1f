"""Memory for time: layers whose states are computed again in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from condenser.errors import UserError
from retrieval.encoder import Encoder


def recompute_layers(encoder: Encoder) -> None:
    """Switch gradient checkpointing on for the encoder's towers; gradients stay what they were, with dropout too.

    Raises:
        UserError: the model's family cannot.
    """
    for model in (encoder.model, encoder.query_model):
        if model is not None:
            recompute_model(model, encoder.source)


def recompute_model(model: Any, source: Path | None) -> None:
    """Switch gradient checkpointing on for one transformers model; see `recompute_layers`."""
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"--gradient_checkpointing: {model.config.model_type} models do not have it",
            source,
            "--cache_tokens saves memory in every family",
        )
    # the second name is that of older transformers
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
