"""Texts drawn under a constraint, against the model's own distribution over all texts that it accepts."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from condenser.decoding.automaton import from_table
from condenser.decoding.constrained import constrained_search
from condenser.decoding.hypotheses import SearchSettings
from condenser.decoding.stochastic import Draw, Gumbels, top_down
from condenser.errors import RunFailed, UserError
from tests.condenser.decoding.tiny import END, WORDS, TextModel, every_text, random_next

HOLDS_5 = from_table({0: {word: int(word == 5) for word in WORDS}, 1: dict.fromkeys(WORDS, 1)}, [1], 0, 7)
ANY = from_table({0: dict.fromkeys(WORDS, 0)}, [0], 0, 7)
DRAWS = 4000


def settings_for(**others: int) -> SearchSettings:
    told = {"beam": 60, "n_best": 1, "max_length": 2} | others
    return SearchSettings(end=END, forbidden=(0, 1), **told)


@pytest.mark.parametrize("automaton", [HOLDS_5, ANY], ids=["holds 5", "any"])
def test_the_draws_are_the_models(automaton: object) -> None:
    """Each text that is accepted comes as often as the model writes it among those: no more than chance apart."""
    log_probs = random_next(7, seed=3)
    possible = {text: math.exp(total) for total, text in every_text(log_probs, 0, 2) if automaton.accepts(text)}  # type: ignore[attr-defined]
    total = sum(possible.values())
    model = TextModel(DRAWS, lambda number, text: log_probs(0, text))
    found = constrained_search(model, automaton, settings_for(n_best=2), draw=Draw(seeds=range(DRAWS)))  # type: ignore[arg-type]
    counts = Counter(one.hypotheses[0].tokens for one in found)
    assert set(counts) <= set(possible)
    for text, mass in possible.items():
        share = mass / total
        assert abs(counts[text] - DRAWS * share) < 4 * math.sqrt(DRAWS * share * (1 - share)) + 1
    # and the second is a draw from what is left
    likeliest = max(possible, key=possible.__getitem__)
    seconds = Counter(one.hypotheses[1].tokens for one in found if one.hypotheses[0].tokens == likeliest)
    left, drawn = total - possible[likeliest], seconds.total()
    assert likeliest not in seconds
    for text in possible.keys() - {likeliest}:
        share = possible[text] / left
        assert abs(seconds[text] - drawn * share) < 4 * math.sqrt(drawn * share * (1 - share)) + 1
    assert found[0].hypotheses[0].log_prob == pytest.approx(math.log(possible[found[0].hypotheses[0].tokens]))


def test_a_narrow_beam_still_meets_the_constraint_and_lengths() -> None:
    log_probs = random_next(7, seed=1)
    told = settings_for(beam=1, max_length=5, min_length=3)
    found = constrained_search(TextModel(50, log_probs), HOLDS_5, told, draw=Draw(seeds=range(50), top_k=1))
    assert all(5 in one.tokens and 3 <= len(one.tokens) <= 5 for outcome in found for one in outcome.hypotheses)
    assert all(outcome.hypotheses for outcome in found)


def test_what_else_is_in_the_batch_does_not_matter() -> None:
    log_probs = random_next(7, seed=2)
    seeds = [7, 8, 9]
    automata = [HOLDS_5, ANY, HOLDS_5]
    together = constrained_search(TextModel(3, log_probs), automata, settings_for(beam=2), draw=Draw(seeds=seeds))
    for number, seed in enumerate(seeds):
        alone = TextModel(1, lambda one, text, number=number: log_probs(number, text))
        (found,) = constrained_search(alone, automata[number], settings_for(beam=2), draw=Draw(seeds=[seed]))
        assert found == together[number]
    with pytest.raises(UserError, match="1 seeds for 3 inputs"):
        constrained_search(TextModel(3, log_probs), automata, settings_for(), draw=Draw(seeds=[1]))


def test_top_k_and_top_p_leave_the_most_probable_of_each_class() -> None:
    """Of the words but 5 only the likeliest; 5, which the constraint asks for, always."""
    log_probs = random_next(7, seed=4)
    for draw in (Draw(seeds=range(40), top_k=1), Draw(seeds=range(40), top_p=1e-9)):
        model = TextModel(40, lambda number, text: log_probs(0, text))
        for outcome in constrained_search(model, HOLDS_5, settings_for(max_length=3), draw=draw):
            (text,) = (one.tokens for one in outcome.hypotheses)
            held = text.index(5)
            for place, word in enumerate(text):
                others = [one for one in WORDS if one != 5 or place > held]
                assert word == 5 or word == max(others, key=lambda one: float(log_probs(0, text[:place])[one]))


@pytest.mark.parametrize(("told", "said"), [({"top_k": 0}, "top_k is 0"), ({"top_p": 5.0}, "top_p is 5.0")])
def test_numbers_out_of_range_are_refused(told: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Draw(seeds=[1], **told)  # type: ignore[arg-type]


def test_nan_is_told_and_proposals_are_refused() -> None:
    numbers = random_next(7)(0, ()).clone()
    numbers[END] = torch.nan
    for draw in (None, Draw(seeds=[1])):
        with pytest.raises(RunFailed, match="NaN"):
            constrained_search(TextModel(1, lambda number, text: numbers), ANY, settings_for(), draw=draw)
    with pytest.raises(UserError, match="exclude each other"):
        constrained_search(TextModel(1, random_next(7)), ANY, settings_for(), 3, Draw(seeds=[1]))


def test_the_best_continuation_has_its_parents_number() -> None:
    """Kool et al.: given that the highest is G, -log(exp(-G) - exp(-Z) + exp(-g)); here with plain floats."""
    parents, rows = torch.tensor([0.3, -2.0]).double(), torch.tensor([0, 0, 1])
    perturbed, others = torch.tensor([1.0, -1.0, -7.0]).double(), torch.tensor([0.5, -6.0]).double()
    found = top_down(parents, rows, perturbed, others)
    highest = [1.0, 1.0, -6.0]
    for number, row in enumerate(rows.tolist()):
        expected = -math.log(math.exp(-parents[row]) - math.exp(-highest[number]) + math.exp(-float(perturbed[number])))
        assert float(found[number]) == pytest.approx(expected)
    assert float(found[0]) == pytest.approx(0.3)
    nothing = top_down(parents[:1], rows[:2], torch.tensor([1.0, -torch.inf]).double(), others[:1])
    assert nothing.tolist() == [pytest.approx(0.3), -math.inf]


def test_each_input_has_its_own_row_of_numbers() -> None:
    noise, alone = Gumbels([4, 5]), Gumbels([5])
    first = noise.of(torch.tensor([0, 1, 1]))
    later = noise.of(torch.tensor([1]))
    own = alone.of(torch.tensor([0, 0, 0]))
    assert torch.cat([first[1:], later]).tolist() == own.tolist()
    many = Gumbels([1]).of(torch.zeros(20_000, dtype=torch.long)).numpy()
    assert abs(many.mean() - np.euler_gamma) < 0.03
