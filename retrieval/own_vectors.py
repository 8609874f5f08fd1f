"""Vectors that another program made become a folder that `condenser index` and `condenser search` take."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from condenser.artifacts import Workspace
from condenser.errors import UserError
from condenser.files import identifier, read_lines
from condenser.talk import say
from retrieval.vectors import Shard, Store, open_array, write_shard

_LIST = "the list of ids"


def import_vectors(
    matrix: np.ndarray | Sequence[Sequence[float]] | str | Path,
    ids: Sequence[str] | str | Path,
    output: str | Path,
    *,
    made_by: str,
    kind: Literal["passage", "query"] = "passage",
    store: Store = "float32",
    shard_size: int = 5000,
) -> Path:
    """Write vectors and their ids as a folder such as `encode` makes.

    float64, float32 and float16 in any order of memory give the same folder. They become float32 one shard
    at a time, so that a memory-mapped file may be larger than memory.

    Args:
        matrix: (n, dimension), or the ``.npy`` file of one.
        ids: n of them, or a text file with one on each line.
        output: the folder to write.
        made_by: what made the vectors; queries and passages of two makers do not meet.
        kind: whether these are passages or queries.
        store: the type to keep them in.
        shard_size: rows per shard.

    Returns:
        The finished folder.

    Raises:
        UserError: something else than a matrix of such numbers; a row with NaN or infinity, by its number and id;
            other counts of rows and ids; an id that is empty or stands twice; and what `Workspace` raises.
    """
    if shard_size < 1:
        raise UserError(f"shard_size is {shard_size}, expected 1 or more")
    place = str(matrix) if isinstance(matrix, str | Path) else "the matrix"
    rows, names = _open_matrix(matrix, place), _read_ids(ids)
    if len(rows) != len(names):
        source = ids if isinstance(ids, str | Path) else _LIST
        raise UserError(f"has {len(rows):,} rows, but {source} has {len(names):,} ids", place)
    shards = range(0, len(names), shard_size)
    digest = hashlib.sha256("\n".join(names).encode())
    for block in _blocks(rows, names, shard_size, place):
        digest.update(block.tobytes())
    config = {"made_by": made_by, "kind": kind, "store": store, "shard_size": shard_size}
    inputs = {"rows": digest.hexdigest()[:16]}
    with Workspace(output, "vectors", config=config, inputs=inputs) as workspace:
        if workspace.done:
            return workspace.output
        for number, block in enumerate(_blocks(rows, names, shard_size, place)):
            start = shards[number]
            write_shard(workspace.path, number, block, Shard(names[start : start + len(block)], 0), store)
        folder = workspace.commit(
            {
                "encoder": made_by,
                "encoder_fingerprint": made_by,
                "kind": kind,
                "similarity": "dot",
                "dimension": rows.shape[1],
                "dtype": store,
                "count": len(names),
                "shards": len(shards),
            }
        )
    say(f"imported {len(names):,} vectors of {rows.shape[1]:,} numbers")
    return folder


def _open_matrix(matrix: Any, place: str) -> np.ndarray:
    """Return the matrix as it is, a file memory-mapped."""
    if isinstance(matrix, str | Path):
        matrix = open_array(Path(matrix))
    elif not isinstance(matrix, np.ndarray):
        matrix = _from_lists(matrix, place)
    if matrix.dtype not in (np.float64, np.float32, np.float16) or matrix.ndim != 2:
        shape = " x ".join(map(str, matrix.shape))
        raise UserError(
            f"is {matrix.dtype} of shape {shape}, expected rows of float32, float64 or float16 from row 0 on", place
        )
    if matrix.shape[1] == 0:
        raise UserError(f"has {len(matrix):,} rows of no numbers", place)
    return matrix


def _from_lists(lists: Any, place: str) -> np.ndarray:
    for number, row in enumerate(lists):
        try:
            fits = np.asarray(row, dtype=np.float64).shape == (len(lists[0]),)
        except (TypeError, ValueError):
            raise UserError(f"row {number} holds something else than numbers", place) from None
        if not fits:
            raise UserError(f"row {number} has another length than row 0, which has {len(lists[0]):,} numbers", place)
    return np.asarray(lists, dtype=np.float64)


def _blocks(rows: np.ndarray, names: list[str], size: int, place: str) -> Iterator[np.ndarray]:
    """Yield the rows of each shard as float32; raise UserError for one that is not finite."""
    for start in range(0, len(rows), size):
        with np.errstate(over="ignore"):
            block = np.ascontiguousarray(rows[start : start + size], dtype=np.float32)
        bad = np.flatnonzero(~np.isfinite(block).all(axis=1))
        if len(bad):
            row = start + int(bad[0])
            raise UserError(f"row {row:,} (id {names[row]!r}) is not finite as float32", place)
        yield block


def _read_ids(ids: Sequence[str] | str | Path) -> list[str]:
    first: dict[str, str] = {}
    for where, name in _placed_ids(ids):
        if name in first:
            raise UserError(f"id {name!r} stands already at {first[name]}", where)
        first[name] = where
    return list(first)


def _placed_ids(ids: Sequence[str] | str | Path) -> Iterator[tuple[str, str]]:
    if isinstance(ids, str | Path):
        for number, line in read_lines(ids):
            where = f"{ids}:{number}"
            yield where, identifier(line, where)
    else:
        for number, name in enumerate(ids):
            yield f"{_LIST}, row {number}", identifier(name, f"{_LIST}, row {number}")
