"""Texts drawn at random by a beam search: stochastic beam search (Kool et al. 2019).

To each text belongs its log-probability and a Gumbel number; of all texts that a model knows, the one with the highest
sum is a draw from the model, and the k highest are k draws without replacement. The sum of the best text behind a
beginning is known before the text is: so a beam search can look for the highest sums. It finds them surely if nothing
is cut; see `condenser.decoding.constrained` for what cuts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from condenser.decoding.sampling import check_cuts


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How texts are drawn that an automaton accepts.

    Attributes:
        seeds: one for each input: what else is in the batch does not matter.
        top_k: of the tokens between which the automaton makes no difference, the so many most probable ones only;
            None: all of them.
        top_p: of these the fewest that together have at least this share of their probability; None: all of them.

    Raises:
        UserError: a number out of its range.
    """

    seeds: Sequence[int]
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_cuts(self.top_k, self.top_p)


class Gumbels:
    """Numbers of the standard Gumbel distribution, a row of them for each input by its own seed."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [np.random.Generator(np.random.Philox(seed)) for seed in seeds]

    def of(self, owners: Tensor) -> Tensor:
        """Return the next number of each of these inputs (n,), ascending: float64."""
        counts = np.bincount(owners.cpu().numpy(), minlength=len(self._generators))
        drawn = [one.gumbel(size=count) for one, count in zip(self._generators, counts, strict=True) if count]
        return torch.from_numpy(np.concatenate([*drawn, np.empty(0)])).to(owners.device)


def top_down(parents: Tensor, rows: Tensor, perturbed: Tensor, others: Tensor) -> Tensor:
    """Return the sums (n,) of continuations such that the highest of each hypothesis is the hypothesis's own.

    -log(exp(-G) - exp(-Z) + exp(-g)) with G of the hypothesis, g of a continuation drawn by itself and Z the highest
    g of all continuations (their equation 8, in the form of their appendix B.3).

    Args:
        parents: sums G of hypotheses (rows,).
        rows: the hypothesis of each continuation (n,).
        perturbed: g of each, its log-probability and a Gumbel number (n,).
        others: the highest g of the continuations that are not among these (rows,).
    """
    highest = others.scatter_reduce(0, rows, perturbed, "amax")
    below = parents[rows] - perturbed + _log1mexp(perturbed - highest[rows])
    return parents[rows] - below.relu() - torch.log1p(torch.exp(-below.abs()))


def rest(rows: Tensor, log_probs: Tensor, count: int) -> Tensor:
    """Return the log-probability (count,) of what each hypothesis has beside these continuations (n,)."""
    known = log_probs.new_zeros(count).index_add(0, rows, log_probs.exp())
    return torch.log((1 - known).clamp(min=0))


def _log1mexp(numbers: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of numbers up to 0."""
    return torch.where(numbers > -0.693, torch.log(-torch.expm1(numbers)), torch.log1p(-torch.exp(numbers)))
