"""Losses against values worked out by hand, naive sums, sentence-transformers, and two processes against one."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from condenser.errors import UserError
from condenser.training.gradcache import cache_gradients
from retrieval.batches import PairBatch
from retrieval.losses import (
    cosine_regression,
    in_batch_correct,
    in_batch_softmax,
    kl_distillation,
    loss_named,
    shared_in_batch_softmax,
)
from tests.condenser.training.test_distributed import join, leave, run_in_two

NAMES = ["softmax", "margin_mse", "kl", "regression"]


@pytest.mark.parametrize("negatives", [0, 1, 2, 7])
def test_equal_vectors_give_the_log_of_the_candidates(cases: Path, negatives: int) -> None:
    """Case B23: in-batch negatives count even without hard negatives."""
    expected = json.loads((cases / "23" / "expected.json").read_text())["loss_by_n_neg"][str(negatives)]
    queries, passages = torch.ones(4, 3), torch.ones(4 * (1 + negatives), 3)
    loss = in_batch_softmax(queries, passages, torch.arange(4) * (1 + negatives))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_equals_the_naive_sum_with_temperature_and_exclusions() -> None:
    torch.manual_seed(0)
    queries, passages = torch.randn(3, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    targets, excluded = torch.tensor([0, 2, 4]), torch.zeros(3, 6, dtype=torch.bool)
    excluded[0, 3] = excluded[2, 1] = True
    naive = 0.0
    for i in range(3):
        scores = [float(queries[i] @ passages[j]) / 0.3 for j in range(6) if not excluded[i, j]]
        naive -= float(queries[i] @ passages[targets[i]]) / 0.3 - math.log(sum(math.exp(s) for s in scores))
    loss = in_batch_softmax(queries, passages, targets, excluded, temperature=0.3)
    assert loss.item() == pytest.approx(naive / 3, rel=1e-12)


def test_the_same_passage_and_known_positives_are_no_negatives() -> None:
    queries = torch.eye(3, 4, dtype=torch.float64)
    passages = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([7, 8, 7, 9])  # the third query's positive is the first's again
    positives = torch.tensor([[7, 8], [8, -1], [7, -1]])
    loss = shared_in_batch_softmax(queries, passages, torch.tensor([0, 1, 2]), rows, positives, temperature=1.0)
    scores = queries @ passages.T
    allowed = [[0, 3], [0, 1, 2, 3], [1, 2, 3]]
    naive = sum(torch.logsumexp(scores[i, allowed[i]], 0) - scores[i, i] for i in range(3)) / 3
    assert loss.item() == pytest.approx(naive.item(), rel=1e-12)


def test_candidates_of_the_own_process_only_leave_out_known_positives_too() -> None:
    torch.manual_seed(2)
    queries, passages = torch.randn(2, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    rows, positives = torch.tensor([5, 9, 6, 5]), torch.tensor([[5, -1], [6, 9]])
    loss = shared_in_batch_softmax(
        queries, passages, torch.tensor([0, 2]), rows, positives, temperature=0.5, share_negatives=False
    )
    scores = queries @ passages.T / 0.5
    allowed = [[0, 1, 2], [0, 2, 3]]
    naive = sum(torch.logsumexp(scores[i, allowed[i]], 0) - scores[i, 2 * i] for i in range(2)) / 2
    assert loss.item() == pytest.approx(naive.item(), rel=1e-12)


def test_of_equal_scores_the_first_passage_wins() -> None:
    queries, passages = torch.ones(2, 1), torch.tensor([[1.0], [2.0], [2.0]])
    assert in_batch_correct(queries, passages, torch.tensor([1, 2])) == 1
    assert in_batch_correct(queries, passages, torch.tensor([0, 1])) == 1


def test_half_precision_vectors_are_scored_in_float32() -> None:
    queries, passages = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (4, 8))
    targets = torch.arange(4) * 2
    exact = in_batch_softmax(queries.double(), passages.double(), targets, temperature=0.05)
    assert in_batch_softmax(queries, passages, targets, temperature=0.05).item() == pytest.approx(
        exact.item(), rel=1e-5
    )


def ragged(seed: int = 0, counts: tuple[int, ...] = (3, 2, 4), first: int = 0) -> tuple[Tensor, Tensor, PairBatch]:
    """Return vectors and a batch in which each query has so many passages, with a teacher's scores."""
    generator = torch.Generator().manual_seed(seed)
    n, m = len(counts), sum(counts)
    queries, passages = (torch.randn(k, 6, dtype=torch.float64, generator=generator) for k in (n, m))
    targets = torch.tensor([0, *torch.tensor(counts).cumsum(0)[:-1].tolist()])
    rows = first + torch.arange(m)
    scores = torch.randn(m, generator=generator) * 3
    return queries, passages, PairBatch([[]] * n, [[]] * m, targets, rows, rows[targets][:, None], scores)


