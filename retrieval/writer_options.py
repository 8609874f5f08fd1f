"""Options of the verb that trains a query writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from condenser.lm_options import Cell
from condenser.options import Options, option, output, seed_of, source
from retrieval.option_types import Device, Format, Split


@dataclass(frozen=True, kw_only=True)
class TrainWriterOptions(Options):
    """Train a model that writes queries for passages: an encoder reads, a recurrent network writes."""

    encoder: str = source("folder or hub name of the encoder: a pretrained or an encoder folder")
    collection: str = source("judged pairs: a folder or file in a known format, or the name of an embedded collection")
    format: Format = option("auto", "how its files are to be read; auto looks at them")
    split: Split = option("train", "judgements to train on")
    dev_split: Split = option("dev", "judgements to choose the best checkpoint on, where there are any")
    output: str = output("folder to write: encoder, network and tokenizer")
    attention: bool = option(True, "each step also looks at the states of the passage's tokens, not at its CLS alone")
    copying: bool = option(True, "a token may also be copied from the passage: so rare words come into a query")
    train_encoder: bool = option(False, "train the encoder too; lower --learning_rate with it")
    cell: Cell = option("lstm", "kind of recurrent layer")
    hidden_size: int | None = option(
        None, "length of a layer's state; default: as the encoder's", minimum=1, maximum=2**16
    )
    layers: int = option(1, "recurrent layers, one above the other", minimum=1, maximum=64)
    dropout: float = option(0.1, "share of numbers dropped, in word vectors and behind each layer", minimum=0, below=1)
    passage_max_length: int | None = option(
        None, "longest passage in tokens; default: as the encoder says, else 128", minimum=3
    )
    query_max_length: int = option(32, "longest query in tokens; longer ones are cut", minimum=1, maximum=2**17)
    drop_empty: bool = option(
        False, "leave out, and count, queries without a positive and positives that are not in the corpus"
    )
    max_steps: int | None = option(None, "optimiser steps; default: from --epochs", minimum=1)
    epochs: float = option(5.0, "passes over the training queries", above=0, maximum=1_000_000)
    batch_size: int = option(32, "queries per step, over all processes", minimum=1)
    learning_rate: float = option(1e-3, "peak learning rate", minimum=0)
    warmup_ratio: float = option(
        0.05, "share of the steps in which the learning rate rises from zero", minimum=0, maximum=1
    )
    weight_decay: float = option(0.01, "AdamW weight decay, not on biases and LayerNorms", minimum=0)
    max_grad_norm: float = option(1.0, "gradient clipping by global norm", above=0)
    seed: int = seed_of("the data order, the choice of positives, dropout and new weights")
    mixed_precision: Literal["no", "fp16", "bf16"] = option("no", "autocast type on GPUs")
    device: Device = option("auto", "where to compute")
    eval_every: int | None = option(None, "steps between dev perplexities; default: a quarter of the steps", minimum=1)
    log_every: int = option(50, "steps between log lines", shapes_result=False, minimum=1)
    save_every: int = option(500, "steps between checkpoints", shapes_result=False, minimum=1)
    keep_checkpoints: int = option(2, "newest checkpoints kept while training", shapes_result=False, minimum=1)
