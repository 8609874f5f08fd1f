"""The verb ``spans`` as the command offers it: a collection may stand in for files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from condenser.corpus.spans import build_spans
from condenser.errors import UserError
from condenser.options import SpansOptions
from retrieval.collections import open_collection


def build_spans_of(options: SpansOptions) -> Path:
    """Run `build_spans` on files, a data set, or the corpus file of ``--collection``.

    Raises:
        UserError: both given, or what `build_spans` and `open_collection` raise.
    """
    if options.collection is None:
        return build_spans(options)
    if options.input or options.dataset:
        raise UserError("give one of --input (files of documents), --collection and --dataset")
    corpus = str(open_collection(options.collection).corpus_file)
    return build_spans(dataclasses.replace(options, input=[corpus], collection=None))
