"""Files of hard negatives and of a teacher's scores, which name queries and passages by id."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from condenser.errors import UserError, sample
from condenser.files import identifier, read_lines, read_records
from condenser.talk import say
from retrieval.formats.base import Negatives, Qrels, Scores
from retrieval.sources import json_suffix

# The official triples give up to a thousand negatives for each of 400,000 queries; nobody trains on more than these.
MOST_OF_TRIPLES = 200


def read_negatives(path: Path, judged: Qrels) -> Negatives:
    r"""Read hard negatives; the file's name and first line say in which form.

    - JSON lines ``{"query_id", "negatives": [passage id, ...]}``;
    - ``query \t passage,passage,...`` (RocketQA's train.negatives.tsv);
    - ``query \t positive \t negative`` (qidpidtriples);
    - ``query \t passage \t query text \t passage text`` (top1000): passages that are not judged positive.

    Of a query's negatives in the last two at most 200 are kept, by a draw that depends on the lines alone.

    Raises:
        UserError: a line that does not fit, with ``file:line``; a query that comes twice in the first two.
    """
    if json_suffix(path):
        return _from_records(path)
    columns = 0
    for _, line in read_lines(path):
        columns = len(line.split("\t"))
        break
    if columns == 2:
        return _from_lists(path)
    if columns in (3, 4):
        return _from_pairs(path, columns, judged)
    raise UserError(
        f"{columns} columns, expected 2 (query; passages with commas), 3 (query, positive, negative) or 4 (top1000)",
        f"{path}:1",
    )


def _from_records(path: Path) -> Negatives:
    negatives: Negatives = {}
    known: dict[str, str] = {}  # one string for each passage, however often it is a negative
    for number, record in read_records(path):
        where = f"{path}:{number}"
        if "query_id" not in record or not isinstance(record.get("negatives"), list):
            raise UserError(f"expected query_id and a list negatives, found {sample(record) or 'nothing'}", where)
        query_id = identifier(record["query_id"], where)
        if query_id in negatives:
            raise UserError(f"query id {query_id!r} stands already on an earlier line", where)
        passages = (identifier(passage_id, where) for passage_id in record["negatives"])
        negatives[query_id] = [known.setdefault(passage, passage) for passage in passages]
    return negatives


def _from_lists(path: Path) -> Negatives:
    negatives: Negatives = {}
    known: dict[str, str] = {}
    for where, (query_id, passages) in _cells(path, 2):
        if query_id in negatives:
            raise UserError(f"query id {query_id!r} stands already on an earlier line", where)
        negatives[query_id] = [known.setdefault(passage, passage) for passage in passages.split(",") if passage]
    return negatives


def _from_pairs(path: Path, columns: int, judged: Qrels) -> Negatives:
    negatives: Negatives = {}
    counts: dict[str, int] = {}
    known: dict[str, str] = {}
    place = 2 if columns == 3 else 1
    for _, cells in _cells(path, columns):
        query_id, passage = cells[0], cells[place]
        if columns == 4 and judged.get(query_id, {}).get(passage, 0) > 0:
            continue
        kept = negatives.setdefault(query_id, [])
        seen = counts[query_id] = counts.get(query_id, 0) + 1
        if len(kept) < MOST_OF_TRIPLES:
            kept.append(known.setdefault(passage, passage))
            continue
        # Reservoir sampling, with the line in the place of a random number: the same file gives the same choice.
        chosen = zlib.crc32(f"{seen}\t{query_id}\t{passage}".encode()) % seen
        if chosen < MOST_OF_TRIPLES:
            kept[chosen] = known.setdefault(passage, passage)
    cut = sum(count > MOST_OF_TRIPLES for count in counts.values())
    if cut:
        say(f"{path}: of {cut:,} queries with more than {MOST_OF_TRIPLES} negatives, {MOST_OF_TRIPLES} are kept")
    return negatives


def _cells(path: Path, width: int) -> Iterator[tuple[str, list[str]]]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) != width or not cells[0]:
            raise UserError(f"found {len(cells)} columns, expected {width} as on the first line", f"{path}:{number}")
        yield f"{path}:{number}", cells


def read_scores(path: Path) -> Scores:
    """Read a teacher's scores: query, passage, score with tabs between, maybe under a line of column names.

    Raises:
        UserError: another number of columns, a score that is no number, a pair scored twice; with ``file:line``.
    """
    scores: Scores = {}
    known: dict[str, str] = {}
    for where, (query_id, passage, score) in _cells(path, 3):
        if score.lower() == "score" and not scores:
            continue
        value = finite(score, where)
        passage = known.setdefault(passage, passage)
        if scores.setdefault(query_id, {}).setdefault(passage, value) != value:
            raise UserError(f"query {query_id!r} and passage {passage!r} have another score on an earlier line", where)
    return scores


def finite(value: object, where: str) -> float:
    """Return a score as a float; UserError when it is no finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not abs(number) < float("inf"):
        raise UserError(f"score is {value!r}, expected a finite number", where)
    return number
