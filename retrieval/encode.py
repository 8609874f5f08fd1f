"""Texts become vectors, shard by shard: a killed run goes on with the next missing shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from condenser.artifacts import Workspace, fingerprint, result_config
from condenser.errors import UserError
from condenser.files import existing_file
from condenser.hub import local_folder
from condenser.talk import Meter, say
from retrieval.collections import open_collection
from retrieval.options import EncodeOptions
from retrieval.readers import read_passages, read_queries
from retrieval.records import Passage, Query
from retrieval.vectors import Shard, ids_file, read_shard, write_shard

Records = Iterator[Passage] | Iterator[Query]


@dataclass(frozen=True)
class _Source:
    """Where the texts come from: read as often as called, and a digest of the bytes behind it."""

    read: Callable[[], Records]
    fingerprint: str


def encode(options: EncodeOptions) -> Path:
    """Encode the passages or queries of a file or collection into a folder of vectors.

    Memory holds the model and one shard, whatever the size of the input. Within a shard texts of like
    length share a batch; rows are written in the order of the input.

    Returns:
        The finished folder, see `retrieval.vectors`.

    Raises:
        UserError: what reading the texts and loading the encoder raise, before anything is encoded; an
            output made with other settings; a vector that is not finite, by its text's id.
    """
    source = _open_source(options)
    folder = local_folder(options.encoder)
    inputs = {"encoder_files": fingerprint(folder), "texts": source.fingerprint}
    with Workspace(
        options.output, "vectors", config=result_config(options), inputs=inputs, resumable=True
    ) as workspace:
        if workspace.done:
            return workspace.output
        facts = _write_shards(options, source, folder, workspace.path)
        return workspace.commit(facts)


def _write_shards(options: EncodeOptions, source: _Source, folder: Path, output: Path) -> dict[str, Any]:
    # Reading all texts once before the work gives the time left, and finds a bad line now instead of in the
    # middle of the night. With bad lines passed over there is nothing to find.
    total = None if options.skip_bad else sum(1 for _ in source.read())
    # Imported here, because the checks above need no torch, which takes seconds to come.
    from retrieval.encoder import Encoder

    encoder = Encoder.load(folder, device=options.device, **{f"{options.kind}_max_length": options.max_length})
    unit = "passages" if options.kind == "passage" else "queries"
    count = cut = shards = 0
    with Meter("encode", total, unit) as meter:
        for records in _in_shards(source.read(), options.shard_size):
            shard = _finished_shard(output, shards, [record.id for record in records], encoder.dimension)
            if shard:
                meter.start += len(records)
                meter.advance(len(records))
            else:
                shard = _encode_shard(encoder, options, records, output, shards, meter)
            count, cut, shards = count + len(records), cut + shard.cut, shards + 1
    length = encoder.max_length(options.kind)
    texts = _number(count, unit)
    say(f"encoded {texts} in {_number(shards, 'shards')}, {cut:,} of {texts} cut at {length} tokens")
    return encoder.facts() | {
        "kind": options.kind,
        "max_length": length,
        "dtype": "float32",
        "count": count,
        "cut": cut,
        "shards": shards,
    }


def _encode_shard(
    encoder: Any, options: EncodeOptions, records: list[Any], output: Path, number: int, meter: Meter
) -> Shard:
    texts = [record.text if isinstance(record, Query) else encoder.passage_text(record) for record in records]
    token_ids, cut = encoder.tokenize_and_count(texts, options.kind)
    vectors = encoder.encode_token_ids(token_ids, batch_tokens=options.batch_tokens, on_batch=meter.advance)
    shard = Shard([record.id for record in records], cut)
    write_shard(output, number, vectors, shard)
    return shard


def _finished_shard(output: Path, number: int, ids: list[str], dimension: int) -> Shard | None:
    """Return a shard that an earlier run finished; None when it is to be made, for the first time or anew."""
    if not ids_file(output, number).exists():
        return None
    try:
        shard, _ = read_shard(output, number, dimension)
    except UserError:
        return None
    return shard if shard.ids == ids else None


def _open_source(options: EncodeOptions) -> _Source:
    if (options.input is None) == (options.collection is None):
        raise UserError("give one of --input and --collection")
    if options.split is not None and (options.collection is None or options.kind != "query"):
        raise UserError("--split goes with --collection and --kind query")
    skip_bad = options.skip_bad
    if options.collection is not None:
        collection = open_collection(options.collection)
        if options.kind == "query":
            return _Source(lambda: collection.queries(options.split, skip_bad=skip_bad), collection.fingerprint())
        return _Source(lambda: collection.passages(skip_bad=skip_bad), fingerprint(collection.corpus_file))
    file = existing_file(str(options.input))
    reader = read_passages if options.kind == "passage" else read_queries
    return _Source(lambda: reader(file, skip_bad=skip_bad), fingerprint(file))


def _in_shards(records: Records, size: int) -> Iterator[list[Any]]:
    while shard := list(islice(records, size)):
        yield shard


def _number(count: int, unit: str) -> str:
    """Return ``1 passage``, ``2 passages``."""
    singular = {"passages": "passage", "queries": "query", "shards": "shard"}
    return f"{count:,} {unit if count != 1 else singular[unit]}"
