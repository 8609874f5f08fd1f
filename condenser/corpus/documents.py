"""Documents: what pretraining reads, before it is cut into spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from condenser.errors import UserError
from condenser.files import identifier, read_lines, read_records

_ID_KEYS = ("_id", "id", "docid")
_TEXT_KEYS = ("text", "contents")


class Document(NamedTuple):
    """One document: either whole texts to be cut (one entry in ``texts``) or spans cut by the user.

    Attributes:
        id: its name in the source, or ``file:line`` when the source has none.
        title: empty when there is none.
        texts: the text, or the texts of the spans.
        is_cut: True when ``texts`` are spans already.
    """

    id: str
    title: str
    texts: tuple[str, ...]
    is_cut: bool


def read_documents(paths: Iterable[str | Path]) -> Iterator[Document]:
    """Yield the documents of several files in order.

    ``.jsonl`` and ``.json`` files (also ``.gz``, ``.zst``) hold one object a line, ``{"_id", "title",
    "text"}`` or ``{"spans": [text, ...]}``; any other file is plain text, one document a line.

    Raises:
        UserError: a missing or empty file, a line that is not an object, or one with neither text nor
            spans; with ``file:line``.
    """
    for path in paths:
        found = False
        for document in _read_file(Path(path)):
            found = True
            yield document
        if not found:
            raise UserError("file holds no document", path)


def _read_file(path: Path) -> Iterator[Document]:
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    if suffixes and suffixes[-1] in (".jsonl", ".json"):
        for number, record in read_records(path):
            yield _from_record(record, f"{path}:{number}")
    else:
        for number, line in read_lines(path):
            if line.strip():
                yield Document(f"{path.name}:{number}", "", (line,), False)


def _from_record(record: dict[str, Any], where: str) -> Document:
    name = next((record[key] for key in _ID_KEYS if key in record), None)
    document_id = where if name is None else identifier(name, where)
    title = _text(record.get("title") or "", "title", where)
    if "spans" in record:
        spans = record["spans"]
        if not isinstance(spans, list):
            raise UserError(f"spans is {type(spans).__name__}, expected a list of texts", where)
        return Document(document_id, title, tuple(_text(span, "spans", where) for span in spans), True)
    key = next((key for key in _TEXT_KEYS if key in record), None)
    if key is None:
        found = ", ".join(record) or "nothing"
        raise UserError(f"record has neither text nor spans (found: {found})", where, "name the text field 'text'")
    return Document(document_id, title, (_text(record[key], key, where),), False)


def _text(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{key} holds {type(value).__name__}, expected text", where)
    return value
