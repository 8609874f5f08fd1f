"""Training examples of a bi-encoder: a split's queries, joined with their positives and hard negatives."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from condenser.errors import UserError, sample
from condenser.talk import say, warn
from condenser.training.distributed import rank
from retrieval.collections import Collection
from retrieval.formats.negatives import read_negatives, read_scores
from retrieval.passages import PassageStore, hash64
from retrieval.records import Query, ScoredPair

_Given = TypeVar("_Given")

# Ids of unusable queries that a message shows.
_SHOWN = 5


class Example(NamedTuple):
    """One training query with the ids of its positives and hard negatives, and a teacher's scores of them, if any."""

    query_id: str
    text: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    positive_scores: tuple[float, ...] = ()
    negative_scores: tuple[float, ...] = ()


class Ragged:
    """Lists of numbers in two flat arrays: 4 bytes a number and 8 a list.

    Args:
        typecode: that of `array.array`: ``i`` for int32, ``f`` for float32.
    """

    def __init__(self, typecode: str) -> None:
        self._values, self._ends = array(typecode), array("q", [0])

    def append(self, numbers: Iterable[Any]) -> None:
        """Put one more list at the end."""
        self._values.extend(numbers)
        self._ends.append(len(self._values))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, place: int) -> array[Any]:
        return self._values[self._ends[place] : self._ends[place + 1]]

    def lengths(self) -> np.ndarray:
        """Return the length of each list, (n,) int64."""
        return np.diff(np.frombuffer(self._ends, np.int64))


class Examples(Sequence[Example]):
    """Training queries in columns: those of MS MARCO with 30 negatives each take a quarter of a GB.

    Args:
        examples: in order.
        name: what messages call them.

    Attributes:
        query_ids: one per query, an array of strings.
        texts: one per query, an array of strings.
        passage_ids: every passage that is a positive or a negative of some query, once.
        positives: per query, rows of ``passage_ids``.
        negatives: per query, rows of ``passage_ids``.
        positive_scores: per query, a teacher's scores in the order of ``positives``; empty without a teacher.
        negative_scores: per query, a teacher's scores in the order of ``negatives``.
    """

    def __init__(self, examples: Iterable[Example], name: str = "training data") -> None:
        self.name = name
        query_ids, texts = [], []
        self.positives, self.negatives = Ragged("i"), Ragged("i")
        self.positive_scores, self.negative_scores = Ragged("f"), Ragged("f")
        row: dict[str, int] = {}
        for example in examples:
            query_ids.append(example.query_id)
            texts.append(example.text)
            self.positives.append(row.setdefault(passage, len(row)) for passage in example.positives)
            self.negatives.append(row.setdefault(passage, len(row)) for passage in example.negatives)
            self.positive_scores.append(example.positive_scores)
            self.negative_scores.append(example.negative_scores)
        # An array's strings lie together, short ones in 16 bytes where a str takes 60. A str that is kept would also
        # keep the page of memory on which it was made, between ids that are dropped.
        kind = np.dtypes.StringDType()
        self.query_ids, self.texts = np.array(query_ids, kind), np.array(texts, kind)
        self.passage_ids = np.array(list(row), kind)

    def __len__(self) -> int:
        return len(self.query_ids)

    @overload
    def __getitem__(self, place: int) -> Example: ...

    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...

    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        place = range(len(self))[place]
        return Example(
            self.query_ids[place],
            self.texts[place],
            tuple(self.passage_ids[row] for row in self.positives[place]),
            tuple(self.passage_ids[row] for row in self.negatives[place]),
            tuple(self.positive_scores[place]),
            tuple(self.negative_scores[place]),
        )


