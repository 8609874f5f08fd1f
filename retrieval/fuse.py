"""Runs become one run: by ranks, or by weighted sums of normalised scores with weights given or chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from condenser.artifacts import refuse_overwriting
from condenser.errors import UserError, sample
from condenser.files import write_json
from condenser.manifest import fingerprint
from condenser.talk import Meter, say
from eval.metrics import measure, parse_metric
from eval.ranks import judged_ranks
from eval.runs import Duplicates, Qrels, RunArrays, load_run, read_rankings, write_run
from retrieval.options import FuseOptions
from retrieval.pyserini_sets import find_qrels
from retrieval.records import Hit

Method = Literal["rrf", "minmax", "zscore"]
RunLike = str | Path | Mapping[str, Mapping[str, float]]

_FINEST = 20  # weights in steps of 1/20 where that gives no more than so many mixtures:
_MOST_MIXTURES = 500


class Ranked(NamedTuple):
    """One run's hits of one query, in house order: ids as UTF-8 bytes, and their scores as float32."""

    ids: list[bytes]
    scores: np.ndarray


class Pooled(NamedTuple):
    """All runs' hits of one query together.

    ``ids`` are in descending order; ``parts`` of shape (runs, ids) is what each run adds to a passage's score.
    """

    ids: list[bytes]
    parts: np.ndarray


class Fitted(NamedTuple):
    """Weights, one for each run, and what they reach on how many queries; ``equal`` is what equal weights reach."""

    weights: list[float]
    metric: str
    value: float
    equal: float
    queries: int


def fuse(options: FuseOptions) -> Path:
    """Fuse runs and write one, with ``RUN.json`` beside it: what was fused, how, and with which weights.

    Returns:
        The run file.

    Raises:
        UserError: fewer than two runs, another number of weights than of runs, weights that are all zero, what
            choosing weights and reading the runs and judgements raises.
    """
    if len(options.runs) < 2:
        raise UserError(f"found {len(options.runs)} run, expected two or more to fuse")
    if options.fit is not None and options.collection is not None:
        raise UserError("give one of --fit and --collection")
    chooses = options.fit is not None or options.collection is not None
    if chooses and options.weights:
        raise UserError("--weights are given, and judgements to choose them on too", hint="leave one of them out")
    if options.method != "rrf" and options.rrf_k != FuseOptions.rrf_k:
        raise UserError(f"--rrf_k goes with --method rrf, --method is {options.method}")
    if options.collection is None and options.split != FuseOptions.split:
        raise UserError("--split goes with --collection")
    if not chooses and options.metric != FuseOptions.metric:
        raise UserError("--metric goes with --fit or --collection, on which weights are chosen")
    refuse_overwriting(options.output, options.fit, *options.runs)
    weights = list(options.weights) or [1.0] * len(options.runs)
    _check_weights(weights, len(options.runs))
    parse_metric(options.metric)
    qrels = _qrels(options) if chooses else None
    runs = [read_ranked(run, options.depth, duplicates=options.duplicates) for run in options.runs]
    fusion = Fusion(runs, options.method, options.rrf_k)
    made_by: dict[str, Any] = {
        "runs": options.runs,
        "fingerprints": [fingerprint(run) for run in options.runs],
        "method": options.method,
        "rrf_k": options.rrf_k if options.method == "rrf" else None,
        "depth": options.depth,
        "k": options.k,
    }
    if qrels is not None:
        fitted = fusion.fit(qrels, options.metric)
        weights = fitted.weights
        made_by["fitted"] = fitted._asdict() | {
            "judgements": options.fit or options.collection,
            "split": None if options.fit else options.split,
        }
        shown = " ".join(f"{weight:g}" for weight in weights)
        say(
            f"fuse: --weights {shown} reach {fitted.metric} {fitted.value:.4f} on {fitted.queries:,} judged queries "
            f"({fitted.equal:.4f} with equal ones)"
        )
    _tell_missing(fusion, options.runs)
    write_run(options.output, _tracked(fusion, weights, options.k), tag="fuse")
    write_json(f"{options.output}.json", made_by | {"weights": weights})
    return Path(options.output)


