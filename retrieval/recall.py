"""How much of the exact top k an approximate index finds: measured, not promised."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from condenser.errors import UserError
from condenser.talk import say, warn
from retrieval.exact import ExactVectors
from retrieval.index import Index
from retrieval.index_folder import live_rows, open_sources


class Recall(NamedTuple):
    """Share of the exact top ``k`` found, a mean over ``queries`` queries."""

    value: float
    k: int
    queries: int

    def __str__(self) -> str:
        shown = f"{self.value:.3f}".removeprefix("0")
        return f"recall of the exact top {self.k:,} on {self.queries:,} queries: {shown}"


def exact_twin(index: Index) -> Index:
    """Return an exact index of the same passages, over the vectors that ``index`` was made from.

    Raises:
        UserError: these vectors are gone or have changed.
    """
    sources = open_sources(index.facts["sources"])
    dead = set(index.deleted.tolist())
    live = {name for row, name in enumerate(index.ids) if row not in dead}
    kept = np.concatenate(live_rows(sources, live))
    store = ExactVectors(
        [shard for source in sources for shard in source.shards], index.dimension, max_norm=index.facts["max_norm"]
    )
    ids = [name for source in sources for name in source.ids]
    return Index(ids, store, facts=index.facts, deleted=np.flatnonzero(~kept))


def choose_queries(count: int, wanted: int, seed: int) -> np.ndarray:
    """Return the numbers of ``wanted`` of ``count`` queries, chosen by the seed, ascending."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:wanted])


def measure_recall(index: Index, queries: np.ndarray, k: int, *, found: list[list[str]] | None = None) -> Recall:
    """Compare an index with exact search over the vectors that it was made from.

    Args:
        index: the index; an exact one has recall 1 and is not searched.
        queries: (q, dimension).
        k: hits per query.
        found: passage ids that the index has found for each query; None searches it here.

    Raises:
        UserError: these vectors are gone or have changed; no query.
    """
    if not len(queries):
        raise UserError("no query to measure recall on")
    k = min(k, len(index))
    if index.exact:
        return Recall(1.0, k, len(queries))
    if found is None:
        found = [[hit.passage_id for hit in hits] for hits in index.search(queries, k)]
    best = exact_twin(index).search(queries, k)
    shared = [
        len({hit.passage_id for hit in exact}.intersection(some[:k])) for exact, some in zip(best, found, strict=True)
    ]
    return Recall(float(np.mean(shared)) / k, k, len(queries))


def tell_recall(index: Index, queries: np.ndarray, k: int, found: list[list[str]]) -> Recall | None:
    """Say what `measure_recall` finds; say why not, and return None, where the vectors are gone."""
    try:
        recall = measure_recall(index, queries, k, found=found)
    except UserError as error:
        warn(f"recall is not measured: {error}")
        return None
    say(str(recall))
    return recall
