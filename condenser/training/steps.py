"""How one step's gradient is made: micro-batch by micro-batch, or through gradient caching."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from condenser.models.half import at_least_float32
from condenser.training.distributed import total, world_size
from condenser.training.gradcache import cache_gradients, replay, represent, surrogate


class MicroBatch(Protocol):
    """What one forward pass reads on one process."""

    @property
    def weight(self) -> float:
        """How much it counts in its step (masked tokens, say); steps are means over weights."""
        ...

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on ``device``."""
        ...


class Objective(Protocol):
    """Named loss parts of a micro-batch; their sum is minimised, or the one named ``loss``: then others are figures.

    Args of a call:
        model: the module, wrapped for several processes where there are several.
        batch: one micro-batch.
        share: what a loss *summed* over the micro-batch's weight is multiplied by to become its
            part of the mean over the whole step (all micro-batches of all processes).
        fraction: one over the number of micro-batches, for losses that are means already.
    """

    def __call__(self, model: nn.Module, batch: Any, *, share: float, fraction: float) -> dict[str, Tensor]:
        """Return the loss parts by name."""
        ...


Step = Callable[[nn.Module, Sequence[Any], Accelerator], dict[str, Tensor]]
"""Forward and backward of one step: model, this process's micro-batches, accelerator -> detached loss parts."""


def accumulate(objective: Objective) -> Step:
    """Return a step that runs forward and backward micro-batch by micro-batch."""

    def step(model: nn.Module, micro_batches: Sequence[Any], accelerator: Accelerator) -> dict[str, Tensor]:
        share = share_of((batch.weight for batch in micro_batches), accelerator)
        sums: dict[str, Tensor] = {}
        for position, batch in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            with nullcontext() if last else accelerator.no_sync(model):
                parts = objective(model, batch.to(accelerator.device), share=share, fraction=1 / len(micro_batches))
                accelerator.backward(parts["loss"] if "loss" in parts else sum(parts.values()))
            _add(sums, parts)
        return sums

    return step


def cached(loss_of: Callable[[Tensor, Any], Tensor], rows_per_chunk: int, name: str = "contrastive") -> Step:
    """Return a step for a masked-LM model with a loss over the CLS vectors of its whole batch.

    The gradient is that of the uncached step, for any chunk size: each masked token weighs the same,
    and the processes' gradients meet once, on the last chunk.

    Args:
        loss_of: the CLS vectors (rows, d) of this process and its batch to a scalar.
        rows_per_chunk: spans whose graph exists at one time.
        name: what the log calls that loss.
    """

    def step(model: nn.Module, micro_batches: Sequence[Any], accelerator: Accelerator) -> dict[str, Tensor]:
        (batch,) = micro_batches  # gradient caching stands in the place of accumulation
        share = share_of((batch.weight for batch in micro_batches), accelerator)
        batch = batch.to(accelerator.device)
        chunks = split_rows(batch, rows_per_chunk)
        sums: dict[str, Tensor] = {}

        def encode(chunk: Any) -> Tensor:
            return at_least_float32(model(chunk.input_ids, chunk.attention_mask, None).cls)

        def repair_and_pull(chunk: Any, gradient: Tensor) -> int:
            out = model(chunk.input_ids, chunk.attention_mask, chunk.labels)
            parts = {part: loss * share for part, loss in out.losses.items()}
            pull = surrogate(at_least_float32(out.cls), gradient[: len(out.cls)])
            accelerator.backward(sum(parts.values()) + pull)
            _add(sums, parts)
            return len(out.cls)

        cls, states = represent(encode, chunks, [accelerator.device])
        # without the gradient scaler: the second backward scales masked-LM losses and surrogate alike
        loss, (gradient,) = cache_gradients(lambda vectors: loss_of(vectors, batch), [cls])
        replay(
            chunks, states, gradient, repair_and_pull,
            lambda last: nullcontext() if last else accelerator.no_sync(model),
        )  # fmt: skip
        return sums | {name: loss}

    return step


def split_rows(batch: Any, rows: int) -> list[Any]:
    """Split a batch of tensors (rows, length) into batches of at most ``rows`` rows.

    A chunk's padding is cut to its longest row.
    """
    chunks = []
    for start in range(0, len(batch.input_ids), rows):
        stop = start + rows
        mask = None if batch.attention_mask is None else batch.attention_mask[start:stop]
        longest = batch.input_ids.shape[1] if mask is None else int(mask.sum(dim=1).max())
        if mask is not None:
            mask = None if bool(mask[:, :longest].all()) else mask[:, :longest]
        chunks.append(
            dataclasses.replace(
                batch,
                input_ids=batch.input_ids[start:stop, :longest],
                attention_mask=mask,
                labels=batch.labels[start:stop, :longest],
            )
        )
    return chunks


def share_of(weights: Iterable[float], accelerator: Accelerator) -> float:
    """Return what turns sums over the weight of this process's micro-batches into its part of the step's mean."""
    weight = total(sum(weights), accelerator.device)
    # DDP averages gradients over processes, so each adds its sum times their number
    return world_size() / max(weight, 1.0)


def _add(sums: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
    for name, part in parts.items():
        sums[name] = sums[name] + part.detach() if name in sums else part.detach()
