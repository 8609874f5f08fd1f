"""The pointer into the passage, against its formula with loops over words and places."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from condenser.models.pointer import Pointer, all_with_copies, first_places, with_copies

# two passages of four tokens; the first says word 4 twice, the second is padded and has a special token (1) in front
IDS = torch.tensor([[4, 2, 4, 0], [1, 3, 5, 0]])
BARRED = torch.tensor([[False, False, False, False], [True, False, False, True]])


def pointed() -> tuple[Pointer, Tensor, Tensor]:
    """Return a pointer, features of one step, and keys."""
    torch.manual_seed(3)
    pointer = Pointer(width=5, states=6)
    return pointer, torch.randn(2, 1, 5), pointer.key(torch.randn(2, 4, 6))


def test_it_is_its_formula() -> None:
    """g P(w) + (1 - g) sum of a_s over the places of w; the token 0 of the first passage is a word like others."""
    pointer, features, keys = pointed()
    read = torch.tensor([[4], [3]])  # behind 4 comes 2 or 0, behind 3 comes 5
    written = torch.randn(2, 6).log_softmax(-1)
    with torch.no_grad():
        found = all_with_copies(written, pointer(features, read, keys, IDS, BARRED), IDS, first_places(IDS)).exp()
        for row in range(2):
            scores = {}
            for place in (one for one in range(4) if not BARRED[row, one]):
                score = float(pointer.query(features[row, 0]) @ keys[row, place]) / math.sqrt(128)
                if place and IDS[row, place - 1] == read[row, 0]:
                    score += float(pointer.next(features[row, 0]))
                scores[place] = math.exp(score)
            gate = float(torch.sigmoid(pointer.gate(features[row, 0])))
            expected = [gate * math.exp(float(one)) for one in written[row]]
            for place, score in scores.items():
                expected[int(IDS[row, place])] += (1 - gate) * score / sum(scores.values())
            torch.testing.assert_close(found[row], torch.tensor(expected), rtol=1e-5, atol=1e-7)
            assert float(found[row].sum()) == pytest.approx(1, rel=1e-5)


def test_first_places() -> None:
    assert first_places(torch.tensor([[7, 8, 7, 8, 9], [0, 0, 0, 1, 0]])).tolist() == [[0, 1, 0, 1, 4], [0, 0, 0, 3, 0]]


def test_the_places_of_a_step_are_those_of_the_whole() -> None:
    pointer, _, keys = pointed()
    features, read = torch.randn(2, 3, 5), torch.tensor([[1, 4, 2], [1, 3, 5]])
    whole = pointer(features, read, keys, IDS, BARRED)
    for step in range(3):
        alone = pointer(features[:, step : step + 1], read[:, step : step + 1], keys, IDS, BARRED)
        torch.testing.assert_close(alone.weights[:, 0], whole.weights[:, step])
        torch.testing.assert_close(alone.gate[:, 0], whole.gate[:, step])


def test_without_a_place_to_copy_from_the_vocabulary_has_it_all() -> None:
    pointer, features, keys = pointed()
    copies = pointer(features, torch.tensor([[4], [3]]), keys, IDS, torch.ones(2, 4, dtype=torch.bool))
    written = torch.randn(2, 6).log_softmax(-1).requires_grad_()
    found = all_with_copies(written, copies, IDS, first_places(IDS))
    torch.testing.assert_close(found, written)
    found.sum().backward()
    slopes = [written.grad, *(one.grad for one in pointer.parameters())]
    assert all(bool(one.isfinite().all()) for one in slopes if one is not None)


def test_a_word_that_is_not_there_has_a_finite_loss_and_slope() -> None:
    gate = torch.tensor([-50.0, 0.0], requires_grad=True)
    log_prob = with_copies(torch.tensor([-3.0, -3.0]), gate, torch.zeros(2))
    assert log_prob[1].item() == pytest.approx(-3 - math.log(2))
    log_prob.sum().backward()
    assert gate.grad is not None and bool(gate.grad.isfinite().all())
    assert float(gate.grad[0]) > 0  # away from copying


def test_before_training_a_word_goes_on_as_it_does_in_the_passage() -> None:
    pointer, features, _ = pointed()
    ids = torch.tensor([[1, 7, 8, 9, 8, 5]])
    none = torch.zeros(1, 6, dtype=torch.bool)
    for read, following in ((7, {2}), (8, {3, 5}), (9, {4})):
        weights = pointer(features[:1], torch.tensor([[read]]), torch.zeros(1, 6, 128), ids, none).weights[0, 0]
        assert set(weights.topk(len(following)).indices.tolist()) == following
