"""Hard negatives of a split, from a run, from BM25 or from an encoder: the verb ``mine``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import orjson

from condenser.artifacts import refuse_one_file, refuse_overwriting
from condenser.errors import UserError, sample
from condenser.files import atomic_write
from condenser.talk import Meter, warn
from eval.runs import Qrels
from retrieval.collections import Collection, open_collection
from retrieval.corpus_index import index_of_corpus
from retrieval.mining import Counts, Ranking, Rules, SameText, candidates_of, rankings_of
from retrieval.options import MineOptions
from retrieval.records import Passage, Query, batched

if TYPE_CHECKING:
    from retrieval.bm25 import Bm25Index
    from retrieval.cross_encoder import CrossEncoder
    from retrieval.index import Index

_QUERIES_AT_ONCE = 512


@dataclass
class Mined:
    """The file that was written and what came of the queries and of the hits."""

    output: Path
    counts: Counts

    def __str__(self) -> str:
        counts = self.counts
        lines = [f"{self.output}: {counts.negatives:,} negatives of {counts.kept:,} queries", counts.queries_line()]
        left_out = [f"{count:,} {why}" for why, count in counts.left_out.items() if count]
        if left_out:
            lines.append(f"hits left out: {', '.join(left_out)}")
        if counts.unanswered:
            lines.append(f"{counts.unanswered:,} queries have no positive among the hits looked at")
        return "\n".join(lines)


@dataclass
class _Pick:
    """A query on its way to its negatives.

    Attributes:
        query: its id and text.
        positives: those that are in the corpus.
        rest: candidates that are not looked at yet, the next one last.
        chosen: the negatives.
        scores: the cross-encoder's, by passage id.
    """

    query: Query
    positives: list[str]
    rest: list[str]
    chosen: list[str] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)


def mine(options: MineOptions) -> Mined:
    """Write hard negatives for the queries judged in a split: what a search ranks high and nobody judged right.

    Never a negative are known positives of the query and passages that say the same as one of them; passages that
    score too high, or too high for a cross-encoder, can be left out as well. A query gets as many as are left.

    Returns:
        The file and the counts of what was kept and dropped, and why.

    Raises:
        UserError: options that do not go together, what reading the collection, the run and the encoders raises,
            a run of other queries, or no negative at all.
    """
    _check(options)
    for written in filter(None, (options.output, options.scores)):
        refuse_overwriting(written, options.run, options.collection, options.encoder, options.cross_encoder)
    refuse_one_file(options.scores, options.output)
    with ExitStack() as stack:
        # Opened first, and closed last to first: what cannot be written is found before the work.
        output = stack.enter_context(atomic_write(options.output))
        scores = stack.enter_context(atomic_write(options.scores)) if options.scores else None
        miner = _Miner(options, open_collection(options.collection, skip_bad=options.skip_bad))
        with _WRITERS[options.format](output, miner) as write:
            for pick in miner.picks():
                write(pick)
                if scores is not None:
                    scores.writelines(f"{pick.query.id}\t{one}\t{score!s}\n" for one, score in pick.scores.items())
        counts = miner.counts
        if not counts.kept:
            raise UserError(f"no negative found: {counts.queries_line()}", options.run or options.collection)
    return Mined(Path(options.output), counts)


def _check(options: MineOptions) -> None:
    sources = [bool(options.run), options.bm25, bool(options.encoder)]
    if sum(sources) != 1:
        raise UserError("give one of --run, --bm25 and --encoder: where the negatives come from")
    if options.skip >= options.depth:
        raise UserError(f"--skip {options.skip} leaves nothing of --depth {options.depth}")
    if options.work is not None and options.encoder is None:
        raise UserError("--work goes with --encoder")
    if options.dtype != "auto" and not options.encoder:
        raise UserError("--dtype goes with --encoder")
    judged = options.cross_threshold is not None or options.scores is not None
    if judged and options.cross_encoder is None:
        raise UserError("--cross_encoder is missing: the model that gives the scores")
    if options.cross_encoder is not None and not judged:
        raise UserError("--cross_encoder gives scores: say what for", hint="--cross_threshold, --scores or both")


class _Miner:
    """Goes through the rankings and gives each query its negatives."""

    def __init__(self, options: MineOptions, collection: Collection) -> None:
        self.collection = collection
        self.counts = Counts()
        self._options = options
        self._rules = Rules(
            depth=options.depth,
            skip=options.skip,
            n=options.n,
            choice=options.choice,
            margin=options.margin,
            ignore_self=options.ignore_self,
            require_positive=options.require_positive,
            seed=options.seed,
        )
        self.queries = {query.id: query for query in collection.queries(options.split)}
        qrels = collection.qrels(options.split)
        self._positives = {
            name: {passage: None for passage, grade in qrels[name].items() if grade > 0} for name in self.queries
        }
        self._same_text = SameText(collection.passages())
        self._tell_gaps(qrels)

    def picks(self) -> Iterator[_Pick]:
        """Yield the queries that get negatives, in the order of the rankings."""
        judge = self._judge()
        for block in batched(self._begun(), _QUERIES_AT_ONCE):
            self._choose(block, judge)
            for pick in block:
                if not pick.chosen:
                    self.counts.drop(pick.query.id, "no hit left that may be a negative")
                    continue
                self.counts.kept += 1
                self.counts.negatives += len(pick.chosen)
                yield pick

    def passage(self, passage_id: str) -> Passage:
        """Return a passage of the corpus."""
        return self.collection.lookup()[passage_id]

    def _tell_gaps(self, qrels: Qrels) -> None:
        """Say which judgements have no effect, for want of the query or of the passage."""
        positives = list({one: None for some in self._positives.values() for one in some})
        present = self._same_text(positives)[0]
        gaps = {
            "judged queries that are not in the query file": [name for name in qrels if name not in self.queries],
            "judged positives that are not in the corpus": [
                one for one, here in zip(positives, present, strict=True) if not here
            ],
        }
        for what, ids in gaps.items():
            if ids:
                warn(f"{self.collection.name}, {self._options.split}: left out {len(ids):,} {what} ({sample(ids)})")

    def _begun(self) -> Iterator[_Pick]:
        """Yield the queries that have candidates, and count those that are dropped before."""
        waiting = dict.fromkeys(self.queries)
        self.counts.queries = len(waiting)
        with Meter("mine", len(waiting), "queries") as meter:
            for ranking in self._rankings():
                if ranking.query_id not in waiting:
                    continue
                del waiting[ranking.query_id]
                meter.advance()
                pick = self._begin(ranking)
                if pick is not None:
                    yield pick
        if len(waiting) == len(self.queries):
            split = self._options.split
            raise UserError(f"no query of split {split!r} is in this run: {sample(self.queries)}", self._options.run)
        for query_id in waiting:
            self.counts.drop(query_id, "not in the run")

    def _begin(self, ranking: Ranking) -> _Pick | None:
        if self._rules.margin is not None and ranking.scores is None:
            what = "this run has ranks and no scores, which --margin compares"
            raise UserError(what, self._options.run, "write it as .trec or .json")
        positives = list(self._positives[ranking.query_id])
        present = [name for name, here in zip(positives, self._same_text(positives)[0], strict=True) if here]
        if not present:
            why = "no positive in the corpus" if positives else "no positive"
            self.counts.drop(ranking.query_id, why)
            return None
        found = candidates_of(ranking, self._positives[ranking.query_id], self._same_text, self._rules, self.counts)
        return None if found is None else _Pick(self.queries[ranking.query_id], present, found[::-1])

    def _choose(self, picks: Sequence[_Pick], judge: CrossEncoder | None) -> None:
        """Take candidates one after the other until each query has its negatives."""
        if judge is None:
            for pick in picks:
                pick.chosen = pick.rest[: -self._rules.n - 1 : -1]
            return
        if self._options.scores is not None:
            self._score(judge, [(pick, one) for pick in picks for one in pick.positives])
        waiting = list(picks)
        while waiting:
            asked = []
            for pick in waiting:
                missing = min(self._rules.n - len(pick.chosen), len(pick.rest))
                asked += [(pick, pick.rest.pop()) for _ in range(missing)]
            self._score(judge, asked)
            for pick, one in asked:
                if self._options.cross_threshold is not None and pick.scores[one] > self._options.cross_threshold:
                    self.counts.left_out["scored too high by the cross-encoder"] += 1
                    del pick.scores[one]
                else:
                    pick.chosen.append(one)
            waiting = [pick for pick in waiting if pick.rest and len(pick.chosen) < self._rules.n]

    def _score(self, judge: CrossEncoder, asked: Sequence[tuple[_Pick, str]]) -> None:
        texts = [(pick.query.text, judge.passage_text(self.passage(one))) for pick, one in asked]
        for (pick, one), score in zip(asked, judge.score(texts), strict=True):
            pick.scores[one] = score

    def _judge(self) -> CrossEncoder | None:
        if self._options.cross_encoder is None:
            return None
        from retrieval.cross_encoder import CrossEncoder

        return CrossEncoder.load(self._options.cross_encoder, device=self._options.device)

    def _rankings(self) -> Iterator[Ranking]:
        options = self._options
        if options.run is not None:
            yield from rankings_of(options.run, options.depth)
            return
        index: Bm25Index | Index = self._bm25() if options.encoder is None else self._encoded(options.encoder)
        depth = min(options.depth, len(index))
        for block in batched(self.queries.values(), _QUERIES_AT_ONCE):
            found: Sequence[Sequence[Any]] = index.search([query.text for query in block], depth)
            for query, hits in zip(block, found, strict=True):
                scores = np.array([hit.score for hit in hits], np.float32)
                yield Ranking(query.id, [hit.passage_id for hit in hits], scores)

    def _bm25(self) -> Bm25Index:
        from retrieval.bm25 import Bm25Index

        return Bm25Index.build(self.collection)

    def _encoded(self, name: str) -> Index:
        options = self._options
        work = Path(options.work or f"{options.output}.work")
        return index_of_corpus(
            options.collection, name, work, device=options.device, dtype=options.dtype, skip_bad=options.skip_bad
        )


_Write = Callable[[_Pick], Any]


@contextmanager
def _write_negatives(stream: TextIO, miner: _Miner) -> Iterator[_Write]:
    yield lambda pick: stream.write(_line({"query_id": pick.query.id, "negatives": pick.chosen}))


@contextmanager
def _write_tevatron(stream: TextIO, miner: _Miner) -> Iterator[_Write]:
    def write(pick: _Pick) -> None:
        line = {
            "query_id": pick.query.id,
            "query_text": pick.query.text,
            "positive_document_ids": pick.positives,
            "negative_document_ids": pick.chosen,
        }
        stream.write(_line(line))

    yield write


@contextmanager
def _write_dpr(stream: TextIO, miner: _Miner) -> Iterator[_Write]:
    first = True

    def contexts(ids: Iterable[str]) -> list[dict[str, str]]:
        return [
            {"title": passage.title, "text": passage.text, "passage_id": passage.id}
            for passage in map(miner.passage, ids)
        ]

    def write(pick: _Pick) -> None:
        nonlocal first
        entry = {
            "question": pick.query.text,
            "answers": list(pick.query.answers),
            "positive_ctxs": contexts(pick.positives),
            "negative_ctxs": [],
            "hard_negative_ctxs": contexts(pick.chosen),
        }
        stream.write(("[\n" if first else ",\n") + _line(entry).rstrip("\n"))
        first = False

    yield write
    stream.write("\n]\n")


_WRITERS = {"negatives": _write_negatives, "tevatron": _write_tevatron, "dpr": _write_dpr}


def _line(value: dict[str, Any]) -> str:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE).decode()
