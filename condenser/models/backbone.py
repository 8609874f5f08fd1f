"""Masked language models of several families behind one face: the only place that knows their insides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, BertForMaskedLM, PretrainedConfig
from transformers.masking_utils import create_bidirectional_mask

from condenser.errors import UserError
from condenser.hub import local_folder, position_limit, quiet_transformers
from condenser.talk import say, warn

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
}


@dataclass(frozen=True)
class Family:
    """Where one transformers family keeps what Condenser needs.

    Attributes:
        vocabulary_head: hidden states to logits with the model's own masked-LM head.
        head_prefixes: parameter names of that head, to tell a fresh head from a loaded one.
        start_head: gives a fresh head a sensible start, from log unigram frequencies.
    """

    vocabulary_head: Callable[[Any, Tensor], Tensor]
    head_prefixes: tuple[str, ...]
    start_head: Callable[[Any, Tensor], None]


def _start_bert_head(lm: Any, log_frequency: Tensor) -> None:
    transform = lm.cls.predictions.transform
    nn.init.eye_(transform.dense.weight)
    nn.init.zeros_(transform.dense.bias)
    lm.cls.predictions.bias.data.copy_(log_frequency)


def _start_roberta_head(lm: Any, log_frequency: Tensor) -> None:
    nn.init.eye_(lm.lm_head.dense.weight)
    nn.init.zeros_(lm.lm_head.dense.bias)
    lm.lm_head.bias.data.copy_(log_frequency)


FAMILIES = {
    "bert": Family(lambda lm, hidden: lm.cls(hidden), ("cls.",), _start_bert_head),
    "roberta": Family(lambda lm, hidden: lm.lm_head(hidden), ("lm_head.",), _start_roberta_head),
}


class Backbone(nn.Module):
    """A masked language model whose layer states and vocabulary head can be used apart.

    Args:
        lm: a transformers ``...ForMaskedLM`` model of a family in `FAMILIES`.

    Raises:
        UserError: another family.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        family = lm.config.model_type
        if family not in FAMILIES:
            raise UserError(f"model family {family!r} is not supported, expected one of {', '.join(FAMILIES)}")
        self.lm: Any = lm
        self._family = FAMILIES[family]

    @property
    def config(self) -> PretrainedConfig:
        """The transformers configuration."""
        return self.lm.config

    @property
    def layers(self) -> int:
        """Number of Transformer layers."""
        return int(self.config.num_hidden_layers)

    @property
    def max_length(self) -> int:
        """Most tokens that a row may hold."""
        return position_limit(self.config)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return the states of all layers, each (batch, length, dim); index 0 is the embedding output."""
        out = self.lm.base_model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return tuple(out.hidden_states)

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocabulary) of states (..., dim) through the model's own masked-LM head."""
        return self._family.vocabulary_head(self.lm, hidden)

    def new_layers(self, count: int) -> nn.ModuleList:
        """Return ``count`` freshly initialised layers of the family's own class and configuration."""
        layer_class = type(self.lm.base_model.encoder.layer[0])
        layers = nn.ModuleList([layer_class(self.config) for _ in range(count)])
        layers.apply(self.lm._init_weights)
        return layers

    def run_layers(self, layers: nn.ModuleList, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Run states (batch, length, dim) through ``layers`` with bidirectional attention."""
        mask = create_bidirectional_mask(self.config, hidden, attention_mask)
        for layer in layers:
            hidden = layer(hidden, mask)
        return hidden

    def start_vocabulary_head(self, unigram_counts: np.ndarray) -> None:
        """Give a fresh masked-LM head its start: transform near identity, bias at log unigram frequency.

        The decoder is tied to the word embeddings already, so that the head begins as "the tokens
        like this state, weighted by how common they are".
        """
        frequency = torch.from_numpy((unigram_counts + 1) / (unigram_counts.sum() + len(unigram_counts)))
        self._family.start_head(self.lm, frequency.log().float())

    def save(self, folder: Path) -> None:
        """Write a clean folder that AutoModel and AutoModelForMaskedLM open."""
        with quiet_transformers():
            self.lm.save_pretrained(folder)


def load_backbone(name: str | Path, unigram_counts: np.ndarray | None = None) -> tuple[Backbone, bool]:
    """Load masked-LM weights in float32 from a folder or by hub name.

    Args:
        name: folder or hub name. A plain encoder without a masked-LM head is taken, with a line that
            says so.
        unigram_counts: token counts (vocabulary,) for the start of a fresh head.

    Returns:
        The backbone, and whether its masked-LM head is fresh.

    Raises:
        UserError: no such folder, missing or damaged weights, an unsupported family, parameters
            missing beyond the head.
    """
    config = _load_config(name)
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model family {config.model_type!r} is not supported, expected one of {', '.join(FAMILIES)}", name
        )
    try:
        with quiet_transformers():
            lm, report = AutoModelForMaskedLM.from_pretrained(
                local_folder(name),
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers, safetensors and the hub raise many kinds
        raise UserError(f"weights could not be loaded: {first_line(error)}", name) from None
    head = FAMILIES[config.model_type].head_prefixes
    missing = sorted(report["missing_keys"])
    lost = [key for key in missing if not key.startswith(head) and not key.endswith("position_ids")]
    if lost:
        raise UserError(f"weights lack {len(lost)} parameters, such as {lost[0]}", name)
    backbone = Backbone(lm)
    fresh = bool(missing)
    if fresh:
        say(f"{name}: no masked-LM head in these weights; a new one is started")
        if unigram_counts is not None:
            backbone.start_vocabulary_head(unigram_counts)
    return backbone, fresh


def new_backbone(size: str, vocabulary_size: int, max_length: int, pad_token_id: int) -> Backbone:
    """Return a BERT of a size in `SIZES` with random weights from torch's generator."""
    config = BertConfig(
        vocab_size=vocabulary_size,
        max_position_embeddings=max(512, max_length),
        pad_token_id=pad_token_id,
        **SIZES[size],
    )
    return Backbone(BertForMaskedLM(config))


def _load_config(name: str | Path) -> Any:
    folder = local_folder(name)
    if not (folder / "config.json").is_file():
        raise UserError("folder has no config.json; expected a transformers model", folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UserError(f"no model configuration could be loaded: {first_line(error)}", name) from None
    if getattr(config, "auto_map", None):
        warn(f"{name}: config.json names code of its own (auto_map); it is not run")
    return config


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its kind when it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