class Fusion:
    """Runs side by side, to be fused with any weights.

    What a run adds to a passage's score, before its weight:

    - ``rrf``: 1 / (rrf_k + rank), and nothing for a passage that it does not have (Cormack, Clarke and Buettcher,
      Reciprocal Rank Fusion, SIGIR 2009);
    - ``minmax``: the score, shifted and scaled so that the run's hits of the query go from 0 to 1; all 1 where they are
      equal;
    - ``zscore``: the score less the mean of the run's hits of the query, over their standard deviation; all 0 where
      they are equal.

    With the last two, a passage that a run does not have counts as the run's lowest hit. A run without hits for a
    query adds nothing to it.

    Args:
        runs: query id -> hits in house order, see `read_ranked`.
        method: which of these.
        rrf_k: with ``rrf``, how little the first ranks stand out.
    """

    def __init__(self, runs: Sequence[Mapping[str, Ranked]], method: Method = "rrf", rrf_k: float = 60.0) -> None:
        self.runs = runs
        self.method = method
        self.rrf_k = rrf_k
        self.query_ids = list(dict.fromkeys(query_id for run in runs for query_id in run))

    def pooled(self, query_id: str) -> Pooled:
        """Return what each run adds for each passage that any of them has for a query."""
        found = [run.get(query_id) for run in self.runs]
        ids = sorted({name for ranked in found if ranked for name in ranked.ids}, reverse=True)
        places = {name: place for place, name in enumerate(ids)}
        parts = np.zeros((len(self.runs), len(ids)))
        for part, ranked in zip(parts, found, strict=True):
            if ranked and ranked.ids:
                added, absent = self._added(ranked.scores.astype(np.float64))
                part[:] = absent
                part[[places[name] for name in ranked.ids]] = added
        return Pooled(ids, parts)

    def _added(self, scores: np.ndarray) -> tuple[np.ndarray, float]:
        """Return what hits with these scores (hits,), best first, add, and what a passage adds that is not there."""
        if self.method == "rrf":
            return 1 / (self.rrf_k + np.arange(1, len(scores) + 1)), 0.0
        low, high = scores[-1], scores[0]
        if self.method == "minmax":
            return ((scores - low) / (high - low), 0.0) if high > low else (np.ones(len(scores)), 0.0)
        if high == low:
            return np.zeros(len(scores)), 0.0
        normal = (scores - scores.mean()) / scores.std()
        return normal, float(normal[-1])

    def rank(self, query_id: str, weights: Sequence[float], k: int) -> list[Hit]:
        """Return a query's k best passages in house order, their scores weighted sums of what the runs add."""
        ids, parts = self.pooled(query_id)
        scores = _weighted(parts, weights)
        # The ids come in descending order, and a stable sort keeps them so where scores tie.
        best = np.argsort(-scores, kind="stable")[:k]
        return [Hit(ids[at].decode(), score) for at, score in zip(best.tolist(), scores[best].tolist(), strict=True)]

    def fit(self, qrels: Qrels, metric: str = "nDCG@10") -> Fitted:
        """Choose the weights with the best mean of a metric over the judged queries, from all mixtures in equal steps.

        Steps are of 1/20, or wider where that would be more than 500 mixtures. Of mixtures that are equally good, the
        one nearest to equal weights is taken.

        Raises:
            UserError: a metric of unknown name, no judged query in any run.
        """
        wanted = parse_metric(metric)
        query_ids = [query_id for query_id in self.query_ids if query_id in qrels]
        if not query_ids:
            raise UserError(
                f"judgements and runs have no query in common: judged are {sample(qrels)}; "
                f"in the runs {sample(self.query_ids) or 'none'}",
                hint="are these the judgements of another split?",
            )
        judged = {query_id: qrels[query_id] for query_id in query_ids}
        rows, parts, passage_ids = _stacked([self.pooled(query_id) for query_id in query_ids], len(self.runs))

        def value(weights: Sequence[float]) -> float:
            ranks = judged_ranks(judged, RunArrays(query_ids, rows, _weighted(parts, weights), passage_ids))
            if not ranks.query_ids:
                raise UserError(f"none of the {len(judged):,} judged queries has a relevant passage")
            return float(measure(wanted, ranks).mean())

        equal = [1 / len(self.runs)] * len(self.runs)
        found = [(value(weights), -math.dist(weights, equal), weights) for weights in mixtures(len(self.runs))]
        best = max(found, key=lambda one: one[:2])
        return Fitted(best[2], wanted.name, best[0], value(equal), len(judged))