def test_margins_equal_the_naive_sum() -> None:
    queries, passages, batch = ragged()
    naive, first = 0.0, 0
    for i, count in enumerate((3, 2, 4)):
        student = [float(queries[i] @ passages[j]) / 0.5 for j in range(first, first + count)]
        teacher = batch.scores[first : first + count].tolist()
        gaps = [(student[0] - student[k] - teacher[0] + teacher[k]) ** 2 for k in range(1, count)]
        naive += sum(gaps) / len(gaps) / 3
        first += count
    assert loss_named("margin_mse", temperature=0.5)(queries, passages, batch).item() == pytest.approx(naive, rel=1e-6)


def test_divergences_equal_the_naive_sum() -> None:
    queries, passages, batch = ragged()
    naive, first = 0.0, 0
    for i, count in enumerate((3, 2, 4)):
        own = slice(first, first + count)
        student = torch.softmax(passages[own] @ queries[i] / 0.5, 0)
        teacher = torch.softmax(batch.scores[own].double() / 2, 0)
        naive += float((teacher * (teacher / student).log()).sum()) / 3
        first += count
    loss = kl_distillation(queries, passages, batch.owners, batch.scores, temperature=0.5, teacher_temperature=2)
    assert loss.item() == pytest.approx(naive, rel=1e-12)
    perfect = torch.cat([passages[batch.owners == i] @ queries[i] for i in range(3)])
    assert loss_named("kl")(queries, passages, dataclasses.replace(batch, scores=perfect)).item() == pytest.approx(0)


def test_extreme_scores_give_numbers() -> None:
    queries, passages, batch = ragged()
    queries.requires_grad_()
    far = dataclasses.replace(batch, scores=batch.scores * 1e4)
    loss = loss_named("kl", temperature=1e-3)(queries, passages, far)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(queries.grad).all()


def test_distillation_equals_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, DistillKLDivLoss, MarginMSELoss

    queries, passages, batch = ragged(counts=(3, 3, 3, 3))
    columns, labels = [queries, *passages.view(4, 3, 6).unbind(1)], batch.scores.double().view(4, 3)
    ours = loss_named("margin_mse")(queries, passages, batch)
    theirs = MarginMSELoss(None).compute_loss_from_embeddings(columns, labels)  # type: ignore[arg-type]
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)
    ours = loss_named("kl")(queries, passages, batch)
    theirs = DistillKLDivLoss(None).compute_loss_from_embeddings(columns, labels)  # type: ignore[arg-type]
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)
    ours = cosine_regression(queries, columns[1], labels[:, 0])
    theirs = CosineSimilarityLoss(None).compute_loss_from_embeddings(columns[:2], labels[:, 0])  # type: ignore[arg-type]
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)


def test_the_cosine_of_a_pair_meets_its_score() -> None:
    first, second = torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([[5.0, 0.0], [0.0, 2.0]])
    assert cosine_regression(first, second, torch.tensor([1.0, 0.0])).item() == pytest.approx(0)
    assert cosine_regression(first, second, torch.tensor([0.5, 1.0])).item() == pytest.approx((0.25 + 1) / 2)


