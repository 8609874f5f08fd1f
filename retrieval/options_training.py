"""Options of the verbs that train on judgements, and that find what to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from condenser.options import Options, option, output, seed_of, source
from retrieval.option_types import Device, Format, Precision, Split


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(Options):
    """Train a bi-encoder on judged pairs or to a teacher's scores, or a cross-encoder on judged pairs."""

    encoder: str = source("folder or hub name to start from: a pretrained or an encoder folder")
    collection: list[str] = source(
        "one or more collections: a folder or file in a known format, or the name of an embedded one"
    )
    format: Format = option("auto", "how the collections' files are to be read; auto looks at them")
    weights: list[float] = option(
        [], "share of the steps of each collection; default: by its number of queries", above=0
    )
    split: Split = option("train", "judgements to train on")
    negatives_file: list[str] = source(
        "more hard negatives: files made by `condenser mine`, added to those of the collection", default=[]
    )
    negatives_pool: int | None = option(
        None,
        "hard negatives per query that are kept of the collection's, and of each file's, drawn once; default: all",
        minimum=1,
    )
    scores_file: list[str] = source(
        "more of a teacher's scores: files made by `condenser rerank` or `mine`, --scores", default=[]
    )
    dev_collection: str | None = source("judgements to choose the best checkpoint on; default: the first", default=None)
    dev_split: Split = option("dev", "their split, where there is one")
    output: str = output("encoder folder to write: opens in AutoModel and SentenceTransformer")
    max_steps: int | None = option(None, "optimiser steps; default: from --epochs", minimum=1)
    epochs: float = option(3.0, "passes over the training queries", above=0, maximum=1_000_000)
    batch_size: int = option(64, "queries per step, over all processes", minimum=1)
    cross_encoder: bool = option(
        False, "train a cross-encoder, which reads query and passage together: a judge for `rerank` (docs/reranking.md)"
    )
    loss: Literal["softmax", "margin_mse", "kl", "regression", "binary"] = option(
        "softmax",
        "softmax over all passages of the step, with --cross_encoder over the query's own; margin_mse or kl against "
        "the scores of a teacher in the data; regression of the cosine on scored pairs; binary: right or wrong, with "
        "--cross_encoder",
    )
    negatives: int = option(0, "hard negatives per query, where the collection gives them", minimum=0)
    share_negatives: bool = option(True, "with several processes: each query meets the passages of all of them")
    drop_empty: bool = option(
        False, "leave out, and count, queries without a positive and positives that are not in the corpus"
    )
    untied: bool | None = option(
        None, "a tower of its own for queries and for passages; default: as the encoder says, else false"
    )
    pooling: Literal["cls", "mean", "last"] | None = option(
        None,
        "vector of a text: state of the first token, mean, or state of the last token; "
        "default: as the encoder says, else cls",
    )
    projection: int | None = option(
        None,
        "a linear layer to this many numbers after pooling; default: as the encoder says, else none",
        minimum=1,
        maximum=2**16,
    )
    normalize: bool | None = option(
        None, "scale vectors to length 1 (cosine); default: as the encoder says, else false"
    )
    temperature: float = option(1.0, "scores are divided by this in the loss (.05 suits normalised vectors)", above=0)
    matryoshka: list[int] = option(
        [], "shorter lengths at which the first numbers of a vector must do alone as well", minimum=1
    )
    passage_template: str | None = option(
        None, "how title and text are joined; default '{title} {text}'; {sep} is the separator token"
    )
    query_prompt: str | None = option(None, "text put before each query")
    passage_prompt: str | None = option(None, "text put before each passage")
    query_max_length: int | None = option(
        None, "longest query in tokens; default: as the encoder says, else 32", minimum=1
    )
    passage_max_length: int | None = option(
        None, "longest passage in tokens; default: as the encoder says, else 128", minimum=1
    )
    learning_rate: float = option(2e-5, "peak learning rate", minimum=0)
    warmup_ratio: float = option(
        0.1, "share of the steps in which the learning rate rises from zero", minimum=0, maximum=1
    )
    weight_decay: float = option(0.01, "AdamW weight decay, not on biases and LayerNorms", minimum=0)
    max_grad_norm: float = option(1.0, "gradient clipping by global norm", above=0)
    cache_tokens: int | None = option(
        None,
        "gradient caching: tokens whose graph exists at one time; the gradient is that of the whole batch; with "
        "--cross_encoder always, default: 2048 on a CPU, 16384 on a GPU",
        minimum=1,
    )
    graph_memory: float = option(
        0.0, "with --cache_tokens: GiB for graphs that are kept, which saves their second forward pass", minimum=0
    )
    gradient_checkpointing: bool = option(False, "recompute layers in the backward pass: less memory, more time")
    lora: int | None = option(None, "train low-rank updates of this rank (peft) and merge them at the end", minimum=1)
    seed: int = seed_of("the data order, the choice of positives and negatives, and dropout")
    mixed_precision: Literal["no", "fp16", "bf16"] = option("no", "autocast type on GPUs")
    device: Device = option("auto", "where to compute")
    eval_every: int | None = option(None, "steps between dev evaluations; default: a quarter of the steps", minimum=1)
    eval_pool: int = option(
        1000,
        "passages searched in the dev evaluation: all positives and a fixed sample; 0: the whole corpus",
        minimum=0,
    )
    dev_run: str | None = source(
        "with --cross_encoder: run of the dev queries that is reranked to choose the best checkpoint; default: BM25's",
        default=None,
    )
    dev_depth: int = option(20, "with --cross_encoder: first hits of it that are reranked", minimum=1)
    dev_queries: int = option(
        200, "with --cross_encoder: dev queries that are reranked, a fixed sample; 0: all", minimum=0
    )
    tracker: Literal["none", "tensorboard", "wandb"] = option(
        "none", "also send the log to this tracker", shapes_result=False
    )
    log_every: int = option(10, "steps between log lines", shapes_result=False, minimum=1)
    save_every: int = option(500, "steps between checkpoints", shapes_result=False, minimum=1)
    keep_checkpoints: int = option(2, "newest checkpoints kept while training", shapes_result=False, minimum=1)


