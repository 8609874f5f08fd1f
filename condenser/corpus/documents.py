"""Documents: what pretraining reads, before it is cut into spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from condenser.errors import UserError, first_line
from condenser.files import identifier, read_lines, read_records

_ID_KEYS = ("_id", "id", "docid")
_TEXT_KEYS = ("text", "contents")


class Document(NamedTuple):
    """One document: a whole text to be cut (one entry in ``texts``), spans cut by the user, or a query and its passage.

    Attributes:
        id: its name in the source, or ``file:line`` when the source has none.
        title: empty when there is none.
        texts: the text, or the texts of the spans, or query and passage.
        is_cut: True when ``texts`` are spans already.
        is_pair: True when ``texts`` are a query and its passage.
    """

    id: str
    title: str
    texts: tuple[str, ...]
    is_cut: bool
    is_pair: bool = False


def read_documents(
    paths: Iterable[str | Path], on_read: Callable[[int], None] | None = None, *, pairs: bool = False
) -> Iterator[Document]:
    """Yield the documents of several files in order.

    By suffix (also before ``.gz`` and ``.zst``): ``.jsonl`` and ``.json`` hold one object a line,
    ``{"_id", "title", "text"}`` or ``{"spans": [text, ...]}``; ``.tsv`` holds ``id<TAB>text`` or
    ``id<TAB>title<TAB>text``, in which quotes are text; any other file is plain text, one document a line.

    Args:
        paths: the files.
        on_read: told the number of bytes read from the disk each time.
        pairs: take ``{"query", "passage"}`` as well.

    Raises:
        UserError: a missing or empty file, a line that is not an object, one with neither text nor
            spans, or one with another number of columns; with ``file:line``.
    """
    for path in paths:
        found = False
        for document in _read_file(Path(path), on_read, pairs):
            found = True
            yield document
        if not found:
            raise UserError("file holds no document", path)


def _read_file(path: Path, on_read: Callable[[int], None] | None, pairs: bool) -> Iterator[Document]:
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    kind = suffixes[-1] if suffixes else ""
    if kind in (".jsonl", ".json"):
        for number, record in read_records(path, on_read):
            yield _from_record(record, f"{path}:{number}", f"{path.name}:{number}", pairs=pairs)
        return
    for number, line in read_lines(path, on_read=on_read):
        if not line.strip():
            continue
        if kind == ".tsv":
            yield _from_columns(line.split("\t"), f"{path}:{number}")
        else:
            yield Document(f"{path.name}:{number}", "", (line,), False)


def _from_columns(columns: list[str], where: str) -> Document:
    if len(columns) not in (2, 3):
        raise UserError(
            f"has {len(columns)} columns, expected 2 (id, text) or 3 (id, title, text) with tabs between", where
        )
    title = columns[1] if len(columns) == 3 else ""
    return Document(identifier(columns[0], where), title, (columns[-1],), False)


def _from_record(
    record: dict[str, Any],
    where: str,
    nameless: str,
    text_keys: tuple[str, ...] = _TEXT_KEYS,
    hint: str = "name the text field 'text'",
    *,
    pairs: bool = False,
) -> Document:
    name = next((record[key] for key in _ID_KEYS if key in record), None)
    document_id = nameless if name is None else identifier(name, where)
    title = _text(record.get("title") or "", "title", where)
    if "spans" in record:
        spans = record["spans"]
        if not isinstance(spans, list):
            raise UserError(f"spans is {type(spans).__name__}, expected a list of texts", where)
        return Document(document_id, title, tuple(_text(span, "spans", where) for span in spans), True)
    key = next((key for key in text_keys if key in record), None)
    if key is None and pairs and "query" in record and "passage" in record:
        pair = tuple(_text(record[key], key, where) for key in ("query", "passage"))
        return Document(document_id, "", pair, is_cut=False, is_pair=True)
    if key is None:
        found = ", ".join(record) or "nothing"
        raise UserError(f"record has neither {text_keys[0]} nor spans (found: {found})", where, hint)
    return Document(document_id, title, (_text(record[key], key, where),), False)


def _text(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{key} holds {type(value).__name__}, expected text", where)
    return value


def read_dataset(name: str, *, config: str | None, split: str, column: str) -> Iterator[Document]:
    """Yield the documents of a Hugging Face data set without loading it whole.

    Rows are read like the objects of a ``.jsonl`` file: ``id`` and ``title`` are taken where they
    exist. No code that comes with a data set is run.

    Args:
        name: a hub name, a folder of data files (JSON lines, CSV, Parquet, text), one such file, or
            what ``save_to_disk`` wrote.
        config: the configuration, for data sets that have several.
        split: which split.
        column: the column that holds the text.

    Raises:
        UserError: no such data set, split or column, damaged files, or no row in it.
    """
    number = -1
    called = Path(name).name if Path(name).exists() else name
    try:
        for number, row in enumerate(_open_dataset(name, config, split)):
            where = f"[{split}]:{number}"
            hint = "choose the text with --dataset_column"
            yield _from_record(row, f"{name}{where}", f"{called}{where}", (column,), hint)
    except UserError:
        raise
    except Exception as error:  # what the library raises over a damaged file depends on the file's kind
        raise UserError(f"cannot read split {split!r} of this data set: {first_line(error)}", name) from None
    if number < 0:
        raise UserError(f"split {split!r} holds no row", name)


def _open_dataset(name: str, config: str | None, split: str) -> Iterable[dict[str, Any]]:
    import datasets

    path = Path(name)
    if (path / "state.json").is_file():
        return datasets.load_from_disk(name)
    if (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(name)[split]
    if path.is_file():
        kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
        kind = next((kinds[suffix] for suffix in reversed(path.suffixes) if suffix in kinds), None)
        if kind is None:
            raise UserError(f"is no data file of a known kind, expected {', '.join(kinds)}", name)
        return datasets.load_dataset(kind, data_files={split: name}, split=split, streaming=True)
    return datasets.load_dataset(name, config, split=split, streaming=True)
