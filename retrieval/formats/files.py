"""Collections whose passages, queries and judgements stand in files of their own, tied together by ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from condenser.errors import UserError, sample
from condenser.talk import warn
from retrieval.formats.base import Collection, Negatives, Qrels, Scores, only_judged
from retrieval.passages import PassageFile, PassageStore
from retrieval.readers import read_queries, read_unique
from retrieval.records import Passage, Query, ScoredPair


@dataclass
class Layout:
    """Which file of a collection holds what.

    Attributes:
        corpus: the files in which the passages stand, opened.
        corpus_paths: their names.
        queries: files of queries by split; a file for all splits stands under "".
        qrels: files of judgements by split.
        negatives: for a split, its files of hard negatives and what reads them.
        scores: files of a teacher's scores by split.
        no_queries: what to say when there is no file of queries.
        qrels_place: where messages about a missing split point.
    """

    corpus: Sequence[PassageFile]
    corpus_paths: Sequence[Path]
    queries: Mapping[str, Path] = field(default_factory=dict)
    qrels: Mapping[str, Path] = field(default_factory=dict)
    negatives: Mapping[str, tuple[Sequence[Path], Callable[[Qrels], Negatives]]] = field(default_factory=dict)
    scores: Mapping[str, Path] = field(default_factory=dict)
    no_queries: str = "no file of queries in this collection"
    qrels_place: Path | None = None


class FileCollection(Collection):
    """A collection in files of its own for passages, queries and judgements, as a layout says."""

    def __init__(self, name: str, folder: Path, format: str, layout: Layout, *, skip_bad: bool = False) -> None:
        super().__init__(name, folder, format, skip_bad=skip_bad)
        self.layout = layout

    def passages(self, *, skip_bad: bool | None = None) -> Iterator[Passage]:
        """Yield the passages in the order of the files; errors are those of `read_passages`."""
        return read_unique(self.layout.corpus, "passage", skip_bad=self.skip_bad if skip_bad is None else skip_bad)

    def queries(self, split: str | None = None, *, skip_bad: bool | None = None) -> Iterator[Query]:
        """Yield the queries in the order of the files; with a split, only those that are judged in it.

        Raises:
            UserError: no file of queries, no such split, none of its queries is here, or one id with two texts.
        """
        skip_bad = self.skip_bad if skip_bad is None else skip_bad
        paths = self.layout.queries
        if not paths:
            here = sample(sorted(entry.name for entry in self.folder.iterdir()), 5) or "nothing"
            raise UserError(f"{self.layout.no_queries}, found {here}", self.folder)
        if split is None:
            yield from _merged(list(paths.values()), skip_bad)
            return
        judged = self.qrels(split)
        chosen = [paths[split]] if split in paths else list(paths.values())
        where = chosen[0] if len(chosen) == 1 else self.folder
        yield from only_judged(_merged(chosen, skip_bad), judged, split, where)

    def splits(self) -> list[str]:
        """Return the names of the splits that have judgements."""
        return sorted(self.layout.qrels)

    def qrels(self, split: str) -> Qrels:
        """Return a split's judgements as query id -> passage id -> grade; UserError when there are none."""
        from eval.runs import load_qrels

        self._check_split(split, self.layout.qrels_place)
        return load_qrels(self.layout.qrels[split])

    def negatives(self, split: str) -> Negatives:
        """Return a split's hard negatives as query id -> passage ids; empty when the collection has none."""
        if split not in self.layout.negatives:
            return {}
        return self.layout.negatives[split][1](self.qrels(split) if split in self.layout.qrels else {})

    def teacher_scores(self, split: str) -> Scores:
        """Return a teacher's scores as query id -> passage id -> score; empty when there are none."""
        return read_scores(self.layout.scores[split]) if split in self.layout.scores else {}

    def scored_pairs(self, split: str) -> list[ScoredPair]:
        """Return nothing: scored pairs of texts are a format of their own."""
        return []

    def corpus_files(self) -> list[Path]:
        """Return the files in which the passages stand."""
        return list(self.layout.corpus_paths)

    def files(self) -> list[Path]:
        """Return all files of the collection."""
        negatives = [file for files, _ in self.layout.negatives.values() for file in files]
        some = [self.layout.queries, self.layout.qrels, self.layout.scores]
        return [*dict.fromkeys([*self.layout.corpus_paths, *(file for of in some for file in of.values()), *negatives])]

    def _make_store(self) -> PassageStore:
        skipped: list[UserError] = []
        store = PassageStore(self.layout.corpus, **({"on_bad": skipped.append} if self.skip_bad else {}))
        if skipped:
            warn(f"{self.corpus_file}: {len(skipped):,} lines skipped, first {skipped[0]}")
        return store


def _merged(paths: Sequence[Path], skip_bad: bool) -> Iterator[Query]:
    """Yield the queries of files in order; one that stands in several files with one text comes once."""
    if len(paths) == 1:
        yield from read_queries(paths[0], skip_bad=skip_bad)
        return
    known: dict[str, tuple[str, Path]] = {}
    for path in paths:
        for query in read_queries(path, skip_bad=skip_bad):
            text, first = known.setdefault(query.id, (query.text, path))
            if text != query.text:
                raise UserError(f"query id {query.id!r} has another text in {first}", path)
            if first == path:
                yield query


def read_scores(path: Path) -> Scores:
    """Read a teacher's scores: query, passage, score with tabs between, maybe under a line of column names.

    Raises:
        UserError: another number of columns, a score that is no number, a pair scored twice; with ``file:line``.
    """
    from condenser.files import read_lines

    scores: Scores = {}
    for number, line in read_lines(path):
        cells = line.split("\t")
        if not line.strip() or (number == 1 and cells[-1].lower() == "score"):
            continue
        where = f"{path}:{number}"
        if len(cells) != 3 or "" in cells:
            raise UserError(f"{len(cells)} columns, expected 3 (query, passage, score) with tabs between", where)
        value = finite(cells[2], where)
        if scores.setdefault(cells[0], {}).setdefault(cells[1], value) != value:
            raise UserError(f"query {cells[0]!r} and passage {cells[1]!r} have two scores", where)
    return scores


def finite(value: object, where: str) -> float:
    """Return a score as a float; UserError when it is no finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not abs(number) < float("inf"):
        raise UserError(f"score is {value!r}, expected a finite number", where)
    return number
