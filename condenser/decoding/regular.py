"""Automata of texts that a regular expression describes."""

from __future__ import annotations

import re
from collections.abc import Callable

import greenery
import numpy as np
from greenery.charclass import Charclass, repartition
from greenery.rxelems import Mult, Pattern

from condenser.decoding.automaton import MOST_STATES, NOWHERE, Automaton, determinised, smallest
from condenser.decoding.pieces import Pieces
from condenser.errors import UserError

_MOST_PLACES = 8 * MOST_STATES


def matching(pattern: str, pieces: Pieces) -> Automaton:
    r"""Accept texts that a regular expression matches as a whole, by whatever tokens they are spelt.

    Literals, ``.`` (any character), ``[a-z]``, ``[^a-z]``, ``|``, ``( )``, ``? * + {m,n}``, ``\d \w \s`` of ASCII and
    ``\xhh``. A byte of a character that is cut into several tokens counts as the character U+FFFD.

    Raises:
        UserError: what is not such an expression, or one that needs too many states.
    """
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", "", pattern)
    if "^" in bare or "$" in bare:
        raise UserError(
            f"regular expression {pattern!r} has an anchor",
            hint="it matches the whole text anyway: leave ^ and $ out, or write [$]",
        )
    try:
        parsed = greenery.parse(pattern)
    except Exception as error:  # its parser has a class of its own that it does not export
        raise UserError(f"{pattern!r} is no regular expression that is understood: {error}") from None
    places = _Places()
    try:
        end = places.of_pattern(parsed, places.new())
        moves, accepting, kinds = places.determinised(end)
    except UserError:
        raise UserError(f"regular expression {pattern!r} needs more than {MOST_STATES:,} states") from None

    def kind_of(letter: str) -> int:
        return next(number for number, some in enumerate(kinds) if some.accepts(letter))

    return lifted(moves, accepting, kind_of, pieces)


class _Places:
    """An expression written out: places in it, the characters that lead from one to another, and silent ways between.

    Thompson's construction, which is as large as the expression; sets of its places are the states of an automaton.
    """

    def __init__(self) -> None:
        self._moves: list[list[tuple[Charclass, int]]] = []
        self._silent: list[set[int]] = []

    def new(self) -> int:
        """Return another place.

        Raises:
            UserError: there are too many.
        """
        if len(self._moves) == _MOST_PLACES:
            raise UserError(f"more than {_MOST_PLACES:,} places")
        self._moves.append([])
        self._silent.append(set())
        return len(self._moves) - 1

    def of_pattern(self, pattern: Pattern, start: int) -> int:
        """Write alternatives out and return the place behind them."""
        end = self.new()
        for alternative in pattern.concs:
            place = start
            for part in alternative.mults:
                place = self._repeated(part, place)
            self._silent[place].add(end)
        return end

    def _repeated(self, part: Mult, start: int) -> int:
        least, most = part.multiplier.min.v or 0, part.multiplier.max.v
        for _ in range(least):
            start = self._once(part.multiplicand, start)
        end = self.new()
        if most is None:
            again = self.new()
            self._silent[start].add(again)
            self._silent[self._once(part.multiplicand, again)].add(again)
            self._silent[again].add(end)
            return end
        for _ in range(most - least):
            self._silent[start].add(end)
            start = self._once(part.multiplicand, start)
        self._silent[start].add(end)
        return end

    def _once(self, what: Charclass | Pattern, start: int) -> int:
        if isinstance(what, Pattern):
            return self.of_pattern(what, start)
        end = self.new()
        self._moves[start].append((what, end))
        return end

    def determinised(self, end: int) -> tuple[np.ndarray, np.ndarray, list[Charclass]]:
        """Return moves (states, kinds), accepting (states,) and the kinds of characters; state 0 is the start."""
        classes = list({letters for moves in self._moves for letters, _ in moves} | {~Charclass(())})
        parts = repartition(classes)  # every character is in one of them, and those of one are alike
        kinds = list(dict.fromkeys(kind for some in parts.values() for kind in some))
        reached: list[dict[Charclass, list[int]]] = [{} for _ in self._moves]
        for place, ways in enumerate(self._moves):
            for letters, after in ways:
                behind = self._silently(after)
                for kind in parts[letters]:
                    reached[place].setdefault(kind, []).extend(behind)
        moves, accepting = determinised(
            self._silently(0), lambda place, kind: reached[place].get(kind, ()), lambda place: place == end, kinds
        )
        return moves, accepting, kinds

    def _silently(self, place: int) -> frozenset[int]:
        """Return the places where one is without another character."""
        met, left = {place}, [place]
        while left:
            new = self._silent[left.pop()] - met
            met |= new
            left += new
        return frozenset(met)


def lifted(moves: np.ndarray, accepting: np.ndarray, kind_of: Callable[[str], int], pieces: Pieces) -> Automaton:
    """Make an automaton over characters one over tokens: a token leads where its characters lead.

    The first token of a text loses a blank at its beginning, for which there is a state more.

    Args:
        moves: (states, kinds of characters), from every state by every kind; state 0 is the start.
        accepting: (states,).
        kind_of: kind of a character.
        pieces: the tokens.
    """
    kinds = {letter: kind_of(letter) for letter in sorted(set("".join(pieces.texts)))}
    # tokens whose characters are alike act alike: a walk for each such form is enough
    forms: dict[tuple[bool, tuple[int, ...]], int] = {}
    classes = np.full(len(pieces.texts), NOWHERE)
    for token, text in enumerate(pieces.texts):
        if text:
            form = text.startswith(" "), tuple(kinds[letter] for letter in text)
            classes[token] = forms.setdefault(form, len(forms))
    table = np.empty((len(moves) + 1, len(forms)), np.int64)
    for number, (blank, walk) in enumerate(forms):
        reached, first = np.arange(len(moves)), np.array(0)
        for place, kind in enumerate(walk):
            reached = moves[reached, kind]
            if place >= blank:
                first = moves[first, kind]
        table[:-1, number], table[-1, number] = reached, first
    return smallest(classes, table, np.append(accepting, accepting[0]), start=len(moves))
