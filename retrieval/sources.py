"""Files whose records can be found again by their place, so that no text has to stay in memory."""

from __future__ import annotations

import mmap
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import orjson

from condenser.errors import UserError
from condenser.files import MAX_LINE_BYTES, existing_file, located_lines, open_bytes, parse_record, refuse, unpack

OnBad = Callable[[UserError], None]
Record = TypeVar("Record")

PACKED_SUFFIXES = (".gz", ".zst")

_BLOCK_BYTES = 1 << 20


class Source(Protocol):
    """Raw records in order, each with its position, and each to be had again by it.

    A raw record is the text of a line or of a JSON object, or a dict of named values.
    """

    place: str

    def scan(self, on_bad: OnBad = refuse) -> Iterator[tuple[int, str, Any]]:
        """Yield (position, ``file:line``, raw record); ``on_bad`` is told of what cannot be read."""

    def read(self, position: int) -> Any:
        """Return the raw record at a position that `scan` gave."""

    def where(self, position: int) -> str:
        """Return ``file:line`` of a position."""


class RecordFile(Generic[Record]):
    """A source whose raw records hold records: none, one, or several (the passages of a training line).

    Args:
        source: the raw records.
        make_parser: gives, for one reading of the file, what turns a raw record and its ``file:line`` into records.
    """

    def __init__(self, source: Source, make_parser: Callable[[], Callable[[Any, str], Sequence[Record]]]) -> None:
        self.source = source
        self.make_parser = make_parser
        self._parse = make_parser()

    def scan(self, on_bad: OnBad = refuse) -> Iterator[tuple[int, str, Sequence[Record]]]:
        """Yield (position, ``file:line``, records); ``on_bad`` is told of what cannot be read."""
        # A parser may learn from the first line which column is which, and `read` needs what it learned.
        parse = self._parse = self.make_parser()
        for position, where, raw in self.source.scan(on_bad):
            try:
                records = parse(raw, where)
            except UserError as error:
                on_bad(error)
                continue
            yield position, where, records

    def read(self, position: int) -> Sequence[Record]:
        """Return the records at a position that `scan` gave."""
        return self._parse(self.source.read(position), self.source.place)


def open_source(path: str | Path) -> Source:
    """Open a text file as its lines, or as the objects of the one JSON array that it holds.

    Raises:
        UserError: no such file, or compressed data that is damaged.
    """
    is_array = json_suffix(path) and existing_file(path).is_file() and first_character(path) == "["
    return ArrayFile(path) if is_array else LineFile(path)


def parsed(raw: str | dict[str, Any], where: str) -> dict[str, Any]:
    """Return a raw record of a JSON file as an object; UserError when its line is none."""
    return parse_record(raw, where) if isinstance(raw, str) else raw


def json_suffix(path: str | Path) -> bool:
    """Tell whether a file's name, without ``.gz`` or ``.zst``, is one of JSON."""
    return plain_suffix(path) in (".json", ".jsonl", ".ndjson")


def plain_suffix(path: str | Path) -> str:
    """Return a file's suffix before ``.gz`` or ``.zst``, in lower case."""
    path = Path(path)
    return (path.with_suffix("") if path.suffix in PACKED_SUFFIXES else path).suffix.lower()


def first_character(path: str | Path) -> str:
    """Return a file's first character that is not blank; empty when there is none near its beginning."""
    with open_bytes(path) as stream:
        try:
            head = stream.read(1 << 16)
        except Exception:  # damage is told where the file is read, with its place
            return ""
    return head.removeprefix(b"\xef\xbb\xbf").decode(errors="replace").lstrip()[:1]


