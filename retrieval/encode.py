"""Texts become vectors, shard by shard, by one worker or many; one that is killed loses no more than its last shard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from condenser.artifacts import result_config
from condenser.errors import UserError
from condenser.files import existing_file
from condenser.hub import local_folder
from condenser.manifest import MANIFEST, fingerprint
from condenser.sharing import SharedWorkspace
from condenser.talk import Meter, say
from retrieval.claims import Claims
from retrieval.collections import open_collection
from retrieval.options import EncodeOptions
from retrieval.readers import read_passages, read_queries
from retrieval.records import Passage, Query, batched
from retrieval.seals import Seals
from retrieval.vectors import Shard, ids_file, read_ids, refuse_strangers, shard_files, write_shard

Records = Iterator[Passage | Query]

_UNITS = {"passage": "passages", "query": "queries"}
_ADOPTING, _PUBLISHING = "adopt", "publish"
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
            worker = _Worker(options, source, folder, workspace)
            try:
                worker.work()
            except FileNotFoundError:
                # Another worker may have published: then the folder was renamed under our hands.
                if not workspace.published():
                    raise
            if not worker.has_published:
                made = _number(worker.made, "shards")
                say(f"{workspace.output}: finished by another process; {made} by this one")
        return workspace.output


class _Worker:
    """One of the processes that fill a folder: it makes shards as long as there are any that nobody has."""

    def __init__(self, options: EncodeOptions, source: _Source, folder: Path, workspace: SharedWorkspace) -> None:
        self._options, self._source, self._folder, self._workspace = options, source, folder, workspace
        self._place = workspace.scratch / "shards"
        self._seals = Seals(workspace.path, self._place, options.store)
        self._claims = Claims(self._place)
        self._total: int | None = None
        self._blank = 0
        self._encoder: Any = None
        self._compute = ""
        self.made = 0
        self.has_published = False

    def work(self) -> None:
        """Return when the folder is finished, by this worker or another.

        Raises:
            FileNotFoundError: another finished it and renamed the folder at this moment.
            UserError: as `encode`.
        """
        self._total = self._count_texts()
        self._refuse_strangers(self._total)
        self._encoder = self._load_encoder()
        self._place.mkdir(exist_ok=True)
        if self._workspace.published():  # then this made it in a folder that a late worker is about to sweep away
            return
        quiet = os.environ.get("RANK", "0") != "0"
        unit = _UNITS[self._options.kind]
        with self._claims:
            self._adopt_withdrawn()
            with Meter("encode", self._total, unit, start=self._count_done(), quiet=quiet) as meter:
                self._fill(meter)

    def _load_encoder(self) -> Any:
        # Imported here, because all checks before need no torch, which takes seconds to come.
        from retrieval.encoder import Encoder
        from retrieval.precision import set_precision

        options = self._options
        encoder = Encoder.load(
            self._folder,
            device=_device(options.device),
            dimension=options.dim,
            **{f"{options.kind}_max_length": options.max_length},
        )
        self._compute = set_precision(encoder, options.kind, options.dtype, options.quantize)
        return encoder

    def _adopt_withdrawn(self) -> None:
        """Take over the shards of a finished folder that was damaged; once, for a seal broken later must not return."""
        while self._workspace.withdrawn():
            if not self._claims.take(_ADOPTING):
                time.sleep(_LOOK_S)
                continue
            try:
                self._seals.adopt(self._workspace.withdrawn())
                self._workspace.forget_withdrawn()
            finally:
                self._claims.release(_ADOPTING)

    def _fill(self, meter: Meter) -> None:
        shards = self._make_shards(meter)
        missing = list(range(shards))
        while not self._workspace.published():
            missing = [number for number in missing if not self._seals.holds(number)]
            if not missing and self._claims.take(_PUBLISHING):
                missing = self._publish(shards)
            elif any(self._claims.is_free(f"{number:05d}") for number in missing):
                self._make_shards(meter)
            else:
                time.sleep(_LOOK_S)

    def _make_shards(self, meter: Meter) -> int:
        """Go through the texts, make every shard that is neither done nor claimed, and return how many there are."""
        shards = self._blank = 0
        for number, records in enumerate(batched(self._source.read(), self._options.shard_size)):
            shards = number + 1
            self._blank += sum(record.is_blank for record in records)
            part = f"{number:05d}"
            if self._seals.holds(number) or not self._claims.take(part):
                continue
            try:
                if not self._seals.holds(number):  # else it was finished just before it was claimed
                    self._seals.break_seal(number)
                    meter.done = self._count_done()
                    self._make_shard(number, records, meter)
            finally:
                self._claims.release(part)
        return shards

    def _make_shard(self, number: int, records: list[Any], meter: Meter) -> None:
        encoder, kind = self._encoder, self._options.kind
        texts = [record.text if isinstance(record, Query) else encoder.passage_text(record) for record in records]
        token_ids, cut = encoder.tokenize_and_count(texts, kind)
        vectors = encoder.encode_token_ids(
            token_ids, kind, batch_tokens=self._options.batch_tokens, on_batch=meter.advance
        )
        if self._claims.holds(f"{number:05d}"):  # else this process slept so long that another took it for dead
            shard = Shard([record.id for record in records], cut)
            write_shard(self._workspace.path, number, vectors, shard, self._options.store)
            self._seals.seal(number)
            self.made += 1

    def _publish(self, shards: int) -> list[int]:
        """Compare every shard with its seal and publish the folder; or return the damaged ones, to be made anew."""
        try:
            damaged = self._seals.break_damaged(shards)
            for error in damaged.values():
                say(f"{error.where}: {error.what}; the shard is made anew")
            if not damaged:
                self._commit(shards)
            return list(damaged)
        finally:
            self._claims.release(_PUBLISHING)

    def _commit(self, shards: int) -> None:
        path, options = self._workspace.path, self._options
        for draft in path.glob("*.tmp-*"):  # what killed workers left
            draft.unlink(missing_ok=True)
        count = cut = 0
        for number in range(shards):
            stored = read_ids(ids_file(path, number))
            count, cut = count + len(stored.ids), cut + stored.cut
        self._refuse_strangers(count)
        if _open_source(options).fingerprint != self._source.fingerprint:
            raise UserError("has changed while it was encoded", self._source.name, f"remove {path} and begin again")
        length = self._encoder.max_length(options.kind)
        self._workspace.commit(
            self._encoder.facts()
            | {
                "kind": options.kind,
                "max_length": length,
                "compute": self._compute,
                "dtype": options.store,
                "count": count,
                "cut": cut,
                "shards": shards,
            }
        )
        texts = _number(count, _UNITS[options.kind])
        share = f"; {_number(self.made, 'shards')} by this process" if self.made < shards else ""
        blank = f", {self._blank:,} have no text" if self._blank else ""
        say(f"encoded {texts} in {_number(shards, 'shards')}, {cut:,} of {texts} cut at {length} tokens{blank}{share}")
        self.has_published = True

    def _count_texts(self) -> int | None:
        """Return how many texts there are, None with bad lines passed over; raise UserError if there is none.

        Reading all of them before the work gives the time left, and finds a bad line now instead of in the
        middle of the night. With bad lines passed over there is nothing to find, and they are to be told of once.
        """
        one = next(self._source.read(), None)
        if one is None:
            raise UserError(f"no {_UNITS[self._options.kind]} to encode", self._source.name)
        return None if self._options.skip_bad else sum(1 for _ in self._source.read())

    def _count_done(self) -> int:
        """Return about how many texts all workers have done."""
        done = self._seals.count() * self._options.shard_size
        return done if self._total is None else min(done, self._total)

    def _refuse_strangers(self, texts: int | None) -> None:
        if texts is not None:
            shards = range(-(-texts // self._options.shard_size))
            expected = {name for number in shards for name in shard_files(number, self._options.store)}
            refuse_strangers(self._workspace.path, expected | {MANIFEST})


def _device(name: str) -> str:
    """Return the device to use; of several processes of torchrun on one machine each takes a GPU of its own."""
    if name != "cpu" and "LOCAL_RANK" in os.environ:
        import torch

        if torch.cuda.is_available():
            return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return name


def _open_source(options: EncodeOptions) -> _Source:
    if (options.input is None) == (options.collection is None):
        raise UserError("give one of --input and --collection")
    if options.format != "auto" and options.collection is None:
        raise UserError("--format goes with --collection")
    if options.split is not None and (options.collection is None or options.kind != "query"):
        raise UserError("--split goes with --collection and --kind query")
    skip_bad = options.skip_bad
    if options.collection is not None:
        collection = open_collection(options.collection, options.format)
        if options.kind == "query":
            return _Source(
                collection.name,
                lambda: collection.queries(options.split, skip_bad=skip_bad),
                collection.fingerprint(),
            )
        passages = partial(collection.passages, skip_bad=skip_bad)
        return _Source(collection.name, passages, collection.corpus_fingerprint())
    file = existing_file(str(options.input))
    reader = read_passages if options.kind == "passage" else read_queries
    return _Source(str(file), lambda: reader(file, skip_bad=skip_bad), fingerprint(file))


def _number(count: int, unit: str) -> str:
    """Return ``1 passage``, ``2 passages``."""
    singular = {"passages": "passage", "queries": "query", "shards": "shard"}
    return f"{count:,} {unit if count != 1 else singular[unit]}"
