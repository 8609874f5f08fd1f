"""Gradient caching equals the whole batch: the reference's numbers, the package on PyPI, dropout replayed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from condenser.corpus.batches import PretrainBatch
from condenser.errors import UserError
from condenser.training.contrastive import span_contrastive_loss
from condenser.training.gradcache import GradCache, cache_gradients, represent, split_input, surrogate
from condenser.training.steps import cached, split_rows
from tests.condenser.reference import TOLERANCE, assert_gradients, reference_model, reference_name
from tests.reference_numbers import golden_json


def cocondenser_batch(golden: Path) -> PretrainBatch:
    return PretrainBatch(**load_file(golden / "cocondenser" / "batch.safetensors"))


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_chunk_size_gives_the_plain_step_of_the_reference(golden: Path, dtype: str, rows: int) -> None:
    expected = golden_json("cocondenser/expected.json")
    model = reference_model(golden, "bert", expected, dtype)
    step = cached(lambda cls, batch: span_contrastive_loss(cls), rows)
    parts = step(model, [cocondenser_batch(golden)], Accelerator(cpu=True))

    cases, tolerance = expected["cases"][dtype], TOLERANCE[dtype]
    for name, value in parts.items():
        assert value.item() == pytest.approx(cases["plain"][f"{name}_loss"], rel=tolerance)
    alone = cases[f"contrastive_only_gradcache_chunk{rows}"]
    assert parts["contrastive"].item() == pytest.approx(alone["loss"], rel=tolerance)
    tensors = load_file(golden / "cocondenser" / "tensors_f64.safetensors") if dtype == "float64" else {}
    exact = {k.removeprefix("plain."): v for k, v in tensors.items() if k.startswith("plain.")}
    assert_gradients(model, cases["plain"]["grad_l2_norms"], exact, tolerance)


@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_references_own_cached_step_counts_the_masked_lm_loss_twice(golden: Path, dtype: str, rows: int) -> None:
    """It sums chunk means weighted by rows over documents; ours differs by just that, and so do its gradients."""
    expected = golden_json("cocondenser/expected.json")
    batch, documents = cocondenser_batch(golden), expected["per_device_train_batch_size"]
    model = reference_model(golden, "bert", expected, dtype)
    parts = cached(lambda cls, batch: span_contrastive_loss(cls), rows)(model, [batch], Accelerator(cpu=True))
    theirs = expected["cases"][dtype][f"reference_training_step_chunk{rows}"]
    chunks = split_rows(batch, rows)
    with torch.no_grad():
        means = [
            (sum(model(c.input_ids, c.attention_mask, c.labels).losses.values()) / c.weight).item() for c in chunks
        ]
    assert means == pytest.approx(theirs["per_chunk_mlm_losses"], rel=TOLERANCE[dtype])
    shares = [len(chunk.input_ids) / documents for chunk in chunks]
    twice = parts["contrastive"].item() + sum(share * mean for share, mean in zip(shares, means, strict=True))
    assert twice == pytest.approx(theirs["returned_loss"], rel=TOLERANCE[dtype])
    assert sum(parts.values()).item() < 0.6 * twice
    if dtype == "float64":
        ours = {reference_name(name): parameter.grad for name, parameter in model.named_parameters()}
        wrong = load_file(golden / "cocondenser" / "tensors_f64.safetensors")
        found = {k: v for k, v in wrong.items() if k.startswith(f"ref_cached_chunk{rows}.")}
        assert found and not any(torch.allclose(v, ours[k.split(".", 1)[1]], rtol=1e-3) for k, v in found.items())


def test_dropout_is_replayed_bit_for_bit(golden: Path) -> None:
    expected = golden_json("cocondenser/expected.json")
    model = reference_model(golden, "bert", expected, "float64")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    chunks = split_rows(cocondenser_batch(golden), 3)
    torch.manual_seed(5)
    first, states = represent(lambda c: model(c.input_ids, c.attention_mask, None).cls, chunks)
    again = []
    for chunk, state in zip(chunks, states, strict=True):
        with state.restored():
            again.append(model(chunk.input_ids, chunk.attention_mask, chunk.labels).cls)
    assert torch.equal(first, torch.cat(again))
    assert not torch.equal(first, torch.cat([model(c.input_ids, c.attention_mask, None).cls for c in chunks]))


def test_chunks_lose_their_padding_and_nothing_else(golden: Path) -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    ids = torch.arange(15).view(3, 5)
    first, second = split_rows(PretrainBatch(ids, mask, ids), 2)
    assert first.input_ids.tolist() == [[0, 1, 2], [5, 6, 7]] and first.attention_mask.tolist() == [
        [1, 1, 1],
        [1, 1, 0],
    ]
    assert second.input_ids.tolist() == [[10, 11, 12, 13, 14]] and second.attention_mask is None


class Tower(nn.Module):
    """Two layers with dropout, called by position, by name or with one tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 4)).double()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        out: Tensor = self.layers(x)
        return out if scale is None else out * scale


