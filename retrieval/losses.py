"""Losses of training: against the other passages of a step, a teacher's scores, scored pairs; those of cross-encoders.

Those of bi-encoders are functions of vectors and of what a `PairBatch` says about them, so that they serve gradient
caching too, and means over the queries of all processes: each query weighs the same. Those of cross-encoders are
functions of scores, and give one number for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from condenser.errors import UserError
from condenser.models.half import at_least_float32
from condenser.training.distributed import for_all_processes, gather_with_gradient, rank

if TYPE_CHECKING:
    from retrieval.batches import PairBatch

LossOf = Callable[[Tensor, Tensor, "PairBatch"], Tensor]
"""Vectors of the queries (n, d) and of the passages (m, d) and their batch, to a scalar."""


def loss_named(
    name: str,
    *,
    temperature: float = 1.0,
    share_negatives: bool = True,
    lengths: Sequence[int] = (),
    normalize: bool = False,
) -> LossOf:
    """Return the loss that ``--loss`` names, as a function of vectors and their batch.

    Args:
        name: ``softmax``, ``margin_mse``, ``kl`` or ``regression``.
        temperature: dot products are divided by this; cosines (``regression``) are not.
        share_negatives: of ``softmax``, see `shared_in_batch_softmax`.
        lengths: shorter vectors that are to do alone as well, see `matryoshka`.
        normalize: vectors are of length 1, and shorter ones are to be.

    Raises:
        UserError: no loss of this name; when called, scores that the batch does not have.
    """
    losses: dict[str, LossOf] = {
        "softmax": lambda queries, passages, batch: shared_in_batch_softmax(
            queries,
            passages,
            batch.targets,
            batch.passage_rows,
            batch.positives,
            temperature=temperature,
            share_negatives=share_negatives,
        ),
        "margin_mse": lambda queries, passages, batch: margin_mse(
            queries, passages, batch.targets, batch.owners, _scores(batch), temperature=temperature
        ),
        "kl": lambda queries, passages, batch: kl_distillation(
            queries, passages, batch.owners, _scores(batch), temperature=temperature
        ),
        "regression": lambda queries, passages, batch: cosine_regression(queries, passages, _scores(batch)),
    }
    if name not in losses:
        raise UserError(f"no loss {name!r}", hint=f"losses: {', '.join(losses)}")
    return matryoshka(losses[name], lengths, normalize=normalize) if lengths else losses[name]


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
    return _in_batch_losses(queries, passages, targets, excluded, temperature).mean()


def in_batch_correct(queries: Tensor, passages: Tensor, targets: Tensor) -> int:
    """Count the queries that score their positive above all other passages of the batch.

    Args are those of `in_batch_softmax`. Of equal scores the first passage wins, as in DPR's training log.
    """
    scores = at_least_float32(queries) @ at_least_float32(passages).T
    own = scores.gather(1, targets[:, None])
    earlier = torch.arange(len(passages), device=scores.device)[None, :] < targets[:, None]
    beaten = (scores > own) | (earlier & (scores == own))
    return int((~beaten.any(dim=1)).sum())


def shared_in_batch_softmax(
    queries: Tensor,
    passages: Tensor,
    targets: Tensor,
    passage_rows: Tensor,
    positives: Tensor,
    *,
    temperature: float,
    share_negatives: bool = True,
) -> Tensor:
    """`in_batch_softmax` over several processes, without the query's other positives as candidates.

    Args:
        queries: (n, d) vectors of this process.
        passages: (m, d) vectors of this process.
        targets: (n,) int64, rows within this process's passages.
        passage_rows: (m,) int64, which passage of the collection each row is.
        positives: (n, p) int64, the known positives of each query, padded with -1.
        temperature: see `in_batch_softmax`.
        share_negatives: the passages of all processes are candidates; else only those of the query's own.

    Returns:
        The mean over the queries of all processes.
    """
    if not share_negatives:
        excluded = _no_negatives(targets, passage_rows[targets], positives, passage_rows)
        return _mean_over_all(_in_batch_losses(queries, passages, targets, excluded, temperature))
    all_passages, all_rows = gather_with_gradient(passages), gather_with_gradient(passage_rows)
    all_targets = _rows_before_this_process(len(passages), passages.device) + targets
    excluded = _no_negatives(all_targets, passage_rows[targets], positives, all_rows)
    # the loss of every query on every process: a passage learns from the queries of all of them
    loss = in_batch_softmax(
        gather_with_gradient(queries),
        all_passages,
        gather_with_gradient(all_targets),
        gather_with_gradient(excluded),
        temperature=temperature,
    )
    return for_all_processes(loss)


def margin_mse(
    queries: Tensor, passages: Tensor, targets: Tensor, owners: Tensor, scores: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Give each query's positive a teacher's lead over each of its negatives (Hofstätter et al. 2020).

    With the student's score ``s(q, p) = <q, p> / T`` and the teacher's ``t(q, p)``::

        L = 1/n sum_i 1/k_i sum_j ( (s(q_i, p_i+) - s(q_i, p_ij-)) - (t(q_i, p_i+) - t(q_i, p_ij-)) )^2

    Args:
        queries: (n, d) vectors.
        passages: (m, d) vectors.
        targets: (n,) int64, the row of each query's positive.
        owners: (m,) int64, the query whose passage each row is.
        scores: (m,) a teacher's score of each passage for its own query.
        temperature: T above.

    Returns:
        The mean over the queries of all processes; a query without negatives counts as 0.
    """
    student = _own_scores(queries, passages, owners) / temperature
    differences = student - scores.to(student)
    # the positive's own lead is 0 on both sides, so that it adds nothing to the sum
    squares = (differences[targets][owners] - differences).square()
    sums = squares.new_zeros(len(queries)).index_add(0, owners, squares)
    negatives = torch.bincount(owners, minlength=len(queries)) - 1
    return _mean_over_all(sums / negatives.clamp(min=1))


