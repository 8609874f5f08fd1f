"""The records that cross rooms: plain text with ids, which are strings always."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

One = TypeVar("One")


class Passage(NamedTuple):
    """One unit of retrieval; ``title`` is empty when there is none."""

    id: str
    title: str
    text: str

    @property
    def is_blank(self) -> bool:
        """Whether it has neither title nor text."""
        return not (self.title.strip() or self.text.strip())

    @property
    def whole(self) -> str:
        """Title and text with a blank between; the text alone where there is no title."""
        return f"{self.title} {self.text}" if self.title else self.text

    @property
    def line(self) -> bytes:
        """The passage as a JSON line of BEIR's corpus.jsonl."""
        import orjson

        record = {"_id": self.id, "title": self.title, "text": self.text}
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


class Query(NamedTuple):
    """One question; ``answers`` are answer strings for open-domain QA, usually none."""

    id: str
    text: str
    answers: tuple[str, ...] = ()

    @property
    def is_blank(self) -> bool:
        """Whether it has no text."""
        return not self.text.strip()


class Hit(NamedTuple):
    """One retrieved passage with its score (float32)."""

    passage_id: str
    score: float


class PassageHit(NamedTuple):
    """One retrieved passage with its score (float32) and its text."""

    passage_id: str
    score: float
    title: str
    text: str


class ScoredPair(NamedTuple):
    """Two texts and a number for how well they go together, as people or a teacher model gave it."""

    first: str
    second: str
    score: float


def batched(records: Iterable[One], size: int) -> Iterator[list[One]]:
    """Yield all records in their order, ``size`` at a time and the rest at the end (as Python 3.12's, but lists)."""
    rest = iter(records)
    while batch := list(islice(rest, size)):
        yield batch


def folded(text: str) -> str:
    """Return a text without what does not change what it says: case, forms of letters (NFKC), blanks between words."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