@pytest.fixture
def published() -> Iterator[object]:
    """The GradCache package, under the module name that it looks for and does not install."""
    before = {name: sys.modules.get(name) for name in ("grad_cache", "grad_cache.context_managers")}
    package = importlib.import_module("gradcache")
    sys.modules["grad_cache"] = package
    sys.modules["grad_cache.context_managers"] = importlib.import_module("gradcache.context_managers")
    try:
        yield importlib.import_module("gradcache.grad_cache").GradCache
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.__setitem__(name, module)


def in_batch(queries: Tensor, passages: Tensor, temperature: float = 1.0) -> Tensor:
    targets = torch.arange(len(queries)) * (len(passages) // len(queries))
    return nn.functional.cross_entropy(queries @ passages.T / temperature, targets)


def gradients(models: list[nn.Module]) -> list[Tensor]:
    return [parameter.grad for model in models for parameter in model.parameters()]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", [1, 3, [2, 5], [6, 12]])
def test_gradients_equal_the_published_package_with_dropout(published: type, sizes: object, tied: bool) -> None:
    results = []
    inputs = [torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (6, 12)]
    for kind in (GradCache, published):
        first = Tower(1)
        models = [first, first] if tied else [first, Tower(2)]
        torch.manual_seed(3)
        loss = kind(models, sizes, in_batch)(*inputs, temperature=0.5)
        results.append((loss, gradients(models)))
    assert results[0][0].item() == pytest.approx(results[1][0].item(), rel=1e-12)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", ["tensor", "list", "dict", "pair"])
def test_every_form_of_input_equals_the_whole_batch(form: str) -> None:
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    scale = torch.rand(6, 1, dtype=torch.float64)
    wrap = {
        "tensor": lambda a: a,
        "list": lambda a: [a, scale] if len(a) == 6 else [a],
        "dict": lambda a: {"x": a, "scale": scale} if len(a) == 6 else {"x": a},
        "pair": lambda a: ([a], {"scale": scale}) if len(a) == 6 else {"x": a},
    }[form]
    cached_tower, whole_tower = Tower(1).eval(), Tower(1).eval()
    loss = GradCache([cached_tower, cached_tower], [4, 5], in_batch)(wrap(x), wrap(y))
    expected = in_batch(whole_tower(x, None if form == "tensor" else scale), whole_tower(y))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(gradients([cached_tower]), gradients([whole_tower]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_surrogate_of_a_large_half_precision_chunk_is_finite() -> None:
    vectors = torch.full((64, 512), 30.0, dtype=torch.float16)
    assert torch.isfinite(surrogate(vectors, vectors))


def test_a_loss_that_ignores_a_tensor_gives_zeros() -> None:
    a, b = torch.ones(2, 3), torch.ones(4, 3)
    loss, (for_a, for_b) = cache_gradients(lambda x, y: x.sum(), [a, b])
    assert loss.item() == 6 and torch.equal(for_a, torch.ones(2, 3)) and torch.equal(for_b, torch.zeros(4, 3))


def test_what_does_not_fit_together_is_one_line() -> None:
    tower = Tower(1)
    with pytest.raises(UserError, match="2 models but 3 chunk sizes"):
        GradCache([tower, tower], [1, 2, 3], in_batch)
    with pytest.raises(UserError, match="2 models but 1 inputs"):
        GradCache([tower, tower], 2, in_batch)(torch.ones(2, 5))
    with pytest.raises(UserError, match="cannot split an input of kind str"):
        split_input("text", 2)
    with pytest.raises(UserError, match=r"chunk sizes are \[0\], expected at least 1"):
        GradCache([tower], 0, in_batch)
