"""An index on disk: shards of ids, with the vectors themselves (Flat) or a FAISS file; deleted rows; what made them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from condenser.errors import UserError, sample
from condenser.files import atomic_write_bytes
from condenser.manifest import MANIFEST, damage, fingerprint, read_manifest
from retrieval.vectors import (
    STORES,
    Matrix,
    Store,
    Vectors,
    ids_file,
    open_array,
    read_ids,
    read_shard,
    scales_file,
    vectors_file,
)

# What an index is made of, drafts among them.
_OWN_FILE = re.compile(r"(vectors|scales|ids|deleted|index)-\d{5,}\.(npy|json|faiss)|.*\.tmp-\d+")

METRIC = "inner product"
FLAT = "Flat"
_FACTS = {
    "dimension": int,
    "factory": str,
    "encoder": str,
    "encoder_fingerprint": str,
    "max_norm": float,
    "metric": str,
    "parts": list,
    "sources": list,
    "generation": int,
}


@dataclass(frozen=True)
class IndexFolder:
    """A finished index as it is found.

    Attributes:
        folder: where it is.
        manifest: all that its manifest says.
        ids: one per row, deleted ones among them.
        shards: the vectors of a Flat index, in the order of ``ids``; empty with another factory.
        deleted: numbers of the rows that count no more, ascending.
    """

    folder: Path
    manifest: dict[str, Any]
    ids: list[str]
    shards: list[Matrix]
    deleted: np.ndarray

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> IndexFolder:
        """Open a folder made by `condenser index`.

        Sizes are always compared with the manifest.

        Args:
            folder: the index.
            verify: compare also the SHA-256 of a FAISS file, whose reader trusts what it reads.

        Raises:
            UserError: no such folder, a file missing or damaged, other counts of ids than of vectors.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, "index", facts=_FACTS)
        facts = manifest["facts"]
        for name, entry in manifest["files"].items():
            fault = damage(folder, name, entry, verify=verify and name.endswith(".faiss"))
            if fault is not None:
                raise fault
        _check_facts(manifest, folder)
        ids: list[str] = []
        shards = []
        for number, store in facts["parts"]:
            if store is None:
                part = read_ids(ids_file(folder, number))
            else:
                part, vectors = read_shard(folder, number, facts["dimension"], store)
                shards.append(vectors)
            ids += part.ids
        deleted = np.empty(0, dtype=np.int64)
        if facts.get("deleted"):
            deleted = np.asarray(open_array(folder / facts["deleted"]))
            if deleted.dtype != np.int64 or deleted.ndim != 1 or (len(deleted) and not 0 <= deleted[-1] < len(ids)):
                raise UserError("holds something else than numbers of rows", folder / facts["deleted"])
        return cls(folder, manifest, ids, shards, deleted)

    @property
    def facts(self) -> dict[str, Any]:
        """What made the vectors and the index."""
        facts: dict[str, Any] = self.manifest["facts"]
        return facts

    @property
    def flat(self) -> bool:
        """Whether the vectors themselves are here."""
        return bool(self.facts["factory"] == FLAT)

    @property
    def faiss_file(self) -> Path:
        """The FAISS index of another factory."""
        return self.folder / str(self.facts["faiss"])

    def rows(self) -> dict[str, int]:
        """Return id -> row of all passages that are not deleted."""
        rows = {name: row for row, name in enumerate(self.ids)}
        for row in self.deleted.tolist():
            if rows.get(self.ids[row]) == row:
                del rows[self.ids[row]]
        return rows


def _check_facts(manifest: dict[str, Any], folder: Path) -> None:
    """Refuse facts that no `condenser index` wrote: they say which files are opened."""
    facts = manifest["facts"]
    for part in facts["parts"]:
        if not (isinstance(part, list) and len(part) == 2 and type(part[0]) is int and part[1] in (None, *STORES)):
            raise UserError(f"parts has {part!r}, expected a number and a type of vectors", folder / MANIFEST)
    if facts["factory"] != FLAT and not facts.get("faiss"):
        raise UserError(f"faiss is {facts.get('faiss')!r}, expected the file of the index", folder / MANIFEST)
    for name in ("faiss", "deleted"):
        if facts.get(name) and facts[name] not in manifest["files"]:
            raise UserError(f"{name} is {facts[name]!r}, which is no file of this index", folder / MANIFEST)


def read_either(folder: Path) -> dict[str, Any]:
    """Read the manifest of an index, or of vectors, which can be searched as they are; refuse any other folder."""
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        if manifest.get("kind") == "vectors":
            return manifest
    return read_manifest(folder, "index")


