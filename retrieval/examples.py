"""Training examples of a bi-encoder: which query meets which passages in which step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from condenser.errors import UserError, sample
from condenser.talk import say, warn
from retrieval.collections import Collection
from retrieval.encoder import Encoder
from retrieval.records import Passage


@dataclass(frozen=True)
class Example:
    """One training query with the ids of its known positives and given hard negatives."""

    query_id: str
    text: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]


@dataclass(frozen=True)
class PairBatch:
    """Tokens of one step on one process, and which passage answers which query.

    Attributes:
        queries: token ids of n queries.
        passages: token ids of m passages.
        targets: (n,) int64, the row of each query's positive among the passages.
        passage_rows: (m,) int64, a number for each distinct passage of the training data.
        positives: (n, p) int64, the known positives of each query by these numbers, padded with -1.
    """

    queries: list[list[int]]
    passages: list[list[int]]
    targets: Tensor
    passage_rows: Tensor
    positives: Tensor

    @property
    def weight(self) -> float:
        """Number of queries."""
        return float(len(self.queries))

    def to(self, device: torch.device) -> PairBatch:
        """Return a copy on ``device``; token ids move when they are padded."""
        tensors = (self.targets.to(device), self.passage_rows.to(device), self.positives.to(device))
        return PairBatch(self.queries, self.passages, *tensors)


def read_examples(collection: Collection, split: str, *, with_negatives: bool) -> list[Example]:
    """Join a split's queries, judgements and hard negatives.

    A passage that is judged relevant is dropped from the negatives of its query and counted.

    Raises:
        UserError: no query of the split has a positive.
    """
    qrels = collection.qrels(split)
    negatives = collection.negatives(split) if with_negatives else {}
    examples, without, contradicted = [], [], 0
    for query in collection.queries(split):
        positives = tuple(passage for passage, grade in qrels[query.id].items() if grade > 0)
        if not positives:
            without.append(query.id)
            continue
        given = negatives.get(query.id, [])
        kept = tuple(passage for passage in dict.fromkeys(given) if passage not in positives)
        contradicted += len(set(given)) - len(kept)
        examples.append(Example(query.id, query.text, positives, kept))
    if without:
        warn(f"{len(without):,} queries of {split} have no positive and are left out, such as {sample(without)}")
    if contradicted:
        warn(f"{contradicted:,} hard negatives are judged positives of their query and are left out")
    if not examples:
        raise UserError(f"no query of split {split!r} has a positive", collection.folder)
    return examples


def collect_passages(collection: Collection, wanted: Iterable[str]) -> dict[str, Passage]:
    """Return the wanted passages by id, in the collection's order.

    Raises:
        UserError: some are not in the collection.
    """
    missing = set(wanted)
    found = {}
    for passage in collection.passages():
        if passage.id in missing:
            found[passage.id] = passage
            missing.discard(passage.id)
    if missing:
        raise UserError(
            f"{len(missing):,} judged or given passages are not in the corpus, such as {sample(sorted(missing))}",
            collection.corpus_file,
        )
    return found


class PairBatches:
    """The batch of a step for one process, a pure function of the seed and the step's number.

    Each query comes once per epoch, with one of its positives and up to ``negatives`` of its hard
    negatives, drawn anew each epoch; queries left over at an epoch's end come in another one.

    Args:
        examples: the training queries.
        passages: at least all positives and negatives of the examples.
        encoder: for its tokenizer, prompts, template and length limits.
        batch_size: queries per step over all processes.
        negatives: hard negatives per query.
        seed: decides order and choices.
        rank: this process's number.
        world: number of processes.

    Raises:
        UserError: fewer queries than one step needs, or a batch that cannot be shared out evenly.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        passages: Mapping[str, Passage],
        encoder: Encoder,
        *,
        batch_size: int,
        negatives: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1 or batch_size % world:
            raise UserError(f"--batch_size {batch_size} cannot be shared out over {world} processes")
        if len(examples) < batch_size:
            raise UserError(
                f"{len(examples):,} training queries, one step needs {batch_size:,}", hint="lower --batch_size"
            )
        self._examples, self._passages, self._encoder = examples, passages, encoder
        self._row = {passage_id: row for row, passage_id in enumerate(passages)}
        self._batch_size, self._negatives, self._seed = batch_size, negatives, seed
        self._rank, self._world = rank, world
        self.steps_per_epoch = len(examples) // batch_size
        self._order = lru_cache(maxsize=2)(self._shuffled)
        if negatives:
            short = sum(len(example.negatives) < negatives for example in examples)
            say(f"{negatives} hard negatives asked per query; {short:,} of {len(examples):,} queries have fewer")

    def __call__(self, step: int) -> list[PairBatch]:
        """Return the step's batch for this process, as the one micro-batch of the step."""
        epoch, whole = self._chosen(step)
        local = self._batch_size // self._world
        chosen = whole[self._rank * local :][:local]
        examples = [self._examples[i] for i in chosen]
        ids: list[str] = []
        targets = []
        for index, example in zip(chosen, examples, strict=True):
            rng = np.random.default_rng([self._seed, epoch, index])
            targets.append(len(ids))
            ids.append(example.positives[rng.integers(len(example.positives))])
            count = min(self._negatives, len(example.negatives))
            ids.extend(example.negatives[i] for i in rng.choice(len(example.negatives), count, replace=False))
        return [self._batch(examples, ids, targets)]

    def names(self, step: int) -> list[str]:
        """Return the ids of a step's queries, over all processes."""
        return [self._examples[index].query_id for index in self._chosen(step)[1]]

    def _chosen(self, step: int) -> tuple[int, list[int]]:
        """Return a step's epoch and its examples, over all processes."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch, self._order(epoch)[place * self._batch_size :][: self._batch_size].tolist()

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._examples))

    def _batch(self, examples: Sequence[Example], ids: Sequence[str], targets: Sequence[int]) -> PairBatch:
        most = max(len(example.positives) for example in examples)
        positives = np.full((len(examples), most), -1, np.int64)
        for i, example in enumerate(examples):
            positives[i, : len(example.positives)] = [self._row[passage] for passage in example.positives]
        texts = [self._encoder.passage_text(self._passages[passage]) for passage in ids]
        return PairBatch(
            queries=self._encoder.tokenize([example.text for example in examples], "query"),
            passages=self._encoder.tokenize(texts, "passage"),
            targets=torch.tensor(targets),
            passage_rows=torch.tensor([self._row[passage] for passage in ids]),
            positives=torch.from_numpy(positives),
        )
