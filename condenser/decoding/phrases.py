"""Automata of texts in which phrases come as whole words."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from condenser.decoding.automaton import NOWHERE, Automaton, determinised, smallest
from condenser.decoding.pieces import BROKEN, Pieces, in_word
from condenser.decoding.regular import lifted


def any_phrase(phrases: Sequence[str], pieces: Pieces) -> Automaton:
    """Accept texts in which one of the phrases comes as whole words, cut as the tokenizer cuts it.

    A phrase ends where its last word does: a ``##`` piece behind it, or one that begins with a letter and without a
    blank, makes another word of it. Texts that spell a phrase by other tokens are left out; a model hardly ever
    writes them, and the automaton is far smaller without.

    Raises:
        UserError: no phrase, a blank one, or one that is not in the vocabulary.
    """
    ways = [way for phrase in phrases for way in pieces.cuts(phrase)]
    own = sorted({token for way in ways for token in way})
    begins, ends = pieces.begins_in_word, pieces.ends_in_word
    # the tokens of the phrases are a class each; of all others only how they begin and end counts
    kinds = 2 * pieces.goes_on + ends
    symbols = [_Symbol(token, bool(begins[token]), bool(pieces.goes_on[token]), bool(ends[token])) for token in own]
    symbols += [_Symbol(None, kind >= 2, kind >= 2, kind % 2 == 1) for kind in range(4)]
    classes = np.where(pieces.ordinary, len(own) + kinds, NOWHERE)
    classes[own] = range(len(own))
    return smallest(classes, *_containing(ways, symbols))


def any_spelling(phrases: Sequence[str], pieces: Pieces) -> Automaton:
    """Accept texts in which one of the phrases comes as whole words, by whatever tokens it is spelt.

    What is not accepted surely does not hold the phrases: this is for ``not``. So a character of which only bytes are
    seen may be a letter of a phrase outside ASCII, or the end of a word.

    Raises:
        UserError: as `any_phrase`.
    """
    spellings = [pieces.join(pieces.cuts(phrase)[0]) for phrase in phrases]
    letters = sorted({*"".join(spellings), BROKEN})
    symbols = [_Symbol(letter, *3 * (in_word(letter) and letter != BROKEN,)) for letter in letters]
    symbols += [_Symbol(None, word, word, word) for word in (False, True)]
    moves, accepting = _containing(spellings, symbols)
    place = {letter: number for number, letter in enumerate(letters)}
    return lifted(moves, accepting, lambda letter: place.get(letter, len(letters) + in_word(letter)), pieces)


class _Symbol(NamedTuple):
    """A token or letter of a phrase, or (None) any other: how it begins, what it does to a word, how it ends."""

    item: Hashable
    begins_in_word: bool
    goes_on: bool
    ends_in_word: bool


class _Place(NamedTuple):
    """Where a text stands: behind ``matched`` items of a phrase; or (phrase -1) outside, in a word or not."""

    phrase: int
    matched: int = 0
    in_word: bool = False


_FOUND = _Place(-2)


def _containing(phrases: Sequence[Sequence[Hashable]], symbols: Sequence[_Symbol]) -> tuple[np.ndarray, np.ndarray]:
    """Return moves and acceptance of texts that hold one of the phrases at word boundaries.

    A text may be outside and in several phrases at once, as in a a a b for the phrase a a b. Of a letter outside ASCII
    there may be several broken pieces.
    """
    ends_in_word = {symbol.item: symbol.ends_in_word for symbol in symbols}

    def matched(phrase: int, count: int) -> _Place:
        whole = count == len(phrases[phrase])
        return _FOUND if whole and not ends_in_word[phrases[phrase][-1]] else _Place(phrase, count)

    def fits(symbol: _Symbol, item: Hashable) -> bool:
        broken = symbol.item == BROKEN and isinstance(item, str) and not item.isascii()
        return symbol.item == item or broken

    def step(place: _Place, symbol: _Symbol) -> list[_Place]:
        if place == _FOUND:
            return [_FOUND]
        if place.phrase == -1:
            after = [_Place(-1, in_word=symbol.ends_in_word)]
            if not (place.in_word and symbol.begins_in_word):
                after += [matched(number, 1) for number, phrase in enumerate(phrases) if fits(symbol, phrase[0])]
            return after
        phrase = phrases[place.phrase]
        if place.matched == len(phrase):
            return [] if symbol.goes_on else [_FOUND]
        after = [matched(place.phrase, place.matched + 1)] if fits(symbol, phrase[place.matched]) else []
        still = symbol.item == BROKEN and fits(symbol, phrase[place.matched - 1])
        return [*after, place] if still else after

    def accepts(place: _Place) -> bool:
        return place == _FOUND or (place.phrase >= 0 and place.matched == len(phrases[place.phrase]))

    return determinised([_Place(-1)], step, accepts, symbols)
