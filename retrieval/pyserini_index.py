"""Pyserini's dense indexes, in and out: a folder of a FAISS file ``index`` and of ``docid``, an id on each line."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from condenser.artifacts import Workspace
from condenser.errors import UserError
from condenser.files import atomic_write, existing_file
from condenser.manifest import fingerprint
from retrieval.faiss_index import load_faiss, read_index, write_index
from retrieval.own_vectors import import_vectors
from retrieval.vectors import Vectors

_INDEX, _IDS = "index", "docid"


def read_pyserini(folder: str | Path, output: str | Path, *, made_by: str) -> Path:
    """Write the vectors of one of Pyserini's indexes as a folder that `condenser index` and `search` take.

    Args:
        folder: with ``index`` (Flat or HNSW with inner products, which keep vectors as they are) and ``docid``.
        output: the folder of vectors to write.
        made_by: what made them; queries of another maker do not meet these passages.

    Returns:
        The finished folder.

    Raises:
        UserError: a file missing or damaged, an index that keeps no vectors or has another metric, and what
            `import_vectors` raises.
    """
    folder = Path(folder)
    ids = existing_file(folder / _IDS)
    return import_vectors(_stored(folder / _INDEX), ids, output, made_by=made_by)


def write_pyserini(vectors: str | Path | Vectors, output: str | Path) -> Path:
    """Write a folder of passages' vectors as an index that Pyserini's `FaissSearcher` opens (Flat, inner products).

    Args:
        vectors: folder made by `condenser encode --kind passage`.
        output: the folder to write.

    Returns:
        The finished folder.

    Raises:
        UserError: vectors of queries, an id with a line break, and what `Vectors.load` and `Workspace` raise.
    """
    if not isinstance(vectors, Vectors):
        vectors = Vectors.load(vectors)
    if vectors.facts["kind"] != "passage":
        raise UserError(f"holds {vectors.facts['kind']} vectors, expected passages", vectors.folder)
    for name in vectors.ids:
        if name.splitlines() != [name] or name.strip() != name:
            raise UserError(f"id {name!r} does not survive a file of one id on each line", vectors.folder)
    with Workspace(output, "pyserini", config={}, inputs={"vectors": fingerprint(vectors.folder)}) as workspace:
        if not workspace.done:
            index = load_faiss().IndexFlatIP(vectors.facts["dimension"])
            for block in vectors.blocks(65_536):
                index.add(np.ascontiguousarray(block, dtype=np.float32))
            write_index(index, workspace.path / _INDEX)
            with atomic_write(workspace.path / _IDS) as stream:
                stream.writelines(f"{name}\n" for name in vectors.ids)
            workspace.commit({"count": len(vectors.ids), "dimension": vectors.facts["dimension"]})
    return workspace.output


def _stored(file: Path) -> np.ndarray:
    """Return the vectors (n, dimension) in a FAISS file, all of them in memory."""
    faiss = load_faiss()
    index = read_index(file)
    store = faiss.downcast_index(index.storage) if hasattr(index, "hnsw") else index
    if not isinstance(store, faiss.IndexFlat):
        raise UserError(
            f"is of kind {type(index).__name__}, expected Flat or HNSW, which keep vectors as they are", file
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError("compares by another metric, expected inner products", file)
    vectors: np.ndarray = index.reconstruct_n(0, index.ntotal)
    return vectors
