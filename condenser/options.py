"""Options of the verbs that turn text into an encoder, and how options are declared anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def required(help: str, *, shapes_result: bool = True) -> Any:
    """Declare an option that must be given; see `option` for ``shapes_result``."""
    return field(metadata={"help": help, "shapes_result": shapes_result})


def source(help: str, **default: Any) -> Any:
    """Declare a path or hub name to read from: its fingerprint counts, not where it lies."""
    if default:
        return option(default["default"], help, shapes_result=False)
    return required(help, shapes_result=False)


def option(default: Any, help: str, *, shapes_result: bool = True) -> Any:
    """Declare an option with a default.

    Args:
        default: its value when not given; a list is copied for each use.
        help: one line for ``--help``.
        shapes_result: False for options that cannot change what the stage writes (where it goes,
            how often it reports): they may differ when a stage is run again.
    """
    metadata = {"help": help, "shapes_result": shapes_result}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def output(help: str) -> Any:
    """Declare where the result goes."""
    return required(help, shapes_result=False)


Titles = Literal["first", "every", "drop"]


@dataclass(frozen=True, kw_only=True)
class SpansOptions:
    """Documents to a memory-mapped store of token spans, kept by document."""

    input: list[str] = source(
        "files of documents: .jsonl ({_id, title, text} or {spans}), .tsv (id, text or id, title, text), plain text "
        "(one document a line), each also .gz and .zst",
        default=[],
    )
    collection: str | None = source(
        "take the passages of this collection (folder or embedded name) instead", default=None
    )
    dataset: str | None = source("take a Hugging Face data set (folder, file or hub name) instead", default=None)
    dataset_config: str | None = option(None, "the data set's configuration, where it has several")
    dataset_split: str = option("train", "the data set's split")
    dataset_column: str = option("text", "the data set's column of text")
    tokenizer: str | None = source("folder or hub name of the tokenizer", default=None)
    train_tokenizer: int | None = option(None, "train a WordPiece tokenizer of this many entries on the input instead")
    max_length: int = option(128, "longest span in tokens, the special tokens included")
    min_tokens: int = option(8, "a shorter last span is dropped, unless it is the document's only one")
    titles: Titles = option("first", "a title is the document's first sentence, begins every span, or is dropped")
    short_spans: float = option(0.0, "share of the spans that end early, at a length drawn at random")
    seed: int = option(42, "seed of the short spans")
    output: str = output("folder to write")
    batch_size: int = option(1000, "documents tokenized at once", shapes_result=False)
    workers: int | None = option(
        None,
        "processes that tokenize, 1 means threads; default: 1 up to 4 processors or 64 MB, else one per processor",
        shapes_result=False,
    )


RandomTokens = Literal["ordinary", "all"]
Objective = Literal["mlm", "condenser", "cocondenser"]


@dataclass(frozen=True, kw_only=True)
class PretrainOptions:
    """Pretrain an encoder on token spans: MLM, Condenser or coCondenser."""

    objective: Objective = option("condenser", "what is learnt")
    data: str = source("token store made by `condenser spans`")
    init: str | None = source("folder or hub name of the weights to start from", default=None)
    model_size: Literal["tiny", "mini"] | None = option(
        None, "start from random weights instead: tiny is 2 layers of 128, mini 4 of 256"
    )
    output: str = output("folder to write: opens in AutoModel and AutoModelForMaskedLM")
    max_steps: int = required("optimiser steps")
    batch_size: int = option(32, "spans per step (documents for cocondenser: two spans each), over all processes")
    max_length: int | None = option(None, "cut spans to this many tokens; default: as stored")
    learning_rate: float = option(1e-4, "peak learning rate")
    warmup_ratio: float = option(0.1, "share of the steps in which the learning rate rises from zero")
    head_warmup_steps: int = option(0, "first steps in which only new heads learn and the encoder stands still")
    weight_decay: float = option(0.01, "AdamW weight decay, not on biases and LayerNorms")
    max_grad_norm: float = option(1.0, "gradient clipping by global norm")
    gradient_accumulation: int = option(1, "micro-batches per step; does not widen the contrastive batch")
    cache_chunk: int | None = option(
        None, "cocondenser: spans per chunk of gradient caching; large batches in the memory of one chunk"
    )
    mlm_probability: float = option(0.15, "share of tokens that are masked, in whole words")
    random_tokens: RandomTokens = option(
        "ordinary", "what a tenth of the masked tokens is replaced by; all: also special tokens, as the original code"
    )
    skip_from: int | None = option(
        None, "layer whose token states the Condenser head sees; default: as in --init, else half the layers"
    )
    head_layers: int | None = option(None, "Transformer layers in the Condenser head; default: as in --init, else 2")
    late_mlm: bool | None = option(None, "add the last layer's MLM loss to the head's; default: as in --init, else yes")
    seed: int = option(42, "seed of the data order, masks, dropout and new weights")
    mixed_precision: Literal["no", "fp16", "bf16"] = option("no", "autocast type on GPUs")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")
    workers: int = option(0, "loader processes; the batches do not depend on it", shapes_result=False)
    log_every: int = option(10, "steps between log lines", shapes_result=False)
    save_every: int = option(500, "steps between checkpoints", shapes_result=False)
    keep_checkpoints: int = option(2, "newest checkpoints kept while training", shapes_result=False)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Weights from the reference Condenser code or from .bin files, and back to the reference."""

    model: str = source("folder to read; with --from transformers also a hub name")
    from_: Literal["reference", "transformers"] | None = option(
        None, "what wrote it: the reference Condenser code (with model.pt), or transformers (weights as .bin)"
    )
    to: Literal["reference"] | None = option(None, "write what the reference Condenser code loads")
    output: str = output("folder to write")
    allow_pickle: bool = option(False, "open .bin and .pt files, as plain tensors", shapes_result=False)
    skip_from: int | None = option(
        None, "--from reference: layer whose token states the head sees; default: half the layers"
    )
    late_mlm: bool | None = option(None, "--from reference: trained with the last layer's MLM loss; default: yes")
