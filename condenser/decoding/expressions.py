"""The little language in which a constraint is written: words, phrases and patterns, joined by and, or and not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from condenser.boolean import BooleanReader
from condenser.decoding.automaton import Automaton
from condenser.decoding.phrases import any_phrase, any_spelling
from condenser.decoding.pieces import Pieces
from condenser.decoding.regular import matching

_JOINT = re.compile(r"\s*(and|or)\b")


def automaton_of(expression: str, pieces: Pieces) -> Automaton:
    """Return the automaton of an expression.

    - ``words:gout,uric acid``: each of these words and phrases comes, as whole words;
    - ``any:gout,uric acid``: at least one of them does;
    - ``regex:what is .*``: the whole text matches;
    - ``A and B``, ``A or B``, ``not A``, ``( )``: ``not`` binds closest, ``or`` loosest.

    A word, phrase or pattern ends at a comma (a pattern does not), at `` and `` or `` or ``, or at a bracket that it
    did not open; between double quotes it may hold these, too (``\\"`` is a quote in it).

    Raises:
        UserError: what cannot be read, with its place; a phrase or pattern that cannot be used.
    """
    return _build(_Reader(expression).read(), pieces, wanted=True)


@dataclass(frozen=True)
class _Node:
    """``kind`` is and, or, not, words, any or regex; with other nodes in it, or words."""

    kind: str
    nodes: tuple[_Node, ...] = ()
    items: tuple[str, ...] = ()


def _build(node: _Node, pieces: Pieces, wanted: bool) -> Automaton:
    """Build a node; ``wanted`` is False inside an odd number of nots."""
    parts = [_build(one, pieces, wanted != (node.kind == "not")) for one in node.nodes]
    if node.kind == "not":
        return parts[0].complement()
    if node.kind == "and":
        return reduce(Automaton.intersection, parts)
    if node.kind == "or":
        return reduce(Automaton.union, parts)
    if node.kind == "regex":
        return matching(node.items[0], pieces)
    phrase = any_phrase if wanted else any_spelling
    if node.kind == "any":
        return phrase(node.items, pieces)
    return reduce(Automaton.intersection, (phrase([item], pieces) for item in node.items))


class _Reader(BooleanReader[_Node]):
    where = "the constraint"

    def joined(self, word: Literal["and", "or", "not"], parts: tuple[_Node, ...]) -> _Node:
        return _Node(word, parts)

    def read_one(self) -> _Node:
        """Read words or a pattern behind their kind."""
        for kind in ("words", "any", "regex"):
            if self.take(f"{kind}:"):
                return _Node(kind, items=self._read_items(kind))
        raise self.error("words:, any:, regex:, not or an opening bracket")

    def _read_items(self, kind: str) -> tuple[str, ...]:
        items = [self._read_item(kind)]
        while kind != "regex" and self.take(","):
            items.append(self._read_item(kind))
        return tuple(items)

    def _read_item(self, kind: str) -> str:
        quoted = self.take(r'"((?:\\"|[^"])*)"')
        if quoted:
            return quoted.group(1).replace('\\"', '"')
        if self.take('"'):
            self.place = len(self.text)
            raise self.error("a closing quote")
        self.skip_blanks()
        start, open_brackets = self.place, 0
        while self.place < len(self.text):
            letter = self.text[self.place]
            blank_before = self.place == start or self.text[self.place - 1].isspace()
            if (letter == "," and kind != "regex") or (blank_before and _JOINT.match(self.text, self.place)):
                break
            open_brackets += (letter == "(") - (letter == ")")
            if open_brackets < 0:
                break
            self.place += 2 if letter == "\\" and kind == "regex" else 1
        item = self.text[start : self.place].strip()
        if not item:
            self.place = start
            raise self.error("a pattern" if kind == "regex" else "a word or phrase")
        return item