@dataclass(frozen=True, kw_only=True)
class MineOptions(Options):
    """Find hard negatives: passages that a search ranks high for a query and that are not known to answer it."""

    collection: str = source("folder or file in a known format, or the name of an embedded collection")
    split: Split = option("train", "whose queries and judgements")
    run: str | None = source("take what this run found: TREC, MS MARCO or JSON, .gz too", default=None)
    bm25: bool = option(False, "or search with BM25")
    encoder: str | None = source("or encode the collection with this encoder, and search", default=None)
    output: str = output("file to write, .gz and .zst too")
    format: Literal["negatives", "tevatron", "dpr"] = option(
        "negatives",
        "negatives: {query_id, negatives}, for finetune --negatives_file; tevatron: JSON lines with ids; "
        "dpr: JSON with texts",
    )
    depth: int = option(200, "first hits of each query that are looked at", minimum=1)
    skip: int = option(0, "first hits that are passed over", minimum=0)
    n: int = option(30, "negatives per query", minimum=1)
    choice: Literal["sample", "top"] = option("sample", "which of the hits that may be negatives: any, or the best")
    margin: float | None = option(
        None,
        "leave out hits scored above P - margin * |P|, where P is the score of the query's best known positive: "
        "they may be positives that nobody judged",
        minimum=0,
    )
    ignore_self: bool = option(False, "leave out the hit whose id is the query's own")
    require_positive: bool = option(False, "no negatives for queries without a positive in the first --depth hits")
    cross_encoder: str | None = source("folder or hub name of a model that scores pairs of texts", default=None)
    cross_threshold: float | None = option(
        None, "leave out hits that the cross-encoder scores above this (its raw output; 2.2 is a probability of .9)"
    )
    scores: str | None = option(
        None, "also write the cross-encoder's scores of positives and negatives here (.tsv)", shapes_result=False
    )
    seed: int = seed_of("the sample")
    dtype: Precision = option("auto", "with --encoder: type to encode passages in, as in `encode`")
    work: str | None = option(None, "with --encoder: folder for the vectors; default: OUTPUT.work", shapes_result=False)
    device: Device = option("auto", "where to encode and to search")
    skip_bad: bool = option(False, "pass over lines that cannot be read, and count them")
