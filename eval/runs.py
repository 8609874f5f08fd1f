"""Judgements and runs, in and out: TREC, MS MARCO, BEIR and JSON files, plain or compressed.

A run holds, for each query, passage ids with scores; which passage stands above which is not a
matter of the file but of `eval.ranks`: score as float32 descending, then passage id descending.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson

from condenser.errors import UserError
from condenser.files import atomic_write, existing_file, identifier, open_bytes, read_lines
from eval.run_lines import TEXT_SUFFIXES, Piece, as_float32, explained, text_pieces

Qrels = dict[str, dict[str, int]]
Run = dict[str, dict[str, float]]
Duplicates = Literal["refuse", "best"]

MAX_GRADE = 2**31

# A first line made of these words alone names the columns; "q1 0 d1 0.7" is a judgement, and a wrong one.
_HEADER_WORDS = set(
    "query-id query_id queryid qid query topic iteration iter q0 corpus-id corpus_id doc-id doc_id docid document "
    "passage-id passage_id pid score relevance rel label grade".split()
)
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")


class RunArrays(NamedTuple):
    """A run as a vector search returns it.

    ``rows`` and ``scores`` have shape (queries, k); ``rows`` point into ``passage_ids``, -1 is an empty place.
    """

    query_ids: Sequence[str]
    rows: np.ndarray
    scores: np.ndarray
    passage_ids: Sequence[str]

    def as_run(self) -> Run:
        """Return the same run as nested dicts; of a passage that stands twice, the better score is kept."""
        run: Run = {}
        rows_of, scores_of = np.asarray(self.rows).tolist(), np.asarray(self.scores).tolist()
        for query_id, rows, scores in zip(self.query_ids, rows_of, scores_of, strict=True):
            hits = run.setdefault(query_id, {})
            for row, score in zip(rows, scores, strict=True):
                if row >= 0:
                    passage_id = self.passage_ids[row]
                    hits[passage_id] = max(score, hits.get(passage_id, score))
        return run


class Ranking(NamedTuple):
    """Hits of one query as a file gives them: ids as UTF-8 bytes, in a list and as a set, and scores as float32."""

    query_id: str
    ids: list[bytes]
    distinct: set[bytes]
    scores: np.ndarray


def load_qrels(path: str | Path) -> Qrels:
    """Read judgements: query id -> passage id -> grade.

    Columns are ``query 0 passage grade`` (TREC, MS MARCO), ``query passage grade`` (BEIR, with or without a
    line of column names) or ``query passage`` (grade 1), parted by tabs if the first line has one, else by
    blanks; or one JSON object of that shape. A repeated line counts once.

    Raises:
        UserError: another number of columns, a grade that is not a whole number, one pair judged twice with
            different grades (both lines are named), no judgement at all; with ``file:line``.
    """
    if _is_json(path):
        return _load_json_qrels(path)
    qrels: Qrels = {}
    width, by_tab = 0, False
    for number, line in read_lines(path):
        if not line.strip():
            continue
        if not width:
            by_tab = "\t" in line
        cells = line.split("\t") if by_tab else line.split()
        if not width:
            width = len(cells)
            if width not in (2, 3, 4):
                raise UserError(
                    f"{width} columns, expected 2 to 4: query, (0,) passage, (grade)",
                    f"{path}:{number}",
                    "a TREC run has 6: are --qrels and --run swapped?" if width == 6 else None,
                )
            if all(cell.lower() in _HEADER_WORDS for cell in cells):
                continue
        if len(cells) != width or "" in cells:
            raise UserError(f"found columns {cells}, expected {width} as on the first line", f"{path}:{number}")
        query_id, passage_id = cells[0], cells[1 if width < 4 else 2]
        grade = 1 if width == 2 else _grade(cells[-1], f"{path}:{number}")
        known = qrels.setdefault(query_id, {}).setdefault(passage_id, grade)
        if known != grade:
            first = _lines_with(path, query_id, passage_id)[0]
            raise UserError(
                f"query {query_id!r} and passage {passage_id!r} are judged {grade}, but {known} on line {first}",
                f"{path}:{number}",
            )
    if not qrels:
        raise UserError("no judgement in this file", path)
    return qrels


def _load_json_qrels(path: str | Path) -> Qrels:
    return {
        query_id: {
            passage_id: _grade(str(grade), f"{path}: query {query_id!r}") for passage_id, grade in grades.items()
        }
        for query_id, grades in _read_nested(path).items()
    }


def _grade(text: str, where: str) -> int:
    if not _WHOLE_NUMBER.fullmatch(text):
        raise UserError(f"grade {text!r} is not a whole number", where, "scale the grades to whole numbers")
    if abs(int(text)) >= MAX_GRADE:
        raise UserError(f"grade {text} is out of range", where)
    return int(text)


def _lines_with(path: str | Path, query_id: str, passage_id: str) -> list[int]:
    """Return the numbers of the lines on which the query and the passage stand."""
    return [
        number
        for number, line in read_lines(path)
        for cells in ((line.split("\t") if "\t" in line else line.split()),)
        if cells[:1] == [query_id] and passage_id in cells[1:3]
    ]


def load_run(path: str | Path, *, duplicates: Duplicates = "refuse", only: Collection[str] | None = None) -> Run:
    """Read a run: query id -> passage id -> score.

    TREC (``query Q0 passage rank score tag``), MS MARCO (``query passage rank``, or without ranks in the order
    of the lines; scores are then minus the rank), ``query passage score`` where the first line's third column
    has a decimal point, or JSON of the returned shape; each also ``.gz`` or ``.zst``.

    Args:
        path: the file.
        duplicates: what to do with a passage that stands twice in one ranking: ``refuse``, or keep the ``best`` score.
        only: keep these queries alone.

    Raises:
        UserError: a line that does not fit, a score that is not a number, a passage twice in one
            ranking; with ``file:line``.
    """
    run: Run = {}
    for ranking in read_rankings(path, duplicates=duplicates):
        if only is not None and ranking.query_id not in only:
            continue
        hits = run.setdefault(ranking.query_id, {})
        for passage_id, score in zip(ranking.ids, ranking.scores.tolist(), strict=True):
            name = passage_id.decode()
            if name in hits:
                if duplicates == "refuse":
                    raise _duplicate(path, ranking.query_id, name)
                score = max(score, hits[name])
            hits[name] = score
    return run


def read_rankings(path: str | Path, *, duplicates: Duplicates = "refuse") -> Iterator[Ranking]:
    """Yield a run file's rankings one by one, so that memory holds one query at a time.

    A query whose lines are not together is yielded once for each place. Arguments and errors as in `load_run`.
    """
    pieces = _json_pieces(path) if _is_json(path) else text_pieces(path)
    for query_id, group in groupby(pieces, key=lambda piece: piece[0]):
        ids, scores = [], []
        for _, some_ids, some_scores in group:
            ids += some_ids
            scores.append(some_scores)
        ranking = Ranking(query_id.decode(), ids, set(ids), np.concatenate(scores) if len(scores) > 1 else scores[0])
        if len(ranking.distinct) != len(ids):
            if duplicates == "refuse":
                repeated = next(name for place, name in enumerate(ids) if name in ids[:place])
                raise _duplicate(path, ranking.query_id, repeated.decode())
            ranking = _keep_best(ranking)
        yield ranking


def _keep_best(ranking: Ranking) -> Ranking:
    best: dict[bytes, float] = {}
    for name, score in zip(ranking.ids, ranking.scores.tolist(), strict=True):
        best[name] = max(score, best.get(name, score))
    return Ranking(ranking.query_id, list(best), ranking.distinct, np.array(list(best.values()), dtype=np.float32))


def _duplicate(path: str | Path, query_id: str, passage_id: str) -> UserError:
    what = f"passage {passage_id!r} stands more than once in the ranking of query {query_id!r}"
    lines = _lines_with(path, query_id, passage_id)
    where = f"{path}:{lines[1]}" if len(lines) > 1 else str(path)
    if len(lines) > 1:
        what += f", first on line {lines[0]}"
    return UserError(what, where, "--duplicates best keeps the better score")


def place_of(path: str | Path, query_id: str, passage_id: str) -> str:
    """Return the ``file:line`` on which a hit stands first, or the file where lines tell nothing."""
    lines = [] if _is_json(path) else _lines_with(path, query_id, passage_id)
    return f"{path}:{lines[0]}" if lines else str(path)


def first_byte(path: str | Path) -> bytes:
    """Return the first byte of a file, unpacked; empty when it has none.

    Raises:
        UserError: no such file, or a pipe, whose first byte would be gone then.
    """
    if not existing_file(path).is_file():
        raise UserError("is a pipe, which can be read once only", path, "write it to a file first")
    with open_bytes(path) as stream, explained(path):
        return stream.read(1)


def _is_json(path: str | Path) -> bool:
    suffix = Path(str(path).removesuffix(".gz").removesuffix(".zst")).suffix
    return suffix == ".json" or (suffix not in TEXT_SUFFIXES and first_byte(path) == b"{")


def read_json_value(path: str | Path) -> Any:
    """Read one JSON value, unpacked; raise UserError when the file holds something else or is damaged."""
    with open_bytes(path) as stream, explained(path):
        text = stream.read()
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error.msg})", f"{path}:{error.lineno}") from None


def _read_nested(path: str | Path) -> dict[str, dict[str, Any]]:
    value = read_json_value(path)
    if not isinstance(value, dict) or not all(isinstance(inner, dict) for inner in value.values()):
        raise UserError("expected a JSON object {query id: {passage id: number}}", path)
    return value


def _json_pieces(path: str | Path) -> Iterator[Piece]:
    for query_id, hits in _read_nested(path).items():
        where = f"{path}: query {query_id!r}"
        for passage_id, score in hits.items():
            if isinstance(score, bool) or not isinstance(score, (int, float)):
                raise UserError(f"score of passage {passage_id!r} is {score!r}, expected a number", where)
        yield (
            query_id.encode(),
            [name.encode() for name in hits],
            as_float32(np.array(list(hits.values()), np.float64)),
        )


def write_run(
    path: str | Path, rows: Iterable[tuple[str, Sequence[tuple[str, float]]]], tag: str = "condenser"
) -> None:
    """Write a run, whole or not at all; the file's name says in which format.

    ``.trec``, ``.run`` or ``.txt`` is TREC's six columns, ``.tsv`` is MS MARCO's ``query passage rank``, ``.json`` is
    ``{query: {passage: score}}``; each also ``.gz``. A score is the shortest text that reads back as the same float32.

    Args:
        path: where to write.
        rows: for each query its id and its (passage id, score) pairs, best first.
        tag: TREC's sixth column.

    Raises:
        UserError: a file name that says nothing, an id that the format cannot carry, a score that is not a number.
    """
    suffix = Path(str(path).removesuffix(".gz")).suffix
    if suffix == ".json":
        _write_json_run(path, rows)
        return
    if suffix not in TEXT_SUFFIXES:
        raise UserError(f"cannot tell the format from {suffix or 'no suffix'!r}", path, "expected .trec, .tsv or .json")
    trec = suffix != ".tsv"
    with atomic_write(path) as stream:
        if trec:
            _check_id(tag, trec, path)
        for query_id, hits in rows:
            _check_id(query_id, trec, path)
            lines = []
            for rank, (passage_id, score) in enumerate(hits, start=1):
                _check_id(passage_id, trec, path)
                text = _score_text(score, query_id, path)
                lines.append(
                    f"{query_id} Q0 {passage_id} {rank} {text} {tag}\n"
                    if trec
                    else f"{query_id}\t{passage_id}\t{rank}\n"
                )
            stream.writelines(lines)


def _write_json_run(path: str | Path, rows: Iterable[tuple[str, Sequence[tuple[str, float]]]]) -> None:
    with atomic_write(path) as stream:
        separator = "{"
        for query_id, hits in rows:
            inner = ", ".join(
                f"{orjson.dumps(identifier(name, str(path))).decode()}: {_score_text(score, query_id, path)}"
                for name, score in hits
            )
            stream.write(f"{separator}\n{orjson.dumps(query_id).decode()}: {{{inner}}}")
            separator = ","
        stream.write("\n}\n" if separator == "," else "{}\n")


def _check_id(name: str, trec: bool, path: str | Path) -> None:
    fault = not name or (name.split() != [name] if trec else any(mark in name for mark in "\t\n\r"))
    if fault:
        what, way_out = ("blanks", ".tsv or .json") if trec else ("tabs or line ends", ".json")
        raise UserError(f"id {name!r}: this format carries no empty id and no {what}", path, f"write {way_out} instead")


def _score_text(score: float, query_id: str, path: str | Path) -> str:
    value = np.float32(score)
    if not np.isfinite(value):
        raise UserError(f"a score of query {query_id!r} is {score}, expected a finite number", path)
    return str(value)
