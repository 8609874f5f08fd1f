"""Which queries meet which passages in which step: pure functions of the seed and the step's number."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from condenser.errors import UserError
from condenser.talk import say, warn
from condenser.training.distributed import rank as this_rank
from condenser.training.steps import MicroBatch
from retrieval.encoder import Encoder
from retrieval.examples import Examples
from retrieval.records import Passage, ScoredPair

# Steps within which a mixture keeps its shares to a step.
_MIXED_STEPS = 100


@dataclass(frozen=True)
class PairBatch:
    """Tokens of one step on one process, and which passage answers which query.

    The passages stand in the order of the queries they were drawn for, each query's positive first.

    Attributes:
        queries: token ids of n queries.
        passages: token ids of m passages.
        targets: (n,) int64, the row of each query's positive among the passages.
        passage_rows: (m,) int64, a number for each distinct passage of the training data.
        positives: (n, p) int64, the known positives of each query by these numbers, padded with -1.
        scores: (m,) float32, what a teacher gives each passage for its query; None without a teacher.
    """

    queries: list[list[int]]
    passages: list[list[int]]
    targets: Tensor
    passage_rows: Tensor
    positives: Tensor
    scores: Tensor | None = None

    @property
    def weight(self) -> float:
        """Number of queries."""
        return float(len(self.queries))

    @property
    def owners(self) -> Tensor:
        """(m,) int64, the row of the query that each passage was drawn for."""
        rows = torch.arange(len(self.passage_rows), device=self.targets.device)
        return torch.searchsorted(self.targets, rows, right=True) - 1

    def to(self, device: torch.device) -> PairBatch:
        """Return a copy on ``device``; token ids move when they are padded."""
        return dataclasses.replace(
            self,
            targets=self.targets.to(device),
            passage_rows=self.passage_rows.to(device),
            positives=self.positives.to(device),
            scores=None if self.scores is None else self.scores.to(device),
        )


class Batches(Protocol):
    """Where a run's batches come from; what is the same for one collection and a mixture of several."""

    count: int
    """Queries, or pairs."""
    steps_per_epoch: int

    def __call__(self, step: int) -> Sequence[MicroBatch]:
        """Return the step's micro-batches for this process; those of bi-encoders are one."""
        ...

    def names(self, step: int) -> list[str]:
        """Return the ids of a step's queries, over all processes."""
        ...


class Order:
    """Which examples a step takes: each once per epoch, in an order drawn anew each time.

    Examples left over at an epoch's end come in another one.

    Args:
        count: number of examples.
        batch_size: examples per step over all processes.
        seed: decides the order.
        rank: this process's number.
        world: number of processes.

    Raises:
        UserError: fewer examples than one step needs, or a batch that cannot be shared out evenly.
    """

    def __init__(self, count: int, batch_size: int, seed: int, rank: int, world: int) -> None:
        if batch_size < 1 or batch_size % world:
            raise UserError(f"--batch_size {batch_size} cannot be shared out over {world} processes")
        if count < batch_size:
            raise UserError(f"{count:,} training queries, one step needs {batch_size:,}", hint="lower --batch_size")
        self._count, self._batch_size, self._seed = count, batch_size, seed
        self._rank, self._local = rank, batch_size // world
        self.steps_per_epoch = count // batch_size
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)

    def whole(self, step: int) -> list[int]:
        """Return a step's examples over all processes."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._shuffled(epoch)[place * self._batch_size :][: self._batch_size].tolist()

    def own(self, step: int) -> list[int]:
        """Return a step's examples on this process."""
        return self.whole(step)[self._rank * self._local :][: self._local]

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self._count)


