"""Documents to spans of tokens: sentences are kept whole where they fit."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from condenser.artifacts import Workspace, fingerprint, identity, result_config
from condenser.corpus.documents import Document, read_documents
from condenser.corpus.tokens import DocumentTokens, SpanTokens, TokenStoreWriter, bare_tokenizer, load_tokenizer
from condenser.errors import UserError
from condenser.options import SpansOptions
from condenser.talk import Meter, say

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

# A sentence begins after closing punctuation and blanks, before a capital, a digit or an opening
# mark; and after a line break. Splitting too often is harmless: sentences are packed together again.
_SENTENCE_BREAK = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[-]*[^\W_a-z])|\n+")


@dataclass
class SpanCounts:
    """What a build read, wrote and left out."""

    documents: int = 0
    spans: int = 0
    tokens: int = 0
    documents_with_two_spans: int = 0
    empty_documents: int = 0
    short_tails_dropped: int = 0
    spans_cut: int = 0

    def summary(self) -> str:
        """Return the counts as one line."""
        return (
            f"{self.documents:,} documents, {self.spans:,} spans, {self.tokens:,} tokens; "
            f"{self.documents_with_two_spans:,} documents have two spans or more; "
            f"left out: {self.empty_documents:,} empty documents, {self.short_tails_dropped:,} short last spans; "
            f"{self.spans_cut:,} given spans cut"
        )

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def build_spans(options: SpansOptions) -> Path:
    """Cut documents into spans of at most ``max_length`` tokens and store them by document.

    Args:
        options: see `SpansOptions`; ``input`` must name files (the command turns a collection into
            its file).

    Returns:
        The token store: an Arrow file (one row a document, a word-start bit per token), the
        tokenizer, and a manifest with the counts.

    Raises:
        UserError: unreadable input, no tokenizer or two, a ``max_length`` with no room for text.
    """
    if not options.input:
        raise UserError("--input is missing: files of documents, or --collection")
    if (options.tokenizer is None) == (options.train_tokenizer is None):
        raise UserError("give exactly one of --tokenizer and --train_tokenizer")
    inputs = {Path(path).name: fingerprint(path) for path in options.input if Path(path).is_file()}
    if options.tokenizer is not None:
        inputs["tokenizer"] = identity(options.tokenizer)
    config = result_config(options) | {"input": [Path(path).name for path in options.input]}
    with Workspace(options.output, "spans", config=config, inputs=inputs) as work:
        if work.done:
            return work.output
        tokenizer = _tokenizer(options)
        room = options.max_length - tokenizer.num_special_tokens_to_add()
        if room < 1:
            raise UserError(
                f"--max_length {options.max_length} leaves no room for text beside "
                f"{tokenizer.num_special_tokens_to_add()} special tokens"
            )
        counts = SpanCounts()
        with TokenStoreWriter(work.path) as store, Meter("spans", unit="documents") as meter:
            for batch in batched(read_documents(options.input), options.batch_size):
                documents = list(cut_documents(batch, bare_tokenizer(tokenizer), room, options.min_tokens, counts))
                store.write(documents)
                meter.advance(len(batch))
        if not counts.spans:
            raise UserError("no text in the input, nothing to store", ", ".join(options.input))
        tokenizer.save_pretrained(work.path / "tokenizer")
        say(f"spans: {counts.summary()}")
        return work.commit(
            counts.as_dict() | {"max_length": options.max_length, "tokenizer": fingerprint(work.path / "tokenizer")}
        )


def _tokenizer(options: SpansOptions) -> PreTrainedTokenizerBase:
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    if options.train_tokenizer is None:
        raise UserError("give exactly one of --tokenizer and --train_tokenizer")
    from condenser.corpus.vocabulary import train_wordpiece

    texts = (text for document in read_documents(options.input) for text in (document.title, *document.texts))
    return train_wordpiece(texts, options.train_tokenizer)


def batched(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Yield lists of at most ``size`` documents."""
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def cut_documents(
    documents: Sequence[Document], tokenizer: tokenizers.Tokenizer, room: int, min_tokens: int, counts: SpanCounts
) -> Iterator[DocumentTokens]:
    """Tokenize documents and cut each into spans of at most ``room`` tokens (without special tokens).

    A title is put in front of the text as a sentence of its own. Spans given by the user are kept
    as they are and cut at ``room``.
    """
    texts: list[str] = []
    for document in documents:
        if document.is_cut:
            texts.extend(document.texts)
        else:
            texts.append("\n".join(part for part in (document.title, *document.texts) if part))
    encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    text_of = iter(texts)
    for document in documents:
        counts.documents += 1
        spans: list[SpanTokens] = []
        for _ in document.texts if document.is_cut else (0,):
            encoding, text = next(encodings), next(text_of)
            tokens = SpanTokens(np.asarray(encoding.ids, np.int32), _word_starts(encoding.word_ids))
            if document.is_cut:
                counts.spans_cut += len(tokens.ids) > room
                cuts = [(0, min(room, len(tokens.ids)))] if len(tokens.ids) else []
            else:
                cuts = cut_spans(
                    _sentence_starts(text, encoding.offsets),
                    np.flatnonzero(tokens.word_starts),
                    len(tokens.ids),
                    room,
                    min_tokens,
                )
                cuts = _drop_short_tail(cuts, min_tokens, counts)
            spans.extend(SpanTokens(tokens.ids[a:b], tokens.word_starts[a:b]) for a, b in cuts)
        if not spans:
            counts.empty_documents += 1
            continue
        counts.spans += len(spans)
        counts.tokens += sum(len(span.ids) for span in spans)
        counts.documents_with_two_spans += len(spans) > 1
        yield DocumentTokens(document.id, spans)