def passage_vectors(place: str | Path | Vectors) -> Vectors:
    """Open the vectors of passages, or look at opened ones: each must have an id of its own.

    Raises:
        UserError: vectors of queries, none at all, or an id that stands twice.
    """
    vectors = place if isinstance(place, Vectors) else Vectors.load(place)
    if vectors.facts["kind"] != "passage":
        raise UserError(f"holds {vectors.facts['kind']} vectors, expected passages", vectors.folder)
    if not vectors.ids:
        raise UserError("holds no vectors, expected at least one", vectors.folder)
    if len(set(vectors.ids)) < len(vectors.ids):
        seen: set[str] = set()
        twice = (name for name in vectors.ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UserError(f"id {next(twice)!r} stands twice", vectors.folder, "give each passage an id of its own")
    return vectors


def recorded_encoder(facts: Mapping[str, Any], index: str | Path) -> str:
    """Return the encoder that an index, by its facts, was made with; UserError when it does not say, or it is gone."""
    encoder = facts.get("encoder")
    if not isinstance(encoder, str):
        raise UserError("does not say which encoder made it", index, "give --encoder")
    if not Path(encoder).is_dir():
        place = os.path.abspath(encoder)
        raise UserError(f"the encoder that made this index is not at {place}", index, "give --encoder")
    return encoder


def source_of(vectors: Vectors) -> dict[str, str]:
    """Return what an index remembers of a folder of vectors, to find it again."""
    return {"vectors": os.path.abspath(vectors.folder), "fingerprint": fingerprint(vectors.folder)}


def open_sources(sources: Sequence[dict[str, str]]) -> list[Vectors]:
    """Open the folders of vectors that an index was made from.

    Raises:
        UserError: one is gone, or has changed since.
    """
    opened = []
    for source in sources:
        folder = Path(source["vectors"])
        if not folder.is_dir():
            raise UserError("the vectors that this index was made from are gone", folder)
        if fingerprint(folder) != source["fingerprint"]:
            raise UserError("the vectors have changed since this index was made from them", folder)
        opened.append(Vectors.load(folder))
    return opened


def live_rows(sources: Sequence[Vectors], live: set[str]) -> list[np.ndarray]:
    """Return which rows of each source an index still holds: those of ``live`` ids, from the last source that has one.

    An id that was replaced, or deleted and added again, stands in more than one source.
    """
    kept: list[np.ndarray] = []
    missing = set(live)
    for source in reversed(sources):
        kept.append(np.array([name in missing for name in source.ids], dtype=bool))
        missing.difference_update(source.ids)
    if missing:
        raise UserError(f"ids of the index are not among its vectors: {sample(sorted(missing))}")
    return kept[::-1]


def rows_of(vectors: Vectors, kept: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the kept rows of a source as float32 blocks."""
    start = 0
    for block in vectors.blocks():
        inside = kept[start : start + len(block)]
        yield block if inside.all() else block[inside]
        start += len(block)


def link_part(vectors: Vectors, shard: int, folder: Path, number: int, *, with_vectors: bool) -> list[Any]:
    """Bring a shard of ``vectors`` into an index as part ``number``, as hard links where the disk has them.

    Returns:
        The part as the index's facts name it: its number and what its vectors are kept as, None without them.
    """
    store: Store = vectors.facts.get("dtype", "float32")
    files = [ids_file]
    if with_vectors:
        files += [vectors_file, *([scales_file] if store == "int8" else [])]
    for file in files:
        target = file(folder, number)
        target.unlink(missing_ok=True)
        try:
            os.link(file(vectors.folder, shard), target)
        except OSError:  # another disk, or one without hard links
            shutil.copyfile(file(vectors.folder, shard), target)
    return [number, store if with_vectors else None]


def write_ids(folder: Path, number: int, ids: Sequence[str]) -> None:
    """Write the ids of a part."""
    with atomic_write_bytes(ids_file(folder, number)) as stream:
        stream.write(orjson.dumps({"ids": list(ids), "cut": 0}))


def write_rows(folder: Path, number: int, shard: Matrix, ids: Sequence[str], kept: np.ndarray) -> None:
    """Write some rows of a part, as they are kept, as part ``number``."""
    arrays = [(vectors_file, shard.codes)] + ([(scales_file, shard.scales)] if shard.scales is not None else [])
    for file, array in arrays:
        with atomic_write_bytes(file(folder, number)) as stream:
            np.save(stream, np.ascontiguousarray(array[kept]), allow_pickle=False)
    write_ids(folder, number, [name for name, keep in zip(ids, kept.tolist(), strict=True) if keep])


def remove_unlisted(folder: Path, listed: set[str]) -> None:
    """Remove files of an index that its manifest does not name: what it held before, or what a killed update left.

    Files that no index has are the user's, and stay.
    """
    for entry in folder.iterdir():
        if entry.is_file() and entry.name not in listed and _OWN_FILE.fullmatch(entry.name):
            entry.unlink()
