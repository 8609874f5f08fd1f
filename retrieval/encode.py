"""Texts become vectors, shard by shard, by one worker or many; who is killed leaves nothing undone but his last shard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from condenser.artifacts import MANIFEST, fingerprint, result_config
from condenser.errors import UserError
from condenser.files import existing_file
from condenser.hub import local_folder
from condenser.sharing import SharedWorkspace
from condenser.talk import Meter, say
from retrieval.claims import Claims
from retrieval.collections import open_collection
from retrieval.options import EncodeOptions
from retrieval.readers import read_passages, read_queries
from retrieval.records import Passage, Query
from retrieval.seals import Seals
from retrieval.vectors import Shard, ids_file, read_ids, refuse_strangers, shard_files, write_shard

Records = Iterator[Passage] | Iterator[Query]

_UNITS = {"passage": "passages", "query": "queries"}
_PUBLISHING = "publish"
_LOOK_S = 0.3


@dataclass(frozen=True)
class _Source:
    """Where the texts come from: read as often as called, and a digest of the bytes behind it."""

    name: str
    read: Callable[[], Records]
    fingerprint: str


def encode(options: EncodeOptions) -> Path:
    """Encode the passages or queries of a file or collection into a folder of vectors.

    Memory holds the model and one shard, whatever the size of the input. Within a shard texts of like
    length share a batch; rows are written in the order of the input. Any number of processes may be started with
    the same options: they share the shards, and each returns when all are there. A folder that is finished
    is read whole and compared; a shard that was lost or changed is made anew, alone.

    Returns:
        The finished folder, see `retrieval.vectors`.

    Raises:
        UserError: what reading the texts and loading the encoder raise, before anything is encoded; no text at
            all; an output made with other settings; files that do not belong; a vector that is not finite, by
            its text's id.
    """
    source = _open_source(options)
    folder = local_folder(options.encoder)
    inputs = {"encoder_files": fingerprint(folder), "texts": source.fingerprint}
    with SharedWorkspace(options.output, "vectors", config=result_config(options), inputs=inputs) as workspace:
        if not workspace.done:
            _Worker(options, source, folder, workspace).work()
        return workspace.output


class _Worker:
    """One of the processes that fill a folder: it takes shards as long as there are any that nobody has."""

    def __init__(self, options: EncodeOptions, source: _Source, folder: Path, workspace: SharedWorkspace) -> None:
        self._options, self._source, self._workspace = options, source, workspace
        self._unit = _UNITS[options.kind]
        self._total = self._count_texts()
        place = workspace.scratch / "shards"
        self._seals = Seals(workspace.path, place, options.store)
        self._seals.adopt(workspace.withdrawn())
        self._claims = Claims(place)
        # Imported here, because the checks above need no torch, which takes seconds to come.
        from retrieval.encoder import Encoder

        self._encoder = Encoder.load(
            folder,
            device=_device(options.device),
            dimension=options.dim,
            **{f"{options.kind}_max_length": options.max_length},
        )
        self._made = 0

    def work(self) -> None:
        """Return when the folder is finished, by this worker or another."""
        with self._claims, self._meter() as meter:
            try:
                while not self._workspace.published():
                    shards = self._make_shards(meter)
                    self._wait_for(shards)
                    self._publish(shards)
            except FileNotFoundError:
                # Another worker published: the folder was renamed under our hands.
                if not self._workspace.published():
                    raise
