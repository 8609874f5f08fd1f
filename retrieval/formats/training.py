"""Collections in training lines: each line is a query with its passages, as texts or as ids of a corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from condenser.errors import UserError
from condenser.files import refuse
from condenser.talk import say, warn
from retrieval.formats.base import Collection, Negatives, Qrels, Scores, only_judged
from retrieval.formats.lines import Parser, TrainingLine
from retrieval.passages import PassageFile, PassageStore
from retrieval.readers import read_unique, warn_of_skipped
from retrieval.records import Passage, Query, ScoredPair
from retrieval.sources import OnBad, RecordFile, Source

LineFile = RecordFile[TrainingLine]


class _Gathered:
    """What the lines of a split say, taken together; an id is one string, however often it comes."""

    def __init__(self) -> None:
        self.queries: dict[str, Query] = {}
        self.qrels: Qrels = {}
        self.negatives: Negatives = {}
        self.scores: Scores = {}
        self.repeated = 0
        self._lines: dict[str, str] = {}
        self._candidates: dict[str, list[str]] = {}
        self._known: dict[str, str] = {}

    def add(self, line: TrainingLine, where: str) -> None:
        """Take one line in; UserError when its query id stands already with another text."""
        query = line.query
        if query is None:
            return
        known = self.queries.setdefault(query.id, query)
        if known.text != query.text:
            earlier = self._lines[query.id]
            raise UserError(f"query id {query.id!r} has another text on {earlier}", where)
        self.repeated += known is not query
        self._lines.setdefault(query.id, where)
        judged = self.qrels.setdefault(known.id, {})
        for passage_id in line.positives:
            judged[self._one(passage_id)] = 1
        for ids, lists in ((line.negatives, self.negatives), (line.candidates, self._candidates)):
            if ids:
                lists.setdefault(known.id, []).extend(map(self._one, ids))
        for passage_id, score in line.scores:
            self.scores.setdefault(known.id, {})[self._one(passage_id)] = score

    def finish(self) -> None:
        """Judge the candidates: of a query without a positive, the one that the teacher scores best is its positive."""
        for query_id, candidates in self._candidates.items():
            judged, scores = self.qrels[query_id], self.scores.get(query_id, {})
            scored = [(scores[name], name) for name in candidates if name in scores]
            if not judged and scored:
                judged[max(scored)[1]] = 1
            self.negatives.setdefault(query_id, []).extend(name for name in candidates if name not in judged)
        del self._lines, self._candidates, self._known

    def judge(self, qrels: Qrels) -> None:
        """Take judgements from elsewhere; what they judge positive is no negative."""
        self.qrels = qrels
        for query_id, names in self.negatives.items():
            judged = qrels.get(query_id, {})
            self.negatives[query_id] = [name for name in names if judged.get(name, 0) <= 0]

    def _one(self, passage_id: str) -> str:
        return self._known.setdefault(passage_id, passage_id)


class TrainingCollection(Collection):
    """A collection in training lines.

    Args:
        name: how messages call it.
        folder: where messages point.
        format: the format it was opened as.
        splits: the files of training lines of each split, opened.
        paths: all files that are read.
        corpus: the files of passages when the lines name these by id; texts in the lines are passed over then.
        corpus_paths: their names.
        skip_bad: pass over, and count, lines that cannot be read.
        qrels: files of judgements by split, for lines that judge nothing.
        identity: see `Collection`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        format: str,
        splits: Mapping[str, Sequence[LineFile]],
        paths: Sequence[Path],
        *,
        corpus: Sequence[PassageFile] = (),
        corpus_paths: Sequence[Path] = (),
        skip_bad: bool = False,
        qrels: Mapping[str, Path] | None = None,
        identity: str | None = None,
    ) -> None:
        super().__init__(name, folder, format, skip_bad=skip_bad, identity=identity)
        self._splits, self._paths = splits, list(paths)
        self._corpus, self._corpus_paths = corpus, list(corpus_paths)
        self._qrels = qrels or {}
        self._gathered = cache(self._gather)

    def passages(self, *, skip_bad: bool | None = None) -> Iterator[Passage]:
        """Yield the passages in the order in which they come first, each id once."""
        skip_bad = self.skip_bad if skip_bad is None else skip_bad
        if self._corpus:
            return read_unique(self._corpus, "passage", skip_bad=skip_bad)
        store = self.lookup() if skip_bad == self.skip_bad else self._build_store(skip_bad)
        if not store:
            raise UserError("no passage in these training lines", self.corpus_file)
        return store.in_order()

    def queries(self, split: str | None = None, *, skip_bad: bool | None = None) -> Iterator[Query]:
        """Yield the queries in the order in which they come first; with a split, those that are judged in it.

        Raises:
            UserError: no such split, no query in it, or one id with two texts.
        """
        skip_bad = self.skip_bad if skip_bad is None else skip_bad
        if split is not None:
            self._check_split(split)
            found = self._gathered(split, skip_bad)
            if not found.queries:
                raise UserError(f"split {split!r} holds pairs of sentences and no query", self.corpus_file)
            yield from only_judged(found.queries.values(), found.qrels, split, self.corpus_file)
            return
        known: dict[str, str] = {}
        for name in self.splits():
            for query in self._gathered(name, skip_bad).queries.values():
                if query.id not in known:
                    known[query.id] = query.text
                    yield query
                elif known[query.id] != query.text:
                    what = f"query id {query.id!r} of split {name!r} has another text in an earlier split"
                    raise UserError(what, self.folder)

    def splits(self) -> list[str]:
        """Return the names of the splits, sorted."""
        return sorted(self._splits)

    def qrels(self, split: str) -> Qrels:
        """Return a split's judgements: the positives of its lines have grade 1, a query may have none."""
        self._check_split(split)
        return self._gathered(split, self.skip_bad).qrels

    def negatives(self, split: str) -> Negatives:
        """Return the negatives of a split's lines; empty when there is no such split."""
        return self._gathered(split, self.skip_bad).negatives if split in self._splits else {}

    def teacher_scores(self, split: str) -> Scores:
        """Return the scores that a split's lines give to passages; empty when there are none."""
        return self._gathered(split, self.skip_bad).scores if split in self._splits else {}

    def scored_pairs(self, split: str) -> list[ScoredPair]:
        """Return the lines of a split that are two texts and a score; empty when there are none."""
        passed_over: list[UserError] = []
        on_bad = passed_over.append if self.skip_bad else refuse
        lines = (line for file in self._splits.get(split, ()) for _, line in _lines(file, on_bad))
        return [line.pair for line in lines if line.pair is not None]

    def corpus_files(self) -> list[Path]:
        """Return the files in which the passages stand."""
        return self._corpus_paths or self._paths

    def files(self) -> list[Path]:
        """Return all files of the collection."""
        return [*dict.fromkeys([*self._corpus_paths, *self._paths, *self._qrels.values()])]

    def _make_store(self) -> PassageStore:
        return self._build_store(self.skip_bad)

    def _build_store(self, skip_bad: bool) -> PassageStore:
        skipped: list[UserError] = []
        on_bad = skipped.append if skip_bad else refuse
        if self._corpus:
            store = PassageStore(self._corpus, on_bad=on_bad)
        else:
            files = [_inline(file) for split in self.splits() for file in self._splits[split]]
            store = PassageStore(files, on_bad=on_bad, merge=True)
            if store.merged:
                say(f"{self.name}: {len(store):,} passages, {store.merged:,} times one comes again")
        warn_of_skipped(skipped, self.corpus_file)
        return store

    def _gather(self, split: str, skip_bad: bool) -> _Gathered:
        skipped: list[UserError] = []
        on_bad = skipped.append if skip_bad else refuse
        gathered = _Gathered()
        for file in self._splits[split]:
            for where, line in _lines(file, on_bad):
                try:
                    gathered.add(line, where)
                except UserError as error:
                    on_bad(error)
        gathered.finish()
        warn_of_skipped(skipped, self._splits[split][0].source.place)
        if gathered.repeated:
            warn(f"{self.name}: {gathered.repeated:,} lines of {split} repeat a query; what they say of it is joined")
        if split in self._qrels:
            from eval.runs import load_qrels

            gathered.judge(load_qrels(self._qrels[split]))
        return gathered


def _lines(file: LineFile, on_bad: OnBad) -> Iterator[tuple[str, TrainingLine]]:
    first_errors: list[UserError] = []

    def noted(error: UserError) -> None:
        first_errors.append(error)
        on_bad(error)

    empty = True
    for _, where, lines in file.scan(noted):
        for line in lines:
            empty = False
            yield where, line
    if empty:
        raise UserError(
            "no training line in this file" + (f"; {first_errors[0]}" if first_errors else ""), file.source.place
        )


def line_file(source: Source, make_parser: Callable[[], Parser]) -> LineFile:
    """Return a source as training lines."""
    return RecordFile(source, make_parser)


def _inline(file: LineFile) -> PassageFile:
    """Return the passages whose texts stand in training lines."""

    def make_parser() -> Callable[[object, str], Sequence[Passage]]:
        parse = file.make_parser()
        return lambda raw, where: [passage for line in parse(raw, where) for passage in line.passages]

    return RecordFile(file.source, make_parser)
