"""One tiny random masked language model of each supported family, over the vocabulary of a tokenizer's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    PretrainedConfig,
    RobertaConfig,
)

SIZE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def config_of(family: str, vocabulary: int, **others: Any) -> PretrainedConfig:
    common = {"vocab_size": vocabulary, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.2}
    common |= others
    if family == "modernbert":
        # local attention in layers 2 and 3, of 4 tokens to either side
        ids = {f"{name}_token_id": number for name, number in (("bos", 2), ("cls", 2), ("eos", 3), ("sep", 3))}
        return ModernBertConfig(**SIZE, **common, **ids, global_attn_every_n_layers=3, local_attention=8)
    if family == "distilbert":
        size = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}
        return DistilBertConfig(**size, **common)
    if family == "electra":
        return ElectraConfig(**SIZE, **NO_DROPOUT, **common, embedding_size=16)
    return {"bert": BertConfig, "roberta": RobertaConfig}[family](**SIZE, **NO_DROPOUT, **common)


def tiny_model(family: str, vocabulary: int = 120, **others: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config_of(family, vocabulary, **others))
    with torch.no_grad():  # so that biases and norms play a part too
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(len(parameter)))
    return model.eval()


def tiny_folder(family: str, tokenizer_folder: Path, folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(folder)
    tiny_model(family, len(tokenizer)).save_pretrained(folder)
    return folder
