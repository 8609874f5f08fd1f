"""Collections: a folder in BEIR's layout, or one of those that are installed with the package, opened by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from condenser.errors import UserError, nearest, sample
from condenser.files import dump_json, identifier, read_json, read_records, sha256_file
from retrieval.options import DataOptions
from retrieval.readers import read_passages, read_queries
from retrieval.records import Passage, Query

_EMBEDDED = Path(__file__).parent / "data"
_PACKINGS = ("", ".gz", ".zst")


class Collection:
    """Passages, queries and judgements in one folder.

    The layout is BEIR's: ``corpus.jsonl`` and ``queries.jsonl`` (each also ``.gz`` or ``.zst``) and
    ``qrels/SPLIT.tsv``; besides, ``negatives/SPLIT.jsonl`` may give hard negatives. Only the corpus must be there.

    Args:
        folder: where the files are.
        name: how messages and tables call the collection.

    Raises:
        UserError: no such folder, or no corpus in it.
    """

    def __init__(self, folder: str | Path, name: str) -> None:
        self.folder = Path(folder)
        self.name = name
        self.corpus_file = self._file("corpus.jsonl")

    def passages(self, *, skip_bad: bool = False) -> Iterator[Passage]:
        """Yield the passages in the file's order; errors are those of `read_passages`."""
        return read_passages(self.corpus_file, skip_bad=skip_bad)

    def queries(self, split: str | None = None, *, skip_bad: bool = False) -> Iterator[Query]:
        """Yield the queries in the file's order; with a split, only those that are judged in it.

        Raises:
            UserError: no query file, no such split, or none of its queries is in the query file.
        """
        judged = None if split is None else self.qrels(split)
        found = False
        for query in read_queries(self.queries_file, skip_bad=skip_bad):
            if judged is None or query.id in judged:
                found = True
                yield query
        if judged is not None and not found:
            raise UserError(
                f"none of the {len(judged):,} queries judged in split {split!r} is here, such as {sample(judged)}",
                self.queries_file,
            )

    @property
    def queries_file(self) -> Path:
        """The file of queries; UserError when there is none."""
        return self._file("queries.jsonl")

    def splits(self) -> list[str]:
        """Return the names of the splits that have judgements."""
        return sorted(file.stem for file in (self.folder / "qrels").glob("*.tsv"))

    def qrels(self, split: str) -> dict[str, dict[str, int]]:
        """Return a split's judgements as query id -> passage id -> grade; UserError when there are none."""
        from eval.runs import load_qrels

        known = self.splits()
        if split not in known:
            close = nearest(split, known)
            hint = f"did you mean {close}?" if close else f"splits here: {', '.join(known) or 'none'}"
            raise UserError(f"no judgements for split {split!r}", self.folder / "qrels", hint)
        return load_qrels(self.folder / "qrels" / f"{split}.tsv")

    def negatives(self, split: str) -> dict[str, list[str]]:
        """Return a split's hard negatives as query id -> passage ids; empty when the collection has none.

        Raises:
            UserError: a line of ``negatives/SPLIT.jsonl`` without ``query_id`` or a list ``negatives``.
        """
        file = self.folder / "negatives" / f"{split}.jsonl"
        if not file.is_file():
            return {}
        negatives: dict[str, list[str]] = {}
        for number, record in read_records(file):
            where = f"{file}:{number}"
            if "query_id" not in record or not isinstance(record.get("negatives"), list):
                raise UserError(f"expected query_id and a list negatives, found {sample(record) or 'nothing'}", where)
            query_id = identifier(record["query_id"], where)
            if query_id in negatives:
                raise UserError(f"query id {query_id!r} stands already on an earlier line", where)
            negatives[query_id] = [identifier(passage_id, where) for passage_id in record["negatives"]]
        return negatives

    def fingerprint(self) -> str:
        """Return a short digest over the bytes of the collection's files."""
        names = [f"{stem}.jsonl{packing}" for stem in ("corpus", "queries") for packing in _PACKINGS]
        files = [self.folder / name for name in names]
        files += [*self.folder.glob("qrels/*.tsv"), *self.folder.glob("negatives/*.jsonl")]
        digest = hashlib.sha256()
        for file in sorted(file for file in files if file.is_file()):
            digest.update(f"{file.relative_to(self.folder).as_posix()}\0{sha256_file(file)}\n".encode())
        return digest.hexdigest()[:16]

    def _file(self, name: str) -> Path:
        found = [file for packing in _PACKINGS if (file := self.folder / f"{name}{packing}").is_file()]
        if not found:
            here = sample(sorted(entry.name for entry in self.folder.iterdir()), 5) or "nothing"
            raise UserError(f"no {name} (or .gz, .zst) in this collection, found {here}", self.folder)
        if len(found) > 1:
            raise UserError(f"both {found[0].name} and {found[1].name} are here", self.folder, "keep one of them")
        return found[0]


def open_collection(name_or_folder: str | Path) -> Collection:
    """Open an embedded collection by name, or a folder in BEIR's layout.

    A bare word that is an embedded name means that collection; write ``./medquad`` for a folder of that name.

    Raises:
        UserError: neither a folder nor a known name (the nearest is named), or what the folder lacks.
    """
    wanted = str(name_or_folder)
    known = _embedded_names()
    if wanted in known:
        return Collection(_EMBEDDED / wanted, wanted)
    folder = Path(name_or_folder)
    if not folder.is_dir():
        close = nearest(wanted, known)
        hint = f"did you mean {close}?" if close else f"embedded collections: {', '.join(known)}"
        raise UserError(f"{wanted!r} is neither a folder nor an embedded collection", hint=hint)
    return Collection(folder, folder.resolve().name)


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
