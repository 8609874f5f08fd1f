"""Automata over the tokens of a vocabulary: which texts a search may write, always in their smallest form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from condenser.errors import UserError

NOWHERE = -1
MOST_STATES = 4096  # a search keeps a beam for each: more would be out of reach
State = TypeVar("State", bound=Hashable)
Symbol = TypeVar("Symbol")


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over tokens; state 0 is the start.

    Tokens that act alike in every state are one class, so that a table of states and classes says it all. States that
    cannot lead to acceptance are left out. What `smallest` returns is the one smallest automaton of its language, its
    states in the order in which they are met from the start and its classes by their lowest token, so that two of
    them accept the same texts exactly if their arrays are equal.

    Attributes:
        classes: class of each token (vocabulary,), int32; -1 is a token that no text of this vocabulary holds, such
            as padding or the end token.
        moves: state that each state reaches by each class (states, classes), int32; -1 is nowhere.
        accepting: where a text may end (states,), bool.
    """

    classes: np.ndarray
    moves: np.ndarray
    accepting: np.ndarray

    @property
    def states(self) -> int:
        """Number of states."""
        return len(self.moves)

    @property
    def kinds(self) -> int:
        """Number of classes."""
        return self.moves.shape[1]

    @property
    def highest_token(self) -> int:
        """The highest token that a text may hold, -1 if there is none."""
        return int(np.flatnonzero(self.classes != NOWHERE).max(initial=-1))

    @property
    def is_empty(self) -> bool:
        """Whether no text at all is accepted."""
        return not self.accepting.any()

    def accepts(self, tokens: Iterable[int]) -> bool:
        """Say whether a text, without its end token, is accepted."""
        state = self.walk(tokens)
        return state != NOWHERE and bool(self.accepting[state])

    def walk(self, tokens: Iterable[int]) -> int:
        """Return the state after these tokens, -1 if they lead nowhere."""
        state = 0
        for token in tokens:
            kind = int(self.classes[token])
            state = int(self.moves[state, kind]) if kind != NOWHERE else NOWHERE
            if state == NOWHERE:
                return NOWHERE
        return state

    def distances(self) -> np.ndarray:
        """Return the fewest tokens that lead from each state to an accepting one (states,), int64.

        An automaton that accepts nothing has states + 1 there: more than any way through it.
        """
        far = self.states + 1
        distance = np.where(self.accepting, 0, far)
        while True:
            padded = np.append(distance, far)  # index -1, nowhere, is the last
            nearer = np.minimum(distance, padded[self.moves].min(axis=1, initial=far) + 1)
            if (nearer == distance).all():
                return distance
            distance = nearer

    def complement(self) -> Automaton:
        """Accept every text over the same tokens that this one does not."""
        moves, accepting = _with_sink(self)
        return smallest(self.classes, moves, ~accepting)

    def intersection(self, other: Automaton) -> Automaton:
        """Accept what both accept."""
        return _product(self, other, np.logical_and)

    def union(self, other: Automaton) -> Automaton:
        """Accept what either accepts."""
        return _product(self, other, np.logical_or)

    def shortest(self, count: int, order: np.ndarray) -> list[list[int]]:
        """Return accepted texts, shortest first, each class written as its first token in an order of all tokens.

        Args:
            count: most texts.
            order: all token ids, the ones to show first.
        """
        shown = first_of_each_class(self.classes, order)
        distances = self.distances()
        found: list[list[int]] = []
        row: list[tuple[int, list[int]]] = [(0, [])]
        # an accepted text of n tokens costs at most n rows; a longest row keeps endless automata from growing it
        while row and len(found) < count and not self.is_empty:
            found += [tokens for state, tokens in row if self.accepting[state]]
            longer = [
                (int(target), [*tokens, int(shown[kind])])
                for state, tokens in row
                for kind, target in enumerate(self.moves[state])
                if target != NOWHERE
            ]
            row = sorted(longer, key=lambda one: distances[one[0]])[: 16 * count]
        return found[:count]


def smallest(classes: np.ndarray, moves: np.ndarray, accepting: np.ndarray, start: int = 0) -> Automaton:
    """Return the smallest automaton of a language: dead and equal states gone, classes that act alike merged.

    Args:
        classes: class of each token (vocabulary,); -1 is a token outside the alphabet.
        moves: (states, classes), -1 is nowhere.
        accepting: (states,).
        start: the state in which every text begins.
    """
    present = np.unique(classes[classes != NOWHERE])
    moves = _without_dead(moves[:, present], accepting)
    order, moves = _in_order_met(moves, start)
    accepting = accepting[order]
    groups = _equal_states(moves, accepting)
    first_of = np.unique(groups, return_index=True)[1]
    moves, accepting, start = np.append(groups, NOWHERE)[moves[first_of]], accepting[first_of], int(groups[0])

    columns, merged = np.unique(moves, axis=1, return_inverse=True)
    of_token = merged.reshape(-1)[np.searchsorted(present, classes[classes != NOWHERE])]
    by_lowest_token = np.argsort(np.unique(of_token, return_index=True)[1], kind="stable")
    renamed = np.full(len(classes), NOWHERE, np.int32)
    renamed[classes != NOWHERE] = np.argsort(by_lowest_token, kind="stable")[of_token]
    order, moves = _in_order_met(columns[:, by_lowest_token], start)
    return Automaton(renamed, moves.astype(np.int32), accepting[order])


