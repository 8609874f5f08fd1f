"""Vector folders made by hand, for tests that need no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from condenser.artifacts import Workspace
from retrieval.vectors import Shard, write_shard

MakeVectors = Callable[..., Path]


@pytest.fixture()
def make_vectors(tmp_path: Path) -> MakeVectors:
    """Write a folder as `condenser encode` does, from a matrix and ids; other facts by keyword."""

    def make(
        matrix: np.ndarray, ids: Sequence[str], *, name: str = "vectors", shard_size: int = 1_000_000, **facts: Any
    ) -> Path:
        matrix = np.asarray(matrix, dtype=np.float32)
        starts = range(0, len(ids), shard_size)
        described = {
            "kind": "passage",
            "encoder": "/models/a",
            "encoder_fingerprint": "aaaa",
            "tokenizer": "tttt",
            "pooling": "cls",
            "normalize": False,
            "query_prompt": "",
            "passage_prompt": "",
            "dimension": matrix.shape[1],
            "count": len(ids),
            "shards": len(starts),
        }
        with Workspace(tmp_path / name, "vectors", config=facts, inputs={}) as workspace:
            for number, start in enumerate(starts):
                stop = start + shard_size
                store = facts.get("dtype", "float32")
                write_shard(workspace.path, number, matrix[start:stop], Shard(list(ids[start:stop]), 0), store)
            return workspace.commit(described | facts)

    return make
