"""The towers of a training step: a batch's texts in chunks of like length, with or without gradient caching.

Gradient caching (Gao et al. 2021) is in `condenser.training.gradcache`; here it meets texts of their own lengths.
Chunks have a budget of tokens, not of rows, and a chunk whose graph fits into memory is not run a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from condenser.models.half import at_least_float32
from condenser.models.pooling import pool_texts
from condenser.models.unpadded import prepare, states_of_texts
from condenser.training.distributed import world_size
from condenser.training.gradcache import cache_gradients, replay, represent, surrogate
from condenser.training.steps import Step
from retrieval.batches import PairBatch
from retrieval.encoder import Encoder, Kind, batches_by_length
from retrieval.losses import LossOf

# Texts of like length go through a tower together. On a CPU the states of more tokens no longer fit its cache; a GPU
# needs many to have all its parts at work.
_FORWARD_TOKENS = {"cpu": 1024, "cuda": 65536}
_KINDS: tuple[Kind, ...] = ("query", "passage")


class Chunk(NamedTuple):
    """Texts that go through a tower together.

    Attributes:
        kind: which tower.
        rows: their places among the texts of the batch, queries before passages.
        token_ids: their tokens.
    """

    kind: Kind
    rows: list[int]
    token_ids: list[list[int]]

    @property
    def tokens(self) -> int:
        """Tokens of the padded chunk."""
        return len(self.rows) * max(map(len, self.token_ids))


class BiEncoder(nn.Module):
    """The towers of one training step: chunks of token ids in, vectors out.

    Args:
        encoder: one tower for both kinds of text, or two.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self._without_padding = all([prepare(encoder.tower(kind).model) for kind in _KINDS])

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the vectors (n, d) of the chunks' texts, one chunk after the other, with gradients."""
        return torch.cat([self._encode(chunk) for chunk in chunks])

    def _encode(self, chunk: Chunk) -> Tensor:
        encoder = self.encoder
        if not self._without_padding:
            return encoder(*encoder.pad(chunk.token_ids), kind=chunk.kind)
        states = states_of_texts(encoder.tower(chunk.kind).model, chunk.token_ids, encoder.device)
        lengths = torch.tensor([len(ids) for ids in chunk.token_ids], device=encoder.device)
        return encoder.finish(pool_texts(states, lengths, encoder.config.pooling), chunk.kind)


def split_batch(batch: PairBatch, budget: int, *, untied: bool) -> list[Chunk]:
    """Split a batch's texts into chunks of at most ``budget`` padded tokens, longest texts first.

    With one tower, queries and passages share chunks; with two, the last two chunks are of one kind each.
    """
    if not untied:
        return _chunks("passage", batch.queries + batch.passages, 0, budget)
    queries = _chunks("query", batch.queries, 0, budget)
    passages = _chunks("passage", batch.passages, len(batch.queries), budget)
    return [*passages[:-1], *queries[:-1], passages[-1], queries[-1]]


def _chunks(kind: Kind, texts: Sequence[list[int]], first: int, budget: int) -> list[Chunk]:
    groups = batches_by_length([len(ids) for ids in texts], budget)
    return [Chunk(kind, [first + row for row in group], [texts[row] for row in group]) for group in groups]


def plain_step(loss_of: LossOf) -> Step:
    """Return a step whose whole graph is in memory."""

    def step(model: nn.Module, micro_batches: Sequence[Any], accelerator: Accelerator) -> dict[str, Tensor]:
        (batch,) = micro_batches
        batch = batch.to(accelerator.device)
        budget = _FORWARD_TOKENS.get(accelerator.device.type, _FORWARD_TOKENS["cpu"])
        chunks = split_batch(batch, budget, untied=_is_untied(model))
        loss = loss_of(*_in_order(at_least_float32(model(chunks)), chunks, batch), batch)
        accelerator.backward(loss)
        return {"contrastive": loss.detach()}

    return step


