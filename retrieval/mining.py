"""Which hits may be hard negatives: no positives, none that say the same as one, none too good to be wrong."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from condenser.errors import UserError, sample
from eval.runs import read_rankings
from retrieval.passages import hash64
from retrieval.records import Passage, folded

# Ids of queries that a message shows.
_SHOWN = 5


class Ranking(NamedTuple):
    """What a search found for one query, best first; scores are float32, None where a run gives ranks alone."""

    query_id: str
    passage_ids: Sequence[str]
    scores: np.ndarray | None


def rankings_of(path: str | Path, depth: int | None) -> Iterator[Ranking]:
    """Yield the first hits (None: all) of each query of a run file, in house order; one query is in memory at a time.

    Raises:
        UserError: what `eval.runs.read_rankings` raises; a query whose lines are not together.
    """
    seen: set[str] = set()
    for query_id, ids, _, scores in read_rankings(path):
        if query_id in seen:
            raise UserError(f"the lines of query {query_id!r} are not together", path, "sort the run by query")
        seen.add(query_id)
        # MS MARCO's third column is a rank, which the reader turns into minus the rank.
        ranks_alone = len(scores) > 1 and bool(np.array_equal(np.sort(-scores), np.arange(1, len(scores) + 1)))
        ranked = sorted(zip(scores.tolist(), ids, strict=True), reverse=True)[:depth]
        best = None if ranks_alone else np.array([score for score, _ in ranked], np.float32)
        yield Ranking(query_id, [name.decode() for _, name in ranked], best)


class SameText:
    """Tells which passages are in the corpus, and which of them say the same, by 16 bytes of each.

    Two passages say the same when their texts agree but for upper and lower case, the forms of letters (NFKC) and
    blanks; of a passage without a text its title counts.
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        ids, texts = array("Q"), array("Q")
        for passage in passages:
            ids.append(hash64(passage.id))
            texts.append(hash64(folded(passage.text or passage.title)))
        order = np.argsort(np.frombuffer(ids, np.uint64), kind="stable")
        self._ids = np.frombuffer(ids, np.uint64)[order]
        self._texts = np.frombuffer(texts, np.uint64)[order]

    def __call__(self, passage_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return for each id whether it is in the corpus, and a number that stands for its text, both (n,)."""
        if not passage_ids:
            return np.zeros(0, bool), np.zeros(0, np.uint64)
        keys = np.array([hash64(one) for one in passage_ids], np.uint64)
        rows = np.minimum(np.searchsorted(self._ids, keys), len(self._ids) - 1)
        return self._ids[rows] == keys, self._texts[rows]


@dataclass
class Counts:
    """What was kept and what was dropped, and why.

    Attributes:
        queries: how many queries there are to find negatives for.
        kept: how many of them got negatives.
        negatives: how many negatives they got.
        dropped: queries without negatives, and a few of their ids, by reason.
        left_out: candidates that may not be negatives, by reason.
        unanswered: queries whose positives are all below the depth.
    """

    queries: int = 0
    kept: int = 0
    negatives: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0

    def drop(self, query_id: str, why: str) -> None:
        """Count a query that gets no negatives."""
        self.dropped[why] += 1
        shown = self.examples.setdefault(why, [])
        if len(shown) <= _SHOWN:
            shown.append(query_id)

    def queries_line(self) -> str:
        """Say how many queries were kept and why the others were not."""
        line = f"kept {self.kept:,} of {self.queries:,} queries"
        dropped = self.dropped.total()
        if not dropped:
            return line
        reasons = [
            f"{f'{count:,} ' if len(self.dropped) > 1 else ''}{why} ({sample(self.examples[why], _SHOWN)})"
            for why, count in self.dropped.items()
        ]
        return f"{line}, dropped {dropped:,}: {', '.join(reasons)}"


@dataclass(frozen=True)
class Rules:
    """What makes a candidate.

    Attributes:
        depth: hits of a ranking that are looked at.
        skip: first hits that are passed over.
        n: negatives per query.
        choice: the best n of the candidates, or a sample of them.
        margin: see `scored_too_high`; None is no bound.
        ignore_self: the passage whose id is the query's own is no candidate.
        require_positive: no negatives for queries whose positives are all below the depth.
        seed: of the sample.
    """

    depth: int
    skip: int
    n: int
    choice: Literal["sample", "top"]
    margin: float | None
    ignore_self: bool
    require_positive: bool
    seed: int


def candidates_of(
    ranking: Ranking, positives: Collection[str], same_text: SameText, rules: Rules, counts: Counts
) -> list[str] | None:
    """Return the passages of a ranking that may be negatives, those first that are to be taken first.

    Args:
        ranking: the first `Rules.depth` hits of a query.
        positives: passages that are known to answer the query.
        same_text: tells which passages say the same.
        rules: what makes a candidate.
        counts: told of what is left out, and of the query when it is dropped.

    Returns:
        Ids in the order of the ranking, or in a random order that depends on seed and query alone; None when the
        query is dropped.
    """
    ids = list(ranking.passage_ids)
    known = np.array([one in positives for one in ids], bool)
    if not known.any():
        counts.unanswered += 1
        if rules.require_positive:
            counts.drop(ranking.query_id, f"no positive in top {rules.depth:,}")
            return None
    present, texts = same_text(ids)
    positives_present, positive_texts = same_text(list(positives))
    reasons = {
        "known positives": known,
        "not in the corpus": ~present,
        "with the text of a positive": np.isin(texts, positive_texts[positives_present]),
        "the query itself": np.array([rules.ignore_self and one == ranking.query_id for one in ids], bool),
        "scored too high": scored_too_high(ranking.scores, known, rules.margin),
    }
    free = np.arange(len(ids)) >= rules.skip
    for why, at_fault in reasons.items():
        counts.left_out[why] += int((free & at_fault).sum())
        free &= ~at_fault
    rows = np.flatnonzero(free)
    if rules.choice == "sample":
        rows = np.random.default_rng([rules.seed, hash64(ranking.query_id)]).permutation(rows)
    return [ids[row] for row in rows.tolist()]


def scored_too_high(scores: np.ndarray | None, known: np.ndarray, margin: float | None) -> np.ndarray:
    """Return which hits score so high that they may well be positives that nobody judged.

    Those are the hits above P - margin * |P|, where P is the score of the best known positive in the ranking. (The
    share of P rather than a distance to it, because it means the same for BM25, dot products and cosines; de Souza
    P. Moreira et al., NV-Retriever, 2024.) Without a positive in the ranking there is nothing to compare with, and
    none is.
    """
    if margin is None or scores is None or not known.any():
        return np.zeros(len(known), bool)
    best = float(scores[known].max())
    return scores > best - margin * abs(best)
