"""The cheapest search-time parameters of an approximate index that find a wanted share of the exact best."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from condenser.errors import UserError
from condenser.files import existing_file
from condenser.hub import local_folder
from condenser.talk import say
from eval.report import Report, Table
from retrieval.faiss_index import FaissVectors, parameters_of, set_parameters
from retrieval.index import Index
from retrieval.index_folder import recorded_encoder
from retrieval.options import PlanOptions
from retrieval.readers import read_queries
from retrieval.recall import choose_queries, exact_twin
from retrieval.vectors import Vectors, check_same_space

_FINE = 16  # a value is found to within a sixteenth of itself
_K_FACTORS = 3  # settings of k_factor, doubling, from the least that can reach the recall
_MOST_K_FACTOR = 1 << 10
_RUNS, _LONG_ENOUGH = 5, 0.5  # seconds: short searches are timed more than once


class Measured(NamedTuple):
    """What a setting does on the sampled queries.

    Attributes:
        setting: search-time parameters by name; none of exact search.
        recall: mean share of the exact best k.
        per_second: queries per second of processor time.
    """

    setting: dict[str, int]
    recall: float
    per_second: float


class Tuner:
    """Measures settings of one index, each once.

    Args:
        index: an approximate index; its parameters change with every measurement.
        twin: an exact index of the same passages.
        queries: (q, dimension) float32.
        k: hits per query.
        wanted: recall to reach.
    """

    def __init__(self, index: Index, twin: Index, queries: np.ndarray, k: int, wanted: float) -> None:
        store = index.store
        if not isinstance(store, FaissVectors):
            raise UserError("is searched exactly: there is nothing to tune", index.folder)
        self._index, self._faiss = index, store.index
        self._queries, self._k, self._wanted = queries, k, wanted
        self.known = sorted(parameters_of(self._faiss))
        self._best, self.exact_per_second = self._search(twin)
        self._done: dict[tuple[tuple[str, int], ...], Measured] = {}

    @property
    def measured(self) -> list[Measured]:
        """All that was measured, by setting."""
        return [self._done[key] for key in sorted(self._done)]

    def measure(self, setting: Mapping[str, int]) -> Measured:
        """Search the queries with a setting."""
        key = tuple(sorted(setting.items()))
        if key not in self._done:
            set_parameters(self._faiss, setting, str(self._index.facts["factory"]), Path(str(self._index.folder)))
            found, per_second = self._search(self._index)
            shared = [len(best & some) for best, some in zip(self._best, found, strict=True)]
            self._done[key] = Measured(dict(key), float(np.mean(shared)) / self._k, per_second)
        return self._done[key]

    def best(self) -> Measured | None:
        """Return the cheapest setting that reaches the recall; None if none does.

        With one parameter that is its lowest value. With a ``k_factor`` beside another one, the other is tuned for
        a few values of it as long as more of it helps, and the fastest pair is taken.
        """
        if not self.known:
            only = self.measure({})
            return only if self._reaches(only) else None
        if "k_factor" not in self.known or len(self.known) == 1:
            return self._lowest(self.known[0], {})
        other = next(name for name in self.known if name != "k_factor")
        first = self._lowest("k_factor", {other: self._most(other)})
        if first is None:
            return None
        found = [first]
        for step in range(_K_FACTORS):
            one = self._lowest(other, {"k_factor": first.setting["k_factor"] * 2**step})
            if one is None or one.setting[other] >= found[-1].setting[other]:
                break
            found.append(one)
        return max(found, key=lambda one: one.per_second)

    def _lowest(self, name: str, fixed: dict[str, int]) -> Measured | None:
        """Double a parameter until the recall is reached, then halve the distance to the value before."""
        low, high, most = 0, 1, self._most(name)
        while not self._reaches(reached := self.measure({name: high} | fixed)):
            if high == most:
                return None
            low, high = high, min(2 * high, most)
        while high - low > max(1, high // _FINE):
            middle = (low + high) // 2
            tried = self.measure({name: middle} | fixed)
            if self._reaches(tried):
                high, reached = middle, tried
            else:
                low = middle
        return reached

    def _most(self, name: str) -> int:
        if name == "nprobe":
            return int(parameters_of(self._faiss)[name].owner.nlist)
        count = max(self._k, len(self._index))
        return count if name == "ef_search" else min(_MOST_K_FACTOR, -(-count // self._k))

    def _reaches(self, measured: Measured) -> bool:
        return measured.recall >= self._wanted

    def _search(self, index: Index) -> tuple[list[set[str]], float]:
        """Return the ids found for each query, and queries per second of processor time, the best of a few runs."""
        times: list[float] = []
        while len(times) < _RUNS and sum(times) < _LONG_ENOUGH:
            began = time.process_time()
            rows, scores = index.search_rows(self._queries, self._k)
            times.append(max(time.process_time() - began, 1e-9))
        found = [{hit.passage_id for hit in hits} for hits in index.hits(rows, scores)]
        return found, len(self._queries) / min(times)


def tune(options: PlanOptions) -> Report:
    """Measure an index's recall at growing parameters and find the cheapest setting that reaches ``--recall``.

    Recall is the share of the exact best k, by search over the vectors that the index was made from, on a seeded
    sample of the queries. Everything but the times is the same each time.

    Raises:
        UserError: an exact index, no queries, vectors that are gone or have changed since the index was made.
    """
    if options.queries is None:
        raise UserError("--queries is missing: what to measure recall with", hint="a file, or a folder of vectors")
    index = Index.load(str(options.tune))
    if index.exact:
        raise UserError("is searched exactly: there is nothing to tune", options.tune)
    queries = _sample_queries(options, index)
    k = index.lower_k(options.k)
    tuner = Tuner(index, exact_twin(index), queries, k, options.recall)
    best = tuner.best()
    say(f"tuned {index.facts['factory']} on {len(queries):,} queries: {len(tuner.measured):,} settings measured")
    return _report(options, index, tuner, best, k, len(queries))


def _sample_queries(options: PlanOptions, index: Index) -> np.ndarray:
    """Return the vectors of a seeded sample of the queries."""
    place = Path(str(options.queries))
    if place.is_dir():
        if options.encoder is not None:
            raise UserError("--encoder is for queries given as text; these are vectors", place)
        stored = Vectors.load(place)
        if stored.facts["kind"] != "query":
            raise UserError(f"holds {stored.facts['kind']} vectors, expected queries", place)
        check_same_space(index.facts, stored.facts)
        chosen = choose_queries(len(stored.ids), options.sample, options.seed)
        vectors = stored.matrix()[chosen]
    else:
        texts = [query.text for query in read_queries(existing_file(place))]
        chosen = choose_queries(len(texts), options.sample, options.seed)
        folder = local_folder(options.encoder or recorded_encoder(index.facts, str(index.folder)))
        from retrieval.encoder import Encoder

        encoder = Encoder.load(folder, device="auto", dimension=index.facts.get("truncated"))
        check_same_space(index.facts, encoder.facts())
        vectors = encoder.encode_queries([texts[row] for row in chosen])
    if not len(vectors):
        raise UserError("holds no queries", place)
    return vectors


def _report(options: PlanOptions, index: Index, tuner: Tuner, best: Measured | None, k: int, queries: int) -> Report:
    factory, wanted = str(index.facts["factory"]), options.recall
    lines: list[str | Table] = [
        f"{factory}, {len(index):,} vectors of {index.dimension:,} numbers, k {k:,}, {queries:,} queries",
        _table(tuner, best),
        f"exact search: {tuner.exact_per_second:,.0f} queries per second of processor time",
    ]
    flags = None if best is None else " ".join(f"--{name} {value}" for name, value in best.setting.items())
    if best is None:
        highest = max(tuner.measured, key=lambda one: one.recall)
        lines.append(
            f"recall {wanted:g} is not reached: {highest.recall:.3f} is the highest ({_described(highest.setting)}). "
            f"{_way_out(factory)}"
        )
    else:
        lines.append(f"cheapest that reaches recall {wanted:g}: {_described(best.setting)}")
    exact_wins = tuner.exact_per_second >= (0.0 if best is None else best.per_second)
    others = f"--queries {shlex.quote(str(options.queries))} --k {k} --output RUN"
    if exact_wins:
        against = "" if best is None else f", {tuner.exact_per_second / best.per_second:.1f} times as fast as this"
        vectors = shlex.quote(str(index.facts["vectors"]))
        lines.append(f"exact search needs no tuning{against}:\n  condenser search --index {vectors} {others}")
    elif flags is not None:
        lines.append(f"next:\n  condenser search --index {shlex.quote(str(options.tune))} {flags} {others}")
    values: dict[str, Any] = {
        "index": options.tune,
        "factory": factory,
        "passages": len(index),
        "k": k,
        "recall": wanted,
        "queries": queries,
        "seed": options.seed,
        "measured": [one._asdict() for one in tuner.measured],
        "exact_per_second": tuner.exact_per_second,
        "best": None if best is None else best._asdict(),
        "flags": flags,
        "exact_is_faster": exact_wins,
    }
    return Report(values, lines)


def _table(tuner: Tuner, best: Measured | None) -> Table:
    header = [*tuner.known, "recall", "queries/CPU second", ""] if tuner.known else ["recall", "queries/CPU second", ""]
    rows = [
        [
            *(str(one.setting[name]) for name in tuner.known),
            f"{one.recall:.3f}",
            f"{one.per_second:,.0f}",
            "cheapest" if one == best else "",
        ]
        for one in tuner.measured
    ]
    return Table(header, rows)


def _described(setting: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in setting.items()) or "there is nothing to set"


def _way_out(factory: str) -> str:
    """Say what to build instead where the codes themselves lose too much."""
    if "Refine" in factory or "RFlat" in factory:
        return "Its first codes are too small: give PQ more pieces, or use SQ8"
    if "PQ" in factory:
        return "Its codes lose too much: append ,RFlat or ,Refine(SQfp16) to the factory, or use SQ8"
    return "Use a finer code, or Flat"
