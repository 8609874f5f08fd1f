"""Models with random weights, small enough to train and to score with anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    ElectraConfig,
    ElectraForPreTraining,
)

from condenser.models.cloze import TwoTowerCloze, tower_config
from condenser.models.electric import ElectricModel


def save_electric(folder: Path, tiny_bert: Path, positions: int) -> Path:
    """Write an Electric model without dropout, with the tokenizer of ``tiny_bert``."""
    tokenizer = BertTokenizer.from_pretrained(tiny_bert)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = ElectraConfig(
        vocab_size=len(tokenizer), embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=positions, initializer_range=0.3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    energy = ElectraForPreTraining(config)
    ElectricModel(energy, TwoTowerCloze(tower_config(config, 0.25), energy.electra.embeddings)).save(folder)
    return folder


def save_classifier(folder: Path, start: Path, labels: int, **config: Any) -> Path:
    """Write a cross-encoder with a new head on a model, with its tokenizer."""
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(start, num_labels=labels, **config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)
    return folder
