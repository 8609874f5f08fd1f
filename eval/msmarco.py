"""The official MS MARCO passage ranking script's number, with its rules to the letter.

Source: ``ms_marco_eval.py`` of microsoft/MSMARCO-Passage-Ranking. Its rules differ from every other metric here:
the rank column places a passage, scores are never seen; each query has 1,000 places that hold passage 0 until
a line fills them; grades are ignored; the mean is over the queries of the judgements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from condenser.errors import UserError, sample
from condenser.files import read_lines
from condenser.talk import warn

RULE = "official MS MARCO passage script: rank column rules, grades ignored, mean over all judged queries"

_PLACES = 1000
_CUT = 10


class OfficialScore(NamedTuple):
    """What the script prints, and the quirks that touched this result.

    ``queries_ranked`` counts the run's queries, judged or not; ``judged`` is what the mean divides by.
    """

    mrr_at_10: float
    queries_ranked: int
    judged: int
    quirks: list[str]


def official_mrr(qrels: str | Path, run: str | Path) -> OfficialScore:
    """Return MRR@10 exactly as the official script does, and warn where its quirks bite.

    Args:
        qrels: tab-separated lines ``query 0 passage grade`` with whole numbers for ids.
        run: tab-separated lines ``query passage rank``; further columns are ignored.

    Raises:
        UserError: what the script refuses, with its words, and the file and line: a line that does not fit, a rank
            above 1,000, or no query in common.
    """
    relevant: dict[int, list[int]] = {}
    for cells, where in _cells(qrels):
        query, passage = _whole_numbers(cells, (0, 2), where)
        relevant.setdefault(query, []).append(passage)
    places: dict[int, list[int]] = {}
    ranks: dict[int, list[int]] = {}
    for cells, where in _cells(run):
        query, passage, rank = _whole_numbers(cells, (0, 1, 2), where)
        try:
            places.setdefault(query, [0] * _PLACES)[rank - 1] = passage
        except IndexError:
            raise _not_valid(cells, where, f"rank {rank} is above {_PLACES}") from None
        ranks.setdefault(query, []).append(rank)
    matching = [query for query in places if query in relevant]
    if not matching:
        raise UserError(
            "No matching QIDs found. Are you sure you are scoring the evaluation set?",
            run,
            f"judged are {sample(map(str, relevant))}; in the run {sample(map(str, places))}",
        )
    total = 0.0
    for query in matching:
        for place, passage in enumerate(places[query][:_CUT], start=1):
            if passage in relevant[query]:
                total += 1 / place
                break
    quirks = list(_quirks(relevant, places, ranks))
    for quirk in quirks:
        warn(quirk)
    return OfficialScore(total / len(relevant), len(places), len(relevant), quirks)


def _cells(path: str | Path) -> Iterator[tuple[list[str], str]]:
    for number, line in read_lines(path):
        yield line.strip().split("\t"), f"{path}:{number}"


def _whole_numbers(cells: list[str], columns: tuple[int, ...], where: str) -> list[int]:
    try:
        return [int(cells[column]) for column in columns]
    except (ValueError, IndexError):
        raise _not_valid(cells, where, "expected whole numbers parted by tabs") from None


def _not_valid(cells: list[str], where: str, hint: str) -> UserError:
    return UserError(f'"{cells}" is not valid format', where, hint)


def _quirks(relevant: dict[int, list[int]], places: dict[int, list[int]], ranks: dict[int, list[int]]) -> Iterator[str]:
    twice = [
        query
        for query, passages in places.items()
        if any(n > 1 and passage for passage, n in Counter(passages).items())
    ]
    if twice:
        yield f"a passage stands more than once in the ranking of {_queries(twice)}; the script scores it all the same"
    gaps = [query for query, some in ranks.items() if sorted(some) != list(range(1, len(some) + 1))]
    if gaps:
        yield f"ranks have gaps or repeat for {_queries(gaps)}; the last line wins, an empty place is passage 0"
    zero = [query for query, passages in relevant.items() if 0 in passages and query in places]
    if zero:
        yield f"passage 0 is relevant to {_queries(zero)}; the script takes it for retrieved wherever a place is empty"


def _queries(ids: list[int]) -> str:
    return f"{len(ids):,} " + ("query" if len(ids) == 1 else "queries") + f" ({sample(map(str, ids))})"
