"""The in-batch softmax against values worked out by hand and by the naive sum."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from retrieval.losses import in_batch_softmax, shared_in_batch_softmax


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


def test_equals_the_reference_on_its_scores(golden: Path) -> None:
    reference = json.loads((golden / "biencoder" / "tevatron_v2_expected.json").read_text())
    tensors = load_file(golden / "biencoder" / "tevatron_v1_tensors_f64.safetensors")
    queries, passages = tensors["v1_tied.q_reps"], tensors["v1_tied.p_reps"]
    for normalize, temperature in ((0, 1.0), (1, 0.02)):
        if normalize:
            queries, passages = (torch.nn.functional.normalize(vectors, dim=1) for vectors in (queries, passages))
        expected = reference["cases"][f"cls_norm{normalize}_T{temperature}"]["float64"]["loss"]
        loss = in_batch_softmax(queries, passages, torch.tensor([0, 4, 8]), temperature=temperature)
        assert loss.item() == pytest.approx(expected, rel=1e-10)


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
