"""Losses of bi-encoder training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from condenser.models.condenser import at_least_float32
from condenser.training.distributed import for_all_processes, gather_with_gradient, rank


def in_batch_softmax(
    queries: Tensor, passages: Tensor, targets: Tensor, excluded: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Make each query find its positive among all passages of the batch (Karpukhin et al. 2020, equation 2).

    ::

        L = -1/n sum_i log( exp(<q_i, p_i+> / T) / sum_j exp(<q_i, p_j> / T) )

    Args:
        queries: (n, d) vectors.
        passages: (m, d) vectors: positives and hard negatives of all queries, in any order.
        targets: (n,) int64, the row of each query's positive.
        excluded: (n, m) bool, True where a passage may not count as a negative (it is another
            known positive of the query, or the same passage again).
        temperature: T above.

    Returns:
        The mean over queries.
    """
    scores = at_least_float32(queries @ passages.T) / temperature
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return nn.functional.cross_entropy(scores, targets)


def shared_in_batch_softmax(
    queries: Tensor, passages: Tensor, targets: Tensor, passage_rows: Tensor, positives: Tensor, *, temperature: float
) -> Tensor:
    """`in_batch_softmax` with the passages of all processes as candidates.

    Args:
        queries: (n, d) vectors of this process.
        passages: (m, d) vectors of this process.
        targets: (n,) int64, rows within this process's passages.
        passage_rows: (m,) int64, which passage of the collection each row is.
        positives: (n, p) int64, the known positives of each query, padded with -1.
        temperature: see `in_batch_softmax`.

    Returns:
        The mean over the queries of all processes.
    """
    all_passages, all_rows = gather_with_gradient(passages), gather_with_gradient(passage_rows)
    own_targets = passage_rows[targets]
    is_positive = (positives[:, :, None] == all_rows[None, None, :]).any(dim=1)
    first = _rows_before_this_process(len(passages), passages.device) + targets
    is_target = torch.zeros_like(is_positive).scatter_(1, first[:, None], True)
    excluded = (is_positive | (own_targets[:, None] == all_rows[None, :])) & ~is_target
    loss = in_batch_softmax(
        gather_with_gradient(queries),
        all_passages,
        gather_with_gradient(first),
        gather_with_gradient(excluded),
        temperature=temperature,
    )
    return for_all_processes(loss)


def _rows_before_this_process(count: int, device: torch.device) -> int:
    counts = gather_with_gradient(torch.tensor([count], device=device))
    return int(counts[: rank()].sum())
