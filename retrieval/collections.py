"""Collections by name or path, whatever their format; two come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from condenser.errors import UserError, nearest
from condenser.files import dump_json, read_json
from retrieval.formats.base import Collection
from retrieval.formats.beir import open_beir
from retrieval.options import DataOptions

__all__ = ["Collection", "list_collections", "open_collection"]

_EMBEDDED = Path(__file__).parent / "data"


def open_collection(name_or_path: str | Path, format: str = "auto", *, skip_bad: bool = False) -> Collection:
    """Open an embedded collection by name, or a folder or file in one of the known formats (docs/formats.md).

    A bare word that is an embedded name means that collection; write ``./medquad`` for a folder of that name.

    Args:
        name_or_path: the name or path.
        format: one of `retrieval.options.Format`; auto looks at names and at the first record.
        skip_bad: pass over, and count, lines that cannot be read, unless a later call says otherwise.

    Raises:
        UserError: neither a folder nor a known name (the nearest is named), or what the folder lacks.
    """
    wanted = str(name_or_path)
    known = _embedded_names()
    if wanted in known:
        return open_beir(_EMBEDDED / wanted, wanted, skip_bad=skip_bad)
    folder = Path(name_or_path)
    if not folder.is_dir():
        close = nearest(wanted, known)
        hint = f"did you mean {close}?" if close else f"embedded collections: {', '.join(known)}"
        raise UserError(f"{wanted!r} is neither a folder nor an embedded collection", hint=hint)
    return open_beir(folder, folder.resolve().name, skip_bad=skip_bad)


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