def read_examples(
    collection: Collection,
    split: str,
    *,
    with_negatives: bool = False,
    with_scores: bool = False,
    drop_empty: bool = False,
    negatives_files: Sequence[str | Path] = (),
    negatives_pool: int | None = None,
    seed: int = 42,
    scores_files: Sequence[str | Path] = (),
) -> Examples:
    """Join a split's queries, judgements and hard negatives.

    What training cannot use is left out, counted and told: judged queries without a text, passages that
    are not in the corpus or blank, and negatives that are judged positives of their query.

    Args:
        collection: where from.
        split: the judgements; a grade above 0 makes a positive.
        with_negatives: read the hard negatives as well.
        with_scores: read a teacher's scores in their place: a query's positives are those with a score, its
            negatives all other passages with a score.
        drop_empty: leave out, and count, queries that cannot be trained on.
        negatives_files: more hard negatives, as `retrieval.formats.negatives.read_negatives` reads them.
        negatives_pool: hard negatives that a query keeps of each source (the collection, each file), so that one
            with many does not crowd out the others; None keeps all.
        seed: of the draw of those.
        scores_files: more of a teacher's scores, as `retrieval.formats.negatives.read_scores` reads them.

    Raises:
        UserError: a query without a positive in the corpus that has a text or, with scores, without a score of a
            positive and of another passage, or a positive outside the corpus (unless ``drop_empty``); no query
            that can be trained on; hard negatives of which none is in the corpus; no scores; a file of other
            queries.
    """
    qrels = collection.qrels(split)
    teacher = None
    if with_scores:
        teacher = {query_id: dict(scores) for query_id, scores in collection.teacher_scores(split).items()}
        for file in scores_files:
            for query_id, scores in _of_these_queries(read_scores(Path(file)), qrels, split, file):
                teacher.setdefault(query_id, {}).update(scores)
    if with_scores and not teacher:
        raise UserError(f"no teacher's scores for split {split!r}", collection.folder, "--loss softmax needs none")
    negatives: dict[str, list[str]] = {}
    if with_negatives and not with_scores:
        sources: list[Iterable[tuple[str, list[str]]]] = [collection.negatives(split).items()]
        for file in negatives_files:
            sources.append(_of_these_queries(read_negatives(Path(file), qrels), qrels, split, file))
        for number, given in enumerate(sources):
            for query_id, names in given:
                kept = names if negatives_pool is None else _drawn(names, negatives_pool, [seed, number], query_id)
                negatives.setdefault(query_id, []).extend(kept)
    join = _Join(qrels, negatives, teacher, collection.lookup())
    usable = (example for query in collection.queries(split) if (example := join.example(query)))
    examples = Examples(usable, f"{collection.name}, {split}")
    join.check(split, collection.folder, len(examples), drop_empty=drop_empty)
    if rank() == 0:
        join.tell(examples.name, len(examples))
        if with_negatives and not with_scores and not negatives:
            warn(f"{examples.name}: hard negatives are asked for, and there are none")
    return examples


def _of_these_queries(
    found: Mapping[str, _Given], qrels: Mapping[str, Any], split: str, file: str | Path
) -> Iterator[tuple[str, _Given]]:
    """Yield what a file gives to queries of the split; UserError when it gives nothing to any of them."""
    if not found.keys() & qrels.keys():
        raise UserError(f"none of its {len(found):,} queries is judged in split {split!r}: {sample(found)}", file)
    return ((query_id, given) for query_id, given in found.items() if query_id in qrels)


def _drawn(names: Sequence[str], count: int, seed: list[int], query_id: str) -> Sequence[str]:
    """Return so many of the names in their order, by a draw that depends on seed and query alone."""
    if len(names) <= count:
        return names
    chosen = np.random.default_rng([*seed, hash64(query_id)]).choice(len(names), count, replace=False)
    return [names[place] for place in np.sort(chosen).tolist()]


