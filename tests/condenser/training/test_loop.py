"""The loop itself, on a model of two numbers: signals, a disk too small, checkpoints none of which is sound."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from condenser.artifacts import Workspace
from condenser.errors import RunFailed, UserError
from condenser.training import loop
from condenser.training.checkpoint import save_checkpoint
from condenser.training.loop import LoopSettings, start_accelerator, train
from condenser.training.steps import accumulate

SETTINGS = LoopSettings(
    max_steps=6, learning_rate=0.1, warmup_ratio=0.0, weight_decay=0.0, max_grad_norm=1.0, seed=1, mixed_precision="no",
    device="cpu", log_every=1, save_every=2, keep_checkpoints=2,
)  # fmt: skip


@dataclass
class Batch:
    """One number to come near to."""

    wanted: Tensor
    weight: float = 1.0

    def to(self, device: torch.device) -> Batch:
        return self


class Batches:
    """A batch source: the step's own number."""

    def __call__(self, step: int) -> list[Batch]:
        return [Batch(torch.tensor([float(step)]))]

    def names(self, step: int) -> list[str]:
        return [str(step)]


def distance(model: nn.Module, batch: Batch, *, share: float, fraction: float) -> dict[str, Tensor]:
    return {"distance": (model(torch.ones(1)) - batch.wanted).square().sum() * share}


def run(output: Path) -> Path:
    """Train from the same start each time; return the finished folder."""
    torch.manual_seed(0)
    model, accelerator = nn.Linear(1, 1), start_accelerator(SETTINGS)
    with Workspace(output, "pretrained", config={}, inputs={}, resumable=True) as workspace:
        train(model, accumulate(distance), Batches(), SETTINGS, accelerator, workspace)
        save_file(model.state_dict(), workspace.path / "model.safetensors")
        workspace.commit({})
    return output


def checkpoints(output: Path) -> list[str]:
    folder = output.with_name(f"{output.name}.partial") / ".work" / "checkpoints"
    return sorted(path.name for path in folder.glob("*"))


def at_step(wanted: int, act: Callable[[], object]) -> Callable[[str], None]:
    """Make a fault point that acts when a step is done for the n-th time."""
    done = 0

    def fault_point(name: str) -> None:
        nonlocal done
        done += name == "step-done"
        if done == wanted and name == "step-done":
            act()

    return fault_point


@pytest.mark.parametrize(
    ("number", "error", "status"), [(signal.SIGTERM, SystemExit, (143,)), (signal.SIGINT, KeyboardInterrupt, ())]
)
def test_a_signal_saves_after_the_step_and_the_run_goes_on_to_the_same_bytes(
    number: int, error: type[BaseException], status: tuple[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Case R34."""
    straight, before = run(tmp_path / "straight"), signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "fault_point", at_step(3, lambda: os.kill(os.getpid(), number)))
        with pytest.raises(error) as caught:
            run(tmp_path / "out")
    assert caught.value.args == status and signal.getsignal(number) is before
    assert checkpoints(tmp_path / "out") == ["step-00000002", "step-00000003"]
    run(tmp_path / "out")
    said = capsys.readouterr().err
    assert "stopped after step 3; the same command goes on from there" in said and "going on after step 3 of 6" in said
    for name in ("model.safetensors", "log.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (straight / name).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case R34: without a checkpoint of the step it came in."""

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), number)

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(loop, "fault_point", at_step(3, twice))
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        run(tmp_path / "out")
    assert checkpoints(tmp_path / "out") == ["step-00000002"]


def test_what_a_launcher_hands_on_is_no_second_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = loop._Stop()
    monkeypatch.setattr(loop, "world_size", lambda: 2)
    stop._ask(signal.SIGINT, None)
    stop._ask(signal.SIGTERM, None)
    assert stop.signal == signal.SIGINT
    stop._asked_at -= 2
    with pytest.raises(KeyboardInterrupt):
        stop._ask(signal.SIGINT, None)


def test_a_disk_too_small_is_told_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case R39: two numbers of four bytes, with two moments each in three checkpoints, and once more at the end."""
    wanted = 2 * 4 * (3 * 3 + 1)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=wanted - 1))
    with pytest.raises(RunFailed, match=r"checkpoints and weights need 0\.0 GB, 0\.0 GB are free \(free some, or"):
        run(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=wanted))
    run(tmp_path / "out")


def test_checkpoints_none_of_which_is_sound_are_no_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R37: never from the first step again without a word."""

    def stop() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(loop, "fault_point", at_step(5, stop))
        run(tmp_path / "out")
    folder = tmp_path / "out.partial" / ".work" / "checkpoints"
    assert checkpoints(tmp_path / "out") == ["step-00000002", "step-00000004"]
    (folder / "step-00000002" / "manifest.json").unlink()
    (folder / "step-00000004" / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        run(tmp_path / "out")
    assert str(caught.value) == f"{folder}: no checkpoint here is sound (remove the folder to start over)"
    assert capsys.readouterr().err.count("checkpoint passed over") == 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_is_no_choice_on_a_cpu_that_is_slow_at_it(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case R29: said, not passed over in silence."""
    monkeypatch.setattr("condenser.training.loop.cpu_multiplies_bfloat16", lambda: False)
    with pytest.raises(UserError, match=f"--mixed_precision {precision} needs a GPU; .*use --mixed_precision no"):
        start_accelerator(replace(SETTINGS, mixed_precision=precision))


def test_a_later_stage_of_a_process_has_the_precision_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("condenser.training.loop.cpu_multiplies_bfloat16", lambda: True)
    for precision in ("no", "bf16", "no"):
        assert start_accelerator(replace(SETTINGS, mixed_precision=precision)).mixed_precision == precision


def test_a_damaged_checkpoint_that_was_passed_over_does_not_take_the_place_of_a_sound_one(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, model, optimizer, {}, {"step": step}, keep=2)
    (tmp_path / "step-00000006" / "model.safetensors").write_bytes(b"")
    save_checkpoint(tmp_path, 5, model, optimizer, {}, {"step": 5}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
