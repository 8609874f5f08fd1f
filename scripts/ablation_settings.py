"""The arms of scripts/ablation.py, how long everything lasts, and what it costs."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from condenser.errors import UserError

ARMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "mlm": ("mlm", "mlm"),
    "condenser": ("condenser", "condenser"),
    "condenser+generator": ("condenser", "condenser"),
    "mlm+contrastive": ("mlm", "mlm_contrastive"),
    "condenser+cocondenser": ("condenser", "cocondenser"),
}
LEXICAL = "bm25"
GENERATED = "condenser+generator"  # its second stage corrupts with draws of what the arm mlm became
PAIRS = ("mlm_contrastive", "cocondenser")
MINILM, RANDOM = "minilm", "random"
SEEN = "has seen about a billion pairs, MS MARCO and Natural Questions among them"
_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number with a point",
    bool: "true or false",
    dict: "an object",
}
# CPU seconds of one thread for a span, pair or passage of at most 64 tokens with MiniLM-L6, and for a stage to begin;
# measured on a 2-core Intel Xeon virtual machine with much other work beside it.
SECONDS = {"mlm": 0.040, "condenser": 0.065, "pair": 0.052, "passage": 0.009, "draw": 0.012, "start": 4.0}
# How many times as fast a CPU with AMX is in bfloat16, by the same measure. Time goes with the tokens, nearly.
HALF = {"training": 1.4, "encoding": 2.7}


class Settings(NamedTuple):
    """How long everything lasts, and what the head looks like.

    Attributes:
        model_size: of random weights; None with given ones.
        vocabulary: entries of the tokenizer that goes with random weights.
        max_length: tokens of spans and of passages.
        pool_queries: test queries; 0 takes all.
        pool_passages: passages that are searched; 0 takes all.
        first_steps: of the first stage of pretraining.
        first_spans: a step.
        head_warmup_steps: of these, steps in which only the new heads learn.
        second_steps: of the second stage.
        second_documents: a step, two spans each; stages of single spans take as many tokens.
        pretrain_rate: peak learning rate of both stages.
        head_layers: of the Condenser head.
        skip_from: layer whose token states it sees; None for half the layers.
        late_mlm: whether the last layer has its masked-LM loss beside the head's.
        finetune_steps: by percentage of the training pairs.
        finetune_batch: queries a step.
        finetune_rate: peak learning rate.
        mixed_precision: of pretraining and fine-tuning.
    """

    model_size: str | None
    vocabulary: int
    max_length: int
    pool_queries: int
    pool_passages: int
    first_steps: int
    first_spans: int
    head_warmup_steps: int
    second_steps: int
    second_documents: int
    pretrain_rate: float
    head_layers: int
    skip_from: int | None
    late_mlm: bool
    finetune_steps: dict[int, int]
    finetune_batch: int
    finetune_rate: float
    mixed_precision: str


MINILM_SETTINGS = Settings(
    model_size=None,
    vocabulary=0,
    max_length=64,
    pool_queries=500,
    pool_passages=3000,
    first_steps=60,
    first_spans=16,
    head_warmup_steps=20,
    second_steps=140,
    second_documents=24,
    pretrain_rate=5e-5,
    head_layers=2,
    skip_from=None,
    late_mlm=True,
    finetune_steps={0: 0, 1: 12, 10: 24, 100: 60},
    finetune_batch=32,
    finetune_rate=1e-4,
    mixed_precision="no",
)
GPU_SETTINGS = MINILM_SETTINGS._replace(
    model_size="mini",
    vocabulary=8000,
    pool_queries=0,
    pool_passages=0,
    first_steps=1000,
    first_spans=128,
    head_warmup_steps=0,
    second_steps=2000,
    second_documents=128,
    pretrain_rate=5e-4,
    finetune_steps={0: 0, 1: 50, 10: 150, 100: 400},
    finetune_batch=64,
    finetune_rate=3e-4,
    mixed_precision="bf16",
)


def settings_of(*, gpu: bool, quick: bool, changes: list[str]) -> Settings:
    """Return the settings of a start, a toy's with ``quick``.

    Args:
        gpu: from random weights, with a GPU's steps; else from given ones, with those of two cores.
        quick: a few steps, which show that everything runs.
        changes: ``NAME=VALUE``, the value as in JSON (a text may go without quotes).

    Raises:
        UserError: an unknown name, or a value of another type.
    """
    settings = GPU_SETTINGS if gpu else MINILM_SETTINGS
    if quick:
        settings = settings._replace(
            model_size="tiny" if gpu else None, vocabulary=300, max_length=16, pool_queries=8, pool_passages=24,
            first_steps=2, first_spans=4, head_warmup_steps=int(not gpu), second_steps=2, second_documents=4,
            finetune_steps=dict.fromkeys(settings.finetune_steps, 2), finetune_batch=4, mixed_precision="no",
        )  # fmt: skip
    allowed = Settings._fields
    for one in changes:
        name, _, text = one.partition("=")
        if name not in allowed:
            raise UserError(f"--set {name}: unknown setting", hint=f"settings: {', '.join(allowed)}")
        try:
            value: Any = json.loads(text)
        except json.JSONDecodeError:
            value = text
        kind = {"model_size": str, "skip_from": int}.get(name, type(getattr(settings, name)))
        if type(value) is not kind:
            raise UserError(f"--set {name} is {text!r}, expected {_WORDS[kind]}")
        if name == "finetune_steps":
            value = _steps_of(text, value, settings.finetune_steps)
        settings = settings._replace(**{name: value})
    return settings


def _steps_of(text: str, given: dict[str, Any], default: dict[int, int]) -> dict[int, int]:
    """Return the steps by percentage, those that are not given as they were."""
    if unknown := [name for name in given if name not in map(str, default)]:
        raise UserError(f"--set finetune_steps is {text!r}: no share {unknown[0]}", hint=f"shares: {[*default]}")
    if any(type(steps) is not int or steps < 0 for steps in given.values()):
        raise UserError(f"--set finetune_steps is {text!r}, expected whole numbers by percentage")
    return default | {int(name): steps for name, steps in given.items()}


def described(settings: Settings) -> dict[str, Any]:
    """Return settings as JSON gives them back."""
    values: dict[str, Any] = json.loads(json.dumps(settings._asdict()))
    return values


def reckoned(settings: Settings, arm: str, percent: int, made: set[str]) -> float:
    """Return about how many CPU minutes a cell takes with MiniLM-L6.

    Args:
        settings: see `Settings`.
        arm: its arm.
        percent: its share of the labels.
        made: stages of pretraining that other cells of its collection and seed have made; grows.
    """
    if arm == LEXICAL:
        return 0.0
    half = settings.mixed_precision != "no"
    training, encoding = (HALF["training"], HALF["encoding"]) if half else (1.0, 1.0)
    training, encoding = (one * 64 / settings.max_length for one in (training, encoding))
    seconds = settings.finetune_steps[percent] * settings.finetune_batch * SECONDS["pair"] / training
    seconds += settings.pool_passages * SECONDS["passage"] / encoding + SECONDS["start"]
    spans = settings.first_steps * settings.first_spans, 2 * settings.second_steps * settings.second_documents
    # The arm with a generator needs the weights of another arm, too.
    for one in ["mlm", arm] if arm == GENERATED else [arm]:
        for number, objective in enumerate(ARMS[one]):
            stage = one if one == GENERATED and number else "-".join(ARMS[one][: number + 1])
            if stage not in made:
                span = SECONDS["condenser" if "condenser" in objective else "mlm"]
                span += SECONDS["draw"] if stage == GENERATED else 0.0
                seconds += spans[number] * span / training + SECONDS["start"]
            made.add(stage)
    return seconds / 60
