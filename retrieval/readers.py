"""Files of passages and queries become records: JSON lines or TSV, plain, ``.gz`` or ``.zst``, one line at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from condenser.errors import UserError, sample
from condenser.files import identifier, parse_record, read_lines
from condenser.talk import warn
from retrieval.records import Passage, Query

_PASSAGE_IDS = ("_id", "docid", "id")
_PASSAGE_TEXTS = ("text", "contents")
_QUERY_IDS = ("_id", "qid", "query_id", "id")
_QUERY_TEXTS = ("text", "query")

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_TSV_SUFFIXES = (".tsv", ".txt")

Record = TypeVar("Record", Passage, Query)
Fields = dict[str, Any]


def read_passages(path: str | Path, *, skip_bad: bool = False) -> Iterator[Passage]:
    r"""Yield the passages of a file in its order.

    JSON lines hold an id (``_id``, ``docid`` or ``id``), a text (``text`` or ``contents``) and maybe a
    ``title``. TSV lines hold id, text or id, title, text and know no quoting: a quote is text. A first line
    of column names (``id``, ``text``, ``title`` in any order) gives the order. Blank lines are passed over, line
    breaks inside a JSON text become blanks.

    Args:
        path: ``.jsonl``, ``.json``, ``.ndjson``, ``.tsv`` or ``.txt``, each also with ``.gz`` or ``.zst``.
        skip_bad: pass over lines that cannot be read, and say at the end how many.

    Raises:
        UserError: with ``file:line``: malformed JSON, no id or text (the fields found are named), a wrong
            number of columns, an id seen before (both lines are named); a file without any passage.
    """
    return _read(path, _passage, (("_id", "text"), ("_id", "title", "text")), "passage", skip_bad)


def read_queries(path: str | Path, *, skip_bad: bool = False) -> Iterator[Query]:
    """Yield the queries of a file in its order.

    JSON lines hold an id (``_id``, ``qid``, ``query_id`` or ``id``), a text (``text`` or ``query``) and maybe
    ``answers``, a list of strings. TSV lines hold id and text. All else is as in `read_passages`.
    """
    return _read(path, _query, (("_id", "text"),), "query", skip_bad)


def _read(
    path: str | Path,
    make: Callable[[Fields, str], Record],
    layouts: tuple[tuple[str, ...], ...],
    kind: str,
    skip_bad: bool,
) -> Iterator[Record]:
    parse, place = _line_parser(Path(path), layouts), str(path)
    first_lines: dict[str, int] = {}
    skipped: list[UserError] = []

    def on_bad(error: UserError) -> None:
        if not skip_bad:
            raise error from None
        skipped.append(error)

    for number, line in read_lines(path, on_bad=on_bad):
        if not line or line.isspace():
            continue
        where = f"{place}:{number}"
        try:
            fields = parse(line, where)
            if fields is None:
                continue
            record = make(fields, where)
            if record.id in first_lines:
                raise UserError(f"{kind} id {record.id!r} stands already on line {first_lines[record.id]}", where)
        except UserError as error:
            on_bad(error)
            continue
        first_lines[record.id] = number
        yield record
    if not first_lines:
        raise UserError(f"no {kind} in this file" + (f"; {skipped[0]}" if skipped else ""), path)
    if skipped:
        lines = "1 line" if len(skipped) == 1 else f"{len(skipped):,} lines"
        warn(f"{path}: {lines} skipped, first {skipped[0]}")


def _line_parser(path: Path, layouts: tuple[tuple[str, ...], ...]) -> Callable[[str, str], Fields | None]:
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    suffix = suffixes[-1] if suffixes else ""
    if suffix in _JSON_SUFFIXES:
        return parse_record
    if suffix in _TSV_SUFFIXES:
        return _TsvParser(layouts)
    raise UserError("unknown kind of file", path, "expected .jsonl or .tsv, each also with .gz or .zst")


class _TsvParser:
    """Splits lines into named columns; the first line decides how many there are and may name them."""

    def __init__(self, layouts: tuple[tuple[str, ...], ...]) -> None:
        self._layouts = layouts
        self._columns: tuple[str, ...] | None = None

    def __call__(self, line: str, where: str) -> Fields | None:
        """Return a line's cells by column name, or None for a line of column names."""
        cells = line.split("\t")
        if self._columns is None:
            header = tuple("_id" if cell == "id" else cell for cell in cells)
            if any(sorted(header) == sorted(layout) for layout in self._layouts):
                self._columns = header
                return None
        layouts = (self._columns,) if self._columns else self._layouts
        columns = next((layout for layout in layouts if len(layout) == len(cells)), None)
        if columns is None:
            found = f"line {where.rsplit(':', 1)[1]} has {len(cells)} column" + ("s" if len(cells) > 1 else "")
            known = " or ".join(f"{len(layout)} ({', '.join(layout)})".replace("_id", "id") for layout in layouts)
            raise UserError(f"{found}, expected {known}", where, "columns are parted by one tab")
        self._columns = columns
        return dict(zip(columns, cells, strict=True))


def _passage(fields: Fields, where: str) -> Passage:
    title = "" if fields.get("title") is None else _text(fields, "title", where)
    text = _text(fields, _find(fields, _PASSAGE_TEXTS, "text", where), where)
    return Passage(_id(fields, _PASSAGE_IDS, where), title, text)


def _query(fields: Fields, where: str) -> Query:
    answers = fields.get("answers") or []
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"answers is {answers!r}, expected a list of strings", where)
    text = _text(fields, _find(fields, _QUERY_TEXTS, "text", where), where)
    return Query(_id(fields, _QUERY_IDS, where), text, tuple(answers))


def _id(fields: Fields, names: tuple[str, ...], where: str) -> str:
    return identifier(fields[_find(fields, names, "id", where)], where)


def _find(fields: Fields, names: tuple[str, ...], what: str, where: str) -> str:
    """Return the first of ``names`` that the record has."""
    for name in names:
        if name in fields:
            return name
    found = sample(fields, 6) or "none"
    raise UserError(f"no {what}: expected a field {' or '.join(names)}, found {found}", where)


def _text(fields: Fields, name: str, where: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r}, expected a string", where)
    return value.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
