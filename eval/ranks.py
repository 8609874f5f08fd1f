"""At which rank each judged passage stands: all that metrics need to know of a run.

The one order of this project, trec_eval's: score as float32 descending, then passage id descending by
UTF-8 bytes. A rank is counted, not sorted for: one more than the hits that stand above.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from condenser.errors import UserError, sample
from eval.runs import MAX_GRADE, Duplicates, RunArrays, load_run, read_rankings

Id = TypeVar("Id", str, bytes)  # UTF-8 bytes and Python's strings sort alike: by code point
Grades = Mapping[str, Mapping[str, int]]

_PAIRS_AT_ONCE = 1024  # rows of k hits compared at a time: a few MB, whatever the number of judgements


class Counts(NamedTuple):
    """How the judged queries and the run's queries meet."""

    judged: int
    in_run: int
    both: int
    nothing_relevant: int
    judged_not_in_run: int
    in_run_not_judged: int


class JudgedRanks(NamedTuple):
    """Judgements of the queries in the mean, each with the rank of its passage.

    ``query``, ``rank`` and ``grade`` have shape (judgements,): an index into ``query_ids``, a rank from 1 (0 when
    the passage was not retrieved) and a grade. ``depth`` has shape (queries,): how many hits a query has.
    """

    query_ids: list[str]
    query: np.ndarray
    rank: np.ndarray
    grade: np.ndarray
    depth: np.ndarray
    counts: Counts
    missing: list[str]


def judged_ranks(
    qrels: Grades,
    run: str | Path | Mapping[str, Mapping[str, float]] | RunArrays,
    *,
    relevance_level: int = 1,
    ignore_self: bool = False,
    duplicates: Duplicates = "refuse",
) -> JudgedRanks:
    """Find the rank of every judged passage.

    Queries with no passage of at least ``relevance_level`` are left out and counted; judged queries that the run
    lacks stay in with nothing retrieved. Queries are sorted by id, so that nothing depends on an order of lines.

    Args:
        qrels: query id -> passage id -> grade.
        run: a file, nested dicts, or `RunArrays` (or a plain tuple of the same four).
        relevance_level: the lowest grade that counts as relevant.
        ignore_self: pass over the hit whose id is the query's id.
        duplicates: a passage twice in one ranking: refuse it or keep its best score.

    Raises:
        UserError: no query in common (samples of both sides are shown), ids that are not strings, fractional
            grades, scores that are not numbers, and what reading a file raises.
    """
    _check_qrels(qrels)
    if isinstance(run, tuple):
        run = RunArrays(*run)
    measured = {
        query_id: grades
        for query_id, grades in sorted(qrels.items())
        if max(grades.values(), default=0) >= relevance_level
    }
    if isinstance(run, Mapping):
        placed, run_ids = _place_dicts(measured, run, ignore_self)
    elif isinstance(run, RunArrays):
        placed, run_ids = _place_arrays(measured, run, ignore_self, duplicates)
    else:
        placed, run_ids = _place_file(measured, run, ignore_self, duplicates)
    missing = sorted(query_id for query_id in qrels if query_id not in run_ids)
    if len(missing) == len(qrels):
        raise UserError(
            f"judgements and run have no query in common: judged are {sample(missing) or 'none'}; "
            f"in the run {sample(sorted(run_ids)) or 'none'}",
            None if isinstance(run, Mapping | RunArrays) else run,
            "are these the judgements of another split?",
        )
    both = len(qrels) - len(missing)
    counts = Counts(
        judged=len(qrels),
        in_run=len(run_ids),
        both=both,
        nothing_relevant=len(qrels) - len(measured),
        judged_not_in_run=len(missing),
        in_run_not_judged=len(run_ids) - both,
    )
    sizes = [len(grades) for grades in measured.values()]
    ranks = (
        placed[query_id].ranks if query_id in placed else [0] * size
        for query_id, size in zip(measured, sizes, strict=True)
    )
    return JudgedRanks(
        query_ids=list(measured),
        query=np.repeat(np.arange(len(sizes)), sizes),
        rank=np.fromiter(chain.from_iterable(ranks), np.int64),
        grade=np.fromiter((grade for grades in measured.values() for grade in grades.values()), np.int64),
        depth=np.array([placed[query_id].depth if query_id in placed else 0 for query_id in measured], np.int64),
        counts=counts,
        missing=missing,
    )


