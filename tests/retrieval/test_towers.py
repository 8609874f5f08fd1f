from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from retrieval.batches import PairBatch
from retrieval.encoder import Encoder
from retrieval.losses import loss_named
from retrieval.towers import BiEncoder, cached_step, plain_step, split_batch

QUERIES = ["the cat", "a river bank", "who ran home"]
PASSAGES = [
    "the cat runs to the river bank and a very old bird sees it",
    "dog",
    "a very old bird",
    "the river runs to the bank",
    "he ran home to the old house and the dog ran to him",
    "bird",
]


def batch_of(encoder: Encoder) -> PairBatch:
    return PairBatch(
        queries=encoder.tokenize(QUERIES, "query"),
        passages=encoder.tokenize(PASSAGES, "passage"),
        targets=torch.tensor([0, 2, 4]),
        passage_rows=torch.arange(6),
        positives=torch.tensor([[0], [2], [4]]),
        scores=None,
    )


def biencoder(start: Path, *, dropout: bool = False, **overrides: Any) -> BiEncoder:
    torch.manual_seed(3)
    model = BiEncoder(Encoder.load(start, **overrides)).train(dropout)
    if model.encoder.query_model is not None:  # as after some training
        with torch.no_grad():
            for parameter in model.encoder.query_model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def gradients(model: BiEncoder, step: Callable[..., dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    (loss,) = step(model, [batch_of(model.encoder)], Accelerator(cpu=True)).values()
    return loss, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("untied", [False, True])
def test_vectors_equal_each_text_alone(tiny_bert: Path, pooling: str, untied: bool) -> None:
    model = biencoder(tiny_bert, pooling=pooling, untied=untied, projection=7, normalize=True)
    batch = batch_of(model.encoder)
    seen: list[Tensor] = []

    def loss_of(queries: Tensor, passages: Tensor, _: PairBatch) -> Tensor:
        seen.extend([*queries.detach(), *passages.detach()])
        return queries.sum() + passages.sum()

    plain_step(loss_of)(model, [batch], Accelerator(cpu=True))
    kinds = ["query"] * len(batch.queries) + ["passage"] * len(batch.passages)
    for vector, kind, ids in zip(seen, kinds, batch.queries + batch.passages, strict=True):
        alone = model.encoder(*model.encoder.pad([ids]), kind=kind)[0]
        torch.testing.assert_close(vector, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("cache_tokens", [1, 16, 1000])
@pytest.mark.parametrize("graph_bytes", [0, 1, 200_000, 10**12])
def test_cached_gradients_are_those_of_the_whole_batch(
    tiny_bert: Path, untied: bool, cache_tokens: int, graph_bytes: int
) -> None:
    loss_of = loss_named("softmax", temperature=0.5)
    overrides = {"untied": untied, "pooling": "mean", "normalize": True}
    loss, expected = gradients(biencoder(tiny_bert, **overrides), plain_step(loss_of))
    cached_loss, found = gradients(biencoder(tiny_bert, **overrides), cached_step(loss_of, cache_tokens, graph_bytes))
    torch.testing.assert_close(cached_loss, loss, rtol=1e-6, atol=1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


def test_the_second_forward_pass_is_the_first_one_with_dropout_on(tiny_bert: Path) -> None:
    """A graph kept from the first pass and one made anew give the same bits only if dropout is replayed."""
    loss_of = loss_named("softmax")
    kept = gradients(biencoder(tiny_bert, dropout=True), cached_step(loss_of, 16, 10**12))
    replayed = gradients(biencoder(tiny_bert, dropout=True), cached_step(loss_of, 16, 0))
    other_dropout = gradients(biencoder(tiny_bert, dropout=False), cached_step(loss_of, 16, 0))
    assert torch.equal(kept[0], replayed[0]) and not torch.equal(kept[0], other_dropout[0])
    for name, gradient in kept[1].items():
        assert torch.equal(replayed[1][name], gradient), name


def test_graphs_are_kept_as_far_as_memory_goes(tiny_bert: Path) -> None:
    model = biencoder(tiny_bert)
    chunks = split_batch(batch_of(model.encoder), 16, untied=False)
    passes: list[bool] = []
    model.register_forward_hook(lambda module, inputs, output: passes.append(output.requires_grad))
    counts = {}
    for graph_bytes in (0, 1, 400_000, 10**12):
        passes.clear()
        gradients(model, cached_step(loss_named("softmax"), 16, graph_bytes))
        counts[graph_bytes] = len(passes)
    assert len(chunks) > 3
    assert counts[0] == counts[1] == 2 * len(chunks)
    assert len(chunks) < counts[400_000] < 2 * len(chunks)
    assert counts[10**12] == len(chunks)


def test_the_last_chunks_of_two_towers_are_of_one_kind_each(tiny_bert: Path) -> None:
    batch = batch_of(Encoder.load(tiny_bert))
    chunks = split_batch(batch, 16, untied=True)
    assert [chunk.kind for chunk in chunks[-2:]] == ["passage", "query"]
    assert sorted(row for chunk in chunks for row in chunk.rows) == list(range(9))
    assert all(chunk.kind == ("query" if row < 3 else "passage") for chunk in chunks for row in chunk.rows)
    assert all(chunk.tokens <= 16 or len(chunk.rows) == 1 for chunk in chunks)


def test_every_parameter_that_is_trained_has_a_gradient(tiny_bert: Path) -> None:
    """Case B29."""
    model = biencoder(tiny_bert, untied=True, projection=5)
    _, found = gradients(model, cached_step(loss_named("softmax"), 16))
    assert found.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
