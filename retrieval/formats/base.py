"""What every collection offers, whatever format lies behind it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from condenser.errors import UserError, nearest, sample
from condenser.files import sha256_file
from condenser.manifest import fingerprint
from retrieval.passages import PassageStore
from retrieval.records import Passage, Query, ScoredPair

Qrels = dict[str, dict[str, int]]
Negatives = dict[str, list[str]]
Scores = dict[str, dict[str, float]]


class Collection(ABC):
    """Passages, queries and, for each split, judgements; besides maybe hard negatives and scores of a teacher.

    What it returns belongs to it: read it, do not change it.

    Attributes:
        name: how messages and tables call the collection.
        folder: where messages point.
        format: the format it was opened as.
        skip_bad: pass over, and count, lines that cannot be read, unless a call says otherwise.
        identity: what stands for the data in fingerprints when they do not lie in files of the user's.
    """

    def __init__(
        self, name: str, folder: Path, format: str, *, skip_bad: bool = False, identity: str | None = None
    ) -> None:
        self.name = name
        self.folder = folder
        self.format = format
        self.skip_bad = skip_bad
        self.identity = identity
        self._store: PassageStore | None = None

    @abstractmethod
    def passages(self, *, skip_bad: bool | None = None) -> Iterator[Passage]:
        """Yield the passages in order, each id once; UserError with ``file:line`` for what cannot be read."""

    @abstractmethod
    def queries(self, split: str | None = None, *, skip_bad: bool | None = None) -> Iterator[Query]:
        """Yield the queries in order; with a split, only those that are judged in it.

        Raises:
            UserError: no queries, no such split, none of its queries is here, or one id with two texts.
        """

    @abstractmethod
    def splits(self) -> list[str]:
        """Return the names of the splits, sorted."""

    @abstractmethod
    def qrels(self, split: str) -> Qrels:
        """Return a split's judgements as query id -> passage id -> grade; UserError when there are none."""

    def negatives(self, split: str) -> Negatives:
        """Return a split's hard negatives as query id -> passage ids; empty when it has none."""
        return {}

    def teacher_scores(self, split: str) -> Scores:
        """Return a teacher's scores as query id -> passage id -> score; empty when there are none."""
        return {}

    def scored_pairs(self, split: str) -> list[ScoredPair]:
        """Return a split's scored pairs of texts; empty when there are none."""
        return []

    def corpus_files(self) -> list[Path]:
        """Return the files in which the passages stand; empty where these are no files of the user's."""
        return []

    def files(self) -> list[Path]:
        """Return all files of the collection."""
        return []

    @abstractmethod
    def _make_store(self) -> PassageStore: ...

    @property
    def corpus_file(self) -> Path:
        """The (first) file in which the passages stand, or the folder where there is none."""
        return next(iter(self.corpus_files()), self.folder)

    def lookup(self) -> PassageStore:
        """Return all passages by id, without their texts in memory; built at the first call."""
        if self._store is None:
            self._store = self._make_store()
        return self._store

    def fingerprint(self) -> str:
        """Return a short digest over the bytes of the collection's files."""
        digest = hashlib.sha256((self.identity or "").encode())
        for file in sorted(self.files()):
            name = file.relative_to(self.folder).as_posix() if file.is_relative_to(self.folder) else file.name
            digest.update(f"{name}\0{sha256_file(file)}\n".encode())
        return digest.hexdigest()[:16]

    def corpus_fingerprint(self) -> str:
        """Return a short digest over the passages' files alone: judgements may change and leave what was made of them.

        Where they lie in no files of their own it is that of the whole collection.
        """
        return "+".join(map(fingerprint, self.corpus_files())) or self.fingerprint()

    def _check_split(self, split: str, where: Path | None = None) -> None:
        known = self.splits()
        if split not in known:
            close = nearest(split, known)
            hint = f"did you mean {close}?" if close else f"splits here: {', '.join(known) or 'none'}"
            raise UserError(f"no judgements for split {split!r}", where or self.folder, hint)


def only_judged(queries: Iterable[Query], judged: Qrels, split: str, where: Path) -> Iterator[Query]:
    """Yield the queries that a split judges; UserError when there is none of them."""
    found = False
    for query in queries:
        if query.id in judged:
            found = True
            yield query
    if not found:
        raise UserError(
            f"none of the {len(judged):,} queries judged in split {split!r} is here, such as {sample(judged)}", where
        )
