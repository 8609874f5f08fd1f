"""Automata to look at: a table, and a picture for Graphviz."""

from __future__ import annotations

import string

import numpy as np

from condenser.corpus.tokens import load_tokenizer
from condenser.decoding.automaton import NOWHERE, Automaton
from condenser.decoding.expressions import automaton_of
from condenser.decoding.options import LmAutomatonOptions
from condenser.decoding.pieces import Pieces, pieces_of
from condenser.errors import UserError

_EXAMPLES = 4


def show_automaton(options: LmAutomatonOptions) -> str:
    """Return a constraint's table and some texts that it accepts, or its picture as DOT text.

    Raises:
        UserError: the constraint cannot be read, or accepts nothing.
    """
    pieces = pieces_of(load_tokenizer(options.tokenizer))
    automaton = automaton_of(options.expression, pieces)
    if automaton.is_empty:
        raise UserError("the constraint accepts no text at all: its parts exclude each other")
    if options.dot:
        return dot_text(automaton, pieces)
    texts = automaton.shortest(options.samples, pieces.words_first())
    shown = ["", "accepts, among others:", *(f"  {pieces.join(text)!r}" for text in texts)] if texts else []
    return "\n".join([table_text(automaton, pieces), *shown])


def table_text(automaton: Automaton, pieces: Pieces) -> str:
    """Return an automaton as two tables: what tokens each class has, and where each state goes by each class.

    ``*`` marks states in which a text may end; ``to end`` is the fewest tokens to such a state; ``.`` is nowhere. A
    token is shown as its piece of text.
    """
    names = [_class_name(kind) for kind in range(automaton.kinds)]
    counts = np.bincount(automaton.classes[automaton.classes != NOWHERE], minlength=automaton.kinds)
    classes = [
        [name, f"{count:,}", examples]
        for name, count, examples in zip(names, counts.tolist(), _examples(automaton, pieces), strict=True)
    ]
    states = [
        [
            f"{state}{'*' if accepts else ''}",
            str(left),
            *("." if target == NOWHERE else str(target) for target in row),
        ]
        for state, (accepts, left, row) in enumerate(
            zip(automaton.accepting, automaton.distances(), automaton.moves.tolist(), strict=True)
        )
    ]
    return "\n".join(
        [
            f"{automaton.states} states, start in 0; {automaton.kinds} classes of tokens",
            "",
            *_columns([["class", "tokens", "such as"], *classes]),
            "",
            *_columns([["state", "to end", *names], *states]),
        ]
    )


def dot_text(automaton: Automaton, pieces: Pieces) -> str:
    """Return an automaton as a directed graph in Graphviz's language: `dot -Tsvg` draws it.

    States in which a text may end have a double ring; an arrow tells the classes by which it leads there, each by its
    first tokens.
    """
    examples = _examples(automaton, pieces)
    lines = ["digraph {", "  rankdir=LR", "  node [shape=circle]", '  start [shape=point label=""]', "  start -> 0"]
    lines += [f"  {state} [shape=doublecircle]" for state in np.flatnonzero(automaton.accepting).tolist()]
    for state, row in enumerate(automaton.moves):
        for target in np.unique(row[row != NOWHERE]).tolist():
            shown = r"\n".join(_quoted(examples[kind]) for kind in np.flatnonzero(row == target).tolist())
            lines.append(f'  {state} -> {target} [label="{shown}"]')
    return "\n".join([*lines, "}"])


def _class_name(kind: int) -> str:
    letter = string.ascii_uppercase[kind % 26]
    return letter if kind < 26 else f"{letter}{kind // 26}"


def _examples(automaton: Automaton, pieces: Pieces) -> list[str]:
    """Return for each class its first tokens as text, whole words first, and a sign if there are more."""
    order = pieces.words_first()
    kinds = automaton.classes[order]
    shown = []
    for kind in range(automaton.kinds):
        members = order[kinds == kind]
        some = [repr(pieces.texts[token]) for token in members[:_EXAMPLES].tolist()]
        shown.append(" ".join(some) + (" ..." if len(members) > _EXAMPLES else ""))
    return shown


def _columns(rows: list[list[str]]) -> list[str]:
    """Align a table's columns; the last one hangs over."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
