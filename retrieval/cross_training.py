"""Training of a cross-encoder: each query with its positive and its own hard negatives, read pair by pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from condenser.errors import UserError
from condenser.options import is_given
from condenser.talk import say, warn
from condenser.training.distributed import rank, world_size
from condenser.training.steps import Objective, accumulate
from retrieval.batches import Batches, MixedBatches, Order, draw_group, tell_group
from retrieval.collections import Collection
from retrieval.cross_encoder import CrossEncoder, PairTokens
from retrieval.dev import DevRerank
from retrieval.examples import Examples, read_examples
from retrieval.losses import localized_contrastive, pairwise_binary
from retrieval.model_card import write_cross_encoder_card
from retrieval.options import FinetuneOptions
from retrieval.recompute import recompute_model
from retrieval.records import Passage
from retrieval.trainee import Trainee

LOSSES = ("softmax", "binary")

# Tokens whose graph exists at one time. On a CPU more states no longer fit its cache; a GPU is busy with these.
_GRAPH_TOKENS = {"cpu": 2048, "cuda": 16384}
# Options that say something about vectors, or about passages that queries share.
_OF_BI_ENCODERS = (
    "untied", "pooling", "projection", "normalize", "matryoshka", "query_prompt", "passage_prompt", "lora",
    "share_negatives", "graph_memory", "eval_pool", "scores_file",
)  # fmt: skip
_OF_CROSS_ENCODERS = ("dev_run", "dev_depth", "dev_queries")


def check_kind(options: FinetuneOptions) -> None:
    """Refuse options of the other kind of encoder.

    Raises:
        UserError: a cross-encoder with options of bi-encoders or without negatives, or the reverse.
    """
    others = _OF_BI_ENCODERS if options.cross_encoder else _OF_CROSS_ENCODERS
    for name in others:
        if is_given(options, name):
            raise UserError(f"--{name} {'does not go' if options.cross_encoder else 'goes'} with --cross_encoder")
    if options.cross_encoder and options.loss not in LOSSES:
        raise UserError(f"--loss {options.loss} does not go with --cross_encoder", hint=f"losses: {', '.join(LOSSES)}")
    if options.cross_encoder and not options.negatives:
        raise UserError("--cross_encoder needs --negatives: how many of them a query brings; it meets no others")
    if options.loss == "binary" and not options.cross_encoder:
        raise UserError("--loss binary goes with --cross_encoder")


def cross_encoder_trainee(
    options: FinetuneOptions, collections: Sequence[Collection], dev_collection: Collection
) -> Trainee:
    """Load the start and join it with its data.

    Raises:
        UserError: what the start and the collections refuse, or no query with a hard negative.
    """
    cross, fresh = CrossEncoder.start(
        options.encoder,
        query_max_length=options.query_max_length,
        passage_max_length=options.passage_max_length,
        passage_template=options.passage_template,
    )
    if rank() == 0:
        begun = "no classifier of pairs in these weights; a new one is started" if fresh else "going on from its scores"
        say(f"{options.encoder}: {begun}")
    if options.gradient_checkpointing:
        recompute_model(cross.model, cross.source)
    parts: list[Batches] = [_batches_of(options, collection, cross) for collection in collections]
    batches = parts[0]
    if len(parts) > 1:
        batches = MixedBatches(parts, [one.name for one in collections], options.weights, seed=options.seed)
    dev = _dev(options, dev_collection)
    return Trainee(
        model=cross,
        step=accumulate(pair_objective(options.loss, options.temperature)),
        batches=batches,
        against=f"each with its positive and {options.negatives:,} negatives at most",
        score=None if dev is None else partial(dev, cross),
        save=lambda folder: cross.save(folder, card=""),
        write_card=lambda folder, names: write_cross_encoder_card(folder, options, names, cross.config),
        facts=dataclasses.asdict(cross.config),
    )


def _dev(options: FinetuneOptions, collection: Collection) -> Callable[[CrossEncoder], dict[str, float]] | None:
    """Return what judges checkpoints; None without a dev split."""
    if options.dev_split not in collection.splits():
        if options.dev_run is not None:
            raise UserError(f"--dev_run has no judgements: no split {options.dev_split!r}", collection.folder)
        return None
    if rank():  # only the first process judges, and it alone needs an index of the corpus for that
        return lambda cross: {}
    return DevRerank(
        collection,
        options.dev_split,
        run=options.dev_run,
        depth=options.dev_depth,
        queries=options.dev_queries,
        seed=options.seed,
    )


def _batches_of(options: FinetuneOptions, collection: Collection, cross: CrossEncoder) -> GroupBatches:
    examples = read_examples(
        collection,
        options.split,
        with_negatives=True,
        drop_empty=options.drop_empty,
        negatives_files=options.negatives_file,
        negatives_pool=options.negatives_pool,
        seed=options.seed,
    )
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    return GroupBatches(
        _with_negatives(examples, collection),
        collection.lookup(),
        cross,
        batch_size=options.batch_size,
        negatives=options.negatives,
        graph_tokens=options.cache_tokens or _GRAPH_TOKENS["cuda" if on_gpu else "cpu"],
        seed=options.seed,
        rank=rank(),
        world=world_size(),
    )


def _with_negatives(examples: Examples, collection: Collection) -> Examples:
    """Leave out queries that have nothing to be told from."""
    kept = Examples((one for one in examples if one.negatives), examples.name)
    if not len(kept):
        hint = "condenser mine finds some, for --negatives_file"
        raise UserError("no query has a hard negative, which a cross-encoder learns from", collection.folder, hint)
    if len(kept) < len(examples) and rank() == 0:
        warn(f"{examples.name}: left out {len(examples) - len(kept):,} queries without a hard negative")
    return kept


@dataclass(frozen=True)
class GroupBatch:
    """Pairs of some queries with their passages, each query's positive first.

    Attributes:
        tokens: of the pairs.
        targets: (n,) int64, the row of each query's positive among the pairs.
    """

    tokens: PairTokens
    targets: Tensor

    @property
    def weight(self) -> float:
        """Number of queries."""
        return float(len(self.targets))

    @property
    def owners(self) -> Tensor:
        """(pairs,) int64, the row of the query that each pair is of."""
        rows = torch.arange(len(self.tokens.ids), device=self.targets.device)
        return torch.searchsorted(self.targets, rows, right=True) - 1

    def to(self, device: torch.device) -> GroupBatch:
        """Return a copy on ``device``; tokens move when they are read."""
        return dataclasses.replace(self, targets=self.targets.to(device))


class GroupBatches:
    """Batches of queries with one of their positives and some of their hard negatives, drawn anew each epoch.

    A query with fewer hard negatives than asked gives all it has. A step comes in micro-batches of whole groups, so
    that its memory does not depend on how many queries it has; its gradient does not depend on how they are parted.

    Args:
        examples: the training queries, each with a negative.
        passages: by id, at least all positives and negatives of the examples.
        cross: for its tokenizer, template and length limits.
        batch_size: queries per step over all processes.
        negatives: hard negatives per query.
        graph_tokens: tokens of a micro-batch; a larger group is one of its own.
        seed: decides order and choices.
        rank: this process's number.
        world: number of processes.

    Raises:
        UserError: fewer queries than one step needs, or a batch that cannot be shared out evenly.
    """

    def __init__(
        self,
        examples: Examples,
        passages: Mapping[str, Passage],
        cross: CrossEncoder,
        *,
        batch_size: int,
        negatives: int,
        graph_tokens: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._order = Order(len(examples), batch_size, seed, rank, world)
        self._examples, self._passages, self._cross = examples, passages, cross
        self._negatives, self._graph_tokens, self._seed = negatives, graph_tokens, seed
        self.count, self.steps_per_epoch = len(examples), self._order.steps_per_epoch
        if rank == 0:
            tell_group(examples.name, examples.negatives.lengths(), negatives)

    def __call__(self, step: int) -> list[GroupBatch]:
        """Return the step's micro-batches for this process."""
        epoch, examples = step // self.steps_per_epoch, self._examples
        pairs: list[tuple[str, str]] = []
        starts: list[int] = []
        for index in self._order.own(step):
            rows, _ = draw_group(examples, index, self._negatives, [self._seed, epoch, index])
            starts.append(len(pairs))
            passages = (self._passages[examples.passage_ids[row]] for row in rows)
            pairs += [(examples.texts[index], self._cross.passage_text(passage)) for passage in passages]
        tokens = self._cross.tokenize(pairs)
        ends = [*starts[1:], len(pairs)]
        batches = []
        first = held = 0
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            more = sum(map(len, tokens.ids[start:end]))
            if held and held + more > self._graph_tokens:
                batches.append(_part(tokens, starts[first:place], start))
                first, held = place, 0
            held += more
        return [*batches, _part(tokens, starts[first:], len(pairs))]

    def names(self, step: int) -> list[str]:
        """Return the ids of a step's queries, over all processes."""
        return [self._examples.query_ids[index] for index in self._order.whole(step)]


def _part(tokens: PairTokens, starts: Sequence[int], end: int) -> GroupBatch:
    return GroupBatch(tokens.take(range(starts[0], end)), torch.tensor(starts) - starts[0])


def pair_objective(loss: str, temperature: float = 1.0) -> Objective:
    """Return the objective that ``--loss`` names: the mean over all queries of the step.

    Args:
        loss: ``softmax`` (`localized_contrastive`) or ``binary`` (`pairwise_binary`).
        temperature: scores are divided by this.
    """
    loss_of = {"softmax": localized_contrastive, "binary": pairwise_binary}[loss]

    def objective(model: nn.Module, batch: Any, *, share: float, fraction: float) -> dict[str, Tensor]:
        losses = loss_of(model(batch.tokens) / temperature, batch.targets, batch.owners)
        return {loss: losses.sum() * share}

    return objective
