"""Documents to spans of tokens: sentences are kept whole where they fit."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import tokenizers

from condenser.corpus.documents import Document
from condenser.corpus.tokens import DocumentTokens, SpanTokens, record_batch
from condenser.errors import UserError
from condenser.options import Titles

# A sentence begins after closing punctuation and blanks, before a capital, a digit or an opening
# mark; after a full stop of scripts without blanks; and after a line break. Splitting too often is
# harmless: sentences are packed together again. One class of characters comes first, because the
# search is fast then.
_SENTENCE_BREAK = re.compile(
    r"[.!?\n\u0964\u061f\u3002\uff01\uff1f]"
    r"(?:(?<=\n)\n*|(?<=[\u3002\uff01\uff1f])(?=\w)|[\"')\]]*\s+(?=[\"'(\[-]*[^\W_a-z]))"
)
# Tokenizers need about 100 bytes a token, so a text of many megabytes goes through in pieces.
_PIECE = 50_000


@dataclass(frozen=True)
class CuttingRules:
    """How documents are cut; the fields are those of `SpansOptions`.

    Attributes:
        room: longest span in tokens, without special tokens.
        min_tokens: a shorter last span is dropped, unless it is the document's only one.
        titles: where a title goes.
        short_spans: share of the spans that are ended early.
        seed: with a document's number in the input it decides which.
        separator: the token between a query and its passage; None where the tokenizer has none.
    """

    room: int
    min_tokens: int = 1
    titles: Titles = "first"
    short_spans: float = 0.0
    seed: int = 0
    separator: int | None = None


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

    def add(self, other: SpanCounts) -> None:
        """Add the counts of another part of the input."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def summary(self) -> str:
        """Return the counts as one line."""
        share = 100 * self.spans_cut / max(1, self.spans)
        cut = f"; {self.spans_cut:,} given spans cut ({share:.1f} %)" if self.spans_cut else ""
        return (
            f"{self.documents:,} documents, {self.spans:,} spans, {self.tokens:,} tokens; "
            f"{self.documents_with_two_spans:,} documents have two spans or more; "
            f"left out: {self.empty_documents:,} empty documents, {self.short_tails_dropped:,} short last spans{cut}"
        )

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Batch(NamedTuple):
    """Documents to be cut, the first of them number ``first`` of the input."""

    first: int
    documents: list[Document]


class _Tokens(NamedTuple):
    """A text's tokens, and the ascending indices of those that begin a sentence (0 left out)."""

    span: SpanTokens
    sentences: list[int]


