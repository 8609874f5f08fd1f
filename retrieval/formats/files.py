"""Collections whose passages, queries and judgements stand in files of their own, tied together by ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from condenser.errors import UserError
from condenser.files import refuse
from retrieval.formats.base import Collection, Negatives, Qrels, Scores, only_judged
from retrieval.formats.negatives import read_negatives, read_scores
from retrieval.passages import PassageFile, PassageStore
from retrieval.readers import read_queries, read_unique, warn_of_skipped
from retrieval.records import Passage, Query


@dataclass
class Layout:
    """Which file of a collection holds what.

    Attributes:
        corpus: the files in which the passages stand, opened.
        corpus_paths: their names.
        queries: files of queries by split; a file for all splits stands under "".
        qrels: files of judgements by split.
        negatives: files of hard negatives by split.
        scores: files of a teacher's scores by split.
        no_queries: what to say when there is no file of queries.
        qrels_place: where messages about a missing split point.
    """

    corpus: Sequence[PassageFile]
    corpus_paths: Sequence[Path]
    queries: Mapping[str, Path] = field(default_factory=dict)
    qrels: Mapping[str, Path] = field(default_factory=dict)
    negatives: Mapping[str, Path] = field(default_factory=dict)
    scores: Mapping[str, Path] = field(default_factory=dict)
    no_queries: str = "no file of queries in this collection"
    qrels_place: Path | None = None


class FileCollection(Collection):
    """A collection in files of its own for passages, queries and judgements, as a layout says."""

    def __init__(
        self,
        name: str,
        folder: Path,
        format: str,
        layout: Layout,
        *,
        skip_bad: bool = False,
        identity: str | None = None,
    ) -> None:
        super().__init__(name, folder, format, skip_bad=skip_bad, identity=identity)
        self.layout = layout

    def passages(self, *, skip_bad: bool | None = None) -> Iterator[Passage]:
        """Yield the passages in the order of the files; errors are those of `read_passages`."""
        return read_unique(self.layout.corpus, "passage", skip_bad=self.skip_bad if skip_bad is None else skip_bad)

    def queries(self, split: str | None = None, *, skip_bad: bool | None = None) -> Iterator[Query]:
        """Yield the queries in the order of the files; with a split, only those that are judged in it.

        Those of a split with a file of its own and without judgements (a leaderboard's, say) are yielded all.

        Raises:
            UserError: no file of queries, no such split, none of its queries is here, or one id with two texts.
        """
        skip_bad = self.skip_bad if skip_bad is None else skip_bad
        paths = self.layout.queries
        if not paths:
            raise UserError(self.layout.no_queries, self.folder)
        if split is None or (split in paths and split not in self.layout.qrels):
            yield from _merged([paths[split]] if split else list(paths.values()), skip_bad)
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
        return read_negatives(self.layout.negatives[split], self.qrels(split) if split in self.layout.qrels else {})

    def teacher_scores(self, split: str) -> Scores:
        """Return a teacher's scores as query id -> passage id -> score; empty when there are none."""
        return read_scores(self.layout.scores[split]) if split in self.layout.scores else {}

    def corpus_files(self) -> list[Path]:
        """Return the files in which the passages stand."""
        return list(self.layout.corpus_paths)

    def files(self) -> list[Path]:
        """Return all files of the collection."""
        layout = self.layout
        by_split = (layout.queries, layout.qrels, layout.negatives, layout.scores)
        return [*layout.corpus_paths, *(file for files in by_split for file in files.values())]

    def _make_store(self) -> PassageStore:
        skipped: list[UserError] = []
        store = PassageStore(self.layout.corpus, on_bad=skipped.append if self.skip_bad else refuse)
        warn_of_skipped(skipped, self.corpus_file)
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