def read_ranked(run: RunLike, depth: int | None = None, *, duplicates: Duplicates = "refuse") -> dict[str, Ranked]:
    """Read a run's best hits of each query, in house order.

    Args:
        run: a file in any format that `eval.runs` reads, or query id -> passage id -> score.
        depth: hits of each query that are kept; None: all.
        duplicates: in a file, a passage twice in one ranking: refuse it or keep its best score.

    Raises:
        UserError: what reading the file raises, or a score that is not finite.
    """
    ranked: dict[str, Ranked] = {}
    if not isinstance(run, Mapping):
        for query_id, ids, _, scores in read_rankings(run, duplicates=duplicates):
            if query_id in ranked:
                # Its lines are not together, which is rare: read again into dicts, which bring them together.
                return read_ranked(load_run(run, duplicates=duplicates), depth)
            ranked[query_id] = _in_house_order(ids, scores, depth, f"{run}: query {query_id!r}")
        return ranked
    for query_id, hits in run.items():
        scores = np.array(list(hits.values()), dtype=np.float32)
        ranked[query_id] = _in_house_order([name.encode() for name in hits], scores, depth, f"query {query_id!r}")
    return ranked


def mixtures(runs: int) -> Iterator[list[float]]:
    """Yield all weights of ``runs`` runs that add up to 1, in steps of 1/20 or as wide as gives at most 500 of them."""
    steps = next(n for n in (_FINEST, 10, 5, 4, 3, 2, 1) if n == 1 or math.comb(n + runs - 1, n) <= _MOST_MIXTURES)
    # Each choice of bars among steps and bars parts the steps into shares.
    for bars in combinations(range(steps + runs - 1), runs - 1):
        edges = (-1, *bars, steps + runs - 1)
        yield [(right - left - 1) / steps for left, right in pairwise(edges)]


def _in_house_order(ids: list[bytes], scores: np.ndarray, depth: int | None, where: str) -> Ranked:
    if not np.isfinite(scores).all():
        raise UserError("a score is not finite", where)
    order = np.lexsort((np.array(ids, dtype=np.bytes_), scores))[::-1][:depth]
    return Ranked([ids[place] for place in order.tolist()], scores[order])


def _weighted(parts: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the weighted sum over the first axis, run by run, so that no library's order of adding matters."""
    total = np.zeros(parts.shape[1:])
    for part, weight in zip(parts, weights, strict=True):
        total += weight * part
    return total.astype(np.float32)


def _stacked(pools: Sequence[Pooled], runs: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return rows (queries, widest), what each run adds (runs, queries, widest), and the ids that rows point to."""
    width = max(len(pool.ids) for pool in pools)
    rows = np.full((len(pools), width), -1, dtype=np.int64)
    parts = np.zeros((runs, len(pools), width))
    known: dict[bytes, int] = {}
    for place, pool in enumerate(pools):
        rows[place, : len(pool.ids)] = [known.setdefault(name, len(known)) for name in pool.ids]
        parts[:, place, : len(pool.ids)] = pool.parts
    return rows, parts, [name.decode() for name in known]


def _tracked(fusion: Fusion, weights: Sequence[float], k: int) -> Iterator[tuple[str, list[Hit]]]:
    with Meter("fuse", len(fusion.query_ids), "queries") as meter:
        for query_id in fusion.query_ids:
            yield query_id, fusion.rank(query_id, weights, k)
            meter.advance()
    say(f"fuse: {len(fusion.runs)} runs of {len(fusion.query_ids):,} queries, {fusion.method}")


def _tell_missing(fusion: Fusion, names: Sequence[str]) -> None:
    for name, run in zip(names, fusion.runs, strict=True):
        missing = len(fusion.query_ids) - len(run)
        if missing:
            say(f"fuse: {name} lacks {missing:,} of the {len(fusion.query_ids):,} queries")


def _check_weights(weights: Sequence[float], runs: int) -> None:
    if len(weights) != runs:
        raise UserError(f"found {len(weights)} --weights for {runs} runs, expected one for each")
    if not any(weights):
        raise UserError("--weights are all 0, expected one above 0")


def _qrels(options: FuseOptions) -> Qrels:
    if options.fit is not None:
        return find_qrels(options.fit)
    from retrieval.collections import open_collection

    return open_collection(str(options.collection)).qrels(options.split)
