"""Passages by id without their texts in memory: where each stands in its file, found by the hash of its id."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from struct import Struct

import numpy as np

from condenser.errors import UserError
from condenser.files import refuse
from retrieval.records import Passage
from retrieval.sources import OnBad, RecordFile

PassageFile = RecordFile[Passage]

_TWO_PARTS = Struct("<QI")


class PassageStore(Mapping[str, Passage]):
    """All passages of a collection by id, 22 bytes of memory for each; iteration is in the order of the files.

    A look-up reads the one record it needs. Rows number the passages from 0, in no order that means anything, and
    are the same whenever the same files are opened.

    Args:
        files: where the passages stand.
        on_bad: told of records that cannot be read, and of ids that stand twice; when it returns they are left out.
        merge: an id may come again with the same title and text, as it does in training lines, and is one passage.

    Raises:
        UserError: an id that stands twice, or with ``merge`` one with two texts; both lines are named. What reading
            the files raises.
    """

    def __init__(self, files: Sequence[PassageFile], *, on_bad: OnBad = refuse, merge: bool = False) -> None:
        self._files = list(files)
        self.merged = 0
        self._blank: set[str] = set()
        hashes, contents = array("Q"), array("Q")
        positions, slots, owners = array("q"), array("I"), array("H")
        for number, file in enumerate(self._files):
            for position, _, passages in file.scan(on_bad):
                for slot, passage in enumerate(passages):
                    hashes.append(hash64(passage.id))
                    if merge:
                        contents.append(hash64("\0".join(passage)))
                    positions.append(position)
                    slots.append(slot)
                    owners.append(number)
                    if passage.is_blank:
                        self._blank.add(passage.id)
        table = np.frombuffer(hashes, np.uint64) if hashes else np.empty(0, np.uint64)
        order = np.argsort(table, kind="stable")
        self._hashes = table[order]
        self._positions = np.array(positions, np.int64)[order]
        self._slots = np.array(slots, np.uint32)[order]
        self._owners = np.array(owners, np.uint16)[order]
        self._last: tuple[int, int, Sequence[Passage]] = (-1, -1, ())
        self._resolve(np.array(contents, np.uint64)[order] if merge else None, on_bad)

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, passage_id: str) -> Passage:
        found = self._find(passage_id)
        if found is None:
            raise KeyError(passage_id)
        return found[1]

    def __contains__(self, passage_id: object) -> bool:
        return isinstance(passage_id, str) and self._find(passage_id) is not None

    def __iter__(self) -> Iterator[str]:
        return (passage.id for passage in self.in_order())

    def in_order(self) -> Iterator[Passage]:
        """Yield all passages in the order of the files."""
        return (self._at(row) for row in self._order)

    def row(self, passage_id: str) -> int:
        """Return the number of a passage, below ``len(self)``; KeyError when it is not here."""
        found = self._find(passage_id)
        if found is None:
            raise KeyError(passage_id)
        return found[0]

    def is_blank(self, passage_id: str) -> bool:
        """Say whether a passage has neither title nor text, which takes no reading for nearly all of them."""
        return passage_id in self._blank and self[passage_id].is_blank

    def where(self, passage_id: str) -> str:
        """Return the ``file:line`` on which a passage stands; KeyError when it is not here."""
        return self._where(self.row(passage_id))

    @cached_property
    def _order(self) -> np.ndarray:
        return np.lexsort((self._slots, self._positions, self._owners))

    def _find(self, passage_id: str) -> tuple[int, Passage] | None:
        key = np.uint64(hash64(passage_id))
        row = int(np.searchsorted(self._hashes, key))
        while row < len(self._hashes) and self._hashes[row] == key:
            passage = self._at(row)
            if passage.id == passage_id:
                return row, passage
            row += 1
        return None

    def _at(self, row: int) -> Passage:
        owner, position = int(self._owners[row]), int(self._positions[row])
        last_owner, last_position, passages = self._last
        if (owner, position) != (last_owner, last_position):
            passages = self._files[owner].read(position)
            self._last = (owner, position, passages)
        slot = int(self._slots[row])
        if slot >= len(passages):
            raise UserError("this file changed while it was in use", self._files[owner].source.place, "start again")
        return passages[slot]

    def _where(self, row: int) -> str:
        return self._files[int(self._owners[row])].source.where(int(self._positions[row]))

    def _resolve(self, contents: np.ndarray | None, on_bad: OnBad) -> None:
        """Keep one of each passage where equal hashes stand side by side."""
        same = self._hashes[1:] == self._hashes[:-1]
        if contents is not None:
            # The second hash covers id, title and text: what agrees in both is the same passage.
            repeated = np.flatnonzero(same & (contents[1:] == contents[:-1])) + 1
            self.merged = len(repeated)
            self._drop(repeated)
            same = self._hashes[1:] == self._hashes[:-1]
        suspects = np.flatnonzero(same)
        doubled = []
        for start in suspects[np.diff(suspects, prepend=-2) > 1]:
            firsts: dict[str, int] = {}
            row = int(start)
            while row < len(self._hashes) and self._hashes[row] == self._hashes[start]:
                passage = self._at(row)
                first = firsts.setdefault(passage.id, row)
                if first != row and (contents is None or self._at(first) != passage):
                    doubled.append((row, first))
                elif first != row:
                    self.merged += 1
                    doubled.append((row, row))
                row += 1
        for row, first in sorted(doubled, key=lambda pair: (self._owners[pair[0]], self._positions[pair[0]])):
            if first != row:
                stands = "stands already" if contents is None else "stands with another title or text"
                where, earlier = self._where(row), self._where(first)
                earlier = f"line {earlier.rsplit(':', 1)[1]}" if self._owners[row] == self._owners[first] else earlier
                on_bad(UserError(f"passage id {self._at(row).id!r} {stands} on {earlier}", where))
        self._drop(np.array([row for row, _ in doubled], np.int64))

    def _drop(self, rows: np.ndarray) -> None:
        if len(rows):
            for name in ("_hashes", "_positions", "_slots", "_owners"):
                setattr(self, name, np.delete(getattr(self, name), rows))


def hash64(text: str) -> int:
    """Return 64 bits that stand for a text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class FirstLines:
    """The line on which each id stood first, in 30 to 60 bytes an id.

    An id is known by 96 bits of its hash: two ids of a corpus like MS MARCO are taken for one with a
    probability of 1e-15.
    """

    def __init__(self) -> None:
        self._used = 0
        self._make_table(1 << 10)

    def setdefault(self, name: str, line: int) -> int:
        """Return the line given when the id came first, which is this one for a new id."""
        low, high = _TWO_PARTS.unpack(blake2b(name.encode(), digest_size=12).digest())
        place = self._place(low, high)
        if self._lines[place]:
            return self._lines[place]
        self._low[place], self._high[place], self._lines[place] = low, high, line
        self._used += 1
        if self._used * 3 > self._size * 2:
            self._grow()
        return line

    def __len__(self) -> int:
        return self._used

    def _make_table(self, size: int) -> None:
        self._size = size
        self._low, self._high = array("Q", bytes(8 * size)), array("I", bytes(4 * size))
        self._lines = array("Q", bytes(8 * size))

    def _place(self, low: int, high: int) -> int:
        """Return where an id stands, or the empty place where it belongs."""
        place = low & (self._size - 1)
        while self._lines[place] and (self._low[place] != low or self._high[place] != high):
            place = (place + 1) & (self._size - 1)
        return place

    def _grow(self) -> None:
        old = zip(self._low, self._high, self._lines, strict=True)
        self._make_table(self._size * 2)
        for low, high, line in old:
            if line:
                place = self._place(low, high)
                self._low[place], self._high[place], self._lines[place] = low, high, line