def _word_starts(word_ids: Sequence[int | None]) -> np.ndarray:
    """Mark the tokens that begin a word, by the tokenizer's own pre-tokenization (WordPiece and BPE alike)."""
    words = np.asarray([-1 if word is None else word for word in word_ids], np.int64)
    starts = np.ones(len(words), bool)
    starts[1:] = (words[1:] != words[:-1]) | (words[1:] < 0)
    return starts


def _sentence_starts(text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of the tokens that begin a sentence, the first token left out."""
    begins = [begin for begin, _ in offsets]
    starts = {bisect_left(begins, match.end()) for match in _SENTENCE_BREAK.finditer(text)}
    return sorted(starts - {0, len(begins)})


def cut_spans(
    sentence_starts: Sequence[int], word_starts: Sequence[int] | np.ndarray, length: int, room: int, min_tokens: int = 1
) -> list[tuple[int, int]]:
    """Cut a text of ``length`` tokens into spans of at most ``room`` tokens.

    Each span ends at the last sentence start that fits, else (a sentence longer than ``room``) at
    the last word start, else (a word longer than ``room``) at ``room`` tokens. A span shorter than
    ``min_tokens`` is lengthened past its sentence end.

    Returns:
        ``(start, stop)`` pairs that cover all tokens in order.
    """
    cuts = []
    start = 0
    while length - start > room:
        stop = _last_between(sentence_starts, start + min(min_tokens, room), start + room)
        if stop is None:
            stop = _last_between(word_starts, start + 1, start + room)
        if stop is None:
            stop = start + room
        cuts.append((start, stop))
        start = stop
    if start < length:
        cuts.append((start, length))
    return cuts


def _last_between(values: Sequence[int] | np.ndarray, low: int, high: int) -> int | None:
    """Return the largest of the ascending ``values`` within ``low..high``, or None."""
    position = bisect_right(values, high)
    if position and values[position - 1] >= low:
        return int(values[position - 1])
    return None


def _drop_short_tail(cuts: list[tuple[int, int]], min_tokens: int, counts: SpanCounts) -> list[tuple[int, int]]:
    if len(cuts) > 1 and cuts[-1][1] - cuts[-1][0] < min_tokens:
        counts.short_tails_dropped += 1
        return cuts[:-1]
    return cuts