def kl_distillation(
    queries: Tensor,
    passages: Tensor,
    owners: Tensor,
    scores: Tensor,
    *,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """Make each query prefer its own passages in a teacher's proportions (Hinton et al. 2015; Lin et al. 2020).

    With both softmaxes over the passages ``p`` of query ``i`` alone::

        L = 1/n sum_i sum_p t_ip log( t_ip / s_ip ),  s_i = softmax(<q_i, p> / T),  t_i = softmax(scores / T')

    The temperatures are two because a cosine and a cross-encoder's score are of different widths.

    Args:
        queries: (n, d) vectors.
        passages: (m, d) vectors.
        owners: (m,) int64, the query whose passage each row is.
        scores: (m,) a teacher's score of each passage for its own query.
        temperature: T above.
        teacher_temperature: T' above.

    Returns:
        The mean over the queries of all processes.
    """
    own = _own_scores(queries, passages, owners)
    student = _log_softmax_of_each(own / temperature, owners, len(queries))
    teacher = _log_softmax_of_each(scores.to(own) / teacher_temperature, owners, len(queries))
    divergence = teacher.exp() * (teacher - student)
    return _mean_over_all(divergence.new_zeros(len(queries)).index_add(0, owners, divergence))


def cosine_regression(first: Tensor, second: Tensor, scores: Tensor) -> Tensor:
    """Give each pair of texts the cosine that people gave it (Reimers and Gurevych 2019, section 3).

    ::

        L = 1/n sum_i ( cos(a_i, b_i) - score_i )^2

    Args:
        first: (n, d) vectors, ``a`` above.
        second: (n, d) vectors, ``b`` above.
        scores: (n,) from 0 to 1.

    Returns:
        The mean over the pairs of all processes.
    """
    cosines = nn.functional.cosine_similarity(at_least_float32(first), at_least_float32(second), dim=1)
    return _mean_over_all((cosines - scores.to(cosines)).square())


def localized_contrastive(scores: Tensor, targets: Tensor, owners: Tensor) -> Tensor:
    """Make a cross-encoder prefer each query's positive to its own negatives (LCE; Gao, Dai and Callan 2021).

    ::

        L_i = -log( exp(s(q_i, p_i+)) / sum_p exp(s(q_i, p)) ),  p the passages of query i alone

    Args:
        scores: (m,) of pairs.
        targets: (n,) int64, the row of each query's positive.
        owners: (m,) int64, the query of each pair.

    Returns:
        (n,) the loss of each query.
    """
    return -_log_softmax_of_each(scores, owners, len(targets))[targets]


def pairwise_binary(scores: Tensor, targets: Tensor, owners: Tensor) -> Tensor:
    """Make a cross-encoder tell right pairs from wrong ones: cross entropy of ``sigmoid(s)`` (Nogueira and Cho 2019).

    Args are those of `localized_contrastive`.

    Returns:
        (n,) for each query the mean over its pairs.
    """
    right = torch.zeros_like(scores).index_fill(0, targets, 1.0)
    losses = nn.functional.binary_cross_entropy_with_logits(scores, right, reduction="none")
    counts = torch.bincount(owners, minlength=len(targets))
    return losses.new_zeros(len(targets)).index_add(0, owners, losses) / counts


def matryoshka(loss_of: LossOf, lengths: Sequence[int], *, normalize: bool) -> LossOf:
    """Return the sum of a loss over whole vectors and over their beginnings (Kusupati et al. 2022, equation 1).

    ::

        L(Q, P) = loss(Q, P) + sum_m loss(Q[:, :m], P[:, :m])

    Args:
        loss_of: the loss.
        lengths: each m above.
        normalize: scale the beginnings to length 1, as whole vectors are.

    Raises:
        UserError: when called with vectors that are not longer than all ``lengths``.
    """

    def beginning(vectors: Tensor, length: int) -> Tensor:
        return nn.functional.normalize(vectors[:, :length], dim=1) if normalize else vectors[:, :length]

    def summed(queries: Tensor, passages: Tensor, batch: PairBatch) -> Tensor:
        if max(lengths) >= queries.shape[1]:
            raise UserError(f"--matryoshka {max(lengths)} is not shorter than vectors of {queries.shape[1]} numbers")
        loss = loss_of(queries, passages, batch)
        for length in lengths:
            loss = loss + loss_of(beginning(queries, length), beginning(passages, length), batch)
        return loss

    return summed


def _in_batch_losses(
    queries: Tensor, passages: Tensor, targets: Tensor, excluded: Tensor | None, temperature: float
) -> Tensor:
    """Return the loss (n,) of each query; see `in_batch_softmax`."""
    # half precision would round a score of 14 to 1/128, and the temperature makes more of it
    scores = at_least_float32(queries) @ at_least_float32(passages).T / temperature
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return nn.functional.cross_entropy(scores, targets, reduction="none")


def _no_negatives(targets: Tensor, target_rows: Tensor, positives: Tensor, candidates: Tensor) -> Tensor:
    """Return where (n, m) a candidate is a positive of the query, but for the target's own place."""
    excluded = target_rows[:, None] == candidates[None, :]
    for column in positives.T:  # one at a time: n x m is large enough
        excluded |= column[:, None] == candidates[None, :]
    return excluded.scatter(1, targets[:, None], False)


def _own_scores(queries: Tensor, passages: Tensor, owners: Tensor) -> Tensor:
    """Return the dot product (m,) of each passage with its own query."""
    return (at_least_float32(queries)[owners] * at_least_float32(passages)).sum(dim=1)


def _log_softmax_of_each(scores: Tensor, owners: Tensor, count: int) -> Tensor:
    """Return the log softmax (m,) of scores among those of the same owner."""
    highest = scores.new_full((count,), -torch.inf).scatter_reduce(0, owners, scores.detach(), "amax")
    shifted = scores - highest[owners]
    return shifted - scores.new_zeros(count).index_add(0, owners, shifted.exp()).log()[owners]


def _mean_over_all(losses: Tensor) -> Tensor:
    """Return the mean over the queries of all processes from the losses (n,) of this one's."""
    return for_all_processes(gather_with_gradient(losses).mean())


def _rows_before_this_process(count: int, device: torch.device) -> int:
    counts = gather_with_gradient(torch.tensor([count], device=device))
    return int(counts[: rank()].sum())


def _scores(batch: PairBatch) -> Tensor:
    if batch.scores is None:
        raise UserError("this loss needs scores, and the training data has none", hint="--loss softmax needs none")
    return batch.scores
