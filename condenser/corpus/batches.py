"""Which spans make up which step: a pure function of the seed and the step's number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from condenser.corpus.corruption import IGNORED, Corrupted, MaskingPolicy, corrupt
from condenser.corpus.tokens import FRAME_TOKENS, SpanTokens, TokenStore
from condenser.errors import UserError


@dataclass(frozen=True)
class PretrainBatch:
    """Corrupted spans as tensors (rows, length).

    Attributes:
        input_ids: CLS, corrupted tokens, SEP, padding.
        attention_mask: 1 on tokens; None when no row is padded.
        labels: -100 where nothing is asked.
        paired_rows: the first rows 2k and 2k+1 are two spans of one document, up to this number;
            later rows have no partner. None: all rows are paired.
        pair_share: this micro-batch's part of the step's pairs, over all processes.
        seeds: one for each row, of what a generator draws there.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor
    paired_rows: int | None = None
    pair_share: float = 1.0
    seeds: tuple[int, ...] = ()

    @property
    def weight(self) -> float:
        """Number of tokens that are asked for."""
        return float((self.labels != IGNORED).sum())

    @property
    def tokens(self) -> int:
        """Number of tokens, CLS and SEP among them."""
        return int(self.input_ids.numel() if self.attention_mask is None else self.attention_mask.sum())

    def to(self, device: torch.device) -> PretrainBatch:
        """Return a copy on ``device``."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return replace(self, input_ids=self.input_ids.to(device), attention_mask=mask, labels=self.labels.to(device))


@dataclass(frozen=True)
class Frame:
    """The special tokens around a span."""

    cls_id: int
    sep_id: int
    pad_id: int


def collate(rows: list[Corrupted], frame: Frame) -> PretrainBatch:
    """Put CLS and SEP around corrupted spans and pad them to the longest."""
    length = max(len(row.ids) for row in rows) + FRAME_TOKENS
    ids = np.full((len(rows), length), frame.pad_id, np.int64)
    labels = np.full((len(rows), length), IGNORED, np.int64)
    real = np.zeros((len(rows), length), np.int64)
    for i, row in enumerate(rows):
        stop = len(row.ids) + 1
        ids[i, 0], ids[i, 1:stop], ids[i, stop] = frame.cls_id, row.ids, frame.sep_id
        labels[i, 1:stop] = row.labels
        real[i, : stop + 1] = 1
    mask = None if real.all() else torch.from_numpy(real)
    seeds = tuple(row.seed for row in rows)
    return PretrainBatch(torch.from_numpy(ids), mask, torch.from_numpy(labels), seeds=seeds)


class SpanBatches:
    """Micro-batches of a step for one process.

    Args:
        store: the corpus.
        pairs: True takes ``batch_size`` documents per step (coCondenser): two different spans of each,
            or the only one, which serves the masked-LM losses alone; False takes single spans.
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
        UserError: fewer examples than one step needs, no document with two spans for pairs, or a batch
            that cannot be shared out evenly.
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
        self.examples = len(store) if pairs else store.span_count
        if pairs and not self._has_two(np.arange(len(store))).any():
            raise UserError(
                "holds no document with two spans, which contrastive objectives need",
                store.folder,
                "build the spans with a smaller --max_length, or pretrain with --objective condenser",
            )
        if self.examples < batch_size:
            kind = "documents" if pairs else "spans"
            raise UserError(
                f"holds {self.examples:,} {kind}, one step needs {batch_size:,}", store.folder, "lower --batch_size"
            )
        self.steps_per_epoch = self.examples // batch_size
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def describe(self) -> str:
        """Say what there is to draw from, and what is not used whole."""
        kind = "documents" if self._pairs else "spans"
        parts = [f"{self.examples:,} {kind}"]
        if self._pairs:
            alone = int((~self._has_two(np.arange(self.examples))).sum())
            parts.append(f"{alone:,} of them with one span, for the MLM losses only")
            parts.append(f"up to {2 * (self._batch_size // self._micro - 1):,} negatives per span")
        if left := self.examples % self._batch_size:
            parts.append(f"{left:,} {kind} left over in each epoch, others each time")
        longer = self._store.spans_longer_than(self._room)
        if longer:
            share = 100 * longer / self._store.span_count
            parts.append(f"{longer:,} spans ({share:.1f} %) longer than {self._room} tokens, read through a window")
        return "; ".join(parts)

    def __call__(self, step: int) -> list[PretrainBatch]:
        """Return this process's micro-batches of a step counted from 0."""
        epoch, examples = self._examples(step)
        if not self._pairs:
            own = examples.reshape(self._world, self._micro, -1)[self._rank]
            return [collate([self._span(epoch, int(example)) for example in part], self._frame) for part in own]
        documents = examples.reshape(self._world, self._micro, -1)
        paired = self._has_two(documents)
        shares = paired.sum(axis=(0, 2)) / max(1, paired.sum())
        own = zip(documents[self._rank], paired[self._rank], shares.tolist(), strict=True)
        return [self._micro_batch(epoch, part, has_two, share) for part, has_two, share in own]

    def names(self, step: int) -> list[str]:
        """Return the ids of the documents that a step draws from, over all processes."""
        _, examples = self._examples(step)
        documents = examples if self._pairs else [self._store.document_of(int(position)) for position in examples]
        return [self._store.name(int(document)) for document in documents]

    def _examples(self, step: int) -> tuple[int, np.ndarray]:
        """Return a step's epoch and its documents (or positions of spans), over all processes."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch, self._order(epoch)[place * self._batch_size :][: self._batch_size]

    def _has_two(self, documents: np.ndarray) -> np.ndarray:
        return self._store.spans_per_document[documents] >= 2

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self.examples)

    def _span(self, epoch: int, example: int) -> Corrupted:
        return self._corrupt(self._store.span_at(example), np.random.default_rng([self._seed, epoch, example]))

    def _micro_batch(self, epoch: int, documents: np.ndarray, has_two: np.ndarray, share: float) -> PretrainBatch:
        """Take two spans of the documents that have them, and behind these one span of the others."""
        in_order = np.concatenate([documents[has_two], documents[~has_two]]).tolist()
        rows = [row for document in in_order for row in self._spans_of(epoch, document)]
        return replace(collate(rows, self._frame), paired_rows=2 * int(has_two.sum()), pair_share=share)

    def _spans_of(self, epoch: int, document: int) -> list[Corrupted]:
        rng = np.random.default_rng([self._seed, epoch, document])
        count = int(self._store.spans_per_document[document])
        chosen = rng.choice(count, size=min(2, count), replace=False)
        return [self._corrupt(self._store.span(document, int(index)), rng) for index in chosen]

    def _corrupt(self, span: SpanTokens, rng: np.random.Generator) -> Corrupted:
        return corrupt(window(span, self._room, rng), self._policy, rng)


def window(span: SpanTokens, room: int, rng: np.random.Generator) -> SpanTokens:
    """Return at most ``room`` tokens of a span, from a random place when it is longer."""
    excess = len(span.ids) - room
    if excess <= 0:
        return span
    start = int(rng.integers(excess + 1))
    return SpanTokens(span.ids[start : start + room], span.word_starts[start : start + room])
