"""A collection looked through before hours are spent on it: the verb ``check``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from condenser.errors import UserError, sample
from condenser.talk import track
from retrieval.check_lengths import Lengths, Ruler, ruler_for
from retrieval.check_report import Finding, Level, report
from retrieval.collections import Collection, open_collection
from retrieval.options import CheckOptions
from retrieval.passages import hash64
from retrieval.records import Passage, ScoredPair, batched, folded

_RECORDS_AT_ONCE = 1024
_SHOWN = 3


@dataclass
class Split:
    """What one split says, before anything is looked up.

    Attributes:
        qrels: query id -> passage id -> grade.
        negatives: query id -> passage ids.
        teacher: query id -> passage id -> a teacher's score.
        pairs: scored pairs of texts.
        positives: query id -> passage ids of a grade above 0; only queries that have some.
    """

    qrels: Mapping[str, Mapping[str, int]]
    negatives: Mapping[str, list[str]]
    teacher: Mapping[str, Mapping[str, float]]
    pairs: list[ScoredPair]
    positives: dict[str, set[str]] = field(init=False)

    def __post_init__(self) -> None:
        positives = {
            query_id: {passage_id for passage_id, grade in grades.items() if grade > 0}
            for query_id, grades in self.qrels.items()
        }
        self.positives = {query_id: passages for query_id, passages in positives.items() if passages}

    def counts(self) -> dict[str, int]:
        """Return the numbers of the table's row."""
        return {
            "queries": len(self.qrels),
            "judged_pairs": sum(map(len, self.qrels.values())),
            "positives": sum(map(len, self.positives.values())),
            "negatives": sum(map(len, self.negatives.values())),
            "teacher_scores": sum(map(len, self.teacher.values())),
            "scored_pairs": len(self.pairs),
        }


@dataclass
class Corpus:
    """What one reading of the passages found; 12 bytes are kept of each.

    Attributes:
        count: how many there are.
        blank: ids of those without title and text.
        missing: ids that were asked for and are not there.
        lengths: in tokens or words.
        repeats: how many have the text of an earlier one.
        repeated: groups of ids with one text, the first few.
    """

    count: int
    blank: list[str]
    missing: set[str]
    lengths: Lengths
    repeats: int = 0
    repeated: list[list[str]] = field(default_factory=list)


@dataclass
class Queries:
    """What one reading of the queries found: per id a hash of the text, normalised."""

    texts: dict[str, int]
    blank: list[str]
    lengths: Lengths


def check(options: CheckOptions) -> str:
    """Count what a collection holds and find what would spoil training or its figures.

    Args:
        options: see `CheckOptions`.

    Returns:
        The report: tables and findings, or JSON. When there are only warnings, that is all.

    Raises:
        UserError: the collection could not train; its ``report`` holds the same report. What reading the
            collection and loading the encoder raise.
    """
    collection = open_collection(options.collection, options.format, skip_bad=options.skip_bad)
    names = collection.splits()
    train = options.split or ("train" if "train" in names else None)
    if train is not None and train not in names:
        collection.qrels(train)  # says which splits there are
    ruler = ruler_for(options)
    splits = {name: _read_split(collection, name) for name in names}
    queries, corpus = Queries({}, [], Lengths(ruler.query_limit)), Corpus(0, [], set(), Lengths(ruler.passage_limit))
    for split in splits.values():
        # both texts of a pair are encoded as queries, in training as in `evaluate --sts`
        queries.lengths.extend(ruler.queries([text for pair in split.pairs for text in (pair.first, pair.second)]))
    if any(split.qrels for split in splits.values()):
        _read_queries(collection, ruler, queries)
    if not any(split.pairs for split in splits.values()):
        wanted = {passage for split in splits.values() for ids in split.positives.values() for passage in ids}
        wanted.update(passage for split in splits.values() for ids in split.negatives.values() for passage in ids)
        corpus.missing = wanted
        _read_passages(collection, ruler, corpus)
    findings = list(_collection_findings(splits, queries, corpus, ruler))
    for name, split in splits.items():
        findings += _split_findings(name, split, queries, corpus, options.negatives, is_train=name == train)
    findings += _leaks(splits, queries)
    findings.sort(key=lambda finding: finding.level)
    text = report(
        collection,
        {name: split.counts() for name, split in splits.items()},
        {"passages": (corpus.count, corpus.lengths), "queries": (len(queries.texts), queries.lengths)},
        ruler.unit,
        findings,
    ).render("json" if options.json else "text")
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        more = f"; and {len(errors) - 1} more" if len(errors) > 1 else ""
        error = UserError(f"not fit for training: {errors[0].text}{more}", options.collection)
        error.report = text
        raise error
    return text


