"""The verb ``spans`` as the command offers it: a collection may stand in for files."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from condenser.corpus.spans import build_spans
from condenser.errors import UserError
from condenser.options import SpansOptions
from retrieval.collections import Collection, open_collection
from retrieval.sources import LineFile, json_suffix, open_source


def build_spans_of(options: SpansOptions) -> Path:
    """Run `build_spans` on files, a data set, or the passages of ``--collection``.

    Raises:
        UserError: both given, or what `build_spans` and `open_collection` raise.
    """
    if options.collection is None:
        return build_spans(options)
    if options.input or options.dataset:
        raise UserError("give one of --input (files of documents), --collection and --dataset")
    collection = open_collection(options.collection)
    if _is_file_of_documents(collection):
        return build_spans(dataclasses.replace(options, input=[str(collection.corpus_file)], collection=None))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{collection.name}.jsonl"
        with path.open("wb") as stream:
            for passage in collection.passages():
                stream.write(passage.line)
        return build_spans(dataclasses.replace(options, input=[str(path)], collection=None))


def _is_file_of_documents(collection: Collection) -> bool:
    """Tell whether the passages stand in one file of JSON lines, which `build_spans` reads as it is."""
    if collection.format not in ("beir", "pyserini") or len(collection.corpus_files()) != 1:
        return False
    file = collection.corpus_file
    return json_suffix(file) and isinstance(open_source(file), LineFile)
