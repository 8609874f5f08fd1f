"""The verb ``spans``: documents of many kinds become a token store."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from condenser.artifacts import Workspace, result_config
from condenser.corpus.cutting import Batch, Cutter, CuttingRules, SpanCounts
from condenser.corpus.documents import Document, read_dataset, read_documents
from condenser.corpus.parallel import map_in_order, usable_cpus
from condenser.corpus.tokens import FRAME_TOKENS, TokenStoreWriter, bare_tokenizer, load_tokenizer, require_words
from condenser.errors import UserError
from condenser.manifest import fingerprint, identity
from condenser.options import SpansOptions
from condenser.talk import Meter, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_CHARACTERS = 2**20
# Threads of one process share the vocabulary in the processor's cache, and are a sixth faster than as many processes,
# until what Python does between them becomes the limit. A small input is done before processes have started.
_THREADS_SUFFICE_CPUS = 4
_THREADS_SUFFICE_BYTES = 64 * 2**20
_MEGABYTE = 10**6


def build_spans(options: SpansOptions) -> Path:
    """Cut documents into spans of at most ``max_length`` tokens and store them by document.

    The result does not depend on the number of workers.

    Args:
        options: see `SpansOptions`; ``input`` must name files (the command turns a collection into
            its file).

    Returns:
        The token store: an Arrow file (one row a document, a word-start bit per token), the
        tokenizer, and a manifest with the counts.

    Raises:
        UserError: unreadable input, no tokenizer or two, one whose words cannot be told apart, a
            ``max_length`` with no room for text.
    """
    _check(options)
    config = result_config(options) | {"input": [Path(path).name for path in options.input]}
    with Workspace(options.output, "spans", config=config, inputs=_fingerprints(options)) as work:
        if work.done:
            return work.output
        tokenizer = _tokenizer(options)
        require_words(tokenizer)
        room = options.max_length - FRAME_TOKENS
        if room < 1:
            raise UserError(
                f"--max_length {options.max_length} leaves no room for text beside {FRAME_TOKENS} special tokens"
            )
        rules = CuttingRules(
            room, options.min_tokens, options.titles, options.short_spans, options.seed, tokenizer.sep_token_id
        )
        cutter = partial(Cutter, bare_tokenizer(tokenizer).to_str(), rules)
        counts = _cut_all(options, cutter, work.path)
        if not counts.spans:
            raise UserError("no text in the input, nothing to store", options.dataset or ", ".join(options.input))
        tokenizer.save_pretrained(work.path / "tokenizer")
        say(f"spans: {counts.summary()}")
        return work.commit(
            counts.as_dict() | {"max_length": options.max_length, "tokenizer": fingerprint(work.path / "tokenizer")}
        )


def _check(options: SpansOptions) -> None:
    if bool(options.input) == (options.dataset is not None):
        raise UserError("give one of --input (files of documents), --collection and --dataset")
    if sum(one is not None for one in (options.tokenizer, options.train_tokenizer, options.train_words)) != 1:
        raise UserError("give exactly one of --tokenizer, --train_tokenizer and --train_words")


def _fingerprints(options: SpansOptions) -> dict[str, str]:
    names = [Path(path).name for path in options.input]
    inputs = {}
    for place, (name, path) in enumerate(zip(names, options.input, strict=True), start=1):
        if Path(path).is_file():
            inputs[name if names.count(name) == 1 else f"{name} ({place})"] = fingerprint(path)
    if options.dataset is not None:
        inputs["dataset"] = identity(options.dataset)
    if options.tokenizer is not None:
        inputs["tokenizer"] = identity(options.tokenizer)
    return inputs


def _cut_all(options: SpansOptions, cutter: Callable[[], Cutter], folder: Path) -> SpanCounts:
    """Write the token store into ``folder``."""
    large = options.dataset is not None or _input_bytes(options) > _THREADS_SUFFICE_BYTES
    workers = options.workers or (usable_cpus() if large and usable_cpus() > _THREADS_SUFFICE_CPUS else 1)
    counts = SpanCounts()
    with TokenStoreWriter(folder) as store, _meter("spans", options) as meter, _libraries_set_aside():
        batches = _batched(_documents(options, _megabytes(meter)), options.batch_size)
        for rows, part in map_in_order(cutter, batches, workers):
            store.write(rows)
            counts.add(part)
            meter.advance(part.documents if options.dataset else 0, f"{counts.documents:,} documents")
    return counts


@contextmanager
def _libraries_set_aside() -> Iterator[None]:
    """Keep the garbage collector from walking through all libraries, while documents come and go by the million."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _input_bytes(options: SpansOptions) -> int:
    return sum(Path(path).stat().st_size for path in options.input if Path(path).is_file())


def _meter(what: str, options: SpansOptions, passes: int = 1) -> Meter:
    if options.dataset is not None:
        return Meter(what, unit="documents")
    return Meter(what, passes * _input_bytes(options) // _MEGABYTE, "MB")


def _megabytes(meter: Meter) -> Callable[[int], None]:
    """Return what is told of bytes read and advances ``meter`` by whole megabytes."""
    read = 0

    def add(count: int) -> None:
        nonlocal read
        read += count
        meter.advance(read // _MEGABYTE - meter.done)

    return add


def _documents(options: SpansOptions, on_read: Callable[[int], None]) -> Iterator[Document]:
    if options.dataset is None:
        return read_documents(options.input, on_read, pairs=True)
    return read_dataset(
        options.dataset,
        config=options.dataset_config,
        split=options.dataset_split,
        column=options.dataset_column,
    )


def _tokenizer(options: SpansOptions) -> PreTrainedTokenizerBase:
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    from condenser.corpus.vocabulary import train_wordpiece, train_words

    with _meter("tokenizer", options, passes=1 if options.train_words else 2) as meter:
        on_read = _megabytes(meter)

        def texts() -> Iterator[str]:
            return (text for document in _documents(options, on_read) for text in (document.title, *document.texts))

        if options.train_words is not None:
            return train_words(texts, options.train_words)
        return train_wordpiece(texts, options.train_tokenizer or 0)


def _batched(documents: Iterable[Document], size: int) -> Iterator[Batch]:
    """Yield at most ``size`` documents at a time, and fewer when they are long."""
    batch = Batch(0, [])
    characters = 0
    for document in documents:
        batch.documents.append(document)
        characters += sum(map(len, document.texts))
        if len(batch.documents) == size or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = Batch(batch.first + len(batch.documents), []), 0
    if batch.documents:
        yield batch