def _without_dead(moves: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """Make every move to a state that leads to no acceptance a move to nowhere."""
    alive = accepting.copy()
    while True:
        more = alive | np.append(alive, False)[moves].any(axis=1)
        if (more == alive).all():
            return np.where(np.append(alive, False)[moves], moves, NOWHERE)
        alive = more


def _in_order_met(moves: np.ndarray, start: int) -> tuple[list[int], np.ndarray]:
    """Return the states in the order in which a walk in breadth meets them, and the moves between them so numbered."""
    order, met = [start], {start, NOWHERE}
    for state in order:
        for target in moves[state].tolist():
            if target not in met:
                met.add(target)
                order.append(target)
    renamed = np.full(len(moves) + 1, NOWHERE)
    renamed[order] = np.arange(len(order))
    return order, renamed[moves[order]]


def _equal_states(moves: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """Return a number for each state, the same for states that accept the same texts (Moore's refinement)."""
    groups = accepting.astype(np.int64)
    count = 0
    while groups.max() + 1 > count:
        count = int(groups.max()) + 1
        rows = np.concatenate([groups[:, None], np.append(groups, NOWHERE)[moves]], axis=1)
        groups = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    return groups


def _with_sink(automaton: Automaton) -> tuple[np.ndarray, np.ndarray]:
    """Return moves and acceptance with nowhere as a state of its own, the last."""
    moves = np.concatenate([automaton.moves, np.full((1, automaton.moves.shape[1]), NOWHERE)])
    return np.where(moves == NOWHERE, automaton.states, moves), np.append(automaton.accepting, False)


def _product(one: Automaton, other: Automaton, accept: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Automaton:
    """Run two automata side by side; accept by what both say."""
    outside = (one.classes == NOWHERE) | (other.classes == NOWHERE)
    pairs, classes = np.unique(np.stack([one.classes, other.classes])[:, ~outside], axis=1, return_inverse=True)
    joined = np.full(len(one.classes), NOWHERE)
    joined[~outside] = classes.reshape(-1)
    (moves_1, accepting_1), (moves_2, accepting_2) = _with_sink(one), _with_sink(other)
    width = len(moves_2)
    # pairs of states are met one row after the other, so that only those that can be reached are ever made
    met, number = [0], {0: 0}
    rows = []
    for pair in met:
        targets = moves_1[pair // width, pairs[0]].astype(np.int64) * width + moves_2[pair % width, pairs[1]]
        for target in np.unique(targets).tolist():
            if target not in number:
                number[target] = len(met)
                met.append(target)
                _check_states(len(met))
        rows.append([number[target] for target in targets.tolist()])
    states = np.array(met)
    moves = np.array(rows, np.int64).reshape(len(met), pairs.shape[1])
    return smallest(joined, moves, accept(accepting_1[states // width], accepting_2[states % width]))


def determinised(
    start: Iterable[State],
    step: Callable[[State, Symbol], Iterable[State]],
    accepts: Callable[[State], bool],
    symbols: Sequence[Symbol],
) -> tuple[np.ndarray, np.ndarray]:
    """Make an automaton that may be in several states at once one that is in one: the sets of states.

    Args:
        start: states in which it begins.
        step: states to which a state leads by a symbol.
        accepts: whether a text may end in a state.
        symbols: one of each class.

    Returns:
        moves (sets, symbols) and accepting (sets,); set 0 is the start.
    """
    met = [frozenset(start)]
    number, rows = {met[0]: 0}, []
    for states in met:
        row = []
        for symbol in symbols:
            target = frozenset(after for state in states for after in step(state, symbol))
            if target not in number:
                number[target] = len(met)
                met.append(target)
                _check_states(len(met))
            row.append(number[target])
        rows.append(row)
    accepting = np.array([any(accepts(state) for state in states) for states in met])
    return np.array(rows, np.int64).reshape(len(met), len(symbols)), accepting


def _check_states(count: int) -> None:
    if count > MOST_STATES:
        raise UserError(
            f"a constraint needs more than {MOST_STATES:,} states",
            hint="n words that must all come need 2^n states: ask for fewer, or for any of them",
        )


def first_of_each_class(classes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the token of each class that comes first in an order of all tokens."""
    ordered = order[classes[order] != NOWHERE]
    kinds, first = np.unique(classes[ordered], return_index=True)
    return ordered[first][np.argsort(kinds, kind="stable")]


def from_table(moves: dict[int, dict[int, int]], accepting: Iterable[int], start: int, vocabulary: int) -> Automaton:
    """Make an automaton from a table that is written out: for each state, where each token leads.

    Tokens that the table never names are outside the alphabet.
    """
    states = sorted({start, *moves, *accepting, *(after for row in moves.values() for after in row.values())})
    number = {state: index for index, state in enumerate(states)}
    tokens = sorted({token for row in moves.values() for token in row})
    classes = np.full(vocabulary, NOWHERE)
    classes[tokens] = np.arange(len(tokens))
    table = np.full((len(states), len(tokens)), NOWHERE)
    for state, row in moves.items():
        for token, after in row.items():
            table[number[state], classes[token]] = number[after]
    wanted = set(accepting)
    return smallest(classes, table, np.array([state in wanted for state in states]), number[start])