@pytest.mark.parametrize("normalize", [False, True])
def test_shorter_vectors_add_their_losses(normalize: bool) -> None:
    queries, passages, batch = ragged()
    naive = loss_named("softmax")(queries, passages, batch)
    for length in (4, 2):
        short = [vectors[:, :length] for vectors in (queries, passages)]
        if normalize:
            short = [vectors / vectors.norm(dim=1, keepdim=True) for vectors in short]
        naive = naive + loss_named("softmax")(*short, batch)
    loss = loss_named("softmax", lengths=(4, 2), normalize=normalize)(queries, passages, batch)
    assert loss.item() == pytest.approx(naive.item(), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_losses_serve_gradient_caching(name: str) -> None:
    """They are called on vectors without a graph behind them, and give each its gradient."""
    queries, passages, batch = ragged(counts=(1, 1, 1) if name == "regression" else (3, 2, 4))
    loss_of = loss_named(name, lengths=(2,))
    loss, gradients = cache_gradients(lambda q, p: loss_of(q, p, batch), [queries, passages])
    leaves = [vectors.clone().requires_grad_() for vectors in (queries, passages)]
    assert torch.autograd.gradcheck(lambda q, p: loss_of(q, p, batch), leaves)
    expected = torch.autograd.grad(loss_of(*leaves, batch), leaves)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    assert loss.item() > 0 and all(gradient.abs().sum() > 0 for gradient in gradients)


def test_what_does_not_fit_together_is_one_line() -> None:
    queries, passages, batch = ragged()
    with pytest.raises(UserError, match=r"no loss 'hinge' \(losses: softmax, margin_mse, kl, regression\)"):
        loss_named("hinge")
    with pytest.raises(UserError, match=r"needs scores, and the training data has none \(--loss softmax needs none\)"):
        loss_named("kl")(queries, passages, dataclasses.replace(batch, scores=None))
    with pytest.raises(UserError, match="--matryoshka 6 is not shorter than vectors of 6 numbers"):
        loss_named("softmax", lengths=(2, 6))(queries, passages, batch)


# Each process its own number of passages, and of queries.
SHARES = {"regression": [(1, 1), (1, 1, 1)]}
OTHERS = [(3, 2), (1, 4, 2)]


def share_of(name: str, number: int) -> tuple[Tensor, Tensor, PairBatch]:
    shares = SHARES.get(name, OTHERS)
    return ragged(10 + number, shares[number], first=number * sum(shares[0]))


def loss_in_a_process(number: int, place: str, folder: Path) -> None:
    accelerator = join(number, place)
    found = {}
    for name in NAMES:
        queries, passages, batch = share_of(name, number)
        loss = loss_named(name, temperature=0.7)(queries.requires_grad_(), passages.requires_grad_(), batch)
        loss.backward()
        found |= {name: loss.detach(), f"{name}.q": queries.grad, f"{name}.p": passages.grad}
    save_file(found, folder / f"{number}.safetensors")
    leave(accelerator)


@pytest.mark.slow
def test_two_processes_equal_one_that_has_all_queries(tmp_path: Path) -> None:
    """Each query weighs the same, also where one process has more; DDP halves the gradients."""
    run_in_two(loss_in_a_process, tmp_path, tmp_path)
    halves = [load_file(tmp_path / f"{number}.safetensors") for number in (0, 1)]
    for name in NAMES:
        shares = [share_of(name, number) for number in (0, 1)]
        queries, passages = (torch.cat([share[i] for share in shares]).requires_grad_() for i in (0, 1))
        first, second = (share[2] for share in shares)
        whole = PairBatch(
            first.queries + second.queries,
            first.passages + second.passages,
            torch.cat([first.targets, len(first.passages) + second.targets]),
            *(torch.cat([getattr(one, field) for one in (first, second)]) for field in ("passage_rows", "positives")),
            scores=torch.cat([first.scores, second.scores]),
        )
        loss = loss_named(name, temperature=0.7)(queries, passages, whole)
        loss.backward()
        for half in halves:
            assert half[name].item() == pytest.approx(loss.item(), rel=1e-12), name
        for key, leaf in (("q", queries), ("p", passages)):
            both = torch.cat([half[f"{name}.{key}"] for half in halves]) / 2
            torch.testing.assert_close(both, leaf.grad, rtol=1e-10, atol=1e-12, msg=name)
