"""Which spans make up which step: a pure function of the seed and the step's number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from condenser.corpus.corruption import IGNORED, Corrupted, MaskingPolicy, mask_whole_words
from condenser.corpus.tokens import SpanTokens, TokenStore
from condenser.errors import UserError


@dataclass(frozen=True)
class PretrainBatch:
    """Corrupted spans as tensors (rows, length); ``attention_mask`` is None when no row is padded."""

    input_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor

    @property
    def weight(self) -> float:
        """Number of tokens that are asked for."""
        return float((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> PretrainBatch:
        """Return a copy on ``device``."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return PretrainBatch(self.input_ids.to(device), mask, self.labels.to(device))


@dataclass(frozen=True)
class Frame:
    """The special tokens around a span."""

    cls_id: int
    sep_id: int
    pad_id: int


def collate(rows: list[Corrupted], frame: Frame) -> PretrainBatch:
    """Put CLS and SEP around corrupted spans and pad them to the longest."""
    length = max(len(row.ids) for row in rows) + 2
    ids = np.full((len(rows), length), frame.pad_id, np.int64)
    labels = np.full((len(rows), length), IGNORED, np.int64)
    real = np.zeros((len(rows), length), np.int64)
    for i, row in enumerate(rows):
        stop = len(row.ids) + 1
        ids[i, 0], ids[i, 1:stop], ids[i, stop] = frame.cls_id, row.ids, frame.sep_id
        labels[i, 1:stop] = row.labels
        real[i, : stop + 1] = 1
    mask = None if real.all() else torch.from_numpy(real)
    return PretrainBatch(torch.from_numpy(ids), mask, torch.from_numpy(labels))


class SpanBatches:
    """Micro-batches of a step for one process.

    Args:
        store: the corpus.
        pairs: True draws two different spans of each of ``batch_size`` documents (coCondenser),
            False single spans.
        batch_size: examples per step over all processes and micro-batches.
        micro_batches: forward passes per step and process.
        policy: how tokens are masked.
        frame: the special tokens.
        room: tokens of a span that fit beside the special tokens; of a longer one a random window
            is taken, the same for ids and masks.
        seed: with the epoch and the example it decides order, spans, windows and masks.
        rank: this process's number.
        world: number of processes.

    Raises:
        UserError: fewer examples than one step needs, or a batch that cannot be shared out evenly.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        pairs: bool,
        batch_size: int,
        micro_batches: int,
        policy: MaskingPolicy,
        frame: Frame,
        room: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1 or batch_size % (micro_batches * world):
            raise UserError(
                f"--batch_size {batch_size} cannot be shared out over {world} processes x {micro_batches} micro-batches"
            )
        self._store, self._pairs, self._policy, self._frame = store, pairs, policy, frame
        self._batch_size, self._micro, self._room, self._seed = batch_size, micro_batches, room, seed
        self._rank, self._world = rank, world
        self._documents = np.flatnonzero(store.spans_per_document >= 2) if pairs else np.zeros(0, np.int64)
        self.examples = len(self._documents) if pairs else store.span_count
        if self.examples < batch_size:
            kind = "documents with two spans" if pairs else "spans"
            raise UserError(
                f"holds {self.examples:,} {kind}, one step needs {batch_size:,}", store.folder, "lower --batch_size"
            )
        self.steps_per_epoch = self.examples // batch_size
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __call__(self, step: int) -> list[PretrainBatch]:
        """Return this process's micro-batches of a step counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        local = self._batch_size // self._world
        first = place * self._batch_size + self._rank * local
        examples = self._order(epoch)[first : first + local]
        return [
            collate([row for example in part for row in self._rows(epoch, int(example))], self._frame)
            for part in np.split(examples, self._micro)
        ]

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self.examples)

    def _rows(self, epoch: int, example: int) -> list[Corrupted]:
        rng = np.random.default_rng([self._seed, epoch, example])
        if not self._pairs:
            return [self._corrupt(self._store.span_at(example), rng)]
        document = int(self._documents[example])
        chosen = rng.choice(self._store.spans_per_document[document], size=2, replace=False)
        return [self._corrupt(self._store.span(document, int(index)), rng) for index in chosen]

    def _corrupt(self, span: SpanTokens, rng: np.random.Generator) -> Corrupted:
        return mask_whole_words(window(span, self._room, rng), self._policy, rng)


def window(span: SpanTokens, room: int, rng: np.random.Generator) -> SpanTokens:
    """Return at most ``room`` tokens of a span, from a random place when it is longer."""
    excess = len(span.ids) - room
    if excess <= 0:
        return span
    start = int(rng.integers(excess + 1))
    return SpanTokens(span.ids[start : start + room], span.word_starts[start : start + room])
