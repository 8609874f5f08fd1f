"""Files of passages and queries become records: JSON lines or TSV, plain, ``.gz`` or ``.zst``, one line at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from condenser.errors import UserError, sample
from condenser.files import identifier
from condenser.talk import warn
from retrieval.passages import FirstLines, PassageFile
from retrieval.records import Passage, Query
from retrieval.sources import RecordFile, json_suffix, open_source, parsed, plain_suffix

_PASSAGE_IDS = ("_id", "docid", "id")
_PASSAGE_TEXTS = ("text", "contents")
_QUERY_IDS = ("_id", "qid", "query_id", "id")
_QUERY_TEXTS = ("text", "query")

_PASSAGE_COLUMNS = (("_id", "text"), ("_id", "title", "text"))
_QUERY_COLUMNS = (("_id", "text"),)
# what a line of column names calls them, small letters or not
_PASSAGE_HEADER = {
    **dict.fromkeys(("_id", "id", "docid", "pid", "passage_id"), "_id"),
    **dict.fromkeys(("text", "contents", "passage"), "text"),
    "title": "title",
}
_QUERY_HEADER = {
    **dict.fromkeys(("_id", "id", "qid", "query_id"), "_id"),
    **dict.fromkeys(("text", "query", "question"), "text"),
}
_TSV_SUFFIXES = (".tsv", ".txt")
_MOST_LINES = 1 << 40  # of one file

Record = TypeVar("Record", Passage, Query)
Fields = dict[str, Any]


def read_passages(path: str | Path, *, skip_bad: bool = False) -> Iterator[Passage]:
    r"""Yield the passages of a file in its order.

    JSON lines hold an id (``_id``, ``docid`` or ``id``), a text (``text`` or ``contents``) and maybe a
    ``title``. TSV lines hold id, text or id, title, text and know no quoting: a quote is text. A first line
    of column names (``id``, ``text``, ``title`` in any order; ``docid``, ``pid``, ``passage`` and the like) gives the
    order. Blank lines are passed over, line breaks inside a JSON text become blanks.

    Args:
        path: ``.jsonl``, ``.json``, ``.ndjson``, ``.tsv`` or ``.txt``, each also with ``.gz`` or ``.zst``.
        skip_bad: pass over lines that cannot be read, and say at the end how many.

    Raises:
        UserError: with ``file:line``: malformed JSON, no id or text (the fields found are named), a wrong
            number of columns, an id seen before (both lines are named); a file without any passage.
    """
    return read_unique([passage_file(path)], "passage", skip_bad=skip_bad)


def passage_file(path: str | Path) -> PassageFile:
    """Open the file that `read_passages` reads in a way that lets its passages be found again."""
    return RecordFile(open_source(path), lambda: passage_parser(path))


def passage_parser(path: str | Path) -> Callable[[Any, str], Sequence[Passage]]:
    """Return what turns a line of a file, or an object in it, and its ``file:line`` into a passage."""
    return _parser(Path(path), passage_of, Columns(_PASSAGE_COLUMNS, header=_PASSAGE_HEADER))


def read_queries(path: str | Path, *, skip_bad: bool = False) -> Iterator[Query]:
    """Yield the queries of a file in its order.

    JSON lines hold an id (``_id``, ``qid``, ``query_id`` or ``id``), a text (``text`` or ``query``) and maybe
    ``answers``, a list of strings. TSV lines hold id and text. All else is as in `read_passages`.
    """
    file = RecordFile(
        open_source(path), lambda: _parser(Path(path), query_of, Columns(_QUERY_COLUMNS, header=_QUERY_HEADER))
    )
    return read_unique([file], "query", skip_bad=skip_bad)


def read_unique(files: Sequence[RecordFile[Record]], kind: str, *, skip_bad: bool) -> Iterator[Record]:
    """Yield the records of files in order, each id once.

    Raises:
        UserError: an id seen before (both lines are named), no record at all, and what cannot be read; lines at
            fault are passed over and counted with ``skip_bad``.
    """
    places = [file.source.place for file in files]
    first_lines = FirstLines()
    skipped: list[UserError] = []

    def on_bad(error: UserError) -> None:
        if not skip_bad:
            raise error from None
        skipped.append(error)

    for number, file in enumerate(files):
        for _, where, records in file.scan(on_bad):
            line = int(where[where.rindex(":") + 1 :])
            for record in records:
                first = first_lines.setdefault(record.id, number * _MOST_LINES + line)
                if first != number * _MOST_LINES + line:
                    owner, first_line = divmod(first, _MOST_LINES)
                    earlier = f"line {first_line}" + (f" of {places[owner]}" if owner != number else "")
                    on_bad(UserError(f"{kind} id {record.id!r} stands already on {earlier}", where))
                else:
                    yield record
    if not len(first_lines):
        what = f"no {kind} in this file" if len(files) == 1 else f"no {kind} in {len(files):,} files, the first"
        raise UserError(what + (f"; {skipped[0]}" if skipped else ""), places[0])
    warn_of_skipped(skipped, places[0])


def warn_of_skipped(skipped: Sequence[UserError], place: str | Path) -> None:
    """Say how many lines were passed over, and why the first was."""
    if skipped:
        lines = "1 line" if len(skipped) == 1 else f"{len(skipped):,} lines"
        warn(f"{place}: {lines} skipped, first {skipped[0]}")


def _parser(
    path: Path, make: Callable[[Fields, str], Record], columns: Columns
) -> Callable[[Any, str], Sequence[Record]]:
    if json_suffix(path):
        return lambda raw, where: (make(parsed(raw, where), where),)
    if plain_suffix(path) not in _TSV_SUFFIXES:
        raise UserError("unknown kind of file", path, "expected .jsonl or .tsv, each also with .gz or .zst")

    def parse(line: str, where: str) -> Sequence[Record]:
        fields = columns(line, where)
        return () if fields is None else (make(fields, where),)

    return parse


class Columns:
    """Splits lines at tabs into named columns; the first line decides how many there are and may name them.

    Args:
        layouts: the names of the columns, for each number of columns that may be.
        names: what else columns may be called; a first line of such names alone gives the names.
        header: how a first line may call the columns of a layout.
    """

    def __init__(
        self,
        layouts: tuple[tuple[str, ...], ...],
        names: frozenset[str] = frozenset(),
        header: Mapping[str, str] | None = None,
    ) -> None:
        self._layouts, self._names, self._header = layouts, names, header or {}
        self._columns: tuple[str, ...] | None = None

    def __call__(self, line: str, where: str) -> Fields | None:
        """Return a line's cells by column name, or None for a line of column names."""
        cells = line.split("\t")
        if self._columns is not None and len(cells) == len(self._columns):
            return dict(zip(self._columns, cells, strict=True))
        if self._columns is None:
            header = tuple(self._header.get(cell.strip().lower(), cell) for cell in cells)
            if any(sorted(header) == sorted(layout) for layout in self._layouts):
                self._columns = header
                return None
            if len(cells) > 1 and self._names.issuperset(lowered := [cell.strip().lower() for cell in cells]):
                self._columns = tuple(lowered)
                return None
        layouts = (self._columns,) if self._columns else self._layouts
        columns = next((layout for layout in layouts if len(layout) == len(cells)), None)
        if columns is None:
            found = f"line {where.rsplit(':', 1)[1]} has {len(cells)} column" + ("s" if len(cells) > 1 else "")
            known = " or ".join(f"{len(layout)} ({', '.join(layout)})".replace("_id", "id") for layout in layouts)
            raise UserError(f"{found}, expected {known}", where, "columns are parted by one tab")
        self._columns = columns
        return dict(zip(columns, cells, strict=True))


def passage_of(fields: Fields, where: str) -> Passage:
    """Return the passage that a record's fields name."""
    title = "" if fields.get("title") is None else _text(fields, "title", where)
    text = _text(fields, _find(fields, _PASSAGE_TEXTS, "text", where), where)
    return Passage(_id(fields, _PASSAGE_IDS, where), title, text)


def query_of(fields: Fields, where: str) -> Query:
    """Return the query that a record's fields name."""
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
    return one_line(value)


def one_line(text: str) -> str:
    """Return a text with blanks for its line breaks."""
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ") if "\n" in text or "\r" in text else text
