"""Vectors on disk: a folder of shards, each a ``.npy`` matrix and the ids of its rows, memory-mapped when read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from condenser.artifacts import load_manifest
from condenser.errors import UserError
from condenser.files import atomic_write_bytes, existing_file

# What two sets of vectors must share for their inner products to mean anything. Length limits and batch
# sizes are not among them: they change how good a vector is, not what it is a vector of.
SPACE = ("dimension", "encoder_fingerprint", "tokenizer", "pooling", "normalize", "query_prompt", "passage_prompt")


@dataclass(frozen=True)
class Vectors:
    """A finished folder of vectors.

    Attributes:
        folder: where it is.
        facts: what made it: encoder, pooling, prompts, dimension, counts.
        ids: one per row, over all shards.
        shards: read-only float32 matrices (rows, dimension), memory-mapped.
    """

    folder: Path
    facts: dict[str, Any]
    ids: list[str]
    shards: list[np.ndarray]

    @classmethod
    def load(cls, folder: str | Path) -> Vectors:
        """Open a folder made by `encode`.

        Raises:
            UserError: no such folder or unfinished; a shard missing, damaged, or with more or fewer ids
                than vectors.
        """
        folder = Path(folder)
        facts = load_manifest(folder, "vectors", facts={"kind": str, "dimension": int, "shards": int})["facts"]
        ids: list[str] = []
        shards = []
        for number in range(facts["shards"]):
            shard, vectors = read_shard(folder, number, facts["dimension"])
            ids += shard.ids
            shards.append(vectors)
        return cls(folder, facts, ids, shards)

    def matrix(self) -> np.ndarray:
        """Return all rows as one (n, dimension) array; memory-mapped when there is one shard, else a copy."""
        return self.shards[0] if len(self.shards) == 1 else np.concatenate(self.shards)


@dataclass(frozen=True)
class Shard:
    """What is kept beside a shard's vectors: the ids of its rows, and how many of its texts were cut."""

    ids: list[str]
    cut: int


def vectors_file(folder: Path, number: int) -> Path:
    """Return the path of a shard's matrix."""
    return folder / f"vectors-{number:05d}.npy"


def ids_file(folder: Path, number: int) -> Path:
    """Return the path of a shard's ids."""
    return folder / f"ids-{number:05d}.json"


def write_shard(folder: Path, number: int, vectors: np.ndarray, shard: Shard) -> None:
    """Write a shard; its ids come last, so that a shard with ids is a whole one.

    Raises:
        UserError: a vector that is not finite, by the id of its text.
    """
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise UserError(
            f"the vector of {shard.ids[bad[0]]!r} is not finite ({len(bad):,} of {len(vectors):,} in this shard)",
            vectors_file(folder, number),
            "the encoder's weights are broken: was it trained to the end?",
        )
    with atomic_write_bytes(vectors_file(folder, number)) as stream:
        np.save(stream, vectors, allow_pickle=False)
    with atomic_write_bytes(ids_file(folder, number)) as stream:
        stream.write(orjson.dumps(asdict(shard)))


def read_shard(folder: Path, number: int, dimension: int) -> tuple[Shard, np.ndarray]:
    """Return a shard's ids and its memory-mapped vectors.

    Raises:
        UserError: a file missing or damaged, another dimension, or other counts of ids and vectors.
    """
    names, matrix = ids_file(folder, number), vectors_file(folder, number)
    vectors = map_matrix(matrix, dimension)
    stored = read_ids(names)
    if len(stored.ids) != len(vectors):
        raise UserError(f"has {len(vectors):,} vectors, but {names} has {len(stored.ids):,} ids", matrix)
    return stored, vectors


def read_ids(file: Path) -> Shard:
    """Read the ids of a shard."""
    try:
        stored = orjson.loads(existing_file(file).read_bytes())
        return Shard(check_ids(stored["ids"], file), int(stored["cut"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise UserError("is not a list of ids as `condenser encode` writes it", file) from None


def check_ids(ids: object, file: Path) -> list[str]:
    """Return ``ids`` if they are a list of texts; raise UserError for what a damaged or foreign file holds."""
    if not isinstance(ids, list) or not set(map(type, ids)) <= {str}:
        raise UserError("holds something else than a list of ids", file, "make the folder anew")
    return ids


def map_matrix(file: Path, dimension: int) -> np.ndarray:
    """Memory-map a float32 ``.npy`` matrix of rows of ``dimension`` numbers; raise UserError for anything else."""
    try:
        matrix = np.load(existing_file(file), mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"is not a whole .npy matrix ({error})", file) from None
    if matrix.dtype != np.float32 or matrix.ndim != 2 or matrix.shape[1] != dimension:
        shape = " x ".join(map(str, matrix.shape))
        raise UserError(f"is {matrix.dtype} of shape {shape}, expected float32 rows of {dimension}", file)
    return matrix


def check_same_space(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Compare what made two sets of vectors, by their facts.

    Raises:
        UserError: they come from different encoders or settings; both values and both encoders' paths are named.
    """
    for name in SPACE:
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"{name.replace('_', ' ')} is {ours.get(name)!r} in the index (encoder {ours.get('encoder')}) "
                f"but {theirs.get(name)!r} in the queries (encoder {theirs.get('encoder')})",
                hint="index and queries need the same encoder",
            )
