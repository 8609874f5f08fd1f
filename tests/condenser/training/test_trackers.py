"""What reaches a tracker is what the log says, and the pace; the log itself does not change by it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn

from condenser.artifacts import Workspace
from condenser.errors import UserError
from condenser.training import loop, trackers
from condenser.training.loop import BatchSource, Evaluation, LoopSettings, start_accelerator, train
from condenser.training.steps import accumulate
from condenser.training.trackers import Pace, idle_gpus
from tests.condenser.training.test_loop import SETTINGS, Batches, distance

TRACKED = replace(SETTINGS, batch_size=8, unit="queries")


class Recorder(GeneralTracker):
    """A tracker that keeps what it is given."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self.finished = False

    @property
    def tracker(self) -> list[dict[str, Any]]:
        return self.lines

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.lines.append({"step": step, **values})

    def finish(self) -> None:
        self.finished = True


def run(output: Path, accelerator: Accelerator, settings: LoopSettings = TRACKED) -> list[dict[str, Any]]:
    """Train a model of two numbers with dev scores on the way; return the log."""
    torch.manual_seed(0)
    evaluation = Evaluation(every=3, score=lambda: {"dev": 0.5, "other": 0.25}, save=lambda folder: None)
    batches: BatchSource = Batches()
    with Workspace(output, "pretrained", config={}, inputs={}, resumable=True) as workspace:
        train(nn.Linear(1, 1), accumulate(distance), batches, settings, accelerator, workspace, evaluation=evaluation)
        timing = [json.loads(line) for line in (workspace.scratch / "timing.jsonl").read_text().splitlines()]
        workspace.commit({})
    paced = [line["step"] for line in timing if line.get("queries_per_second", 0) > 0]
    assert paced == [1, 2, 3, 4, 5, 6], "with each line of a training step"
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_a_tracker_has_the_lines_of_the_log_and_the_pace(tmp_path: Path) -> None:
    recorder = Recorder()
    log = run(tmp_path / "tracked", Accelerator(cpu=True, log_with=[recorder]))
    assert [line["step"] for line in log if "dev" in line] == [3, 6]
    assert {"loss", "distance", "grad_norm", "lr"} <= log[0].keys()
    rates = [line.pop("queries_per_second") for line in recorder.lines if "loss" in line]
    assert len(rates) == 6 and all(rate > 0 for rate in rates)
    assert recorder.lines == log
    assert recorder.settings == asdict(TRACKED)
    assert recorder.finished


def test_the_log_is_the_same_without_a_tracker(tmp_path: Path) -> None:
    run(tmp_path / "tracked", Accelerator(cpu=True, log_with=[Recorder()]))
    run(tmp_path / "plain", start_accelerator(TRACKED))
    assert (tmp_path / "tracked" / "log.jsonl").read_bytes() == (tmp_path / "plain" / "log.jsonl").read_bytes()


def test_a_tracker_is_told_of_the_end_of_a_run_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    def stop(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "fault_point", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", Accelerator(cpu=True, log_with=[recorder]))
    assert recorder.finished


def test_tensorboard_has_the_lines_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = replace(TRACKED, tracker="tensorboard", output=str(tmp_path / "out"))
    log = run(tmp_path / "out", start_accelerator(settings), settings)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "out")).Reload()
    for name in ("loss", "distance", "grad_norm", "lr", "dev"):
        sent = [(event.step, event.value) for event in events.Scalars(name)]
        assert sent == [(line["step"], pytest.approx(line[name])) for line in log if name in line]
    assert len(events.Scalars("queries_per_second")) == 6


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_one_line() -> None:
    with pytest.raises(UserError) as caught:
        start_accelerator(replace(SETTINGS, tracker="wandb", output="out"))
    assert str(caught.value) == (
        '--tracker wandb: the package wandb is not installed (pip install "condenser-ir[trackers]")'
    )


def test_pace_counts_the_time_of_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0.0, 2.0, 10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(trackers.time, "monotonic", lambda: next(clock))
    pace = Pace(8)
    pace.pause()
    pace.go_on()
    pace.pause()
    assert pace.take() == 2 * 8 / 4
    pace.go_on()
    pace.pause()
    assert pace.take() == 8


def test_gpus_that_stand_idle_are_said() -> None:
    """Case B30: no launcher, one process, one GPU in use."""
    assert idle_gpus(1, 1) is None
    assert idle_gpus(2, 2) is None
    line = idle_gpus(2, 1)
    assert line is not None and line.startswith("2 GPUs are visible and one is used; torchrun --nproc_per_node 2 ")