def cached_step(loss_of: LossOf, cache_tokens: int, graph_bytes: int = 0) -> Step:
    """Return a step that keeps no more graph than it may; its gradient is that of `plain_step`.

    Args:
        loss_of: see `LossOf`.
        cache_tokens: padded tokens of a chunk: what is run with a graph at one time.
        graph_bytes: as many bytes of graphs are kept from the first forward pass, longest texts first.
            Those chunks need no second one.
    """

    def step(model: nn.Module, micro_batches: Sequence[Any], accelerator: Accelerator) -> dict[str, Tensor]:
        (batch,) = micro_batches
        batch = batch.to(accelerator.device)
        untied = _is_untied(model)
        chunks = split_batch(batch, cache_tokens, untied=untied)
        # Processes exchange gradients in the backward pass of the last unit. Its forward pass must come right before
        # it, with every parameter in its graph: with two towers, the last chunk of each kind.
        units = [[chunk] for chunk in chunks]
        if world_size() > 1:
            last = 2 if untied else 1
            units = [*units[:-last], [chunk for unit in units[-last:] for chunk in unit]]
        graphs = _GraphMemory(graph_bytes)
        kept: list[Tensor | None] = []

        def encode(unit: list[Chunk]) -> Tensor:
            return at_least_float32(model(unit))

        def first_pass(numbered: tuple[int, list[Chunk]]) -> Tensor:
            position, unit = numbered
            exchanges = world_size() > 1 and position == len(units) - 1
            with accelerator.no_sync(model):
                vectors = (
                    encode(unit) if exchanges else graphs.forward(partial(encode, unit), sum(c.tokens for c in unit))
                )
            kept.append(vectors if vectors.requires_grad else None)
            return vectors.detach()

        def pull(numbered: tuple[int, list[Chunk]], gradient: Tensor) -> int:
            position, unit = numbered
            vectors, kept[position] = kept[position], None  # the graph goes now, not at the end of the step
            vectors = encode(unit) if vectors is None else vectors
            accelerator.backward(surrogate(vectors, gradient[: len(vectors)]))
            return len(vectors)

        in_order = list(enumerate(units))
        vectors, states = represent(first_pass, in_order, [accelerator.device])
        loss, (gradient,) = cache_gradients(
            lambda vectors: loss_of(*_in_order(vectors, chunks, batch), batch), [vectors]
        )
        replay(in_order, states, gradient, pull, lambda last: nullcontext() if last else accelerator.no_sync(model))
        return {"contrastive": loss}

    return step


class _GraphMemory:
    """Decides which graphs are kept.

    The bytes of the first chunk, which has the longest texts, are counted; those of the others follow from their
    tokens. Attention makes long texts cost more per token, so that is a bound from above.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._used = 0.0
        self._bytes_per_token: float | None = None

    def forward(self, run: Callable[[], Tensor], tokens: int) -> Tensor:
        """Run a forward pass over so many tokens; the result has a graph if there is room for it."""
        if self._bytes_per_token is None and self._allowed:
            with torch.enable_grad(), _SavedBytes() as saved:
                output = run()
            self._bytes_per_token = saved.total() / tokens
            return output if self._reserve(saved.total()) else output.detach()
        keep = self._bytes_per_token is not None and self._reserve(self._bytes_per_token * tokens)
        with torch.set_grad_enabled(keep):
            return run()

    def _reserve(self, size: float) -> bool:
        fits = self._used + size <= self._allowed
        if fits:
            self._used += size
        return fits


class _SavedBytes:
    """Counts what the forward passes in its block save for their backward passes."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)

    def _count(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_leaf and tensor.requires_grad):  # parameters are there anyway
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def total(self) -> int:
        """Return the bytes so far."""
        return sum(self._storages.values())

    def __enter__(self) -> _SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def _is_untied(model: nn.Module) -> bool:
    towers: Any = getattr(model, "module", model)  # DDP's wrapper has the model in `module`
    return towers.encoder.query_model is not None


def _in_order(vectors: Tensor, chunks: Sequence[Chunk], batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Return the vectors of the queries and of the passages in the batch's order."""
    rows = torch.tensor([row for chunk in chunks for row in chunk.rows], device=vectors.device)
    ordered = torch.empty_like(vectors).index_copy(0, rows, vectors)
    return ordered[: len(batch.queries)], ordered[len(batch.queries) :]
