"""Which texts go through a model together, and where it computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from condenser.errors import UserError


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the rows of each batch, longest texts first, so that a batch too large for memory shows at once.

    Args:
        lengths: tokens per text.
        batch_tokens: most tokens in a batch once its rows are padded to the longest.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if rows and (len(rows) + 1) * lengths[rows[0]] > batch_tokens:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def padded_rows(token_ids: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return ``(input_ids, attention_mask)``, each (n, longest), padded at the right.

    The mask is None when all rows are of one length.
    """
    lengths = [len(row) for row in token_ids]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.tensor(token_ids, dtype=torch.long, device=device), None
    padded = torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in token_ids], dtype=torch.long)
    mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    return padded.to(device), mask.long().to(device)


def resolve_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``; raise UserError when there is no GPU to use."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU here", hint="use --device cpu, or install a CUDA build")
    return torch.device(name)
