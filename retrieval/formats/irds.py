"""Data sets of the ir_datasets package, by their ids there; the package is an extra."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from condenser.errors import UserError, first_line, nearest
from retrieval.formats.base import Collection, Qrels, only_judged
from retrieval.passages import PassageStore
from retrieval.readers import one_line, passage_parser
from retrieval.records import Passage, Query
from retrieval.sources import LineFile, RecordFile

PREFIX = "irds:"


class IrDatasetsCollection(Collection):
    """A data set of ir_datasets with the splits below it: ``msmarco-passage`` has ``train``, ``dev/small`` and so on.

    An id with judgements of its own is also its one split, by the last part of the id.
    """

    def __init__(self, identifier: str, *, skip_bad: bool = False) -> None:
        name = identifier.removeprefix(PREFIX)
        super().__init__(name, Path(), "ir_datasets", skip_bad=skip_bad, identity=f"ir_datasets {name}")
        self._datasets = _import()
        known = list(self._datasets.registry)
        if name not in known:
            close = nearest(name, known)
            raise UserError(f"ir_datasets knows no {name!r}", hint=f"did you mean {PREFIX}{close}?" if close else None)

    @cached_property
    def _splits(self) -> dict[str, str]:
        below = {
            other.removeprefix(f"{self.name}/"): other
            for other in self._datasets.registry
            if other.startswith(f"{self.name}/") and self._datasets.load(other).has_qrels()
        }
        own = {self.name.rsplit("/", 1)[-1]: self.name} if self._datasets.load(self.name).has_qrels() else {}
        return below | own

    def passages(self, *, skip_bad: bool | None = None) -> Iterator[Passage]:
        """Yield the documents in the package's order."""
        for document in self._each(self.name, "docs"):
            title = getattr(document, "title", "") or ""
            text = next(
                (value for name in ("text", "body", "abstract") if (value := getattr(document, name, ""))), None
            )
            if text is None:
                text, title = document.default_text(), ""
            yield Passage(str(document.doc_id), one_line(title), one_line(text))

    def queries(self, split: str | None = None, *, skip_bad: bool | None = None) -> Iterator[Query]:
        """Yield the queries; with a split, those that are judged in it."""
        if split is not None:
            self._check_split(split)
            found = self._queries(self._splits[split])
            yield from only_judged(found, self.qrels(split), split, self.folder)
            return
        seen = set()
        for name in dict.fromkeys([self.name, *self._splits.values()]):
            if self._datasets.load(name).has_queries():
                for query in self._queries(name):
                    if query.id not in seen:
                        seen.add(query.id)
                        yield query

    def _queries(self, name: str) -> Iterator[Query]:
        for query in self._each(name, "queries"):
            text = getattr(query, "text", None) or query.default_text()
            yield Query(str(query.query_id), one_line(text))

    def splits(self) -> list[str]:
        """Return the ids below this one that have judgements."""
        return sorted(self._splits)

    def qrels(self, split: str) -> Qrels:
        """Return a split's judgements."""
        self._check_split(split)
        qrels: Qrels = {}
        for judgement in self._each(self._splits[split], "qrels"):
            qrels.setdefault(str(judgement.query_id), {})[str(judgement.doc_id)] = int(judgement.relevance)
        return qrels

    def _make_store(self) -> PassageStore:
        # One copy of the texts, of which we know where each stands; it has no name and is gone with the process.
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            for passage in self.passages():
                file.write(passage.line)
            file.flush()
            lines = LineFile(file.name)
            lines.hold()
            return PassageStore([RecordFile(lines, lambda: passage_parser(lines.path))])

    def _each(self, name: str, what: str) -> Iterator[Any]:
        try:
            yield from getattr(self._datasets.load(name), f"{what}_iter")()
        except Exception as error:  # the package downloads when first asked
            raise UserError(f"ir_datasets cannot give the {what} of {name!r}: {first_line(error)}") from None


def _import() -> Any:
    try:
        import ir_datasets
    except ImportError:
        raise UserError("ir_datasets is not installed", hint="pip install 'condenser-ir[ir_datasets]'") from None
    return ir_datasets
