"""An Electric model small enough to train and to score with anywhere, without dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertTokenizer, ElectraConfig, ElectraForPreTraining

from condenser.models.cloze import TwoTowerCloze, tower_config
from condenser.models.electric import ElectricModel


@pytest.fixture(scope="session")
def electric_folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    folder = tmp_path_factory.mktemp("electric")
    tokenizer = BertTokenizer.from_pretrained(tiny_bert)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = ElectraConfig(
        vocab_size=len(tokenizer), embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=24, initializer_range=0.3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    energy = ElectraForPreTraining(config)
    ElectricModel(energy, TwoTowerCloze(tower_config(config, 0.25), energy.electra.embeddings)).save(folder)
    return folder
