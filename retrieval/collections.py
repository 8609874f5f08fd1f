"""Collections by name or path, whatever their format; two come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from condenser.errors import UserError, nearest
from condenser.files import dump_json, read_json
from retrieval.formats import folders, inline
from retrieval.formats.base import Collection
from retrieval.formats.detect import detect
from retrieval.formats.irds import PREFIX, IrDatasetsCollection
from retrieval.options import DataOptions, Format

__all__ = ["Collection", "list_collections", "open_collection"]

_EMBEDDED = Path(__file__).parent / "data"


def open_collection(name_or_path: str | Path, format: str = "auto", *, skip_bad: bool = False) -> Collection:
    """Open a folder or file in a known format (docs/formats.md), an embedded collection, or a data set by name.

    A bare word that is an embedded name means that collection; write ``./medquad`` for a folder of that name.

    Args:
        name_or_path: folder, file, embedded name, ``irds:ID`` or ``NAME?query=COLUMN&positive=COLUMN``; maybe behind
            a format, as in ``pairs:mine.tsv``.
        format: one of `retrieval.options.Format`; auto looks at names and at the first record.
        skip_bad: pass over, and count, lines that cannot be read, unless a later call says otherwise.

    Raises:
        UserError: nothing of this name (the nearest is named), a format that cannot be told (those there are are
            named), or what the folder or file lacks.
    """
    wanted, formats = str(name_or_path), get_args(Format)
    if format not in formats:
        close = nearest(format, formats)
        hint = f"did you mean {close}?" if close else f"formats: {', '.join(formats)}"
        raise UserError(f"unknown format {format!r}", hint=hint)
    prefix, _, rest = wanted.partition(":")
    if not wanted:
        raise UserError("collection has no name", hint="give a folder, a file or the name of an embedded collection")
    if format == "auto" and rest and prefix in formats and not Path(wanted).exists():
        wanted, format = rest, prefix
    known = _embedded_names()
    if wanted in known and format in ("auto", "beir"):
        return folders.open_beir(_EMBEDDED / wanted, wanted, skip_bad=skip_bad)
    if format == "ir_datasets" or (format == "auto" and wanted.startswith(PREFIX)):
        return IrDatasetsCollection(wanted, skip_bad=skip_bad)
    path = Path(wanted)
    if format == "datasets" or (format == "auto" and "?" in wanted and not path.exists()):
        return _open_dataset(wanted, skip_bad)
    if not path.exists():
        raise UserError(f"{wanted!r} is no folder, no file and no embedded collection", hint=_advice(path, known))
    format = detect(path) if format == "auto" else format
    name = path.resolve().name
    if format == "datasets":
        return _open_dataset(wanted, skip_bad)
    if format in ("beir", "pyserini") or (format == "msmarco" and not inline.is_top1000(path)):
        opener = {"beir": folders.open_beir, "msmarco": folders.open_msmarco, "pyserini": folders.open_pyserini}[format]
        return opener(path, name, skip_bad=skip_bad)
    return inline.open_training(path, name, format, skip_bad=skip_bad)


def _open_dataset(name: str, skip_bad: bool) -> Collection:
    # Imported here, because it is seldom wanted.
    from retrieval.formats.huggingface import open_dataset

    return open_dataset(name, skip_bad=skip_bad)


def _advice(path: Path, known: list[str]) -> str:
    beside = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(str(path), [*known, *beside])
    if close:
        return f"did you mean {close}?"
    if len(path.parts) == 2 and not path.parent.is_dir():
        return f"for a data set of the Hugging Face hub: datasets:{path}"
    return f"embedded collections: {', '.join(known)}"


def _embedded_names() -> list[str]:
    return sorted(folder.name for folder in _EMBEDDED.iterdir() if (folder / "SOURCE.json").is_file())


def list_collections(options: DataOptions) -> str:
    """Describe the embedded collections: passages, judged queries of each split, licence, source.

    Returns:
        A table, or a JSON array with also the citations and the folder.
    """
    descriptions = [_describe(open_collection(name)) for name in _embedded_names()]
    if options.json:
        return dump_json(descriptions).decode().rstrip()
    rows = [("name", "passages", "judged queries", "licence", "source")]
    for about in descriptions:
        queries = ", ".join(f"{split} {count:,}" for split, count in about["queries"].items())
        rows.append((about["name"], f"{about['passages']:,}", queries, about["licence"], about["source"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _describe(collection: Collection) -> dict[str, Any]:
    return {
        **read_json(collection.folder / "SOURCE.json"),
        "name": collection.name,
        "folder": str(collection.folder),
        "passages": sum(1 for _ in collection.passages()),
        "queries": {split: len(collection.qrels(split)) for split in collection.splits()},
    }
