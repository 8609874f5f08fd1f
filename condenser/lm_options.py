"""Options of the verbs that train and use recurrent language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from condenser.options import Options, option, output, seed_of, source

Cell = Literal["rnn", "gru", "lstm"]
Device = Literal["auto", "cpu", "cuda"]
MOST_TEXTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class LmTrainOptions(Options):
    """Train a recurrent language model on text, by truncated back-propagation through time."""

    data: str = source("token store made by `condenser spans`; its documents are read whole")
    dev: list[str] = source(
        "files of documents (as `spans` reads them) to choose the best checkpoint on; default: the last weights",
        default=[],
    )
    output: str = output("folder to write: network, weights and tokenizer")
    cell: Cell = option("lstm", "kind of recurrent layer")
    embedding_size: int | None = option(
        None, "length of a word's vector; default: as in --vectors, else 256", minimum=1, maximum=2**16
    )
    hidden_size: int = option(512, "length of a layer's state", minimum=1, maximum=2**16)
    layers: int = option(1, "recurrent layers, one above the other", minimum=1, maximum=64)
    dropout: float = option(0.1, "share of numbers dropped, in word vectors and behind each layer", minimum=0, below=1)
    tied: bool = option(True, "the word vectors also weigh the output")
    vectors: str | None = source("word vectors to start from: a text file of word2vec or GloVe", default=None)
    freeze_vectors: bool = option(False, "keep the word vectors as they are given")
    reset: bool = option(True, "forget at the beginning of each document what was read before")
    max_steps: int | None = option(None, "optimiser steps; default: from --epochs", minimum=1)
    epochs: float = option(10.0, "passes over the documents", above=0, maximum=1_000_000)
    batch_size: int = option(32, "parallel streams", minimum=1)
    chunk: int = option(64, "tokens of each stream in a step, over which gradients go back", minimum=1)
    learning_rate: float = option(2e-3, "peak learning rate", minimum=0)
    warmup_ratio: float = option(
        0.05, "share of the steps in which the learning rate rises from zero", minimum=0, maximum=1
    )
    weight_decay: float = option(0.01, "AdamW weight decay, not on biases", minimum=0)
    max_grad_norm: float = option(0.25, "gradient clipping by global norm", above=0)
    seed: int = seed_of("the order of documents, dropout and new weights")
    mixed_precision: Literal["no", "fp16", "bf16"] = option("no", "autocast type on GPUs")
    device: Device = option("auto", "where to compute")
    eval_every: int | None = option(None, "steps between dev perplexities; default: an epoch", minimum=1)
    log_every: int = option(50, "steps between log lines", shapes_result=False, minimum=1)
    save_every: int = option(500, "steps between checkpoints", shapes_result=False, minimum=1)
    keep_checkpoints: int = option(2, "newest checkpoints kept while training", shapes_result=False, minimum=1)


@dataclass(frozen=True, kw_only=True)
class LmPerplexityOptions(Options):
    """How well a language model foresees a text: perplexity per token and per word."""

    model: str = source("folder made by `condenser lm train`")
    input: list[str] = source("files of documents, as `spans` reads them; each document is read on its own")
    device: Device = option("auto", "where to compute")
    json: bool = option(False, "print JSON")


@dataclass(frozen=True, kw_only=True)
class LmSampleOptions(Options):
    """Texts drawn from a language model, one a line."""

    model: str = source("folder made by `condenser lm train`")
    count: int = option(5, "texts", minimum=1, maximum=MOST_TEXTS)
    prompt: str = option("", "how each text begins")
    max_tokens: int = option(64, "longest text in tokens, behind the prompt", minimum=1, maximum=2**17)
    temperature: float = option(1.0, "scores are divided by this before the softmax", above=0)
    top_k: int | None = option(None, "draw among the so many most probable tokens only", minimum=1)
    top_p: float | None = option(
        None, "draw among the fewest most probable tokens that together have this probability", above=0, maximum=1
    )
    seed: int = seed_of("the draw; text i has the same in any number of texts")
    device: Device = option("auto", "where to compute")
