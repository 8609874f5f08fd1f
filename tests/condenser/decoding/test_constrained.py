"""Constrained search against reference numbers, enumeration and its own promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from condenser.decoding.automaton import Automaton, from_table, smallest
from condenser.decoding.beam import beam_search
from condenser.decoding.constrained import constrained_search
from condenser.decoding.expressions import automaton_of
from condenser.decoding.generators import CausalModel, SequenceToSequence
from condenser.decoding.hypotheses import SearchSettings
from condenser.decoding.pieces import Pieces
from condenser.errors import UserError
from tests.condenser.decoding.test_beam import reference_generator
from tests.condenser.decoding.tiny import (
    END,
    WORDS,
    TextModel,
    every_text,
    next_of_transformer,
    padded,
    random_next,
    tiny_transformer,
)
from tests.reference_numbers import golden_json

CASES = [
    (kind, name, way, width)
    for kind, numbers in golden_json("electra_lm/lm/expected.json").items()
    for name, case in numbers["constrained"].items()
    for way in ("forced", "dispatch")
    for width in case[way]
]


def reference_automaton(case: dict[str, Any]) -> Automaton:
    moves = {int(state): {int(token): after for token, after in row.items()} for state, row in case["delta"].items()}
    return from_table(moves, case["accept"], case["start"], 8)


@pytest.mark.parametrize(("kind", "name", "way", "width"), CASES)
def test_reference_numbers(kind: str, name: str, way: str, width: str) -> None:
    """A beam per state, and the search that sorts each hypothesis's best tokens into states, which often fails."""
    case = golden_json("electra_lm/lm/expected.json")[kind]["constrained"][name]
    wanted, automaton = case[way][width], reference_automaton(case)
    beam, _, proposals = width.removeprefix("K").partition("_top")
    found = constrained_search(
        reference_generator(kind, 2),
        automaton,
        SearchSettings(end=END, beam=int(beam), n_best=3, max_length=5, forbidden=(0, 1)),
        int(proposals) if proposals else None,
    )
    for one in found:
        assert [[*text.tokens, END] for text in one.hypotheses] == [text["tokens"] for text in wanted]
        assert [text.log_prob for text in one.hypotheses] == pytest.approx([t["logprob"] for t in wanted], abs=1e-10)
        assert (one.dead_end is None) == bool(wanted)
    assert wanted or way == "dispatch"


@st.composite
def automata(draw: st.DrawFn) -> Automaton:
    """Draw an automaton over the words, of up to six states, that accepts something."""
    states = draw(st.integers(1, 6))
    table = draw(
        st.lists(st.lists(st.integers(-1, states - 1), min_size=4, max_size=4), min_size=states, max_size=states)
    )
    accepting = draw(st.lists(st.booleans(), min_size=states, max_size=states))
    return smallest(np.array([-1, -1, -1, 0, 1, 2, 3]), np.array(table), np.array(accepting))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(automata(), st.integers(0, 9), st.integers(1, 3), st.integers(0, 2), st.sampled_from([0.0, 1.0]))
