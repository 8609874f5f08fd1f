"""Written queries on disk: a folder in BEIR's layout whose queries say how they came about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from condenser.errors import UserError
from condenser.files import NO_SPACE, atomic_write, atomic_write_bytes, read_records, sync_folder
from condenser.manifest import MANIFEST, load_manifest
from retrieval.collections import Collection

KIND = "written queries"
CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels/train.tsv"
_NO_ID = frozenset("\t\n\r")


class Written(NamedTuple):
    """A query that a model wrote for a passage.

    Attributes:
        id: the passage's id, ``-g`` and a number.
        text: what was written.
        passage_id: for which passage.
        decoder: how: ``mode`` sample or constrained, and its settings; with sample the seed of this query.
        constraint: the expression that holds for the text, if any.
        log_prob: the model's log-probability of the query's tokens and of its end.
        tokens: how many these are.
    """

    id: str
    text: str
    passage_id: str
    decoder: dict[str, Any]
    constraint: str | None
    log_prob: float
    tokens: int

    @property
    def line(self) -> str:
        """The query as a JSON line of BEIR's queries.jsonl."""
        own = {name: value for name, value in self._asdict().items() if name not in ("id", "text")}
        record = {"_id": self.id, "text": self.text, "metadata": own}
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE).decode()


def read_written(folder: str | Path) -> Iterator[Written]:
    """Yield the queries of a folder in their order, each with how it came about.

    Raises:
        UserError: no folder of written queries, or one that is damaged; with ``file:line``, a query that does not
            say for which passage it was written, or how.
    """
    folder = Path(folder)
    check_written(folder)
    yield from written_in(folder / QUERIES)


def written_in(file: Path) -> Iterator[Written]:
    """Yield the queries of one file; see `read_written`."""
    for number, record in read_records(file):
        own = record.get("metadata")
        fields = {**own, "id": record.get("_id"), "text": record.get("text")} if isinstance(own, dict) else {}
        kinds = {"id": str, "text": str, "passage_id": str, "decoder": dict, "log_prob": float, "tokens": int}
        wrong = next((name for name, kind in kinds.items() if not isinstance(fields.get(name), kind)), None)
        if wrong is not None:
            found = f"metadata.{wrong}" if fields and wrong not in ("id", "text") else wrong
            raise UserError(
                f"query has no {found}, expected one made by `condenser queries generate`", f"{file}:{number}"
            )
        yield Written(**{name: fields.get(name) for name in Written._fields})  # type: ignore[arg-type]


def check_written(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of written queries, its files compared with it.

    Raises:
        UserError: another kind of folder, or files missing or changed.
    """
    return load_manifest(folder, KIND, verify=True)


def check_id(name: str, where: str | Path) -> None:
    """Raise UserError for an id that a line of judgements cannot hold, tabs being between its columns."""
    if not _NO_ID.isdisjoint(name):
        raise UserError(f"id {name!r} holds a tab or a line break, which judgements cannot", where, "rename it")


def write_qrels(folder: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write judgements, grade 1, for pairs of a query's and a passage's id, under BEIR's column names."""
    with atomic_write(folder / QRELS) as stream:
        stream.write("query-id\tcorpus-id\tscore\n")
        stream.writelines(f"{query}\t{passage}\t1\n" for query, passage in pairs)


def write_corpus(collection: Collection, folder: Path) -> None:
    """Write a collection's passages as BEIR's corpus.jsonl.

    A file of that name is copied; in a finished folder of ours, whose files never change, it gets a second name.
    """
    target = folder / CORPUS
    target.unlink(missing_ok=True)
    files = collection.corpus_files()
    if len(files) == 1 and files[0].name == CORPUS:
        draft = target.with_name(f"{CORPUS}.tmp-{os.getpid()}")
        ours = (files[0].parent / MANIFEST).is_file() and not files[0].is_symlink()
        try:
            (os.link if ours else shutil.copyfile)(files[0], draft)
        except OSError as error:
            if not ours or error.errno in NO_SPACE:
                raise
            shutil.copyfile(files[0], draft)  # another disk, or one that has no second names
        os.replace(draft, target)
        sync_folder(folder)
        return
    with atomic_write_bytes(target) as stream:
        stream.writelines(passage.line for passage in collection.passages())
