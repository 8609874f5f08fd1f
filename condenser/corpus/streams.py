"""Texts as parallel streams of tokens, which a recurrent language model reads chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from condenser.corpus.corruption import IGNORED
from condenser.corpus.cutting import Batch, Cutter, CuttingRules
from condenser.corpus.documents import read_documents
from condenser.corpus.tokens import TokenStore, bare_tokenizer
from condenser.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WHOLE = 2**31 - 1
_READ_AT_ONCE = 1000


class TokenDocuments(NamedTuple):
    """Documents' tokens in one array, without special tokens: 4 bytes a token, 8 a document.

    Attributes:
        tokens: int32 (n,).
        ends: int64 (documents + 1,): document i is ``tokens[ends[i] : ends[i + 1]]``.
        words: words that the tokenizer sees in all of them.
    """

    tokens: np.ndarray
    ends: np.ndarray
    words: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 (documents,)."""
        return np.diff(self.ends)

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of one document (from 0)."""
        return self.tokens[self.ends[number] : self.ends[number + 1]]


class TextFrame(NamedTuple):
    """The tokens with which a text begins and ends for a language model, as ids."""

    start: int
    end: int


def text_frame(tokenizer: PreTrainedTokenizerBase) -> TextFrame:
    """Return a tokenizer's first and last token: [CLS] and [SEP], or <s> and </s>.

    Raises:
        UserError: it has neither pair.
    """
    for start, end in (
        (tokenizer.cls_token_id, tokenizer.sep_token_id),
        (tokenizer.bos_token_id, tokenizer.eos_token_id),
    ):
        if start is not None and end is not None:
            return TextFrame(int(start), int(end))
    raise UserError("tokenizer has no tokens with which a text begins and ends", tokenizer.name_or_path)


def stored_documents(store: TokenStore) -> TokenDocuments:
    """Return the documents of a token store, each one's spans joined again."""
    return TokenDocuments(*store.joined())


def read_token_documents(paths: Iterable[str | Path], tokenizer: PreTrainedTokenizerBase) -> TokenDocuments:
    """Read files of documents and tokenize each whole: title and text as one.

    Raises:
        UserError: what `read_documents` refuses; no text in any of them.
    """
    cutter = Cutter(bare_tokenizer(tokenizer).to_str(), CuttingRules(_WHOLE))
    parts, lengths, words = [np.empty(0, np.int32)], [0], 0
    waiting = Batch(0, [])
    for document in chain(read_documents(paths), [None]):
        if document is not None:
            waiting.documents.append(document)
            if len(waiting.documents) < _READ_AT_ONCE:
                continue
        for ids, starts in zip(*cutter(waiting)[0].columns[1:], strict=True):
            parts += [span.values.to_numpy() for span in ids]
            lengths.append(sum(len(span.values) for span in ids))
            words += sum(span.values.true_count for span in starts)
        waiting.documents.clear()
    if len(lengths) == 1:
        raise UserError("no text in the input", ", ".join(map(str, paths)))
    return TokenDocuments(np.concatenate(parts), np.cumsum(lengths), words)


@dataclass(frozen=True)
class StreamBatch:
    """The next tokens of parallel streams.

    Attributes:
        tokens: (streams, length), what is read.
        targets: (streams, length), the token after each; -100 where that is the first token of a text, which
            nobody need foresee.
        resets: (streams, length) bool: what was read before this token is to be forgotten.
    """

    tokens: Tensor
    targets: Tensor
    resets: Tensor

    @property
    def weight(self) -> float:
        """Number of tokens that are asked for."""
        return float((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> StreamBatch:
        """Return a copy on ``device``."""
        return replace(
            self, tokens=self.tokens.to(device), targets=self.targets.to(device), resets=self.resets.to(device)
        )


class Streams:
    """Chunks of parallel streams: a pure function of the seed and the step's number.

    For each epoch all documents, each between its first and last token, are put in a new order one behind the
    other and cut into streams of equal length. A step is the next chunk of every stream; what is left over at the
    end (fewer tokens than streams) comes in another epoch.

    Args:
        documents: what there is to read.
        frame: the tokens around a document.
        streams: how many are read side by side.
        chunk: tokens of each in a step, the last of an epoch may have fewer.
        apart: forget at the beginning of each document what was read before; False forgets only where an epoch
            begins.
        seed: decides the order of the documents.

    Raises:
        UserError: fewer tokens than streams need.
    """

    def __init__(
        self, documents: TokenDocuments, frame: TextFrame, *, streams: int, chunk: int, apart: bool, seed: int
    ) -> None:
        self._documents, self._frame, self._apart, self._seed = documents, frame, apart, seed
        self._streams, self._chunk = streams, chunk
        self.count = len(documents.lengths)
        self.tokens = len(documents.tokens) + 2 * self.count
        self._length = (self.tokens - 1) // streams
        if self._length < 1:
            raise UserError(f"holds {self.tokens:,} tokens, {streams:,} streams need more", hint="lower --batch_size")
        self.steps_per_epoch = -(-self._length // chunk)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __call__(self, step: int) -> list[StreamBatch]:
        """Return the chunk of a step counted from 0, as the one micro-batch of the step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        ids, is_first = self._read(epoch, self._positions(place))
        targets = np.where(is_first[:, 1:], IGNORED, ids[:, 1:])
        resets = is_first[:, :-1] if self._apart else np.zeros_like(is_first[:, :-1])
        if place == 0:
            resets[:, 0] = True
        arrays = (ids[:, :-1], targets, resets)
        return [StreamBatch(*(torch.from_numpy(np.ascontiguousarray(one)) for one in arrays))]

    def names(self, step: int) -> list[str]:
        """Return the documents that a step reads in, by their places in the data from 1."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order, begins = self._order(epoch)
        read = order[np.searchsorted(begins, self._positions(place), side="right") - 1]
        return [f"document {1 + number}" for number in np.unique(read).tolist()]

    def _positions(self, place: int) -> np.ndarray:
        """Return where in an epoch's text a step reads, and one token further: (streams, length + 1)."""
        start = place * self._chunk
        stop = min(start + self._chunk, self._length)
        return np.arange(self._streams)[:, None] * self._length + np.arange(start, stop + 1)

    def _read(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens at these places, int64, and whether each is the first of its document."""
        order, begins = self._order(epoch)
        number = np.searchsorted(begins, positions, side="right") - 1
        document, offset = order[number], positions - begins[number]
        is_last = offset > self._documents.lengths[document]
        inside = np.clip(self._documents.ends[document] + offset - 1, 0, len(self._documents.tokens) - 1)
        ids = self._documents.tokens[inside].astype(np.int64)
        ids[is_last] = self._frame.end
        ids[offset == 0] = self._frame.start
        return ids, offset == 0

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an epoch's order of the documents, and where in its text each of them begins."""
        order = np.random.default_rng([self._seed, epoch]).permutation(self.count)
        framed = self._documents.lengths[order] + 2
        return order, np.cumsum(framed) - framed
