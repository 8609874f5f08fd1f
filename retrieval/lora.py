"""Low-rank updates (Hu et al. 2022, LoRA) of an encoder's towers through peft, and the plain encoder they make."""

from __future__ import annotations

import copy
import importlib.util
import re
from typing import Any

import torch
from torch import nn

from condenser.errors import UserError
from condenser.talk import say
from condenser.training.distributed import rank as process_rank
from retrieval.encoder import Encoder

# The update is scaled by alpha over rank: with this alpha by 2, whatever the rank.
_ALPHA_PER_RANK = 2
# Layers are numbered in every family: what lies in one is attention or feed-forward.
_IN_A_LAYER = re.compile(r"\.\d+\.")


def require_peft() -> None:
    """Raise UserError when peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("--lora: the package peft is not installed", hint='pip install "condenser-ir[lora]"')


def add_lora(encoder: Encoder, rank: int, seed: int) -> None:
    """Put a low-rank update beside each linear layer of attention and feed-forward, and let nothing else learn.

    ::

        y = W x + 2 B A x        A: (rank, inputs), random; B: (outputs, rank), zero

    A projection behind the pooling learns as well. Vectors are at first what they were.

    Args:
        encoder: changed in place; with two towers, both.
        rank: of the updates.
        seed: of A.

    Raises:
        UserError: peft is not installed, or the rank is not below a layer's own.
    """
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    for model in _towers(encoder):
        layers = {name: layer for name, layer in model.named_modules() if _is_adapted(name, layer)}
        if not layers:
            raise UserError(f"--lora: found no linear layers in a {model.config.model_type} model", encoder.source)
        smallest = min(min(layer.weight.shape) for layer in layers.values())
        if rank >= smallest:
            raise UserError(
                f"--lora is {rank}, expected less than the {smallest} of the narrowest layer", encoder.source
            )
        config = LoraConfig(r=rank, lora_alpha=_ALPHA_PER_RANK * rank, target_modules=list(layers))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model)
    if process_rank():
        return
    trained = sum(parameter.numel() for parameter in encoder.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in encoder.parameters())
    say(f"lora: rank {rank}, {trained:,} of {total:,} parameters are trained ({trained / total:.2%})")


def without_lora(encoder: Encoder) -> Encoder:
    """Return an encoder of plain layers, W + 2 B A in the place of each update: itself when it has none.

    A copy, so that a run goes on from what it had: taking an update out of a sum again would leave its rounding.
    """
    if not any(_adapters(model) for model in _towers(encoder)):
        return encoder
    plain = copy.deepcopy(encoder)
    for model in _towers(plain):
        for name, layer in _adapters(model).items():
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
        del model.peft_config  # a note of peft's
        model.requires_grad_(True)
    return plain


def _towers(encoder: Encoder) -> list[Any]:
    return [model for model in (encoder.model, encoder.query_model) if model is not None]


def _is_adapted(name: str, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and _IN_A_LAYER.search(name) is not None


def _adapters(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have an update beside them, by name."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_base_layer")}
