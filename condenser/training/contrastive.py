"""The contrastive loss over spans of the corpus (coCondenser)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from condenser.models.half import at_least_float32
from condenser.training.distributed import for_all_processes, gather_with_gradient


def span_contrastive_loss(cls: Tensor) -> Tensor:
    """Make two spans of one document find each other among all spans of the batch.

    Gao and Callan 2022 (coCondenser), equation 5, with dot products of raw CLS vectors::

        L_ij = -log exp(<h_i1, h_i2>) / sum over all other spans kl of exp(<h_ij, h_kl>)

    Args:
        cls: (2n, d) vectors of this process, rows 2k and 2k+1 from document k.

    Returns:
        The mean over the spans of all processes; 0 when there are none.
    """
    vectors = gather_with_gradient(cls)
    if not len(vectors):
        return cls.sum()
    scores = at_least_float32(vectors @ vectors.T)
    itself = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    partner = torch.arange(len(vectors), device=vectors.device) ^ 1
    return for_all_processes(nn.functional.cross_entropy(scores.masked_fill(itself, -torch.inf), partner))
