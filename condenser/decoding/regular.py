"""Automata of texts that a regular expression describes."""

from __future__ import annotations

import re
from collections.abc import Callable

import greenery
import numpy as np

from condenser.decoding.automaton import MOST_STATES, NOWHERE, Automaton, smallest
from condenser.decoding.pieces import Pieces
from condenser.errors import UserError


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
    machine = parsed.to_fsm().reduce()
    if len(machine.states) > MOST_STATES:
        raise UserError(f"regular expression {pattern!r} needs {len(machine.states):,} states, at most {MOST_STATES:,}")
    letters = list(machine.alphabet)
    states = [machine.initial, *(state for state in machine.states if state != machine.initial)]
    number = {state: index for index, state in enumerate(states)}
    moves = np.array([[number[machine.map[state][kind]] for kind in letters] for state in states])
    accepting = np.array([state in machine.finals for state in states])

    def kind_of(letter: str) -> int:
        return next(kind for kind, some in enumerate(letters) if some.accepts(letter))

    return lifted(moves, accepting, kind_of, pieces)


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
