"""Two processes against one: losses, gradients and how often they meet."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from condenser.corpus.batches import PretrainBatch
from condenser.objectives.masked_lm import contrastive_losses
from condenser.training.contrastive import span_contrastive_loss
from condenser.training.distributed import gather_with_gradient, rank, total
from condenser.training.steps import accumulate, cached
from tests.condenser.reference import reference_model, reference_name
from tests.reference_numbers import golden_json

SETTINGS = {"n_head_layers": 2, "skip_from": 2, "late_mlm": True}


def run_in_two(work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run ``work(rank, meeting place, *arguments)`` in two processes that train together."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        torch.multiprocessing.spawn(work, (f"{place}/store", *arguments), nprocs=2)


def join(number: int, place: str) -> Accelerator:
    """Meet through a file, which needs no free port, and give up rather than wait for a lost process."""
    # accelerate asks for an address even of processes that have met already
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="unused", MASTER_PORT="1")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}", rank=number, world_size=2, timeout=timedelta(seconds=90)
    )
    return Accelerator(cpu=True)


def leave(accelerator: Accelerator) -> None:
    """End this process when both are done, without taking the group apart.

    Its destructor waits for gloo's thread while it holds Python's lock, which that thread may still want: now and
    then both wait for ever.
    """
    accelerator.wait_for_everyone()
    os._exit(0)


def half(golden: Path, number: int) -> PretrainBatch:
    """Give each process two documents, the first with more masked tokens than the second."""
    batch = load_file(golden / "cocondenser" / "batch.safetensors")
    rows = slice(0, 4) if number == 0 else slice(4, 8)
    return PretrainBatch(**{name: tensor[rows] for name, tensor in batch.items()})


def one_step(number: int, place: str, golden: Path, chunks: tuple[int, int] | None, output: Path) -> None:
    accelerator = join(number, place)
    model = reference_model(golden, "bert", SETTINGS, "float64")
    wrapped = accelerator.prepare(model)
    assert isinstance(wrapped, DistributedDataParallel)
    reductions: list[int] = []

    def count(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        reductions.append(1)
        summed = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return summed.then(lambda future: future.value()[0] / 2)

    wrapped.register_comm_hook(None, lambda state, bucket: count(bucket))  # a string annotation is refused
    loss = span_contrastive_loss
    step = cached(lambda cls, batch: loss(cls), chunks[number]) if chunks else accumulate(contrastive_losses)
    parts = step(wrapped, [half(golden, number)], accelerator)
    expected = golden_json("cocondenser/expected.json")
    for name, value in parts.items():
        wanted = expected["cases"]["float64"]["plain"][f"{name}_loss"]
        assert total(float(value), accelerator.device) / 2 == pytest.approx(wanted, rel=1e-10)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    save_file(gradients | {"reductions": torch.tensor([len(reductions)])}, output / f"{chunks}-{number}.safetensors")
    leave(accelerator)


@pytest.mark.slow
def test_two_processes_equal_the_whole_batch_cached_or_not(golden: Path, tmp_path: Path) -> None:
    """Cases B21, B22, B29: one reduction per bucket, also where one process has two chunks and the other four."""
    whole = reference_model(golden, "bert", SETTINGS, "float64")
    batch = PretrainBatch(**load_file(golden / "cocondenser" / "batch.safetensors"))
    accumulate(contrastive_losses)(whole, [batch], Accelerator(cpu=True))
    counts = {}
    for chunks in (None, (3, 3), (3, 1)):
        run_in_two(one_step, tmp_path, golden, chunks, tmp_path)
        for number in (0, 1):
            found = load_file(tmp_path / f"{chunks}-{number}.safetensors")
            counts[chunks, number] = int(found.pop("reductions"))
            for name, parameter in whole.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-13, msg=f"{chunks} {name}")
    assert len(set(counts.values())) == 1, counts
    reference = load_file(golden / "cocondenser" / "tensors_f64.safetensors")
    ours = {reference_name(name): parameter.grad for name, parameter in whole.named_parameters()}
    for name, gradient in reference.items():
        case, _, parameter = name.partition(".")
        if case == "plain":
            torch.testing.assert_close(ours[parameter], gradient, rtol=1e-10, atol=1e-12)
        elif case.startswith("ddp2_"):  # a mean of the processes' means, and twice when cached
            assert not torch.allclose(ours[parameter], gradient, rtol=1e-3, atol=1e-6), name


def test_the_references_two_processes_weigh_tokens_by_process(golden: Path) -> None:
    """What ours differs from: each process's own mean, and the loss over all spans once per process."""
    expected = golden_json("cocondenser/expected.json")
    theirs, plain = expected["ddp_world2"], expected["cases"]["float64"]["plain"]
    model = reference_model(golden, "bert", SETTINGS, "float64")
    halves = [half(golden, number) for number in (0, 1)]
    means = [(sum(model(b.input_ids, b.attention_mask, b.labels).losses.values()) / b.weight).item() for b in halves]
    assert means == pytest.approx(theirs["mlm_per_rank"], rel=1e-10)
    for number, mean in enumerate(means):
        assert theirs["plain"][f"loss_rank{number}"] == pytest.approx(mean + 2 * theirs["contrastive_full"], rel=1e-10)
    assert theirs["contrastive_full"] == pytest.approx(plain["contrastive_loss"], rel=1e-10)
    assert abs(sum(means) / 2 - (plain["head_mlm_loss"] + plain["late_mlm_loss"])) > 1e-3


def uneven(number: int, place: str) -> None:
    accelerator = join(number, place)
    own = torch.full((1 + 2 * number, 2), float(number + 1), requires_grad=True)
    rows = gather_with_gradient(own)
    assert rows[:, 0].tolist() == [1, 2, 2, 2] and rank() == number
    rows.sum().backward()
    assert torch.equal(own.grad, torch.ones_like(own))
    leave(accelerator)


@pytest.mark.slow
def test_processes_may_hold_different_numbers_of_rows(tmp_path: Path) -> None:
    run_in_two(uneven, tmp_path)


def test_one_process_needs_no_gathering() -> None:
    vectors = torch.randn(3, 2, requires_grad=True)
    assert gather_with_gradient(vectors) is vectors
    assert total(2.5, torch.device("cpu")) == 2.5
