"""Key terms: what is rare in the corpus and frequent in the passage, in the forms that stand there."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from retrieval.queries.terms import KeyTerm, KeyTerms, constraints
from retrieval.records import Passage

CORPUS = [
    Passage("a", "Gout", "Gout attacks hurt. An attack of gout: what is it? 12 of us."),
    Passage("b", "", "Pain that hurts and hurts is a disease."),
    Passage("c", "", "A disease, an attack."),
]


def test_the_weight_is_that_of_a_count_by_hand() -> None:
    terms = KeyTerms(CORPUS).of(CORPUS[0])
    # gout: 3 times, in 1 of 3 passages, in the title; attack(s): twice, in 2 of 3; hurt: once, in 2 of 3
    assert [term.forms for term in terms] == [("gout",), ("attacks", "attack"), ("hurt",)]
    expected = [2 * (1 + math.log(3)) * math.log(3), (1 + math.log(2)) * math.log(1.5), math.log(1.5)]
    assert [term.weight for term in terms] == pytest.approx(expected)


def test_the_form_that_comes_most_often_is_first_and_equal_weights_keep_their_order() -> None:
    assert [term.forms for term in KeyTerms(CORPUS).of(CORPUS[1])] == [("pain",), ("hurts",), ("disease",)]
    assert KeyTerms(CORPUS).of(Passage("d", "", "of 7 it")) == []


def test_constraints_are_the_combinations_of_ranks_by_their_sum() -> None:
    terms = [KeyTerm((letter, f"{letter}s"), 0.0) for letter in "abcde"]
    assert constraints(terms, 1, 2) == ['any:"a","as"', 'any:"b","bs"']
    assert constraints(terms, 2, 3) == [
        f"{terms[i].constraint} and {terms[j].constraint}" for i, j in ((0, 1), (0, 2), (0, 3))
    ]
    every = sorted(combinations(range(5), 3), key=sum)
    asked = [" and ".join(terms[rank].constraint for rank in ranks) for ranks in every]
    for count in range(1, 12):
        assert constraints(terms, 3, count) == asked[:count]
    assert constraints(terms[:2], 3, 4) == []


@pytest.mark.parametrize("word", ["re\u0301sume\u0301", "हिन्दी", "مُدَرِّسَة", "Straße", "ποταμός", "北京是中国的首都"])
def test_words_of_other_scripts_and_with_accents_are_spelt_as_they_stand(word: str) -> None:
    passage = Passage("a", "", f"({word}) 😀 🎉")
    terms = KeyTerms([passage, Passage("b", "", "others")]).of(passage)
    assert [term.forms for term in terms] == [(word.lower(),)]