class _Join:
    """Makes examples and remembers what it leaves out.

    Args:
        qrels: query id -> passage id -> grade.
        negatives: query id -> passage ids.
        teacher: query id -> passage id -> score; None without a teacher.
        corpus: all passages.
    """

    def __init__(
        self,
        qrels: Mapping[str, Mapping[str, int]],
        negatives: Mapping[str, Sequence[str]],
        teacher: Mapping[str, Mapping[str, float]] | None,
        corpus: PassageStore,
    ) -> None:
        self._qrels, self._negatives, self._teacher, self._corpus = qrels, negatives, teacher, corpus
        self._present: set[str] = set()
        self._without_text = dict.fromkeys(qrels)
        self._unusable: dict[str, list[str]] = {}
        self._absent_positives: dict[str, None] = {}
        self._absent_negatives: dict[str, None] = {}
        self._blank: dict[str, None] = {}
        self._contradicted = self._negatives_kept = 0

    def example(self, query: Query) -> Example | None:
        """Return a query's example, or None if it cannot be trained on."""
        self._without_text.pop(query.id, None)
        judged = {passage: None for passage, grade in self._qrels[query.id].items() if grade > 0}
        positives = self._usable(judged, self._absent_positives)
        if not positives:
            blank = not judged.keys().isdisjoint(self._blank)
            lack = "with no positive that has a text" if blank else "with no positive in the corpus"
            self._leave_out(query, lack if judged else "without a positive")
            return None
        scores = {} if self._teacher is None else self._teacher.get(query.id, {})
        given = dict.fromkeys(self._negatives.get(query.id, ()) if self._teacher is None else scores)
        negatives = self._usable((one for one in given if one not in judged), self._absent_negatives)
        self._negatives_kept += len(negatives)
        if self._teacher is None:
            self._contradicted += sum(one in judged for one in given)
            return Example(query.id, query.text, positives, negatives)
        positives = tuple(one for one in positives if one in scores)
        if not positives or not negatives:
            self._leave_out(query, "without a score of a positive and of another passage")
            return None
        return Example(
            query.id,
            query.text,
            positives,
            negatives,
            tuple(scores[one] for one in positives),
            tuple(scores[one] for one in negatives),
        )

    def check(self, split: str, folder: Path, kept: int, *, drop_empty: bool) -> None:
        """Raise UserError if too much is left out."""
        if self._absent_negatives and not self._negatives_kept:
            raise UserError(
                f"hard negatives of split {split!r} name passages of another corpus: none of "
                f"{len(self._absent_negatives):,} is here, such as {sample(self._absent_negatives)}",
                folder,
            )
        dropped = sum(map(len, self._unusable.values()))
        if dropped and not (drop_empty and kept):
            raise UserError(
                f"{dropped:,} of {kept + dropped:,} queries of split {split!r} cannot be trained on: {self._reasons()}",
                folder,
                "--drop_empty leaves them out" if kept else None,
            )
        if self._absent_positives and not drop_empty:
            raise UserError(
                f"{len(self._absent_positives):,} judged positives of split {split!r} are not in the corpus: "
                f"{sample(self._absent_positives, _SHOWN)}",
                folder,
                "are these the judgements of this corpus? --drop_empty trains without them",
            )

    def tell(self, name: str, kept: int) -> None:
        """Warn of what is left out."""
        dropped = sum(map(len, self._unusable.values()))
        if dropped:
            warn(f"{name}: kept {kept:,} of {kept + dropped:,} queries, dropped {dropped:,}: {self._reasons()}")
        for what, ids in (
            ("judged queries that are not in the query file", self._without_text),
            ("judged positives that are not in the corpus", self._absent_positives),
            ("hard negatives that are not in the corpus", self._absent_negatives),
            ("positives and hard negatives that have neither title nor text", self._blank),
        ):
            if ids:
                warn(f"{name}: left out {len(ids):,} {what} ({sample(ids)})")
        if self._contradicted:
            warn(f"{name}: left out {self._contradicted:,} hard negatives that are judged positives of their query")

    def _usable(self, passages: Iterable[str], absent: dict[str, None]) -> tuple[str, ...]:
        """Return those that are in the corpus and not blank; remember the others."""
        usable = []
        for passage in passages:
            if passage not in self._present:
                if passage not in self._corpus:
                    absent[passage] = None
                    continue
                if self._corpus.is_blank(passage):
                    self._blank[passage] = None
                    continue
                self._present.add(passage)
            usable.append(passage)
        return tuple(usable)

    def _leave_out(self, query: Query, why: str) -> None:
        self._unusable.setdefault(why, []).append(query.id)

    def _reasons(self) -> str:
        return ", ".join(f"{len(ids):,} {why} ({sample(ids, _SHOWN)})" for why, ids in self._unusable.items())


def read_pairs(collection: Collection, split: str) -> list[ScoredPair]:
    """Return a split's scored pairs of texts with their scores scaled to 0..1.

    Scores within 0..1 stay as they are; others are measured between the lowest and the highest of the split.

    Raises:
        UserError: no scored pairs, or all of one score.
    """
    pairs = collection.scored_pairs(split)
    if not pairs:
        raise UserError(f"no scored pairs in split {split!r}", collection.folder, "--loss regression trains on them")
    low, high = min(pair.score for pair in pairs), max(pair.score for pair in pairs)
    if low >= 0 and high <= 1:
        return list(pairs)
    if low == high:
        raise UserError(f"all {len(pairs):,} pairs of split {split!r} have the score {low:g}", collection.folder)
    if rank() == 0:
        say(f"scores {low:g} to {high:g} of {len(pairs):,} pairs of split {split!r} become 0 to 1")
    return [pair._replace(score=(pair.score - low) / (high - low)) for pair in pairs]
