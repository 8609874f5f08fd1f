"""At which rank each judged passage stands: all that metrics need to know of a run.

The one order of this project, trec_eval's: score as float32 descending, then passage id descending by
UTF-8 bytes. A rank is counted, not sorted for: one more than the hits that stand above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from condenser.errors import UserError, sample
from eval.runs import Duplicates, Qrels, RunArrays, load_run, read_rankings

Id = TypeVar("Id", str, bytes)

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
    qrels: Mapping[str, Mapping[str, int]],
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
        run: a file, nested dicts, or `RunArrays`.
        relevance_level: the lowest grade that counts as relevant.
        ignore_self: pass over the hit whose id is the query's id.
        duplicates: a passage twice in one ranking: refuse it or keep its best score.

    Raises:
        UserError: no query in common (samples of both sides are shown), ids that are not strings, fractional
            grades, scores that are not numbers, and what reading a file raises.
    """
    _check_qrels(qrels)
    in_mean = sorted(
        query_id for query_id, grades in qrels.items() if max(grades.values(), default=0) >= relevance_level
    )
    table = _Table({query_id: index for index, query_id in enumerate(in_mean)})
    if isinstance(run, Mapping):
        run_ids = _place_dicts(qrels, run, table, ignore_self)
    elif isinstance(run, RunArrays):
        run_ids = _place_arrays(qrels, run, table, ignore_self, duplicates)
    else:
        run_ids = _place_file(qrels, run, table, ignore_self, duplicates)
    both = [query_id for query_id in qrels if query_id in run_ids]
    if not both:
        raise UserError(
            f"judgements and run have no query in common: judged are {sample(sorted(qrels)) or 'none'}; "
            f"in the run {sample(sorted(run_ids)) or 'none'}",
            None if isinstance(run, (Mapping, RunArrays)) else run,
            "are these the judgements of another split?",
        )
    counts = Counts(
        judged=len(qrels),
        in_run=len(run_ids),
        both=len(both),
        nothing_relevant=len(qrels) - len(in_mean),
        judged_not_in_run=len(qrels) - len(both),
        in_run_not_judged=len(run_ids) - len(both),
    )
    return table.finish(qrels, in_mean, counts, [query_id for query_id in sorted(qrels) if query_id not in run_ids])


class _Table:
    """Collects ranks; judgements never placed are added at the end with rank 0."""

    def __init__(self, index_of: dict[str, int]) -> None:
        self.index_of = index_of
        self.query: list[int] = []
        self.rank: list[int] = []
        self.grade: list[int] = []
        self.depth = np.zeros(len(index_of), dtype=np.int64)
        self.placed: set[str] = set()

    def add(self, query_id: str, placed: Iterable[tuple[int, int]], depth: int) -> None:
        index = self.index_of[query_id]
        self.placed.add(query_id)
        self.depth[index] = depth
        for rank, grade in placed:
            self.query.append(index)
            self.rank.append(rank)
            self.grade.append(grade)

    def finish(
        self, qrels: Mapping[str, Mapping[str, int]], query_ids: list[str], counts: Counts, missing: list[str]
    ) -> JudgedRanks:
        for query_id in query_ids:
            if query_id not in self.placed:
                self.add(query_id, ((0, int(grade)) for grade in qrels[query_id].values()), 0)
        query, rank, grade = (np.array(column, dtype=np.int64) for column in (self.query, self.rank, self.grade))
        return JudgedRanks(query_ids, query, rank, grade, self.depth, counts, missing)


def _place_dicts(
    qrels: Mapping[str, Mapping[str, int]], run: Mapping[str, Mapping[str, float]], table: _Table, ignore_self: bool
) -> set[str]:
    for query_id, hits in run.items():
        first = next(iter(hits), "")
        for name in (query_id, first):
            if not isinstance(name, str):
                raise UserError(f"id {name!r} in the run is {type(name).__name__}, expected str")
        if query_id not in table.index_of:
            continue
        try:
            scores = np.fromiter(hits.values(), np.float32, len(hits))
        except (TypeError, ValueError):
            raise UserError(f"a score of query {query_id!r} in the run is not a number") from None
        if np.isnan(scores).any():
            raise UserError(f"a score of query {query_id!r} in the run is NaN, which has no place in an order")
        table.add(query_id, *_place(query_id, qrels[query_id], list(hits), scores, hits, ignore_self))
    return set(run)


def _place_file(
    qrels: Mapping[str, Mapping[str, int]], path: str | Path, table: _Table, ignore_self: bool, duplicates: Duplicates
) -> set[str]:
    seen: set[str] = set()
    for query_id, ids, scores in read_rankings(path, duplicates=duplicates):
        if query_id in seen:  # its lines are not together: rare, so read again into dicts, which brings them together
            table.__init__(table.index_of)  # type: ignore[misc]
            return _place_dicts(qrels, load_run(path, duplicates=duplicates), table, ignore_self)
        seen.add(query_id)
        if query_id in table.index_of:
            grades = {passage_id.encode(): grade for passage_id, grade in qrels[query_id].items()}
            table.add(query_id, *_place(query_id.encode(), grades, ids, scores, set(ids), ignore_self))
    return seen


