"""An index changes in place: passages come and go by id, and at every moment the folder holds the old index or the new.

New files stand beside the old ones under names of their own; what counts is the manifest, which is replaced last.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from condenser.errors import UserError, sample
from condenser.faults import fault_point
from condenser.files import atomic_write_bytes, read_lines
from condenser.manifest import read_manifest, revise_manifest
from condenser.talk import say, warn
from retrieval.exact import longest
from retrieval.faiss_build import Recipe, fill_index, new_index
from retrieval.faiss_index import read_index, write_index
from retrieval.index_folder import (
    IndexFolder,
    link_part,
    live_rows,
    open_sources,
    passage_vectors,
    remove_unlisted,
    rows_of,
    source_of,
    write_ids,
    write_rows,
)
from retrieval.options import UpdateOptions
from retrieval.vectors import Vectors, check_same_space, ids_file, read_shard, scales_file, vectors_file


def update(options: UpdateOptions) -> Path:
    """Delete and add passages, and compact an index, in one step that happens whole or not at all.

    Returns:
        The index.

    Raises:
        UserError: nothing to do; what `change_index` raises.
    """
    if options.add is None and options.delete is None and not options.compact:
        raise UserError("give at least one of --add, --delete and --compact")
    if options.replace and options.add is None:
        raise UserError("--replace goes with --add")
    return change_index(
        options.index,
        add=options.add,
        delete=() if options.delete is None else _read_ids(options.delete),
        replace=options.replace,
        compact=options.compact,
    )


def change_index(
    folder: str | Path,
    *,
    add: str | Path | Vectors | None = None,
    delete: Iterable[str] = (),
    replace: bool = False,
    compact: bool = False,
) -> Path:
    """Delete and add passages, and compact an index, in one step that happens whole or not at all.

    Deleted rows stay where they are and are not found any more, until the index is compacted: a Flat index then
    writes the shards anew that hold any, another is built anew from the vectors it was made from.

    Args:
        folder: made by `condenser index`.
        add: vectors of passages, by the same encoder.
        delete: ids; they go before any are added.
        replace: added passages take the place of those with the same ids.
        compact: give back the space of deleted passages.

    Raises:
        UserError: no such index, or another process is changing it; none of the ids to delete is there; an added id
            is there already; vectors of another encoder; nothing would be left; to compact a FAISS index, vectors
            that it was made from are gone.
    """
    folder = Path(folder)
    added = None if add is None else passage_vectors(add)
    with _alone(folder):
        change = _Change(IndexFolder.open(folder))
        try:
            if delete := list(delete):
                change.delete(delete)
            if added is not None:
                change.add(added, replace)
            if compact:
                change.compact()
            change.publish()
        finally:  # what the old index or the new one does not need, and what a killed update left
            remove_unlisted(folder, set(read_manifest(folder)["files"]))
    return folder


class _Change:
    """What an index is going to be: its parts, its deleted rows and what it was made from."""

    def __init__(self, old: IndexFolder) -> None:
        self.old, self.folder = old, old.folder
        self._facts = dict(old.facts)
        self._parts = [list(part) for part in old.facts["parts"]]
        self._ids = list(old.ids)
        self._rows = old.rows()
        self._deleted = set(old.deleted.tolist())
        self._next = 1 + max(number for number, _ in self._parts)
        self._generation = old.facts["generation"] + 1
        self._said: list[str] = []

    def delete(self, ids: Sequence[str]) -> None:
        known = [name for name in dict.fromkeys(ids) if name in self._rows]
        if not known:
            raise UserError(f"none of the {len(ids):,} ids to delete is in this index: {sample(ids)}", self.folder)
        if strange := len(set(ids)) - len(known):
            warn(f"{strange:,} of {len(set(ids)):,} ids to delete are not in this index")
        self._bury(known)
        self._said.append(f"{len(known):,} deleted")

    def add(self, vectors: Vectors, replace: bool) -> None:
        check_same_space(self._facts, vectors.facts, "vectors to add")
        known = [name for name in vectors.ids if name in self._rows]
        if known and not replace:
            raise UserError(
                f"{len(known):,} of the ids to add are in this index already: {sample(known)}",
                vectors.folder,
                "--replace puts the new passages in their place",
            )
        self._bury(known)
        for shard in range(len(vectors.shards)):
            part = link_part(vectors, shard, self.folder, self._next, with_vectors=self.old.flat)
            self._parts.append(part)
            self._next += 1
        if not self.old.flat:
            index = read_index(self.old.faiss_file, mapped=False)
            for block in vectors.blocks():
                index.add(np.ascontiguousarray(block))
            self._write_faiss(index)
        self._rows |= {name: row for row, name in enumerate(vectors.ids, start=len(self._ids))}
        self._ids += vectors.ids
        self._facts["sources"] = [*self._facts["sources"], source_of(vectors)]
        self._facts["max_norm"] = max(self._facts["max_norm"], longest(vectors.blocks()))
        self._said.append(f"{len(vectors.ids):,} added" + (f", {len(known):,} replaced" if known else ""))

    def compact(self) -> None:
        if not self._rows:
            raise UserError("all passages of this index are deleted", self.folder, "remove the folder")
        if self._deleted:
            self._compact_flat() if self.old.flat else self._build_anew()
        self._said.append(f"compacted, {len(self._deleted):,} rows given back")
        self._deleted = set()

    def publish(self) -> None:
        """Write what is left to write, and put the new manifest in the old one's place."""
        facts = self._facts | {"parts": self._parts, "generation": self._generation, "count": len(self._rows)}
        facts["deleted"] = f"deleted-{self._generation:05d}.npy" if self._deleted else None
        if self._deleted:
            with atomic_write_bytes(self.folder / facts["deleted"]) as stream:
                np.save(stream, np.array(sorted(self._deleted), dtype=np.int64), allow_pickle=False)
        files = {name for name in (facts["deleted"], facts.get("faiss")) if name}
        for number, store in self._parts:
            files |= {file(self.folder, number).name for file in _part_files(store)}
        fault_point("index-files-written")
        inputs = self.old.manifest["inputs"] | {"updates": str(self._generation)}
        revise_manifest(self.folder, self.old.manifest, files=files, facts=facts, inputs=inputs)
        fault_point("index-manifest-written")
        say(f"{'; '.join(self._said)}: {len(self._rows):,} passages, {len(self._deleted):,} deleted rows kept")

    def _bury(self, ids: Sequence[str]) -> None:
        self._deleted |= {self._rows.pop(name) for name in ids}

    def _compact_flat(self) -> None:
        """Write the parts with deleted rows anew, without them; leave out those that hold nothing else."""
        dead = np.zeros(len(self._ids), dtype=bool)
        dead[sorted(self._deleted)] = True
        parts, start = [], 0
        for number, store in self._parts:
            part, matrix = read_shard(self.folder, number, self._facts["dimension"], store)
            kept = ~dead[start : start + len(part.ids)]
            start += len(part.ids)
            if kept.all():
                parts.append([number, store])
            elif kept.any():
                write_rows(self.folder, self._next, matrix, part.ids, kept)
                parts.append([self._next, store])
                self._next += 1
        self._parts = parts

    def _build_anew(self) -> None:
        sources = open_sources(self._facts["sources"])
        live = live_rows(sources, set(self._rows))

        def blocks() -> Iterator[np.ndarray]:
            for vectors, kept in zip(sources, live, strict=True):
                yield from rows_of(vectors, kept)

        recipe, count = Recipe.of(self._facts), len(self._rows)
        index = new_index(recipe, self._facts["dimension"], count, self.folder)
        self._write_faiss(fill_index(index, recipe, count, blocks, self.folder))
        ids = [
            name
            for vectors, kept in zip(sources, live, strict=True)
            for name, keep in zip(vectors.ids, kept.tolist(), strict=True)
            if keep
        ]
        write_ids(self.folder, self._next, ids)
        self._parts = [[self._next, None]]

    def _write_faiss(self, index: Any) -> None:
        self._facts["faiss"] = f"index-{self._generation:05d}.faiss"
        write_index(index, self.folder / self._facts["faiss"])


def _part_files(store: str | None) -> list[Any]:
    if store is None:
        return [ids_file]
    return [ids_file, vectors_file, *([scales_file] if store == "int8" else [])]


def _read_ids(file: str) -> list[str]:
    """Read a file of ids, one a line; blank lines are passed over."""
    ids = [line for _, line in read_lines(file) if line.strip()]
    if not ids:
        raise UserError("holds no id to delete", file)
    return ids


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the folder meanwhile; the lock dies with its holder."""
    if not folder.is_dir():
        raise UserError("no such folder; expected an index folder", folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError("another process is changing this index", folder) from None
    finally:
        os.close(handle)