def _read_split(collection: Collection, name: str) -> Split:
    pairs = collection.scored_pairs(name)
    qrels = {} if pairs else collection.qrels(name)
    return Split(qrels, collection.negatives(name), collection.teacher_scores(name), pairs)


def _read_queries(collection: Collection, ruler: Ruler, queries: Queries) -> None:
    for block in batched(collection.queries(), _RECORDS_AT_ONCE):
        for query in block:
            queries.texts[query.id] = hash64(_normalised(query.text))
            if query.is_blank:
                queries.blank.append(query.id)
        queries.lengths.extend(ruler.queries([query.text for query in block]))


def _read_passages(collection: Collection, ruler: Ruler, corpus: Corpus) -> None:
    hashes = array("Q")
    for block in batched(track(collection.passages(), "check", unit="passages"), _RECORDS_AT_ONCE):
        corpus.count += len(block)
        for passage in block:
            corpus.missing.discard(passage.id)
            text = _text(passage)
            if text:
                hashes.append(hash64(text))
            else:
                corpus.blank.append(passage.id)
        corpus.lengths.extend(ruler.passages(block))
    _, first, counts = np.unique(np.asarray(hashes), return_index=True, return_counts=True)
    twice = counts > 1
    corpus.repeats = int((counts[twice] - 1).sum())
    corpus.repeated = _ids_of(collection, {hashes[row] for row in np.sort(first[twice])[:_SHOWN].tolist()})


def _ids_of(collection: Collection, hashes: set[int]) -> list[list[str]]:
    """Return two ids for each hash of a text that stands more than once, reading no further than needed."""
    found: dict[int, list[str]] = {}
    if hashes:
        for passage in collection.passages():
            key = hash64(_text(passage))
            if key in hashes and len(found.setdefault(key, [])) < 2:
                found[key].append(passage.id)
                if len(found) == len(hashes) and all(len(ids) == 2 for ids in found.values()):
                    break
    return list(found.values())


def _collection_findings(
    splits: Mapping[str, Split], queries: Queries, corpus: Corpus, ruler: Ruler
) -> Iterator[Finding]:
    if not splits:
        yield Finding("error", "no_judgements", None, 1, [], "no split has judgements: there is nothing to train on")
    if corpus.blank:
        yield _finding("blank_passages", None, corpus.blank, "passages have neither title nor text")
    if queries.blank:
        yield _finding("blank_queries", None, queries.blank, "queries have no text")
    if corpus.repeats:
        pairs = [" = ".join(map(repr, ids)) for ids in corpus.repeated]
        what = f"passages have the text of an earlier one, such as {', '.join(pairs)}"
        yield Finding("warning", "repeated_passages", None, corpus.repeats, pairs, f"{corpus.repeats:,} {what}")
    for kind, lengths in (("passages", corpus.lengths), ("queries", queries.lengths)):
        if lengths.over:
            at_least = "" if ruler.exact else "at least "
            yield Finding(
                "warning",
                f"cut_{kind}",
                None,
                lengths.over,
                [],
                f"{at_least}{lengths.over:,} of {len(lengths):,} {kind} ({lengths.share_over:.1%}) "
                f"are longer than {lengths.limit} {ruler.unit} and would be cut",
            )


