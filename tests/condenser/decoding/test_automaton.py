"""Automata against sets of texts, written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from condenser.decoding import automaton as module
from condenser.decoding.automaton import Automaton, determinised, from_table, smallest
from condenser.errors import UserError

VOCABULARY = 6  # token 0 is outside the alphabet, 3 and 4 always act alike
TEXTS = [text for length in range(5) for text in itertools.product(range(1, VOCABULARY), repeat=length)]


def random_automaton(seed: int) -> Automaton:
    drawn = np.random.default_rng(seed)
    states = int(drawn.integers(1, 6))
    return smallest(
        np.array([-1, 0, 1, 2, 2, 3]), drawn.integers(-1, states, (states, 5)), drawn.random(states) < 0.4, states - 1
    )


def language(automaton: Automaton) -> set[tuple[int, ...]]:
    return {text for text in TEXTS if automaton.accepts(text)}


def same(one: Automaton, other: Automaton) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("classes", "moves", "accepting"))


@pytest.mark.parametrize("seed", range(40))
def test_algebra(seed: int) -> None:
    one, other = random_automaton(seed), random_automaton(1000 + seed)
    assert language(one.intersection(other)) == language(one) & language(other)
    assert language(one.union(other)) == language(one) | language(other)
    assert language(one.complement()) == set(TEXTS) - language(one)


@pytest.mark.parametrize("seed", range(40))
def test_equal_languages_have_equal_arrays(seed: int) -> None:
    one, other = random_automaton(seed), random_automaton(2000 + seed)
    assert same(one.complement().complement(), one)
    assert same(one.union(other).complement(), one.complement().intersection(other.complement()))
    assert same(one.intersection(other), other.intersection(one))
    assert same(one.union(one), one)
    assert one.intersection(one.complement()).is_empty


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_smallest(seed: int) -> None:
    """No two states accept the same continuations, each leads to an end, each is reached; no two classes act alike."""
    one = random_automaton(seed)
    after = [
        frozenset(text for text in TEXTS if Automaton(one.classes, one.moves, one.accepting).accepts((*way, *text)))
        for way in ways_to_states(one)
    ]
    assert len(after) == one.states == len(set(after))
    assert all(after) or one.is_empty
    assert len({tuple(column) for column in one.moves.T.tolist()}) == one.kinds


def ways_to_states(one: Automaton) -> list[tuple[int, ...]]:
    ways = {one.walk(text): text for text in reversed(TEXTS)}
    return [ways[state] for state in range(one.states)]


@pytest.mark.parametrize("seed", range(40))
def test_distances_and_shortest_texts(seed: int) -> None:
    one = random_automaton(seed)
    accepted = sorted(language(one), key=len)
    texts = one.shortest(5, np.arange(VOCABULARY))
    assert all(one.accepts(text) for text in texts)
    if accepted:
        assert one.distances()[0] == len(accepted[0]) == len(texts[0])
    elif one.is_empty:
        assert texts == [] and (one.distances() > one.states).all()


def test_a_table_written_out() -> None:
    one = from_table({7: {1: 7, 2: 9}, 9: {1: 8, 2: 9}, 8: {}}, [9], 7, VOCABULARY)
    assert one.states == 2  # state 8 is a dead end
    assert one.classes.tolist() == [-1, 0, 1, -1, -1, -1]
    assert one.accepts([1, 2, 2]) and not one.accepts([1, 2, 1]) and not one.accepts([3])
    nothing = from_table({0: {1: 0}}, [], 0, VOCABULARY)
    assert nothing.is_empty and nothing.states == 1
    only_the_empty_text = from_table({}, [0], 0, VOCABULARY)
    assert only_the_empty_text.accepts([]) and not only_the_empty_text.accepts([1])
    assert only_the_empty_text.complement().is_empty


def test_too_many_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STATES", 8)
    with pytest.raises(UserError, match="more than 8 states"):
        determinised([0], lambda place, symbol: [0, place + symbol], lambda place: place > 5, [0, 1, 2])
    with pytest.raises(UserError, match="more than 8 states"):
        (random_automaton(1).union(random_automaton(3))).intersection(random_automaton(8))
