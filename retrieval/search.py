"""Queries become a run: their vectors against an index, written with what made both."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from condenser.artifacts import fingerprint, load_manifest
from condenser.errors import UserError
from condenser.files import existing_file, write_json
from condenser.hub import local_folder
from condenser.talk import Meter, say
from eval.runs import write_run
from retrieval.collections import open_collection
from retrieval.index import Index
from retrieval.options import SearchOptions
from retrieval.readers import read_queries
from retrieval.records import Hit, Query
from retrieval.vectors import Vectors, check_same_space

_QUERIES_AT_ONCE = 1024

Rows = Iterator[tuple[str, list[Hit]]]


def search(options: SearchOptions) -> Path:
    """Search the index for each query and write the run, with ``RUN.json`` beside it: what made the run.

    Queries are texts, encoded here, or a folder of query vectors, for which no model is loaded.

    Returns:
        The run file.

    Raises:
        UserError: what reading queries, index and encoder raise; queries and index of different
            encoders; a file name or an id that the run's format cannot carry.
    """
    if (options.queries is None) == (options.collection is None):
        raise UserError("give one of --queries and --collection")
    if options.split is not None and options.collection is None:
        raise UserError("--split goes with --collection")
    stored = options.queries is not None and Path(options.queries).is_dir()
    made_by: dict[str, Any] = {}
    # The rows are made while the file is open: an output that cannot be written is found before the work.
    write_run(options.output, _stored_rows(options, made_by) if stored else _text_rows(options, made_by))
    write_json(f"{Path(options.output)}.json", made_by)
    return Path(options.output)


def _stored_rows(options: SearchOptions, made_by: dict[str, Any]) -> Rows:
    if options.encoder is not None:
        raise UserError("--encoder is for queries given as text; these are vectors", options.queries)
    queries = Vectors.load(str(options.queries))
    if queries.facts["kind"] != "query":
        raise UserError(f"holds {queries.facts['kind']} vectors, expected queries", queries.folder)
    index = _open_index(options)
    check_same_space(index.facts, queries.facts)
    made_by |= _provenance(options, index) | {"queries_fingerprint": fingerprint(queries.folder)}
    k = index.lower_k(options.k)
    ids = iter(queries.ids)
    with Meter("search", len(queries.ids), "queries") as meter:
        for shard in queries.shards:
            for start in range(0, len(shard), _QUERIES_AT_ONCE):
                block = shard[start : start + _QUERIES_AT_ONCE]
                yield from zip(islice(ids, len(block)), index.search(block, k), strict=True)
                meter.advance(len(block))
    say(f"searched {meter.done:,} queries over {len(index.ids):,} passages, k {k:,}")


def _text_rows(options: SearchOptions, made_by: dict[str, Any]) -> Rows:
    queries = _read_texts(options)
    recorded = load_manifest(options.index, "index", facts={"encoder": str})["facts"]
    folder = local_folder(options.encoder or recorded["encoder"])
    # Imported here, because mistakes up to here should show at once and stored vectors need no torch.
    from retrieval.encoder import Encoder

    encoder = Encoder.load(folder, device=options.device, dimension=recorded.get("truncated"))
    index = _open_index(options, encoder)
    made_by |= _provenance(options, index)
    k, cut = index.lower_k(options.k), 0
    with Meter("search", len(queries), "queries") as meter:
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            block = queries[start : start + _QUERIES_AT_ONCE]
            token_ids, cut_here = encoder.tokenize_and_count([query.text for query in block], "query")
            hits = index.search(encoder.encode_token_ids(token_ids, "query"), k)
            yield from zip((query.id for query in block), hits, strict=True)
            cut += cut_here
            meter.advance(len(block))
    say(
        f"searched {len(queries):,} queries over {len(index.ids):,} passages, k {k:,}, "
        f"{cut:,} of {len(queries):,} queries cut at {encoder.max_length('query')} tokens"
    )


def _read_texts(options: SearchOptions) -> list[Query]:
    if options.collection is not None:
        return list(open_collection(options.collection).queries(options.split))
    return list(read_queries(existing_file(str(options.queries))))


def _open_index(options: SearchOptions, encoder: Any = None) -> Index:
    return Index.load(options.index, encoder=encoder, nprobe=options.nprobe, ef_search=options.ef_search)


def _provenance(options: SearchOptions, index: Index) -> dict[str, Any]:
    """Return what a reader of the run needs to know, without the run's own name: equal runs have equal sidecars."""
    return {
        "index": options.index,
        "index_fingerprint": fingerprint(options.index),
        "encoder": options.encoder or index.facts["encoder"],
        "encoder_fingerprint": index.facts["encoder_fingerprint"],
        "passages": len(index.ids),
        "factory": index.facts["factory"],
        "queries": options.queries,
        "collection": options.collection,
        "split": options.split,
        "k": options.k,
        "nprobe": options.nprobe,
        "ef_search": options.ef_search,
    }
