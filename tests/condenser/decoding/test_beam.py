"""Beam search against reference numbers, enumeration and its own promises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from condenser.decoding.beam import STOPPING, beam_search
from condenser.decoding.generators import CausalModel, Recurrent, SequenceToSequence
from condenser.decoding.hypotheses import SearchSettings, best_of_each, top_tokens
from condenser.errors import RunFailed, UserError
from tests.condenser.decoding.tiny import (
    END,
    TextModel,
    every_text,
    next_of_transformer,
    padded,
    random_next,
    tiny_transformer,
)
from tests.condenser.models.test_language_model import KINDS, reference
from tests.reference_numbers import golden_json

CASES = [
    (kind, rule, width)
    for kind, numbers in golden_json("electra_lm/lm/expected.json").items()
    for rule, widths in numbers["beam"].items()
    for width in widths
]


def reference_generator(kind: str, inputs: int) -> Recurrent:
    model = reference(kind)
    return Recurrent(model, model.initial_state(inputs), torch.ones(inputs, dtype=torch.long))


@pytest.mark.parametrize(("kind", "rule", "width"), CASES)
def test_reference_numbers(kind: str, rule: Any, width: str) -> None:
    wanted = golden_json("electra_lm/lm/expected.json")[kind]["beam"][rule][width]
    settings = SearchSettings(end=END, beam=int(width), max_length=5, forbidden=(0, 1))
    for found in beam_search(reference_generator(kind, 2), settings, rule):
        best = found.hypotheses[: len(wanted)]
        assert [[*one.tokens, END] for one in best] == [one["tokens"] for one in wanted]
        assert [one.log_prob for one in best] == pytest.approx([one["logprob"] for one in wanted], abs=1e-10)


def test_reference_of_the_length_normalised_best() -> None:
    for kind in KINDS:
        wanted = golden_json("electra_lm/lm/expected.json")[kind]["length_normalised_best_(logprob/len_incl_eos)"][0]
        settings = SearchSettings(end=END, beam=5000, n_best=1, max_length=5, length_exponent=1, forbidden=(0, 1))
        (found,) = beam_search(reference_generator(kind, 1), settings)
        (best,) = found.hypotheses
        assert [*best.tokens, END] == wanted["tokens"]
        assert best.score == pytest.approx(wanted["logprob"] / len(wanted["tokens"]))


@pytest.mark.parametrize("rule", STOPPING)
@pytest.mark.parametrize("exponent", [0.0, 0.7])
def test_a_wide_beam_finds_the_best_of_all_texts(rule: Any, exponent: float) -> None:
    """It also stops before it has seen them all: the bound lets no better one be missed."""
    log_probs = random_next(7)
    settings = SearchSettings(
        end=END, beam=400, n_best=5, max_length=4, min_length=1, length_exponent=exponent, forbidden=(0, 1)
    )
    for number, found in enumerate(beam_search(TextModel(2, log_probs), settings, rule)):
        scored = [
            (total / (len(text) + 1) ** exponent, text) for total, text in every_text(log_probs, number, 4) if text
        ]
        wanted = sorted(scored, key=lambda one: -one[0])[:5]
        assert [one.tokens for one in found.hypotheses] == [text for _, text in wanted]
        assert [one.score for one in found.hypotheses] == pytest.approx([score for score, _ in wanted], abs=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_transformers_are_searched_exactly(family: str) -> None:
    """A wide beam through cache and padding, on whichever side it is, equals every text, scored alone."""
    inputs = [[3, 4, 5], [6, 3, 3, 4, 5, 6]]
    model = tiny_transformer(family)
    generators = [
        (CausalModel if family == "gpt2" else SequenceToSequence)(model, *padded(inputs, side))
        for side in ("left", "right")
    ]
    settings = SearchSettings(end=END, beam=64, n_best=6, max_length=3, forbidden=(0, 1))
    left, right = (beam_search(generator, settings) for generator in generators)
    assert left == right
    alone = next_of_transformer(model, inputs)
    for number, found in enumerate(left):
        wanted = every_text(alone, number, 3)[:6]
        assert [one.tokens for one in found.hypotheses] == [text for _, text in wanted]
        assert [one.log_prob for one in found.hypotheses] == pytest.approx([total for total, _ in wanted], abs=1e-10)


@pytest.mark.parametrize("rule", STOPPING)
def test_what_else_is_in_the_batch_does_not_matter(rule: Any) -> None:
    log_probs = random_next(9)
    settings = SearchSettings(end=END, beam=3, max_length=6)
    together = beam_search(TextModel(4, log_probs), settings, rule)
    for order in ([2], [3, 0], [1, 3, 2]):
        chosen = lambda one, text, order=order: log_probs(order[one], text)  # noqa: E731
        apart = beam_search(TextModel(len(order), chosen), settings, rule)
        assert apart == [together[number] for number in order]


@pytest.mark.parametrize("rule", STOPPING)
def test_n_best_has_no_repeats(rule: Any) -> None:
    """Where a beam has room for more texts than there are, it returns those that there are."""
    one_word = torch.tensor([-torch.inf, -torch.inf, -0.7, -0.7])
    settings = SearchSettings(end=END, beam=4, max_length=2)
    (found,) = beam_search(TextModel(1, lambda one, text: one_word), settings, rule)
    assert sorted(one.tokens for one in found.hypotheses) == [(), (3,), (3, 3)]
    (four,) = beam_search(TextModel(1, random_next(5)), settings, rule)
    texts = [one.tokens for one in four.hypotheses]
    assert len(set(texts)) == len(texts) == 4


@pytest.mark.parametrize("rule", STOPPING)
def test_a_text_that_wants_to_end_at_once_has_its_least_length(rule: Any) -> None:
    eager = torch.tensor([-3.0, -4.0, -0.1])
    settings = SearchSettings(end=END, beam=4, max_length=3, min_length=1)
    (found,) = beam_search(TextModel(1, lambda one, text: eager), settings, rule)
    assert len(found.hypotheses) == 4
    assert found.hypotheses[0].tokens == (0,)
    assert all(one.tokens for one in found.hypotheses)


def test_what_the_rules_return_on_one_example() -> None:
    """The end is second best at first: one rule waits, one takes it, one passes it over."""
    table = {(): [-9, -0.5, -1.0], (1,): [-9, -1.0, -0.5], (1, 1): [-9, -0.1, -2.5]}

    def log_probs(number: int, text: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(table.get(text, [-9, -3.0, -0.1]), dtype=torch.float64)

    settings = SearchSettings(end=END, beam=1, max_length=3)
    best = {rule: beam_search(TextModel(1, log_probs), settings, rule)[0].hypotheses for rule in STOPPING}  # type: ignore[arg-type]
    assert {rule: [one.tokens for one in found] for rule, found in best.items()} == {
        "frozen": [(1,)],
        "pool": [()],
        "pool_hf": [(1,)],
    }


def test_equal_continuations_are_told_apart_by_their_place() -> None:
    flat = torch.full((6,), -1.0)
    settings = SearchSettings(end=5, beam=2, max_length=2, min_length=2)
    (found,) = beam_search(TextModel(1, lambda one, text: flat), settings)
    assert [one.tokens for one in found.hypotheses] == [(0, 0), (0, 1)]


def test_top_tokens_are_those_of_a_stable_sort() -> None:
    values = torch.randint(-3, 3, (50, 40), generator=torch.Generator().manual_seed(0)).float()
    for count in (1, 5, 39, 40, 60):
        found, places = top_tokens(values, count)
        wanted = values.sort(dim=1, descending=True, stable=True)
        assert torch.equal(found, wanted.values[:, :count])
        assert torch.equal(places, wanted.indices[:, :count])


def test_best_of_each_group() -> None:
    groups, scores = torch.tensor([1, 0, 1, 1, 0]), torch.tensor([2.0, 1.0, 3.0, 2.0, 1.0])
    assert best_of_each(groups, scores, 2).tolist() == [1, 4, 2, 0]


def test_nan_stops_the_search() -> None:
    bad = torch.tensor([0.0, torch.nan, -1.0, -1.0])
    with pytest.raises(RunFailed, match="NaN"):
        beam_search(TextModel(1, lambda one, text: bad), SearchSettings(end=END))


def test_settings_are_checked() -> None:
    for bad in ({"beam": 0}, {"n_best": 0}, {"min_length": 3, "max_length": 2}, {"length_exponent": -1.0}):
        with pytest.raises(UserError, match=next(iter(bad))):
            SearchSettings(end=END, **bad)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="stopping rule 'never'"):
        beam_search(TextModel(1, random_next(4)), SearchSettings(end=END), "never")  # type: ignore[arg-type]


def test_a_dead_end_is_told() -> None:
    """After the first word nothing at all is possible."""
    table = {(): torch.tensor([-1.0, -1.0, -torch.inf])}
    nothing = torch.full((3,), -torch.inf)
    (found,) = beam_search(TextModel(1, lambda one, text: table.get(text, nothing)), SearchSettings(end=END))
    assert found.hypotheses == []
    assert found.dead_end is not None and "after 1 tokens" in found.dead_end


def test_narrow_beams_are_those_of_a_search_written_out() -> None:
    """The pool rule, one continuation at a time, on random models with holes."""
    for seed, beam, exponent in itertools.product(range(6), (1, 2, 3), (0.0, 1.0)):
        log_probs = random_next(6, seed, holes=0.3)
        live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        bank: list[tuple[float, tuple[int, ...]]] = []
        for length in range(5):
            allowed = [END] if length == 4 else range(6)
            longer = [(total + float(log_probs(0, text)[one]), (*text, one)) for total, text in live for one in allowed]
            longer = sorted((one for one in longer if one[0] > -torch.inf), key=lambda one: -one[0])
            bank += [
                (total / len(text) ** exponent, text[:-1]) for total, text in longer[: 2 * beam] if text[-1] == END
            ]
            live = [one for one in longer if one[1][-1] != END][:beam]
        settings = SearchSettings(end=END, beam=beam, max_length=4, length_exponent=exponent)
        (found,) = beam_search(TextModel(1, log_probs), settings)
        wanted = sorted(bank, key=lambda one: -one[0])[:beam]
        assert [one.tokens for one in found.hypotheses] == [text for _, text in wanted]
        assert [one.score for one in found.hypotheses] == pytest.approx([score for score, _ in wanted], abs=1e-12)
