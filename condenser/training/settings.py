"""What the training loop takes from a verb's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from condenser.training.trackers import NO_TRACKER


@dataclass(frozen=True)
class LoopSettings:
    """How long, how fast and where a model is trained; see `PretrainOptions` and `FinetuneOptions` for the fields.

    ``unit`` names what ``batch_size`` counts, for the pace.
    """

    max_steps: int
    learning_rate: float
    warmup_ratio: float
    weight_decay: float
    max_grad_norm: float
    seed: int
    mixed_precision: str
    device: str
    log_every: int
    save_every: int
    keep_checkpoints: int
    workers: int = 0
    head_warmup_steps: int = 0
    batch_size: int = 1
    unit: str = "examples"
    tracker: str = NO_TRACKER
    compile: bool = False
    output: str = ""


def loop_settings(options: Any, **others: Any) -> LoopSettings:
    """Take the loop's settings from a verb's options, and ``others`` besides or in their place."""
    names = LoopSettings.__dataclass_fields__
    values = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return LoopSettings(**(values | others))