def best_first(hits: Mapping[str, float]) -> list[str]:
    """Return passage ids in the one order."""
    return sorted(hits, key=lambda passage_id: (np.float32(hits[passage_id]), passage_id), reverse=True)


class _Placed(NamedTuple):
    """One query: the rank of each judged passage, in the judgements' order, and the number of hits."""

    ranks: list[int]
    depth: int


_Placements = tuple[dict[str, _Placed], set[str]]


def _place_dicts(qrels: Grades, run: Mapping[str, Mapping[str, float]], ignore_self: bool) -> _Placements:
    placed = {}
    for query_id, hits in run.items():
        if not all(issubclass(kind, str) for kind in {type(query_id), *map(type, hits)}):
            odd = next(name for name in (query_id, *hits) if not isinstance(name, str))
            raise UserError(f"id {odd!r} in the run is {type(odd).__name__}, expected str")
        if query_id not in qrels:
            continue
        try:
            with np.errstate(over="ignore"):  # beyond float32 is infinite, as in trec_eval
                scores = np.fromiter(hits.values(), np.float32, len(hits))
        except (TypeError, ValueError):
            raise UserError(f"a score of query {query_id!r} in the run is not a number") from None
        if np.isnan(scores).any():
            raise UserError(f"a score of query {query_id!r} in the run is NaN, which has no place in an order")
        placed[query_id] = _place(qrels[query_id], list(hits), hits, scores, query_id if ignore_self else None)
    return placed, set(run)


def _place_file(qrels: Grades, path: str | Path, ignore_self: bool, duplicates: Duplicates) -> _Placements:
    placed: dict[str, _Placed] = {}
    seen: set[str] = set()
    for query_id, ids, distinct, scores in read_rankings(path, duplicates=duplicates):
        if query_id in seen:
            # Its lines are not together, which is rare: read again into dicts, which bring them together.
            return _place_dicts(qrels, load_run(path, duplicates=duplicates), ignore_self)
        seen.add(query_id)
        if query_id in qrels:
            judged = [passage_id.encode() for passage_id in qrels[query_id]]
            placed[query_id] = _place(judged, ids, distinct, scores, query_id.encode() if ignore_self else None)
    return placed, seen


def _place(
    judged: Iterable[Id], ids: Sequence[Id], retrieved: Container[Id], scores: np.ndarray, left_out: Id | None
) -> _Placed:
    """Find the ranks of ``judged`` in one ranking; ``ids`` and ``scores`` run in parallel, in any order."""
    if left_out is not None and left_out in retrieved:
        scores = np.delete(scores, ids.index(left_out))
        ids = [name for name in ids if name != left_out]
        retrieved = set(ids)
    ranks = []
    for passage_id in judged:
        rank = 0
        if passage_id in retrieved:
            score = scores[ids.index(passage_id)]
            rank = 1 + int(np.count_nonzero(scores > score))
            ties = np.flatnonzero(scores == score)
            if len(ties) > 1:
                rank += sum(ids[place] > passage_id for place in ties.tolist())
        ranks.append(rank)
    return _Placed(ranks, len(ids))


