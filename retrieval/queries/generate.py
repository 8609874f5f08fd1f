"""The verb ``queries generate``: passages to the queries that a model writes for them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from condenser.artifacts import Workspace, refuse_overwriting, result_config
from condenser.errors import RunFailed, UserError
from condenser.faults import fault_point
from condenser.files import atomic_write, read_json, write_json
from condenser.manifest import identity
from condenser.talk import Meter, say, warn
from retrieval.collections import Collection, open_collection
from retrieval.passages import hash64
from retrieval.queries.options import QueriesGenerateOptions
from retrieval.queries.pool import KIND, QUERIES, Written, check_id, write_corpus, write_qrels, written_in
from retrieval.queries.terms import KeyTerm, KeyTerms, constraints
from retrieval.records import Passage, batched, folded

if TYPE_CHECKING:
    from condenser.decoding.automaton import Automaton
    from condenser.decoding.hypotheses import Hypothesis
    from retrieval.queries.writers import Writer

_TERMS = "terms"
_SHARD = "{:06d}.json"


@dataclass
class Counts:
    """What came of the passages and of what was written for them."""

    passages: int = 0
    queries: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add another's counts."""
        self.passages += other.passages
        self.queries += other.queries
        self.left_out += other.left_out

    @property
    def reasons(self) -> str:
        """What was left out, and why."""
        return ", ".join(f"{count:,} {why}" for why, count in self.left_out.items() if count)

    def as_json(self) -> dict[str, Any]:
        """Return what `of_json` reads."""
        return {"passages": self.passages, "queries": self.queries, "left_out": dict(self.left_out)}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Counts:
        """Read what `as_json` returned."""
        return cls(found["passages"], found["queries"], Counter(found["left_out"]))


@dataclass
class Pool:
    """The folder that was written, and the counts."""

    output: Path
    counts: Counts

    def __str__(self) -> str:
        counts = self.counts
        lines = [f"{self.output}: {counts.queries:,} queries for {counts.passages:,} passages"]
        return "\n".join([*lines, *([f"left out: {counts.reasons}"] if counts.reasons else [])])


class _Wanted(NamedTuple):
    """A query to be written: for which passage, its number there, and its constraint unless it is a free one."""

    passage: Passage
    number: int
    constraint: str | None


def generate(options: QueriesGenerateOptions) -> Pool:
    """Write queries for the passages of a collection, some drawn freely, some under a constraint.

    A drawn query depends on the seed, its passage and its number there alone, not on what else is in the batch, but for
    the last bits of the writer's arithmetic. Blank queries, repeats for the same passage (upper and lower case aside)
    and free ones without an end are left out and counted; so are passages without a text. A killed run goes on after
    its last finished shard, to the same bytes.

    Returns:
        A folder in BEIR's layout, `retrieval.queries.pool`: the passages, the queries with how they came about, and
        ``qrels/train.tsv`` with each query's passage; and the counts.

    Raises:
        UserError: what reading the collection and loading the writer raise; a constraint that cannot be read or that
            no text of these lengths meets; no passage with a text, or no query at all.
    """
    _check(options)
    refuse_overwriting(options.output, options.collection, options.writer)
    collection = open_collection(options.collection, options.format)
    inputs = {"writer": identity(options.writer), "corpus": collection.corpus_fingerprint()}
    workspace = Workspace(options.output, KIND, config=result_config(options), inputs=inputs, resumable=True)
    counts = Counts()
    with workspace:
        if workspace.done:
            say(f"{options.output}: up to date")
            return Pool(workspace.output, Counts.of_json(read_json(workspace.output / "counts.json")))
        chosen, blank = _chosen(collection, options)
        work = _Work(options, collection)
        shards = []
        with Meter("queries generate", int(chosen.sum()), "passages") as meter:
            for number, passages in enumerate(batched(compress(collection.passages(), chosen), options.shard_size)):
                file = workspace.scratch / _SHARD.format(number)
                if not file.is_file():
                    write_json(file, work.shard(passages, meter))
                    fault_point("shard-written")
                else:
                    meter.advance(len(passages))
                shards.append(file)
                counts.add(Counts.of_json(read_json(file)["counts"]))
        if not counts.queries:
            for shard in shards:  # there is nothing in them to go on with, and other options should not find them
                shard.unlink()
            what = f"no query was written for {counts.passages:,} passages; left out: {counts.reasons}"
            raise UserError(what, options.collection, "more --per_passage, or a greater --max_length")
        counts.left_out["passages without a text"] += blank
        _write_pool(workspace.path, collection, shards)
        write_json(workspace.path / "counts.json", counts.as_json())
        workspace.commit({"queries": counts.queries, "passages": counts.passages, "collection": collection.name})
    return Pool(workspace.output, counts)


