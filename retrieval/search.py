"""Queries become a run: their vectors against an index, written with what made both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from condenser.artifacts import refuse_overwriting
from condenser.errors import UserError
from condenser.files import write_json
from condenser.hub import local_folder
from condenser.manifest import fingerprint
from condenser.talk import Meter, say
from eval.runs import write_run
from retrieval.collections import open_collection
from retrieval.feedback import Feedback
from retrieval.index import Index
from retrieval.index_folder import read_either, recorded_encoder
from retrieval.options import SearchOptions
from retrieval.pyserini_sets import find_queries
from retrieval.recall import choose_queries, tell_recall
from retrieval.records import Hit, Query
from retrieval.vectors import Vectors, check_same_space

_QUERIES_AT_ONCE = 1024

Rows = Iterator[tuple[str, list[Hit]]]
_Blocks = Iterator[tuple[list[str], np.ndarray]]


@dataclass(frozen=True)
class _Queries:
    """What is searched for: ids with their vectors, block by block, made as they are asked for."""

    count: int
    blocks: _Blocks
    index: Index
    made_by: dict[str, Any]


def search(options: SearchOptions) -> Path:
    """Search the index for each query and write the run, with ``RUN.json`` beside it: what made the run.

    Queries are texts, encoded here, or a folder of query vectors, for which no model is loaded. An approximate index
    is compared with exact search on some of the queries, and the share of the exact top k that it finds is said.

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
    if not options.feedback and options.feedback_weight != SearchOptions.feedback_weight:
        raise UserError("--feedback_weight goes with --feedback")
    if options.float16 and options.device == "cpu":
        raise UserError("--float16 is for GPUs, --device is cpu", hint="leave it out")
    refuse_overwriting(options.output, options.index, options.queries)
    made_by: dict[str, Any] = {}
    # The rows are made while the file is open: an output that cannot be written is found before the work.
    write_run(options.output, _rows(options, made_by))
    write_json(f"{Path(options.output)}.json", made_by)
    return Path(options.output)


def _rows(options: SearchOptions, made_by: dict[str, Any]) -> Rows:
    stored = options.queries is not None and Path(options.queries).is_dir()
    queries = _stored_queries(options) if stored else _text_queries(options)
    index, told = queries.index, queries.made_by
    made_by |= _provenance(options, index)
    k = index.lower_k(options.k)
    # One hit more, in case that the query itself is among them.
    fetched = min(k + options.ignore_self, len(index))
    chosen = choose_queries(queries.count, 0 if index.exact else options.recall_queries, options.seed)
    sample: list[np.ndarray] = []
    found: list[list[str]] = []
    ignored = 0
    move = None
    if options.feedback:
        move = Feedback(index, options.feedback, options.feedback_weight, ignore_self=options.ignore_self)
    with Meter("search", queries.count, "queries") as meter:
        for ids, given in queries.blocks:
            vectors = given if move is None else move(ids, given)
            hits = index.hits(*index.search_rows(vectors, fetched))
            for row in chosen[(chosen >= meter.done) & (chosen < meter.done + len(ids))] - meter.done:
                sample.append(vectors[row])
                found.append([hit.passage_id for hit in hits[row]])
            for query_id, row_hits in zip(ids, hits, strict=True):
                kept = row_hits
                if options.ignore_self:
                    kept = [hit for hit in row_hits if hit.passage_id != query_id]
                    ignored += len(row_hits) - len(kept)
                yield query_id, kept[:k]
            meter.advance(len(ids))
    made_by |= told
    notes = [f"searched {meter.done:,} queries over {len(index):,} passages ({index.describe()})", f"k {k:,}"]
    if options.feedback:
        notes.append(f"moved towards the first {options.feedback:,} passages by {options.feedback_weight:g}")
    if options.ignore_self:
        notes.append(f"{ignored:,} hits left out that were the query itself")
    if "queries_cut" in told:
        notes.append(f"{told['queries_cut']:,} of {meter.done:,} queries cut at {told['query_max_length']} tokens")
    say(", ".join(notes))
    if sample:
        recall = tell_recall(index, np.stack(sample), k, found)
        made_by["recall"] = None if recall is None else recall._asdict()


def _stored_queries(options: SearchOptions) -> _Queries:
    if options.encoder is not None:
        raise UserError("--encoder is for queries given as text; these are vectors", options.queries)
    queries = Vectors.load(str(options.queries))
    if queries.facts["kind"] != "query":
        raise UserError(f"holds {queries.facts['kind']} vectors, expected queries", queries.folder)
    index = _open_index(options)
    check_same_space(index.facts, queries.facts)
    _say_types(options.index, index.facts, queries.facts)

    def blocks() -> _Blocks:
        ids = iter(queries.ids)
        for block in queries.blocks(_QUERIES_AT_ONCE):
            yield list(islice(ids, len(block))), block

    return _Queries(len(queries.ids), blocks(), index, {"queries_fingerprint": fingerprint(queries.folder)})


def _text_queries(options: SearchOptions) -> _Queries:
    queries = _read_texts(options)
    recorded = read_either(Path(options.index))["facts"]
    folder = local_folder(options.encoder or recorded_encoder(recorded, options.index))
    # Imported here, because mistakes up to here should show at once and stored vectors need no torch.
    from retrieval.encoder import Encoder

    encoder = Encoder.load(folder, device=options.device, dimension=recorded.get("truncated"))
    index = _open_index(options, encoder)
    _say_types(options.index, index.facts, {})
    told: dict[str, Any] = {"queries_cut": 0, "query_max_length": encoder.max_length("query")}

    def blocks() -> _Blocks:
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            block = queries[start : start + _QUERIES_AT_ONCE]
            token_ids, cut = encoder.tokenize_and_count([query.text for query in block], "query")
            told["queries_cut"] += cut
            yield [query.id for query in block], encoder.encode_token_ids(token_ids, "query")

    return _Queries(len(queries), blocks(), index, told)


def _say_types(index: str, passages: dict[str, Any], queries: dict[str, Any]) -> None:
    """Say so where the two sides were computed in different types: float32 queries over int8 passages, say."""
    theirs, ours = (facts.get("compute", "float32") for facts in (passages, queries))
    if theirs != ours:
        say(f"{index}: its passages were encoded in {theirs}, the queries in {ours}")


def _read_texts(options: SearchOptions) -> list[Query]:
    if options.collection is not None:
        return list(open_collection(options.collection).queries(options.split))
    return find_queries(str(options.queries))


def _open_index(options: SearchOptions, encoder: Any = None) -> Index:
    return Index.load(
        options.index,
        encoder=encoder,
        backend=options.backend,
        device=options.device,
        float16=options.float16,
        nprobe=options.nprobe,
        ef_search=options.ef_search,
        k_factor=options.k_factor,
    )


def _provenance(options: SearchOptions, index: Index) -> dict[str, Any]:
    """Return what a reader of the run needs to know, without the run's own name: equal runs have equal sidecars."""
    return {
        "index": options.index,
        "index_fingerprint": fingerprint(options.index),
        "encoder": options.encoder or index.facts["encoder"],
        "encoder_fingerprint": index.facts["encoder_fingerprint"],
        "passages": len(index),
        "factory": index.facts["factory"],
        "metric": index.facts["metric"],
        "queries": options.queries,
        "collection": options.collection,
        "split": options.split,
        "k": options.k,
        "parameters": index.parameters,
        "ignore_self": options.ignore_self,
        "feedback": options.feedback,
        "feedback_weight": options.feedback_weight if options.feedback else None,
    }
