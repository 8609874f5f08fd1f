"""Options of the verbs that turn text into an encoder, and how options are declared anywhere."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from condenser.errors import UserError

_HIGHEST_SEED = 2**32 - 1  # what every generator takes
_HIGHEST_INTEGER = 2**63 - 1  # what JSON, Arrow and numpy keep


class Range(NamedTuple):
    """Which numbers an option takes; None is no bound."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Say whether a number lies inside; nothing infinite and no NaN does."""
        return (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.minimum is not None:
            return f"{self.minimum} or more" if self.maximum is None else f"{self.minimum} to {self.maximum}"
        bounds = {"more than": self.above, "at most": self.maximum, "less than": self.below}
        told = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
        return " and ".join(told) or "a finite number"


class Options:
    """What every verb's options share: a number out of an option's range is refused, however it came here."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not isinstance(number, bool):
                    _check_number(option_name(one.name), number, one.metadata.get("range") or Range())


def option_name(field: str) -> str:
    """Return what a field is called on a command line: ``from_`` is --from, a word of Python without the underscore."""
    return field.rstrip("_")


def is_given(options: Options, name: str) -> bool:
    """Say whether an option has another value than its default."""
    declared = {one.name: one for one in fields(options)}[name]  # type: ignore[arg-type]
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    return bool(getattr(options, name) != default)


def _check_number(name: str, value: float, allowed: Range) -> None:
    if isinstance(value, int) and abs(value) > _HIGHEST_INTEGER:
        raise UserError(f"--{name} is {value}, expected a number that fits into 64 bits")
    if not allowed.holds(value):
        raise UserError(f"--{name} is {value}, expected {allowed}")


def required(help: str, *, shapes_result: bool = True, **bounds: float) -> Any:
    """Declare an option that must be given; see `option` for ``shapes_result`` and ``bounds``."""
    return field(metadata={"help": help, "shapes_result": shapes_result, "range": Range(**bounds)})


def source(help: str, **default: Any) -> Any:
    """Declare a path or hub name to read from: its fingerprint counts, not where it lies."""
    if default:
        return option(default["default"], help, shapes_result=False)
    return required(help, shapes_result=False)


def option(default: Any, help: str, *, shapes_result: bool = True, **bounds: float) -> Any:
    """Declare an option with a default.

    Args:
        default: its value when not given; a list is copied for each use.
        help: one line for ``--help``.
        shapes_result: False for options that cannot change what the stage writes (where it goes,
            how often it reports): they may differ when a stage is run again.
        bounds: ``minimum``, ``above``, ``maximum``, ``below`` of a number, or of each in a list; see `Range`.
    """
    metadata = {"help": help, "shapes_result": shapes_result, "range": Range(**bounds)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def seed_of(what: str) -> Any:
    """Declare the seed of ``what``."""
    return option(42, f"seed of {what}", minimum=0, maximum=_HIGHEST_SEED)


def output(help: str) -> Any:
    """Declare where the result goes."""
    return required(help, shapes_result=False)


Titles = Literal["first", "every", "drop"]


@dataclass(frozen=True, kw_only=True)
class SpansOptions(Options):
    """Documents to a memory-mapped store of token spans, kept by document."""

    input: list[str] = source(
        "files of documents: .jsonl ({_id, title, text}, {spans} or {query, passage}), .tsv (id, text or id, title, "
        "text), plain text (one document a line), each also .gz and .zst",
        default=[],
    )
    collection: str | None = source(
        "take the passages of this collection (folder or embedded name) instead", default=None
    )
    pairs: str | None = option(
        None, "with --collection: its judged pairs of this split, a span each: query, separator, passage"
    )
    dataset: str | None = source("take a Hugging Face data set (folder, file or hub name) instead", default=None)
    dataset_config: str | None = option(None, "the data set's configuration, where it has several")
    dataset_split: str = option("train", "the data set's split")
    dataset_column: str = option("text", "the data set's column of text")
    tokenizer: str | None = source("folder or hub name of the tokenizer", default=None)
    train_tokenizer: int | None = option(
        None, "train a WordPiece tokenizer of this many entries on the input instead", minimum=6, maximum=10_000_000
    )
    train_words: int | None = option(
        None,
        "take this many of the input's most frequent words for a vocabulary instead",
        minimum=6,
        maximum=10_000_000,
    )
    max_length: int = option(128, "longest span in tokens, the special tokens included", minimum=1)
    min_tokens: int = option(8, "a shorter last span is dropped, unless it is the document's only one", minimum=1)
    titles: Titles = option("first", "a title is the document's first sentence, begins every span, or is dropped")
    short_spans: float = option(
        0.0, "share of the spans that end early, at a length drawn at random", minimum=0, maximum=1
    )
    seed: int = seed_of("the short spans")
    output: str = output("folder to write")
    batch_size: int = option(1000, "documents tokenized at once", shapes_result=False, minimum=1)
    workers: int | None = option(
        None,
        "processes that tokenize, 1 means threads; default: 1 up to 4 processors or 64 MB, else one per processor",
        shapes_result=False,
        minimum=1,
        maximum=256,
    )


RandomTokens = Literal["ordinary", "all"]
Objective = Literal["mlm", "mlm_contrastive", "condenser", "cocondenser", "electra", "electric"]
NoiseRatio = Literal["counts", "released"]
NoiseLossOver = Literal["candidates", "attended"]


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(Options):
    """Pretrain an encoder on token spans: MLM, Condenser (coCondenser), ELECTRA or Electric."""

    objective: Objective = option(
        "condenser", "what is learnt; cocondenser and mlm_contrastive also tell two spans of a document from others"
    )
    data: str = source("token store made by `condenser spans`")
    init: str | None = source("folder or hub name of the weights to start from", default=None)
    model_size: Literal["tiny", "mini", "small", "medium"] | None = option(
        None, "start from random weights instead: tiny is 2 layers of 128, mini 4 of 256, small 4 and medium 8 of 512"
    )
    output: str = output("folder to write: opens in AutoModel, and in the class of the objective")
    max_steps: int | None = option(None, "optimiser steps", minimum=1)
    epochs: float | None = option(
        None,
        "or passes over the spans (contrastive objectives: over the documents)",
        above=0,
        maximum=1_000_000,
    )
    batch_size: int = option(
        32, "spans per step (contrastive objectives: documents, two spans each), over all processes", minimum=1
    )
    max_length: int | None = option(None, "cut spans to this many tokens; default: as stored", minimum=1, maximum=2**17)
    learning_rate: float = option(1e-4, "peak learning rate", minimum=0)
    warmup_ratio: float = option(
        0.1, "share of the steps in which the learning rate rises from zero", minimum=0, maximum=1
    )
    head_warmup_steps: int = option(
        0, "first steps in which only new heads learn and the encoder stands still", minimum=0
    )
    weight_decay: float = option(0.01, "AdamW weight decay, not on biases and LayerNorms", minimum=0)
    max_grad_norm: float = option(1.0, "gradient clipping by global norm", above=0)
    gradient_accumulation: int = option(1, "micro-batches per step; does not widen the contrastive batch", minimum=1)
    cache_chunk: int | None = option(
        None,
        "contrastive objectives: spans per chunk of gradient caching; large batches in the memory of one chunk",
        minimum=1,
    )
    mlm_probability: float = option(0.15, "share of tokens that are masked or replaced", above=0, maximum=1)
    random_tokens: RandomTokens = option(
        "ordinary", "what a tenth of the masked tokens is replaced by; all: also special tokens, as the original code"
    )
    skip_from: int | None = option(
        None, "layer whose token states the Condenser head sees; default: as in --init, else half the layers"
    )
    head_layers: int | None = option(
        None, "Transformer layers in the Condenser head; default: as in --init, else 2", minimum=1
    )
    late_mlm: bool | None = option(None, "add the last layer's MLM loss to the head's; default: as in --init, else yes")
    corruption: str = source(
        "what stands in the masked tokens' place: the mask token, or draws of a masked LM, frozen, as generator:DIR",
        default="mask",
    )
    whole_words: bool | None = option(None, "mask whole words; default: yes, but for electra single tokens")
    init_generator: str | None = source(
        "electra: folder or hub name of the generator; default: that beside --init, else a new one", default=None
    )
    generator_size: float | None = option(
        None,
        "electra, electric: width of a new generator (noise model) as a share of the model's; default: 0.25",
        above=0,
        maximum=1,
    )
    generator_layers: int | None = option(
        None, "electra: layers of a new generator; default: as the discriminator", minimum=1
    )
    generator_hidden: int | None = option(
        None, "electra: width of a new generator in place of its share; heads as wide as the discriminator's", minimum=1
    )
    embedding_sharing: Literal["all", "token", "none"] = option(
        "all", "electra: what generator and discriminator share: the whole embedding block, its words, nothing"
    )
    masked_share: float = option(
        1.0, "electra: share of the chosen tokens that are masked, as in the paper; 0.85 as in the released code",
        minimum=0, maximum=1,
    )  # fmt: skip
    discriminator_weight: float = option(50.0, "electra: weight of the discriminator's loss", minimum=0)
    special_tokens_judged: bool = option(
        True, "electra: CLS and SEP count in the discriminator's loss, as in the released code"
    )
    nce_weight: float = option(
        50.0, "electric: weight of the noise contrastive loss beside the noise model's", minimum=0
    )
    nce_ratio: NoiseRatio = option(
        "counts", "electric: odds of noise by each text's own counts, or .15 to .85 as in the released code"
    )
    nce_over: NoiseLossOver = option(
        "candidates", "electric: the loss is a mean over the texts' tokens; attended: with CLS and SEP, as released"
    )
    seed: int = seed_of("the data order, masks, dropout and new weights")
    mixed_precision: Literal["no", "fp16", "bf16"] = option("no", "autocast type on GPUs")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")
    compile: bool = option(False, "run the model through torch.compile, which takes minutes at the start")
    workers: int = option(
        0, "loader processes; the batches do not depend on it", shapes_result=False, minimum=0, maximum=256
    )
    log_every: int = option(10, "steps between log lines", shapes_result=False, minimum=1)
    save_every: int = option(500, "steps between checkpoints", shapes_result=False, minimum=1)
    keep_checkpoints: int = option(2, "newest checkpoints kept while training", shapes_result=False, minimum=1)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """Weights and vectors from other toolkits, and back to theirs; two encoders to one."""

    model: str = source("folder or hub name to read; --to pyserini: passages' vectors")
    passages: str | None = source(
        "encoder of the passages (folder or hub name), to make one with MODEL as the tower of the queries",
        default=None,
    )
    from_: Literal["reference", "transformers", "pyserini"] | None = option(
        None,
        "what wrote it: the reference Condenser code (with model.pt), transformers (weights as .bin), or Pyserini "
        "(a dense index: FAISS's file and docid)",
    )
    to: Literal["reference", "pyserini"] | None = option(
        None, "write what the reference Condenser code loads, or a dense index that Pyserini opens"
    )
    output: str = output("folder to write")
    allow_pickle: bool = option(False, "open .bin and .pt files, as plain tensors", shapes_result=False)
    skip_from: int | None = option(
        None, "--from reference: layer whose token states the head sees; default: half the layers"
    )
    late_mlm: bool | None = option(None, "--from reference: trained with the last layer's MLM loss; default: yes")
    made_by: str | None = option(
        None, "--from pyserini: name of the encoder of the vectors; queries' vectors need the same"
    )