def _check(options: QueriesGenerateOptions) -> None:
    if options.min_length > options.max_length:
        raise UserError(f"--min_length {options.min_length} is more than --max_length {options.max_length}")
    if options.length_exponent and options.search == "drawn":
        raise UserError("--length_exponent goes with --search best: it compares texts, and none are compared here")
    if options.constraint == _TERMS or options.constrained:
        return
    raise UserError("--constraint goes with --constrained above 0: the share of the queries that it holds for")


def _chosen(collection: Collection, options: QueriesGenerateOptions) -> tuple[np.ndarray, int]:
    """Return for each passage whether it is written for, and how many others have no text.

    Raises:
        UserError: no passage with a text, or one whose id no line of judgements can hold.
    """
    has_text = bytearray()
    for passage in collection.passages():
        check_id(passage.id, options.collection)
        has_text.append(not passage.is_blank)
    chosen = np.frombuffer(has_text, bool)
    rows = np.flatnonzero(chosen)
    if not len(rows):
        raise UserError(f"none of its {len(chosen):,} passages has a text", options.collection)
    if options.passages is None or options.passages >= len(rows):
        return chosen, len(chosen) - len(rows)
    places = np.random.default_rng(options.seed).choice(len(rows), options.passages, replace=False)
    chosen = np.zeros(len(chosen), bool)
    chosen[rows[places]] = True
    return chosen, 0


