"""The verb ``spans`` as the command offers it: a collection may stand in for files."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson

from condenser.corpus.spans import build_spans
from condenser.errors import UserError
from condenser.options import SpansOptions
from retrieval.collections import Collection, open_collection
from retrieval.examples import read_examples
from retrieval.sources import LineFile, json_suffix, open_source


def build_spans_of(options: SpansOptions) -> Path:
    """Run `build_spans` on files, a data set, or the passages or judged pairs of ``--collection``.

    Raises:
        UserError: several given, ``--pairs`` without a collection, or what `build_spans`, `open_collection` and
            `read_examples` raise.
    """
    if options.collection is None:
        if options.pairs is not None:
            raise UserError("--pairs goes with --collection", hint='files hold pairs as {"query", "passage"}')
        return build_spans(options)
    if options.input or options.dataset:
        raise UserError("give one of --input (files of documents), --collection and --dataset")
    collection = open_collection(options.collection)
    options = dataclasses.replace(options, collection=None)
    if options.pairs is None and _is_file_of_documents(collection):
        return build_spans(dataclasses.replace(options, input=[str(collection.corpus_file)]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{collection.name.replace('/', '-')}.jsonl"
        with path.open("wb") as stream:
            lines = _passages(collection) if options.pairs is None else _pairs(collection, options.pairs)
            stream.writelines(lines)
        return build_spans(dataclasses.replace(options, input=[str(path)]))


def _passages(collection: Collection) -> Iterator[bytes]:
    return (passage.line for passage in collection.passages())


def _pairs(collection: Collection, split: str) -> Iterator[bytes]:
    """Yield each judged query with each of its positives."""
    passages = collection.lookup()
    for example in read_examples(collection, split, drop_empty=True):
        for positive in example.positives:
            passage = passages[positive]
            pair = {"_id": f"{example.query_id} {passage.id}", "query": example.text, "passage": passage.whole}
            yield orjson.dumps(pair, option=orjson.OPT_APPEND_NEWLINE)


def _is_file_of_documents(collection: Collection) -> bool:
    """Tell whether the passages stand in one file of JSON lines, which `build_spans` reads as it is."""
    if collection.format not in ("beir", "pyserini") or len(collection.corpus_files()) != 1:
        return False
    file = collection.corpus_file
    return json_suffix(file) and isinstance(open_source(file), LineFile)