class PairBatches:
    """Batches of queries with one of their positives and some of their hard negatives, drawn anew each epoch.

    A query with fewer hard negatives than asked gives all it has, none twice; the passages of the other
    queries of the step are its negatives anyway.

    Args:
        examples: the training queries.
        passages: by id, at least all positives and negatives of the examples; looked up when a batch is made.
        encoder: for its tokenizer, prompts, template and length limits.
        batch_size: queries per step over all processes.
        negatives: hard negatives per query.
        seed: decides order and choices.
        rank: this process's number.
        world: number of processes.

    Raises:
        UserError: fewer queries than one step needs, a batch that cannot be shared out evenly, or a teacher's
            scores and no negatives.
    """

    def __init__(
        self,
        examples: Examples,
        passages: Mapping[str, Passage],
        encoder: Encoder,
        *,
        batch_size: int,
        negatives: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not negatives and any(examples.negative_scores.lengths()):
            raise UserError("--negatives 0 leaves a teacher nothing to compare", hint="--negatives 1 or more")
        self._order = Order(len(examples), batch_size, seed, rank, world)
        self._examples, self._passages, self._encoder = examples, passages, encoder
        self._negatives, self._seed = negatives, seed
        self.count, self.steps_per_epoch = len(examples), self._order.steps_per_epoch
        if negatives and rank == 0:
            tell_group(examples.name, examples.negatives.lengths(), negatives)

    def __call__(self, step: int) -> list[PairBatch]:
        """Return the step's batch for this process, as the one micro-batch of the step."""
        epoch, chosen = step // self.steps_per_epoch, self._order.own(step)
        examples = self._examples
        targets: list[int] = []
        rows: list[int] = []
        scores: list[float] = []
        for index in chosen:
            targets.append(len(rows))
            its_rows, its_scores = draw_group(examples, index, self._negatives, [self._seed, epoch, index])
            rows += its_rows
            scores += its_scores
        texts = [self._encoder.passage_text(self._passages[examples.passage_ids[row]]) for row in rows]
        return [
            PairBatch(
                queries=self._encoder.tokenize([examples.texts[index] for index in chosen], "query"),
                passages=self._encoder.tokenize(texts, "passage"),
                targets=torch.tensor(targets),
                passage_rows=torch.tensor(rows),
                positives=_padded([examples.positives[index] for index in chosen]),
                scores=torch.tensor(scores) if scores else None,
            )
        ]

    def names(self, step: int) -> list[str]:
        """Return the ids of a step's queries, over all processes."""
        return [self._examples.query_ids[index] for index in self._order.whole(step)]


class ScoredPairBatches:
    """Batches of pairs of texts with the score that their cosine is to have.

    Both texts of a pair are encoded as queries, as `condenser evaluate --sts` encodes them.

    Args:
        pairs: as `read_pairs` gives them.
        encoder: for its tokenizer, prompt and length limit of queries.
        batch_size: pairs per step over all processes.
        seed: decides the order.
        rank: this process's number.
        world: number of processes.

    Raises:
        UserError: fewer pairs than one step needs, or a batch that cannot be shared out evenly.
    """

    def __init__(
        self,
        pairs: Sequence[ScoredPair],
        encoder: Encoder,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._order = Order(len(pairs), batch_size, seed, rank, world)
        self._pairs, self._encoder = pairs, encoder
        self.count, self.steps_per_epoch = len(pairs), self._order.steps_per_epoch

    def __call__(self, step: int) -> list[PairBatch]:
        """Return the step's batch for this process, as the one micro-batch of the step."""
        chosen = self._order.own(step)
        pairs = [self._pairs[index] for index in chosen]
        return [
            PairBatch(
                queries=self._encoder.tokenize([pair.first for pair in pairs], "query"),
                passages=self._encoder.tokenize([pair.second for pair in pairs], "query"),
                targets=torch.arange(len(pairs)),
                passage_rows=torch.tensor(chosen),
                positives=torch.tensor(chosen)[:, None],
                scores=torch.tensor([pair.score for pair in pairs]),
            )
        ]

    def names(self, step: int) -> list[str]:
        """Return a step's pairs, over all processes, by their places in the data from 1."""
        return [f"pair {1 + index}" for index in self._order.whole(step)]


class MixedBatches:
    """Batches of several collections, each step's from one of them, so that in-batch negatives are of one kind.

    In every hundred steps each collection has its share of them, to a step; which steps they are is drawn.

    Args:
        parts: the batches of each collection.
        names: what messages call the collections.
        weights: the share of each in the steps, in any unit; empty: by their numbers of queries, so that all
            end their epochs together.
        seed: decides which step takes which.

    Raises:
        UserError: another number of weights than of collections.
    """

    def __init__(
        self, parts: Sequence[Batches], names: Sequence[str], weights: Sequence[float] = (), *, seed: int
    ) -> None:
        if weights and len(weights) != len(parts):
            raise UserError(f"--weights gives {len(weights)} numbers for {len(parts)} collections")
        self._parts, self._names, self._seed = parts, names, seed
        self.count = sum(part.count for part in parts)
        self.steps_per_epoch = sum(part.steps_per_epoch for part in parts)
        wanted = np.array(weights or [part.count for part in parts], np.float64)
        shares = wanted / wanted.sum()
        self._bounds = np.cumsum(shares)[:-1]
        self._steps_before = [np.zeros(len(parts), np.int64)]  # of each collection, before each block of steps
        self._drawn = lru_cache(maxsize=2)(self._draw)
        if this_rank() == 0:
            say("steps by collection: " + ", ".join(f"{n} {s:.1%}" for n, s in zip(names, shares, strict=True)))

    def __call__(self, step: int) -> Sequence[MicroBatch]:
        """Return the step's micro-batches for this process."""
        part, its_step = self.place(step)
        return self._parts[part](its_step)

    def names(self, step: int) -> list[str]:
        """Return collection and id of each of a step's queries, over all processes."""
        part, its_step = self.place(step)
        return [f"{self._names[part]}: {name}" for name in self._parts[part].names(its_step)]

    def place(self, step: int) -> tuple[int, int]:
        """Return which collection a step takes, and how many steps took it before."""
        block, offset = divmod(step, _MIXED_STEPS)
        while len(self._steps_before) <= block:
            last = self._drawn(len(self._steps_before) - 1)
            self._steps_before.append(self._steps_before[-1] + np.bincount(last, minlength=len(self._parts)))
        drawn = self._drawn(block)
        part = int(drawn[offset])
        return part, int(self._steps_before[block][part] + np.count_nonzero(drawn[:offset] == part))

    def _draw(self, block: int) -> np.ndarray:
        """Return the collection of each step of a block: every hundredth of the shares once, shuffled."""
        rng = np.random.default_rng([self._seed, block])
        hundredths = (np.arange(_MIXED_STEPS) + rng.random()) / _MIXED_STEPS
        return rng.permutation(np.searchsorted(self._bounds, hundredths, side="right"))


def draw_group(examples: Examples, index: int, negatives: int, seed: list[int]) -> tuple[list[int], list[float]]:
    """Return the rows of one of a query's positives and of some of its hard negatives, and a teacher's scores of them.

    A query with fewer hard negatives than asked gives all it has; without a teacher there are no scores.
    """
    rng = np.random.default_rng(seed)
    positives, others = examples.positives[index], examples.negatives[index]
    positive = int(rng.integers(len(positives)))
    chosen = rng.choice(len(others), min(negatives, len(others)), replace=False).tolist()
    rows = [positives[positive], *(others[i] for i in chosen)]
    if not (positive_scores := examples.positive_scores[index]):
        return rows, []
    negative_scores = examples.negative_scores[index]
    return rows, [positive_scores[positive], *(negative_scores[i] for i in chosen)]


def tell_group(name: str, given: np.ndarray, asked: int) -> None:
    """Say how many hard negatives a query brings along, whatever the data holds."""
    if not given.any():
        warn(f"{name}: no hard negatives for --negatives {asked}, so there are in-batch negatives only")
        return
    short = np.count_nonzero(given < asked)
    fewer = f"; {short:,} of {len(given):,} queries have fewer and bring all they have" if short else ""
    say(
        f"{name}: each query brings a positive and {asked} hard negatives, drawn anew each epoch from {given.min():,} "
        f"to {given.max():,} in the data ({given.mean():,.1f} on average){fewer}"
    )


def _padded(rows: Sequence[Iterable[int]]) -> Tensor:
    lists = [torch.tensor(list(row)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-1)