class _Work:
    """Writes the queries of one shard after the other."""

    def __init__(self, options: QueriesGenerateOptions, collection: Collection) -> None:
        self._options, self._collection = options, collection
        self._searched = round(options.per_passage * options.constrained)
        # the best under one expression for all are found at once; others have a constraint or a seed of their own
        together = options.constraint != _TERMS and options.search == "best"
        self._texts_of_a_search = max(1, self._searched) if together else 1
        self._loaded: Writer | None = None
        self._terms: KeyTerms | None = None
        self._automaton = lru_cache(4096)(self._made)

    def shard(self, passages: Sequence[Passage], meter: Meter) -> dict[str, Any]:
        """Return a shard as JSON: queries in the order of the passages, and the counts."""
        counts = Counts(passages=len(passages))
        lines = []
        size = max(1, self._options.batch_size // self._options.per_passage)
        for block in batched(passages, size):
            try:
                lines += [one.line for one in self._kept(self._written(block), counts)]
            except RunFailed as error:
                raise RunFailed(error.what, error.where or self._options.writer, error.hint) from None
            meter.advance(len(block))
        counts.queries = len(lines)
        return {"queries": lines, "counts": counts.as_json()}

    @property
    def _writer(self) -> Writer:
        """The model, loaded when the first shard is written: a run that only finishes needs none."""
        if self._loaded is None:
            from retrieval.queries.writers import load_writer

            options = self._options
            self._loaded = load_writer(
                options.writer,
                device=options.device,
                passage_max_length=options.passage_max_length,
                prompt=options.prompt,
            )
        return self._loaded

    def _written(self, passages: Sequence[Passage]) -> Iterator[tuple[_Wanted, Hypothesis | None]]:
        """Yield what was written for each passage: constrained queries before free ones."""
        searched = [wanted for passage in passages for wanted in self._under_constraints(passage)]
        of_passage = Counter(wanted.passage.id for wanted in searched)
        drawn = [
            _Wanted(passage, number, None)
            for passage in passages
            for number in range(of_passage[passage.id], self._options.per_passage)
        ]
        found = zip(chain(searched, drawn), chain(self._search(searched), self._draw(drawn)), strict=True)
        place = {passage.id: number for number, passage in enumerate(passages)}
        yield from sorted(found, key=lambda pair: (place[pair[0].passage.id], pair[0].number))

    def _under_constraints(self, passage: Passage) -> list[_Wanted]:
        """Return the constrained queries of a passage; fewer where it has too few key terms."""
        options = self._options
        if not self._searched:
            return []
        if options.constraint != _TERMS:
            return [_Wanted(passage, number, options.constraint) for number in range(self._searched)]
        if self._terms is None:
            self._terms = KeyTerms(self._collection.passages())
        terms = [known for term in self._terms.of(passage) if (known := self._spelt(term))]
        expressions = constraints(terms, options.terms, self._searched)
        return [_Wanted(passage, number, expression) for number, expression in enumerate(expressions)]

    def _spelt(self, term: KeyTerm) -> KeyTerm | None:
        """Return a term with those of its forms that the writer's tokens can spell, in time."""
        most = self._options.max_length // self._options.terms
        pieces = self._writer.pieces  # what these raise is no fault of the term
        forms = []
        for form in term.forms:
            try:
                ways = pieces.cuts(form)
            except UserError:
                continue
            if min(map(len, ways)) <= most:
                forms.append(form)
        return term._replace(forms=tuple(forms)) if forms else None

    def _draw(self, wanted: Sequence[_Wanted]) -> Iterator[Hypothesis]:
        from condenser.decoding.sampling import SampleSettings, sample

        options, writer = self._options, self._writer
        settings = SampleSettings(
            end=writer.end,
            max_length=options.max_length,
            min_length=options.min_length,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            forbidden=writer.forbidden,
        )
        for block in batched(wanted, options.batch_size):
            yield from sample(self._bound(block), settings, [_seed(options.seed, one) for one in block])

    def _search(self, wanted: Sequence[_Wanted]) -> Iterator[Hypothesis | None]:
        """Return a text under each constraint; where the best are wanted under one expression, the best so many."""
        from condenser.decoding.constrained import constrained_search
        from condenser.decoding.hypotheses import SearchSettings
        from condenser.decoding.stochastic import Draw

        options, writer = self._options, self._writer
        inputs = [one for one in wanted if self._texts_of_a_search == 1 or one.number == 0]
        settings = SearchSettings(
            end=writer.end,
            beam=max(options.beam, self._texts_of_a_search),
            n_best=self._texts_of_a_search,
            max_length=options.max_length,
            min_length=options.min_length,
            length_exponent=options.length_exponent,
            forbidden=writer.forbidden,
        )
        for block in batched(inputs, options.batch_size):
            automata = [self._automaton(str(one.constraint)) for one in block]
            draw = None
            if options.search == "drawn":
                seeds = [_seed(options.seed, one) for one in block]
                draw = Draw(seeds=seeds, top_k=options.top_k, top_p=options.top_p)
            for outcome in constrained_search(self._bound(block), automata, settings, draw=draw):
                yield from outcome.hypotheses
                yield from [None] * (self._texts_of_a_search - len(outcome.hypotheses))

    def _bound(self, wanted: Sequence[_Wanted]) -> Any:
        """Return the writer as it has read each query's passage, each passage once."""
        from condenser.decoding.generators import Repeated

        rows: dict[str, int] = {}
        passages: list[Passage] = []
        for one in wanted:
            if one.passage.id not in rows:
                rows[one.passage.id] = len(passages)
                passages.append(one.passage)
        read = self._writer.generator(passages, [self._options.max_length] * len(passages))
        return Repeated(read, [rows[one.passage.id] for one in wanted])

    def _made(self, expression: str) -> Automaton:
        from condenser.decoding.expressions import automaton_of

        return automaton_of(expression, self._writer.pieces)

    def _kept(self, written: Iterable[tuple[_Wanted, Hypothesis | None]], counts: Counts) -> Iterator[Written]:
        """Yield the queries that are kept, and count the others by the reason."""
        options = self._options
        seen: set[tuple[str, str]] = set()
        for wanted, found in written:
            if found is None:
                counts.left_out["searches that ended without a text"] += 1
                continue
            text = self._writer.text(found.tokens)
            key = (wanted.passage.id, folded(text))
            if not found.finished:
                counts.left_out[f"free queries without an end after {options.max_length} tokens"] += 1
            elif not text.strip():
                counts.left_out["blank queries"] += 1
            elif key in seen:
                counts.left_out["repeats for the same passage"] += 1
            else:
                seen.add(key)
                yield Written(
                    id=f"{wanted.passage.id}-g{wanted.number}",
                    text=text,
                    passage_id=wanted.passage.id,
                    decoder=self._decoder(wanted),
                    constraint=wanted.constraint,
                    log_prob=float(found.log_prob),
                    tokens=len(found.tokens) + 1,
                )

    def _decoder(self, wanted: _Wanted) -> dict[str, Any]:
        options = self._options
        seed = {"seed": _seed(options.seed, wanted)}
        cuts = {"top_k": options.top_k, "top_p": options.top_p}
        if wanted.constraint is None:
            return {"mode": "sample", "temperature": options.temperature, **cuts, **seed}
        own = {**cuts, **seed} if options.search == "drawn" else {"length_exponent": options.length_exponent}
        beam = max(options.beam, self._texts_of_a_search)
        return {"mode": "constrained", "search": options.search, "beam": beam, **own}


def _seed(seed: int, wanted: _Wanted) -> int:
    """Return the seed of one drawn query: below 2^53, so that every reader of JSON keeps it."""
    return hash64(f"{seed} {wanted.passage.id} {wanted.number}") >> 11


def _write_pool(folder: Path, collection: Collection, shards: Sequence[Path]) -> None:
    """Put the shards together, and write judgements and passages beside them."""
    with atomic_write(folder / QUERIES) as stream:
        for shard in shards:
            stream.writelines(read_json(shard)["queries"])
    texts = array("Q")

    def pairs() -> Iterator[tuple[str, str]]:
        for one in written_in(folder / QUERIES):
            texts.append(hash64(folded(one.text)))
            yield one.id, one.passage_id

    write_qrels(folder, pairs())
    write_corpus(collection, folder)
    counts = np.unique(np.frombuffer(texts, np.uint64), return_counts=True)[1]
    shared = int(counts[counts > 1].sum())
    if shared:
        warn(f"{shared:,} queries have a text that was written for several passages (filter by: passages == 1)")