def _place_arrays(qrels: Grades, run: RunArrays, ignore_self: bool, duplicates: Duplicates) -> _Placements:
    rows, scores = np.asarray(run.rows), np.asarray(run.scores, dtype=np.float32)
    _check_arrays(rows, scores, run)
    if _any_row_twice(rows, len(run.passage_ids)):
        if duplicates == "best":
            return _place_dicts(qrels, run.as_run(), ignore_self)
        raise UserError("a passage stands more than once in a ranking", hint="duplicates='best' keeps the better score")
    places = [place for place, query_id in enumerate(run.query_ids) if query_id in qrels]
    wanted = {passage_id for grades in qrels.values() for passage_id in grades}
    wanted.update(run.query_ids if ignore_self else ())
    row_of = {passage_id: row for row, passage_id in enumerate(run.passage_ids) if passage_id in wanted}
    filled = rows >= 0
    if ignore_self:
        filled &= rows != np.array([row_of.get(query_id, -1) for query_id in run.query_ids])[:, None]
    if not filled.all():
        rows, scores = np.where(filled, rows, -1), np.where(filled, scores, -np.inf)
    pairs = [(place, row_of.get(passage_id, -2)) for place in places for passage_id in qrels[run.query_ids[place]]]
    ranks: list[int] = []
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        some = np.array(pairs[start : start + _PAIRS_AT_ONCE])
        ranks += _ranks_in_arrays(some[:, 0], some[:, 1], rows, scores, run.passage_ids)
    depths = np.count_nonzero(filled, axis=1)
    next_rank = iter(ranks)
    placed = {}
    for place in places:
        query_id = run.query_ids[place]
        placed[query_id] = _Placed(list(islice(next_rank, len(qrels[query_id]))), int(depths[place]))
    return placed, set(run.query_ids)


def _check_arrays(rows: np.ndarray, scores: np.ndarray, run: RunArrays) -> None:
    if rows.shape != scores.shape or rows.ndim != 2 or len(rows) != len(run.query_ids):
        raise UserError(
            f"rows have shape {rows.shape}, scores {scores.shape}, and there are {len(run.query_ids)} query ids",
            hint="expected two arrays of shape (queries, k)",
        )
    if rows.size and int(rows.max()) >= len(run.passage_ids):
        raise UserError(f"a hit is row {int(rows.max())}, but there are {len(run.passage_ids)} passage ids")
    if len(set(run.query_ids)) != len(run.query_ids):
        raise UserError("a query id stands twice in the run")
    if np.isnan(scores).any():
        raise UserError("a score is NaN, which has no place in an order")


def _ranks_in_arrays(
    places: np.ndarray, targets: np.ndarray, rows: np.ndarray, scores: np.ndarray, passage_ids: Sequence[str]
) -> list[int]:
    """Return the rank (0: not there) of passage row ``targets[i]`` in the ranking ``places[i]``."""
    if not rows.shape[1]:
        return [0] * len(places)
    candidates = rows[places]
    is_target = candidates == targets[:, None]
    at = is_target.argmax(axis=1)
    found = is_target[np.arange(len(at)), at]
    others = scores[places]
    own = others[np.arange(len(at)), at][:, None]
    ranks = np.where(found, 1 + np.count_nonzero(others > own, axis=1), 0)
    tied = (others == own) & (candidates >= 0)
    for pair in np.flatnonzero(found & (np.count_nonzero(tied, axis=1) > 1)).tolist():
        name = passage_ids[targets[pair]]
        ranks[pair] += sum(passage_ids[row] > name for row in candidates[pair][tied[pair]].tolist())
    return [int(rank) for rank in ranks]


def _any_row_twice(rows: np.ndarray, passages: int) -> bool:
    # Sorting 32-bit numbers is an order of magnitude faster than 64-bit ones.
    ordered = np.sort(rows.astype(np.int32) if passages < 2**31 else rows, axis=1)
    return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())


def _check_qrels(qrels: Grades) -> None:
    for query_id, grades in qrels.items():
        if not isinstance(query_id, str):
            raise UserError(f"query id {query_id!r} in the judgements is {type(query_id).__name__}, expected str")
        for passage_id, grade in grades.items():
            if not isinstance(passage_id, str):
                raise UserError(
                    f"passage id {passage_id!r} in the judgements is {type(passage_id).__name__}, expected str"
                )
            if grade != int(grade) or abs(grade) >= MAX_GRADE:
                raise UserError(f"grade {grade} of query {query_id!r}, passage {passage_id!r}: expected a whole number")
