"""Metrics by name, computed from the ranks of the judged passages.

Each equals trec_eval's measure of the same meaning where there is one; names tell apart what papers
mix up: ``R@k`` (share of the relevant passages found), ``R_cap@k`` (the same, out of at most k) and
``Success@k`` (DPR's top-k accuracy: anything relevant found).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from condenser.errors import UserError, nearest
from eval.ranks import JudgedRanks

_HIGHEST_EXPONENT = 1000


class Metric(NamedTuple):
    """A measure and its cut; ``k`` is None where the whole ranking counts."""

    name: str
    kind: str
    k: int | None


class _View(NamedTuple):
    """What a formula sees; arrays of shape (judgements,), and (queries,) for ``depth``."""

    query: np.ndarray
    rank: np.ndarray
    grade: np.ndarray
    depth: np.ndarray
    relevant: np.ndarray
    retrieved: np.ndarray

    def per_query(self, values: np.ndarray) -> np.ndarray:
        """Add up ``values`` (judgements,) by query."""
        return np.bincount(self.query, weights=values, minlength=len(self.depth))


def _reciprocal_rank(view: _View, k: int | None) -> np.ndarray:
    hits = view.relevant & view.retrieved
    best = np.full(len(view.depth), np.inf)
    np.minimum.at(best, view.query[hits], view.rank[hits])
    return 1 / best


def _recall(view: _View, k: int | None) -> np.ndarray:
    return view.per_query(view.relevant & view.retrieved) / view.per_query(view.relevant)


def _capped_recall(view: _View, k: int | None) -> np.ndarray:
    possible = view.per_query(view.relevant)
    return view.per_query(view.relevant & view.retrieved) / np.minimum(possible, k or np.inf)


def _success(view: _View, k: int | None) -> np.ndarray:
    return np.minimum(view.per_query(view.relevant & view.retrieved), 1)


def _precision(view: _View, k: int | None) -> np.ndarray:
    return view.per_query(view.relevant & view.retrieved) / (k or np.maximum(view.depth, 1))


def _judged(view: _View, k: int | None) -> np.ndarray:
    places = np.maximum(np.minimum(view.depth, k or np.inf), 1)
    return view.per_query(view.retrieved) / places


def _average_precision(view: _View, k: int | None) -> np.ndarray:
    hits = np.flatnonzero(view.relevant & view.retrieved)
    hits = hits[np.lexsort((view.rank[hits], view.query[hits]))]
    query, rank = view.query[hits], view.rank[hits]
    first_of_query = np.searchsorted(query, query)
    precision = (np.arange(len(hits)) - first_of_query + 1) / rank
    total = np.bincount(query, weights=precision, minlength=len(view.depth))
    return total / view.per_query(view.relevant)


def _ndcg(view: _View, k: int | None) -> np.ndarray:
    return _dcg_ratio(view, k, np.maximum(view.grade, 0).astype(float))


def _ndcg_exponential(view: _View, k: int | None) -> np.ndarray:
    if view.grade.max(initial=0) > _HIGHEST_EXPONENT:
        raise UserError(f"grade {view.grade.max()} is too high for nDCG_exp, whose gain is 2 to the power of the grade")
    return _dcg_ratio(view, k, np.exp2(np.maximum(view.grade, 0)) - 1)


def _dcg_ratio(view: _View, k: int | None, gain: np.ndarray) -> np.ndarray:
    """Discounted gain, log2(1 + rank), over that of the best possible order of the judged passages."""
    found = view.retrieved
    dcg = np.bincount(view.query[found], weights=gain[found] / np.log2(view.rank[found] + 1), minlength=len(view.depth))
    order = np.lexsort((-gain, view.query))
    query = view.query[order]
    ideal_rank = np.arange(len(query)) - np.searchsorted(query, query) + 1
    counted = ideal_rank <= (k or np.inf)
    ideal = np.bincount(
        query[counted], weights=gain[order][counted] / np.log2(ideal_rank[counted] + 1), minlength=len(view.depth)
    )
    return np.divide(dcg, ideal, out=np.zeros(len(view.depth)), where=ideal > 0)


_FORMULAS: dict[str, Callable[[_View, int | None], np.ndarray]] = {
    "MRR": _reciprocal_rank,
    "R": _recall,
    "R_cap": _capped_recall,
    "Success": _success,
    "nDCG": _ndcg,
    "nDCG_exp": _ndcg_exponential,
    "MAP": _average_precision,
    "P": _precision,
    "Judged": _judged,
}
_OTHER_NAMES = {"rr": "MRR", "recall": "R", "hit": "Success", "hits": "Success", "ap": "MAP", "precision": "P"}
_NEED_A_CUT = ("R_cap", "Success", "P", "Judged")


def parse_metric(name: str) -> Metric:
    """Return the metric that a name such as ``nDCG@10`` stands for.

    Case does not matter; ``RR``, ``Recall``, ``Hit``, ``AP`` and ``Precision`` are other names.

    Raises:
        UserError: an unknown name (the nearest is given), a cut that is not a whole number from 1 on, or none
            where one is needed.
    """
    stem, at, cut = name.partition("@")
    kinds = {kind.lower(): kind for kind in _FORMULAS} | _OTHER_NAMES
    kind = kinds.get(stem.lower())
    if kind is None:
        close = nearest(stem.lower(), kinds)
        hint = f"did you mean {kinds[close]}{at}{cut}?" if close else f"known are {', '.join(_FORMULAS)}"
        raise UserError(f"unknown metric {name!r}", hint=hint)
    if at and not re.fullmatch("[1-9][0-9]*", cut):
        raise UserError(f"metric {name!r}: the cut is {cut!r}, expected a whole number from 1 on")
    if not at and kind in _NEED_A_CUT:
        raise UserError(f"metric {name!r} needs a cut", hint=f"for example {kind}@10")
    return Metric(f"{kind}{at}{cut}", kind, int(cut) if at else None)


def measure(metric: Metric, ranks: JudgedRanks, *, relevance_level: int = 1) -> np.ndarray:
    """Return the metric's value for each of ``ranks.query_ids``, shape (queries,), float64."""
    retrieved = ranks.rank > 0
    if metric.k is not None:
        retrieved &= ranks.rank <= metric.k
    relevant = ranks.grade >= relevance_level
    view = _View(ranks.query, ranks.rank, ranks.grade, ranks.depth, relevant, retrieved)
    return _FORMULAS[metric.kind](view, metric.k)