class Cutter:
    """Tokenizes documents and cuts them into spans.

    Args:
        engine: the tokenizer as JSON (it crosses processes as text).
        rules: see `CuttingRules`.
    """

    def __init__(self, engine: str, rules: CuttingRules) -> None:
        self._engine = tokenizers.Tokenizer.from_str(engine)
        self._rules = rules

    def __call__(self, batch: Batch) -> tuple[pa.RecordBatch, SpanCounts]:
        """Return the documents that have text as rows of the token store, and what was counted."""
        counts = SpanCounts(documents=len(batch.documents))
        tokens = iter(self._tokenize([text for document in batch.documents for text in self._texts(document)]))
        rows = []
        for number, document in enumerate(batch.documents, start=batch.first):
            parts = [next(tokens) for _ in self._texts(document)]
            spans = self._spans(document, parts, number, counts)
            if spans:
                rows.append(DocumentTokens(document.id, spans))
                counts.spans += len(spans)
                counts.tokens += sum(len(span.ids) for span in spans)
                counts.documents_with_two_spans += len(spans) > 1
            else:
                counts.empty_documents += 1
        return record_batch(rows), counts

    def _texts(self, document: Document) -> Sequence[str]:
        """Return what is tokenized of a document: spans, or one text, or title and text (query and passage) alone."""
        if document.is_cut or document.is_pair:
            return document.texts
        if self._rules.titles == "every":
            blank = " " if document.title else ""  # which byte-level tokenizers see
            return (document.title, *(blank + text for text in document.texts))
        title = document.title if self._rules.titles == "first" else ""
        return ("\n".join(part for part in (title, *document.texts) if part),)

    def _spans(self, document: Document, parts: list[_Tokens], number: int, counts: SpanCounts) -> list[SpanTokens]:
        rules = self._rules
        if document.is_pair:
            return [self._pair(document, *(part.span for part in parts))]
        if document.is_cut:
            counts.spans_cut += sum(len(part.span.ids) > rules.room for part in parts)
            return [_slice(part.span, 0, rules.room) for part in parts if len(part.span.ids)]
        body = parts[-1]
        title = _at_most(parts[0].span, rules.room // 2) if rules.titles == "every" else None
        room = rules.room - (len(title.ids) if title else 0)
        words = np.flatnonzero(body.span.word_starts)
        cuts = cut_spans(body.sentences, words, len(body.span.ids), room, rules.min_tokens, self._limits(number, room))
        if len(cuts) > 1 and cuts[-1][1] - cuts[-1][0] < rules.min_tokens:
            counts.short_tails_dropped += 1
            cuts.pop()
        spans = [_slice(body.span, start, stop) for start, stop in cuts]
        if title is None or not len(title.ids):
            return spans
        return [_joined(title, span) for span in spans] or [title]

    def _pair(self, document: Document, query: SpanTokens, passage: SpanTokens) -> SpanTokens:
        """Return query, separator and as much of the passage as there is room for, of which the query takes half."""
        separator = self._rules.separator
        if separator is None:
            raise UserError("is a pair, for which the tokenizer has no separator token", document.id)
        query = _at_most(query, self._rules.room // 2)
        between = SpanTokens(np.array([separator], np.int32), np.ones(1, bool))
        return _slice(_joined(_joined(query, between), passage), 0, self._rules.room)

    def _limits(self, number: int, room: int) -> Callable[[], int] | None:
        """Return the draw of each span's limit in document ``number``, None when all get the whole room."""
        if not self._rules.short_spans:
            return None
        rng = np.random.default_rng([self._rules.seed, number])
        share = self._rules.short_spans
        return lambda: int(rng.integers(1, room + 1)) if rng.random() < share else room

    def _tokenize(self, texts: Sequence[str]) -> Iterator[_Tokens]:
        pieces = [list(_pieces(text)) for text in texts]
        encodings = iter(
            self._engine.encode_batch([piece for parts in pieces for piece in parts], add_special_tokens=False)
        )
        for text, parts in zip(texts, pieces, strict=True):
            breaks = [match.end() for match in _SENTENCE_BREAK.finditer(text)]
            ends = list(accumulate(map(len, parts)))
            yield _join(
                [
                    _tokens(next(encodings), breaks, end - len(piece), end)
                    for piece, end in zip(parts, ends, strict=True)
                ]
            )


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most ``_PIECE`` characters, which begin with a blank where there is one.

    A blank belongs to the word behind it for tokenizers that keep blanks.
    """
    start = 0
    while len(text) - start > _PIECE:
        blank = text.rfind(" ", start + 1, start + _PIECE)
        stop = blank if blank > 0 else start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


def _tokens(encoding: tokenizers.Encoding, breaks: Sequence[int], start: int, end: int) -> _Tokens:
    """Return the tokens of a text from character ``start`` to ``end``; ``breaks`` are those of all of the text."""
    # Words are the tokenizer's own (its pre-tokenization), for WordPiece and BPE alike; a sentence begins with a word.
    words = encoding.word_ids
    ids = np.array(encoding.ids, np.int32)
    numbers = np.array(words, np.int32)
    starts = np.ones(len(ids), bool)
    starts[1:] = numbers[1:] != numbers[:-1]
    sentences = set()
    for place in breaks[bisect_left(breaks, start) : bisect_left(breaks, end)]:
        word = encoding.char_to_word(place - start)
        if word is not None:  # else the tokenizer dropped this letter
            sentences.add(bisect_left(words, word))  # type: ignore[type-var]
    return _Tokens(SpanTokens(ids, starts), sorted(sentences))


def _join(parts: list[_Tokens]) -> _Tokens:
    """Put the pieces of one text together again; each begins a word. The first sentence begins where the text does."""
    sentences, offset = [], 0
    for part in parts:
        sentences += [offset + start for start in part.sentences if offset + start]
        offset += len(part.span.ids)
    if len(parts) == 1:
        return _Tokens(parts[0].span, sentences)
    spans = [part.span for part in parts]
    return _Tokens(
        SpanTokens(np.concatenate([s.ids for s in spans]), np.concatenate([s.word_starts for s in spans])), sentences
    )


def _slice(span: SpanTokens, start: int, stop: int) -> SpanTokens:
    return SpanTokens(span.ids[start:stop], span.word_starts[start:stop])


def _joined(first: SpanTokens, second: SpanTokens) -> SpanTokens:
    return SpanTokens(np.concatenate([first.ids, second.ids]), np.concatenate([first.word_starts, second.word_starts]))


def _at_most(span: SpanTokens, room: int) -> SpanTokens:
    """Return the words of a span that fit into ``room`` tokens."""
    if len(span.ids) <= room:
        return span
    return _slice(span, 0, _last_between(np.flatnonzero(span.word_starts), 1, room) or room)


def cut_spans(
    sentence_starts: Sequence[int],
    word_starts: Sequence[int] | np.ndarray,
    length: int,
    room: int,
    min_tokens: int = 1,
    limit: Callable[[], int] | None = None,
) -> list[tuple[int, int]]:
    """Cut a text of ``length`` tokens into spans of at most ``room`` tokens.

    Each span ends at the last sentence start that fits, else (a sentence longer than ``room``) at
    the last word start, else (a word longer than ``room``) at ``room`` tokens. A span shorter than
    ``min_tokens`` is lengthened past its sentence end.

    Args:
        sentence_starts: ascending token indices, 0 left out.
        word_starts: ascending token indices.
        length: tokens of the text.
        room: tokens of the longest span.
        min_tokens: tokens of the shortest span but the last.
        limit: drawn for each span; with less than ``room`` the span ends at the last sentence start
            within the limit, or with its first sentence.

    Returns:
        ``(start, stop)`` pairs that cover all tokens in order.
    """
    cuts = []
    start = 0
    while start < length:
        most = room if limit is None else limit()
        stop = None if length - start > most else length
        least = start + min(min_tokens, room)
        if stop is None:
            stop = _last_between(sentence_starts, least, start + most)
        if stop is None and most < room:
            stop = _first_between(sentence_starts, max(least, start + most), start + room)
        if stop is None and length - start <= room:
            stop = length
        if stop is None:
            stop = _last_between(word_starts, start + 1, start + room) or start + room
        cuts.append((start, stop))
        start = stop
    return cuts


def _last_between(values: Sequence[int] | np.ndarray, low: int, high: int) -> int | None:
    """Return the largest of the ascending ``values`` within ``low..high``, or None."""
    position = bisect_right(values, high)
    if position and values[position - 1] >= low:
        return int(values[position - 1])
    return None


def _first_between(values: Sequence[int] | np.ndarray, low: int, high: int) -> int | None:
    """Return the smallest of the ascending ``values`` within ``low..high``, or None."""
    position = bisect_left(values, low)
    if position < len(values) and values[position] <= high:
        return int(values[position])
    return None