def _split_findings(
    name: str, split: Split, queries: Queries, corpus: Corpus, negatives: int, *, is_train: bool
) -> Iterator[Finding]:
    """Yield what is wrong in one split; what training refuses is an error in the split it reads."""
    refused: Level = "error" if is_train else "warning"
    positives = {passage for ids in split.positives.values() for passage in ids}
    if missing := sorted(positives & corpus.missing):
        yield _finding("missing_positives", name, missing, "positives are not in the corpus", "error")
    if empty := [query_id for query_id in split.qrels if query_id not in split.positives]:
        yield _finding(
            "no_positive", name, empty, "judged queries have no positive (--drop_empty leaves them out)", refused
        )
    if textless := [query_id for query_id in split.qrels if query_id not in queries.texts]:
        level: Level = refused if len(textless) == len(split.qrels) else "warning"
        yield _finding("no_query", name, textless, "judged queries are not among the queries", level)
    blank = set(corpus.blank)
    if lost := sorted(positives & blank):
        level = refused if any(ids <= blank for ids in split.positives.values()) else "warning"
        yield _finding("blank_positives", name, lost, "positives have neither title nor text, and are left out", level)
    given = {passage for ids in split.negatives.values() for passage in ids}
    if missing := sorted(given & corpus.missing):
        level = refused if len(missing) == len(given) else "warning"
        yield _finding("missing_negatives", name, missing, "negatives are not in the corpus", level)
    both = [
        f"{query_id} {passage}"
        for query_id, ids in split.negatives.items()
        for passage in dict.fromkeys(ids)
        if passage in split.positives.get(query_id, ())
    ]
    if both:
        yield _finding("positive_negatives", name, both, "negatives are positives of their query, and are left out")
    if split.negatives or (negatives and is_train):
        wanted = negatives or 1
        few = [
            query_id
            for query_id, ids in split.positives.items()
            if len(set(split.negatives.get(query_id, ())) - ids) < wanted
        ]
        if few:
            yield _finding("few_negatives", name, few, f"queries have fewer than {wanted} negatives")
    if split.teacher:
        unscored = [
            f"{query_id} {passage}"
            for query_id, ids in split.positives.items()
            for passage in (*sorted(ids), *split.negatives.get(query_id, ()))
            if passage not in split.teacher.get(query_id, ())
        ]
        if unscored:
            yield _finding("no_teacher_score", name, unscored, "positives and negatives have no score of the teacher")
    if empty := [pair.first + pair.second for pair in split.pairs if not (pair.first.strip() and pair.second.strip())]:
        yield _finding("blank_pairs", name, empty, "scored pairs lack a text")
    if len(split.pairs) > 1 and len({pair.score for pair in split.pairs}) == 1:
        text = f"{name}: all {len(split.pairs):,} scored pairs have the score {split.pairs[0].score}"
        yield Finding(refused, "one_score", name, len(split.pairs), [], text)


def _leaks(splits: Mapping[str, Split], queries: Queries) -> Iterator[Finding]:
    """Yield a finding for each two splits in which the same queries, or scored pairs, stand."""
    names = {name: _names_by_text(split, queries) for name, split in splits.items()}
    for one, other in combinations(splits, 2):
        shared = [text for text in names[one] if text in names[other]]
        if shared:
            same = [f"{names[one][text]!r} = {names[other][text]!r}" for text in shared[:_SHOWN]]
            text = f"{len(shared):,} query texts stand in {one} and in {other}, such as {', '.join(same)}"
            yield Finding("warning", "shared_queries", f"{one}, {other}", len(shared), same, text)


def _names_by_text(split: Split, queries: Queries) -> dict[int, str]:
    """Return what a split's texts are called, by the hash of the text: query ids, or the first text of a pair."""
    if split.pairs:
        return {hash64(f"{_normalised(pair.first)}\n{_normalised(pair.second)}"): pair.first for pair in split.pairs}
    blank = set(queries.blank)
    judged = (query_id for query_id in split.qrels if query_id in queries.texts and query_id not in blank)
    return {queries.texts[query_id]: query_id for query_id in judged}


def _finding(kind: str, split: str | None, ids: list[str], what: str, level: Level = "warning") -> Finding:
    place = f"{split}: " if split else ""
    text = f"{place}{len(ids):,} {what}, such as {sample(ids, _SHOWN)}"
    return Finding(level, kind, split, len(ids), ids[:_SHOWN], text)


def _text(passage: Passage) -> str:
    """Return what an encoder reads of a passage, whatever the blanks between the words."""
    return " ".join(passage.whole.split())


def _normalised(text: str) -> str:
    """Return a query as people would call it the same: letters of one case, single blanks, no mark at the end."""
    return folded(text).rstrip(" .?!")