def _place(
    query_id: Id,
    grades: Mapping[Id, int],
    ids: Sequence[Id],
    scores: np.ndarray,
    retrieved: Any,
    ignore_self: bool,
) -> tuple[list[tuple[int, int]], int]:
    """Return (rank, grade) of each judgement of one query, and the number of hits."""
    if ignore_self and query_id in retrieved:
        keep = np.array([name != query_id for name in ids])
        ids, scores = [name for name in ids if name != query_id], scores[keep]
        retrieved = set(ids)
    placed = []
    for passage_id, grade in grades.items():
        rank = 0
        if passage_id in retrieved:
            score = scores[ids.index(passage_id)]
            rank = 1 + int(np.count_nonzero(scores > score))
            ties = np.flatnonzero(scores == score)
            if len(ties) > 1:
                rank += sum(ids[place] > passage_id for place in ties.tolist())
        placed.append((rank, int(grade)))
    return placed, len(ids)


def _place_arrays(
    qrels: Mapping[str, Mapping[str, int]], run: RunArrays, table: _Table, ignore_self: bool, duplicates: Duplicates
) -> set[str]:
    rows, scores = np.asarray(run.rows), np.asarray(run.scores, dtype=np.float32)
    if rows.shape != scores.shape or rows.ndim != 2 or len(rows) != len(run.query_ids):
        raise UserError(
            f"rows have shape {rows.shape}, scores {scores.shape}, and there are {len(run.query_ids)} query ids",
            hint="expected two arrays of shape (queries, k)",
        )
    if rows.size and int(rows.max()) >= len(run.passage_ids):
        raise UserError(f"a hit is row {int(rows.max())}, but there are {len(run.passage_ids)} passage ids")
    if _any_row_twice(rows, len(run.passage_ids)):
        if duplicates == "best":
            return _place_dicts(qrels, _best_of(run), table, ignore_self)
        raise UserError("a passage stands more than once in a ranking", hint="duplicates='best' keeps the better score")
    if np.isnan(scores).any():
        raise UserError("a score is NaN, which has no place in an order")
    filled = rows >= 0
    if not filled.all():
        scores = np.where(filled, scores, -np.inf)
    wanted = {name for query_id in table.index_of for name in qrels[query_id]}
    wanted |= set(run.query_ids) if ignore_self else set()
    row_of = {name: row for row, name in enumerate(run.passage_ids) if name in wanted}
    if ignore_self:
        own = np.array([row_of.get(query_id, -2) for query_id in run.query_ids])
        is_own = rows == own[:, None]
        filled, scores, rows = filled & ~is_own, np.where(is_own, -np.inf, scores), np.where(is_own, -1, rows)
    pairs = [
        (place, row_of.get(passage_id, -2), table.index_of[query_id], int(grade))
        for place, query_id in enumerate(run.query_ids)
        if query_id in table.index_of
        for passage_id, grade in qrels[query_id].items()
    ]
    table.placed.update(query_id for query_id in run.query_ids if query_id in table.index_of)
    for place, query_id in enumerate(run.query_ids):
        if query_id in table.index_of:
            table.depth[table.index_of[query_id]] = np.count_nonzero(filled[place])
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        places, targets, queries, grades = zip(*pairs[start : start + _PAIRS_AT_ONCE], strict=True)
        ranks = _ranks_in_arrays(np.array(places), np.array(targets), rows, scores, run.passage_ids)
        table.query += queries
        table.rank += ranks
        table.grade += grades
    return set(run.query_ids)


def _ranks_in_arrays(
    places: np.ndarray, targets: np.ndarray, rows: np.ndarray, scores: np.ndarray, passage_ids: Sequence[str]
) -> list[int]:
    """Return the rank (0: not there) of passage row ``targets[i]`` in the ranking ``places[i]``."""
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


def _best_of(run: RunArrays) -> dict[str, dict[str, float]]:
    best: dict[str, dict[str, float]] = {}
    for query_id, rows, scores in zip(run.query_ids, run.rows.tolist(), run.scores.tolist(), strict=True):
        hits = best.setdefault(query_id, {})
        for row, score in zip(rows, scores, strict=True):
            if row >= 0:
                name = run.passage_ids[row]
                hits[name] = max(score, hits.get(name, score))
    return best


def _check_qrels(qrels: Mapping[str, Mapping[str, int]]) -> None:
    for query_id, grades in qrels.items():
        if not isinstance(query_id, str):
            raise UserError(f"query id {query_id!r} in the judgements is {type(query_id).__name__}, expected str")
        for passage_id, grade in grades.items():
            if not isinstance(passage_id, str):
                raise UserError(
                    f"passage id {passage_id!r} in the judgements is {type(passage_id).__name__}, expected str"
                )
            if grade != int(grade):
                raise UserError(f"grade {grade} of query {query_id!r}, passage {passage_id!r} is not a whole number")


__all__ = ["Counts", "JudgedRanks", "Qrels", "judged_ranks"]