class _MappedFile:
    """A file's bytes, mapped when first asked for.

    A packed file is unpacked once, into a file without a name where temporary files go (TMPDIR); it is gone with the
    process, however that ends.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing_file(path)
        self.place = str(path)

    @cached_property
    def _bytes(self) -> mmap.mmap:
        if self.path.suffix not in PACKED_SUFFIXES:
            with open_bytes(self.path) as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with tempfile.TemporaryFile() as copy:
            unpack(self.path, copy)
            copy.flush()
            return mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)

    def hold(self) -> None:
        """Map the file now; its name may go then."""
        _ = self._bytes

    def where(self, position: int) -> str:
        """Return ``file:line`` of a position."""
        blocks = range(0, position, _BLOCK_BYTES)
        breaks = sum(self._bytes[start : min(start + _BLOCK_BYTES, position)].count(b"\n") for start in blocks)
        return f"{self.place}:{1 + breaks}"


class LineFile(_MappedFile):
    """The lines of a text file that are not blank; a position is an offset in the unpacked file."""

    def scan(self, on_bad: OnBad = refuse) -> Iterator[tuple[int, str, str]]:
        """Yield (offset, ``file:line``, line); errors are those of `condenser.files.read_lines`."""
        for offset, number, line in located_lines(self.path, on_bad=on_bad):
            if line and not line.isspace():
                yield offset, f"{self.place}:{number}", line

    def read(self, position: int) -> str:
        """Return the line at an offset."""
        end = self._bytes.find(b"\n", position)
        raw = self._bytes[position : end if end >= 0 else None]
        return raw.removesuffix(b"\r").decode(errors="replace")


def _balanced(depth: int) -> bytes:
    """Return a pattern for a JSON object with objects in it, ``depth`` deep; it never backtracks."""
    other = rb'[^"{}]++|"(?:[^"\\]++|\\.)*+"'
    inner = b"" if depth == 1 else b"|" + _balanced(depth - 1)
    return rb"\{(?:" + other + inner + rb")*+\}"


class ArrayFile(_MappedFile):
    """The objects of one big JSON array, found one by one: gigabytes are never parsed as a whole.

    A position is the offset of an object's first brace in the unpacked file.
    """

    _OBJECT = re.compile(_balanced(8), re.DOTALL)
    _BLANKS = re.compile(rb"\s*+")

    def scan(self, on_bad: OnBad = refuse) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield (offset, ``file:line``, object).

        Raises:
            UserError: what is not an array of objects, with ``file:line``; it is never passed over, because
                what follows it cannot be told apart.
        """
        data = self._bytes
        position = self._BLANKS.match(data, 3 if data[:3] == b"\xef\xbb\xbf" else 0).end()  # type: ignore[union-attr]
        line, counted, expected = 1, 0, b"["
        while True:
            if data[position : position + 1] != expected:
                self._refuse(position, f"expected {expected.decode()!r}")
            position = self._BLANKS.match(data, position + 1).end()  # type: ignore[union-attr]
            if expected == b"[" and data[position : position + 1] == b"]":
                break
            found = self._OBJECT.match(data, position)
            if found is None:
                self._refuse(position, "expected an object in braces, which ends")
            line, counted = line + data[counted:position].count(b"\n"), position
            yield position, f"{self.place}:{line}", self._parse(position, found.end())
            position = self._BLANKS.match(data, found.end()).end()  # type: ignore[union-attr]
            if data[position : position + 1] == b"]":
                break
            expected = b","
        rest = self._BLANKS.match(data, position + 1).end()  # type: ignore[union-attr]
        if rest != len(data):
            self._refuse(rest, "expected nothing after the array")

    def read(self, position: int) -> dict[str, Any]:
        """Return the object at an offset."""
        found = self._OBJECT.match(self._bytes, position)
        if found is None:
            self._refuse(position, "expected an object in braces, which ends")
        return self._parse(position, found.end())

    def _parse(self, start: int, end: int) -> dict[str, Any]:
        if end - start > MAX_LINE_BYTES:
            raise UserError(f"an object is longer than {MAX_LINE_BYTES:,} bytes", self.where(start))
        try:
            record: dict[str, Any] = orjson.loads(self._bytes[start:end])
        except orjson.JSONDecodeError as error:
            place, first = self.where(start).rsplit(":", 1)
            raise UserError(f"not valid JSON ({error.msg})", f"{place}:{int(first) + error.lineno - 1}") from None
        return record

    def _refuse(self, position: int, expected: str) -> NoReturn:
        shown = self._bytes[position : position + 20].decode(errors="replace") or "the end of the file"
        raise UserError(f"not a JSON array of objects: {expected}, found {shown!r}", self.where(position))