def test_every_text_satisfies_its_constraint_and_there_is_one(
    automaton: Automaton, seed: int, beam: int, shortest: int, exponent: float
) -> None:
    log_probs = random_next(7, seed)
    possible = [
        (total, text)
        for total, text in every_text(log_probs, 0, 4)
        if len(text) >= shortest and automaton.accepts(text)
    ]
    told = SearchSettings(
        end=END, beam=beam, n_best=4, max_length=4, min_length=shortest, length_exponent=exponent, forbidden=(0, 1)
    )
    if not possible:
        with pytest.raises(UserError, match=r"the constraint (accepts no|needs)"):
            constrained_search(TextModel(1, log_probs), automaton, told)
        return
    (found,) = constrained_search(TextModel(1, log_probs), automaton, told)
    texts = [one.tokens for one in found.hypotheses]
    assert texts and len(set(texts)) == len(texts)
    assert set(texts) <= {text for _, text in possible}
    wide = SearchSettings(
        end=END, beam=300, n_best=4, max_length=4, min_length=shortest, length_exponent=exponent, forbidden=(0, 1)
    )
    (exact,) = constrained_search(TextModel(1, log_probs), automaton, wide)
    best = sorted(((total / (len(text) + 1) ** exponent, text) for total, text in possible), reverse=True)[:4]
    assert [one.tokens for one in exact.hypotheses] == [text for _, text in best]
    assert [one.score for one in exact.hypotheses] == pytest.approx([score for score, _ in best], abs=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(automata(), st.integers(0, 9))
def test_a_model_with_holes_never_makes_it_leave_the_constraint(automaton: Automaton, seed: int) -> None:
    """What has no probability is not written; where nothing is left, that is said."""
    log_probs = random_next(7, seed, holes=0.4)
    told = SearchSettings(end=END, beam=2, max_length=4, forbidden=(0, 1))
    if automaton.is_empty or automaton.distances()[0] > 4:
        return
    (found,) = constrained_search(TextModel(1, log_probs), automaton, told)
    possible = {text for _, text in every_text(log_probs, 0, 4) if automaton.accepts(text)}
    assert {one.tokens for one in found.hypotheses} <= possible
    assert (found.dead_end is None) == bool(found.hypotheses)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_transformers_are_searched_exactly(family: str) -> None:
    inputs = [[3, 4, 5], [6, 3, 3, 4, 5, 6]]
    model = tiny_transformer(family)
    generator = (CausalModel if family == "gpt2" else SequenceToSequence)(model, *padded(inputs, "right"))
    holds_5_and_6 = from_table(
        {state: {word: state | (word == 5) | 2 * (word == 6) for word in WORDS} for state in range(4)}, [3], 0, 7
    )
    told = SearchSettings(end=END, beam=64, n_best=5, max_length=3, forbidden=(0, 1))
    alone = next_of_transformer(model, inputs)
    for number, found in enumerate(constrained_search(generator, holds_5_and_6, told)):
        wanted = [(total, text) for total, text in every_text(alone, number, 3) if {5, 6} <= set(text)][:5]
        assert [one.tokens for one in found.hypotheses] == [text for _, text in wanted]
        assert [one.log_prob for one in found.hypotheses] == pytest.approx([total for total, _ in wanted], abs=1e-10)


def test_each_input_may_have_its_own_automaton() -> None:
    log_probs = random_next(7)
    own = [
        from_table({0: {5: 1, 4: 0}, 1: {word: 1 for word in WORDS}}, [1], 0, 7),
        from_table({0: {3: 0, 6: 1}}, [1], 0, 7),
    ]
    own.append(own[0])
    told = SearchSettings(end=END, beam=2, max_length=5, forbidden=(0, 1))
    together = constrained_search(TextModel(3, log_probs), own, told)
    for number, automaton in enumerate(own):
        chosen = lambda one, text, number=number: log_probs(number, text)  # noqa: E731
        assert constrained_search(TextModel(1, chosen), automaton, told) == [together[number]]
        assert all(automaton.accepts(one.tokens) for one in together[number].hypotheses)
    with pytest.raises(UserError, match="2 automata for 3 inputs"):
        constrained_search(TextModel(3, log_probs), own[:2], told)


def test_an_automaton_that_allows_all_finds_what_beam_search_finds() -> None:
    log_probs = random_next(7, seed=5)
    anything = from_table({0: dict.fromkeys(WORDS, 0)}, [0], 0, 7)
    told = SearchSettings(end=END, beam=300, n_best=5, max_length=4, forbidden=(0, 1))
    assert constrained_search(TextModel(2, log_probs), anything, told) == beam_search(TextModel(2, log_probs), told)


def test_n_best_has_no_repeats_and_the_forced_token_in_each() -> None:
    """Four where there are as many, and as many as there are where there are fewer."""
    holds_5 = from_table({0: {word: int(word == 5) for word in WORDS}, 1: dict.fromkeys(WORDS, 1)}, [1], 0, 7)
    for longest, count in ((4, 4), (1, 1)):
        told = SearchSettings(end=END, beam=4, n_best=4, max_length=longest, forbidden=(0, 1))
        (found,) = constrained_search(TextModel(1, random_next(7)), holds_5, told)
        texts = [one.tokens for one in found.hypotheses]
        assert len(texts) == len(set(texts)) == count
        assert all(5 in text for text in texts)


ALLOWED = {2: [3, 6, 47], 3: [6], 6: [47], 47: [3]}


def of_allowed(allowed: dict[int, list[int]], accepting: list[int]) -> Automaton:
    """Make an automaton of the tokens that may follow each token; a text begins behind token 2."""
    return from_table({one: {after: after for after in some} for one, some in allowed.items()}, accepting, 2, 50)


def test_no_token_outside_a_list_of_allowed_ones() -> None:
    log_probs = random_next(50)
    told = SearchSettings(end=0, beam=4, max_length=6, min_length=3)
    (found,) = constrained_search(TextModel(1, log_probs), of_allowed(ALLOWED, [3, 6, 47]), told)
    assert len(found.hypotheses) == 4
    for one in found.hypotheses:
        assert all(after in ALLOWED[before] for before, after in zip((2, *one.tokens), one.tokens, strict=False))


def test_a_hypothesis_in_a_dead_end_is_dropped() -> None:
    """Behind 6 nothing is allowed and no text may end: it is never written."""
    told = SearchSettings(end=0, beam=4, max_length=6)
    (found,) = constrained_search(TextModel(1, random_next(50)), of_allowed(ALLOWED | {6: []}, [3, 47]), told)
    assert {one.tokens for one in found.hypotheses} == {(3,), (47,), (47, 3)}


def test_where_no_hypothesis_is_left_it_is_said() -> None:
    """The model gives no probability to the one word that must come second."""

    def log_probs(number: int, text: tuple[int, ...]) -> torch.Tensor:
        scores = torch.zeros(50)
        scores[47] = -torch.inf
        return scores.log_softmax(0)

    told = SearchSettings(end=0, max_length=6)
    (found,) = constrained_search(TextModel(1, log_probs), of_allowed({2: [6], 6: [47]}, [47]), told)
    assert found.hypotheses == []
    assert found.dead_end is not None and "after 1 tokens" in found.dead_end and "(state 1)" in found.dead_end


@pytest.mark.parametrize(
    ("automaton", "told", "message"),
    [
        (of_allowed(ALLOWED, []), {}, "accepts no text at all"),
        (of_allowed({2: [6], 6: [47]}, [47]), {"max_length": 1}, "needs 2 tokens, but max_length is 1"),
        (of_allowed({2: [6], 6: [47]}, [47]), {"min_length": 3}, "accepts no text of 3 to 32 tokens"),
        (of_allowed({2: [6], 6: [47]}, [47]), {"forbidden": (6,)}, "accepts no text of 0 to 32 tokens"),
    ],
)
def test_an_impossible_constraint_is_refused_before_the_search(
    automaton: Automaton, told: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        constrained_search(TextModel(1, random_next(50)), automaton, SearchSettings(end=0, **told))


def test_a_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="knows token 47, the model only 40 tokens"):
        constrained_search(TextModel(1, random_next(40)), of_allowed(ALLOWED, [47]), SearchSettings(end=0))


def test_words_and_patterns_through_a_search(pieces_by_kind: dict[str, Pieces]) -> None:
    """A model that has never read anything writes what it is told to."""
    for kind, expression in (("wordpiece", "words:fever and not any:pain"), ("bpe", "regex:the (gout|acid) .*")):
        pieces = pieces_by_kind[kind]
        automaton = automaton_of(expression, pieces)
        told = SearchSettings(end=pieces.tokenizer.all_special_ids[0], beam=2, max_length=8)
        for found in constrained_search(TextModel(2, random_next(len(pieces.texts) + 3)), automaton, told):
            assert len(found.hypotheses) == 2
            for one in found.hypotheses:
                text = f" {pieces.join(one.tokens)} "
                assert text.startswith((" the gout ", " the acid ")) or (" fever " in text and " pain " not in text)
