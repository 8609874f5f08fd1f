"""What crosses processes: gathered vectors that keep their gradient, and sums."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's global number, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_with_gradient(rows: Tensor) -> Tensor:
    """Stack the rows (n_r, ...) of all processes along the first axis, in order of global rank.

    Processes may hold different numbers of rows. The gathered copies carry no gradient, so the own
    slice is put back live. A loss over all rows then gives each process the gradient of its own
    rows; times the number of processes (`for_all_processes`) it equals, after DDP's averaging, the
    gradient of one process with the whole batch.
    """
    if world_size() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    longest = int(max(counts))
    # all_gather wants equal shapes
    padded = torch.cat([rows.detach(), rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    slices = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(slices, padded.contiguous())
    parts = [part[: int(count)] for part, count in zip(slices, counts, strict=True)]
    parts[rank()] = rows
    return torch.cat(parts)


def for_all_processes(loss: Tensor) -> Tensor:
    """Return a loss over the rows of all processes with its gradient times their number, its value unchanged.

    DDP will divide the gradient by that number, see `gather_with_gradient`.
    """
    if world_size() == 1:
        return loss
    return loss * world_size() - (loss * (world_size() - 1)).detach()


def total(value: float, device: torch.device) -> float:
    """Add a number up over all processes."""
    if world_size() == 1:
        return value
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return float(tensor)
