"""What the verb ``finetune`` trains: a bi-encoder or a cross-encoder, with all that differs between the two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from condenser.training.steps import Step
from retrieval.batches import Batches


class Trainee(NamedTuple):
    """A model and how it is trained, judged and kept.

    Attributes:
        model: the module of the training step.
        step: forward and backward of one step.
        batches: what it reads.
        against: what each query is trained against, for the line at the start.
        score: dev figures by name, the first of which chooses the weights; None without a dev split.
        save: writes a folder without its model card.
        write_card: writes the card into the finished folder, from the names of the collections.
        facts: what the manifest says of the model.
    """

    model: nn.Module
    step: Step
    batches: Batches
    against: str
    score: Callable[[], dict[str, float]] | None
    save: Callable[[Path], None]
    write_card: Callable[[Path, list[str]], None]
    facts: dict[str, Any]
