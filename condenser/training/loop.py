"""The training loop of every objective: one step after another, byte for byte the same after a kill."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import orjson
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from condenser.artifacts import Workspace
from condenser.errors import RunFailed, UserError
from condenser.faults import fault_point
from condenser.files import write_json
from condenser.models.half import cpu_multiplies_bfloat16
from condenser.talk import Meter, say, warn
from condenser.training.checkpoint import (
    load_checkpoint,
    random_states,
    remove_drafts,
    require_space,
    save_checkpoint,
    truncate,
)
from condenser.training.distributed import rank, total, world_size
from condenser.training.settings import LoopSettings
from condenser.training.steps import MicroBatch, Step
from condenser.training.trackers import Pace, idle_gpus, tracked, tracker_settings

_BEST = "best"
# float16 begins with steps that overflow until the loss scale has come down
_BAD_STEPS_ALLOWED = {"no": 2, "bf16": 2, "fp16": 20}
_HANDED_ON_SECONDS = 1.0
# The first process takes dev scores and writes checkpoints alone, over a whole corpus perhaps; NCCL would wait for ten
# minutes.
_LONGEST_WAIT = timedelta(hours=6)


@dataclass
class Evaluation:
    """Dev scores taken while training, by name; the weights with the best first one are kept in ``best/``."""

    every: int
    score: Callable[[], dict[str, float]]
    save: Callable[[Path], None]


class BatchSource(Protocol):
    """Where a run's batches come from: pure functions of the step's number (from 0)."""

    def __call__(self, step: int) -> Sequence[MicroBatch]:
        """Return this process's micro-batches."""
        ...

    def names(self, step: int) -> list[str]:
        """Return the ids of the step's examples, to look at when numbers run away."""
        ...


class _Steps(Dataset[list[Any]]):
    """The micro-batches of each step, made by a pure function of its number."""

    def __init__(self, batches: BatchSource, count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int) -> list[Any]:
        return list(self._batches(step))


def start_accelerator(settings: LoopSettings) -> Accelerator:
    """Return the accelerator for a run.

    Raises:
        UserError: CUDA asked for and absent, half precision on a CPU that is slow at it, or a tracker that is
            not installed.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no usable CUDA device", hint="leave --device at auto")
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    asked = settings.mixed_precision
    if on_cpu and (asked == "fp16" or (asked == "bf16" and not cpu_multiplies_bfloat16())):
        raise UserError(
            f"--mixed_precision {asked} needs a GPU; on this CPU it is many times slower than float32",
            hint="use --mixed_precision no",
        )
    if PartialState._shared_state and PartialState().num_processes == 1:
        # What the library keeps for the whole Python process is that of an earlier stage in it.
        AcceleratorState._reset_state(reset_partial_state=True)
    trackers = tracker_settings(settings.tracker, settings.output)
    patience = InitProcessGroupKwargs(timeout=_LONGEST_WAIT)
    accelerator = Accelerator(
        cpu=on_cpu, mixed_precision=settings.mixed_precision, kwargs_handlers=[patience], **trackers
    )
    idle = None if on_cpu else idle_gpus(torch.cuda.device_count(), accelerator.num_processes)
    if idle:
        say(idle)
    return accelerator


def train(
    model: nn.Module,
    run_step: Step,
    batches: BatchSource,
    settings: LoopSettings,
    accelerator: Accelerator,
    workspace: Workspace,
    *,
    new_parameters: Sequence[nn.Parameter] = (),
    evaluation: Evaluation | None = None,
) -> None:
    """Train ``model`` in place, going on from the newest checkpoint of the workspace.

    Writes ``log.jsonl`` (one line per ``log_every`` steps, the same bytes for the same run), and
    into the scratch folder ``timing.jsonl`` (wall-clock figures), ``checkpoints/`` and ``best/``.

    Args:
        model: the module; moved to the accelerator's device.
        run_step: forward and backward of one step, see `condenser.training.steps`.
        batches: this process's micro-batches by step; a resumed run needs only its position.
        settings: see `LoopSettings`.
        accelerator: from `start_accelerator`.
        workspace: the run's artifact.
        new_parameters: those that learn alone during ``head_warmup_steps``.
        evaluation: a dev score to take on the way and after the last step.

    Raises:
        RunFailed: three steps in a row without a finite gradient (``bad-batch.json`` names their
            examples), GPU memory that ran out, or a disk too small for the checkpoints.
        SystemExit: 143, after SIGTERM, with a checkpoint written.
        KeyboardInterrupt: after Ctrl-C, with a checkpoint written.
    """
    plain_model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(
        _parameter_groups(plain_model, settings.weight_decay, new_parameters),
        lr=settings.learning_rate,
        fused=True,
    )
    if settings.compile:
        plain_model.compile(dynamic=True)
    torch.manual_seed(settings.seed * 1_000_003 + rank())
    checkpoints, best = workspace.scratch / "checkpoints", workspace.scratch / _BEST
    logs = workspace.path / "log.jsonl", workspace.scratch / "timing.jsonl"
    if accelerator.is_main_process:
        remove_drafts(checkpoints)
        # those that are kept and the one being written; SIGTERM may ask for one in any run
        at_once = min(settings.keep_checkpoints + 1, max(1, settings.max_steps // settings.save_every))
        require_space(checkpoints, plain_model, at_once)
    state = load_checkpoint(checkpoints, plain_model, optimizer) or {
        "step": 0, "log_bytes": 0, "best_score": None, "best_step": None, "bad_steps": 0,
    }  # fmt: skip
    if state["step"]:
        say(f"going on after step {state['step']:,} of {settings.max_steps:,}")
    if accelerator.is_main_process:
        truncate(logs[0], state["log_bytes"])
    if accelerator.scaler is not None and "scaler" in state:
        accelerator.scaler.load_state_dict(state["scaler"])
    wrapped, prepared = accelerator.prepare(plain_model, optimizer)
    steps = DataLoader(
        _Steps(batches, settings.max_steps),
        batch_size=None,
        sampler=range(state["step"], settings.max_steps),
        num_workers=settings.workers,
        worker_init_fn=_leave_signals_to_the_parent,
        generator=torch.Generator(),  # without one, the loader draws from the state that dropout is replayed from
    )
    wrapped.train()
    meter = Meter(workspace.output.name, settings.max_steps, "steps", start=state["step"],
                  quiet=not accelerator.is_main_process)  # fmt: skip
    pace = Pace(settings.batch_size)
    with _Stop() as stop, meter, tracked(accelerator, workspace.output, asdict(settings), state["step"]):
        for step, micro_batches in enumerate(steps, start=state["step"]):
            rate = learning_rate_at(step, settings)
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if step < settings.head_warmup_steps and not group["new"] else rate
            with _explained_memory(step):
                losses = run_step(wrapped, micro_batches, accelerator)
            norm = float(accelerator.clip_grad_norm_(wrapped.parameters(), settings.max_grad_norm))
            sound = math.isfinite(norm)
            if sound or accelerator.scaler is not None:  # the scaler skips the step itself, and learns from it
                with _explained_memory(step):  # the first one makes room for AdamW's moments
                    prepared.step()
            state["bad_steps"] = 0 if sound else state["bad_steps"] + 1
            if not sound:
                warn(f"step {step + 1}: gradient norm is {norm} ({_in_words(losses)}); the step is not applied")
            if state["bad_steps"] > _BAD_STEPS_ALLOWED[settings.mixed_precision]:
                raise _diverged(step, state["bad_steps"], losses, rate, batches, workspace)
            prepared.zero_grad()
            pace.pause()
            state["step"] = step + 1
            if state["step"] % settings.log_every == 0 or state["step"] == settings.max_steps:
                line = {"step": state["step"], **_averaged(losses, accelerator), "grad_norm": norm, "lr": rate}
                rate_in_units = pace.take()
                _write_log(logs, line, state, accelerator, {f"{settings.unit}_per_second": rate_in_units})
                meter.note = f"loss {line['loss']:.3f}, {rate_in_units:,.1f} {settings.unit}/s"
            meter.advance()
            if evaluation and (state["step"] % evaluation.every == 0 or state["step"] == settings.max_steps):
                _evaluate(evaluation, state, logs, best, accelerator)
                wrapped.train()
            fault_point("step-done")
            # a signal may reach the processes in different steps, and all must save the same one
            asked_to_stop = total(stop.signal, accelerator.device) > 0
            if state["step"] % settings.save_every == 0 or asked_to_stop:
                _save(checkpoints, plain_model, optimizer, state, settings, accelerator)
            if asked_to_stop:
                if accelerator.is_main_process:
                    say(f"stopped after step {state['step']:,}; the same command goes on from there")
                raise KeyboardInterrupt if stop.signal == signal.SIGINT else SystemExit(143)
            pace.go_on()
    accelerator.free_memory()


def write_weights(workspace: Workspace, save: Callable[[Path], None]) -> None:
    """Put weights into the folder of a run that `train` has ended: those of the best dev score, else the last.

    Args:
        workspace: the run's artifact.
        save: writes the last ones into a folder.
    """
    best = workspace.scratch / _BEST
    if best.is_dir():
        shutil.copytree(best, workspace.path, dirs_exist_ok=True)
    else:
        save(workspace.path)


def learning_rate_at(step: int, settings: LoopSettings) -> float:
    """Return the rate of a step (from 0): a linear rise over the warm-up, then a linear fall to zero."""
    warmup = max(1, round(settings.max_steps * settings.warmup_ratio))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * (settings.max_steps - step) / max(1, settings.max_steps - warmup)


def _parameter_groups(
    model: nn.Module, weight_decay: float, new_parameters: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """Group parameters by whether they decay (matrices do, biases and norms do not) and whether they are new."""
    new = {id(parameter) for parameter in new_parameters}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim > 1, id(parameter) in new), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "new": is_new}
        for (decays, is_new), parameters in groups.items()
    ]


def _averaged(losses: dict[str, Tensor], accelerator: Accelerator) -> dict[str, float]:
    values = {name: total(float(loss), accelerator.device) / world_size() for name, loss in losses.items()}
    return {"loss": sum(values.values()), **values}


def _in_words(losses: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {float(loss):.4g}" for name, loss in losses.items())


def _diverged(
    step: int, in_a_row: int, losses: dict[str, Tensor], rate: float, batches: BatchSource, workspace: Workspace
) -> RunFailed:
    """Write down which examples the last steps read, and return the failure to raise."""
    steps = range(step + 1 - in_a_row, step + 1)
    saved = sorted(path.name for path in (workspace.scratch / "checkpoints").glob("step-*"))
    file = workspace.path / "bad-batch.json"
    write_json(file, {"learning_rate": rate, "examples": {str(one + 1): batches.names(one) for one in steps}})
    return RunFailed(
        f"{in_a_row} steps in a row without a finite gradient, up to step {step + 1} ({_in_words(losses)}, "
        f"learning rate {rate:.3g}); the last checkpoint is {saved[-1] if saved else 'none'}",
        workspace.path,
        f"lower --learning_rate, or look at the examples in {file.name}",
    )


def _leave_signals_to_the_parent(worker: int) -> None:
    """Let a loader process live through a signal to all its group: it ends with its parent, which saves first."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _explained_memory(step: int) -> Iterator[None]:
    """Turn CUDA's running out of memory into one line."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        raise RunFailed(
            f"step {step + 1}: out of GPU memory (peak {peak:.1f} GiB; {str(error).splitlines()[0]})",
            hint="lower --batch_size, or its share per pass: --cache_chunk or --gradient_accumulation",
        ) from None


def _write_log(
    logs: tuple[Path, Path],
    line: dict[str, Any],
    state: dict[str, Any],
    accelerator: Accelerator,
    wall: dict[str, float],
) -> None:
    """Write a line down; wall-clock figures go to the trackers and to a file of their own, so that logs compare."""
    if not accelerator.is_main_process:
        return
    with logs[0].open("ab") as log:
        state["log_bytes"] += log.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    with logs[1].open("ab") as timing:
        times = {"step": line["step"], "unix_time": time.time(), **wall}
        timing.write(orjson.dumps(times, option=orjson.OPT_APPEND_NEWLINE))
    accelerator.log({name: value for name, value in (line | wall).items() if name != "step"}, step=line["step"])


def _evaluate(
    evaluation: Evaluation, state: dict[str, Any], logs: tuple[Path, Path], best: Path, accelerator: Accelerator
) -> None:
    """Take the dev score on the first process and keep the weights if none was better."""
    if accelerator.is_main_process:
        scores = evaluation.score()
        _write_log(logs, {"step": state["step"], **scores}, state, accelerator, {})
        say(f"step {state['step']:,}: {', '.join(f'{name} {value:.4f}' for name, value in scores.items())}")
        score = next(iter(scores.values()))
        if state["best_score"] is None or score > state["best_score"]:
            state["best_score"], state["best_step"] = score, state["step"]
            evaluation.save(best)
    accelerator.wait_for_everyone()


def _save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    settings: LoopSettings,
    accelerator: Accelerator,
) -> None:
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler.state_dict()
    random = random_states(accelerator.device)
    if accelerator.is_main_process:
        save_checkpoint(folder, state["step"], model, optimizer, random, state, keep=settings.keep_checkpoints)
    accelerator.wait_for_everyone()


class _Stop:
    """Turns SIGTERM and Ctrl-C into a wish that the loop sees between two steps; a second one stops at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        # signals can be caught in the main thread only; elsewhere the default stays
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number: int, frame: object) -> None:
        # a launcher hands on to its processes what they may have had from the terminal or the scheduler already
        handed_on = world_size() > 1 and time.monotonic() - self._asked_at < _HANDED_ON_SECONDS
        if self.signal and not handed_on:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            os._exit(143)
        if not self.signal:
            self.signal, self._asked_at = number, time.monotonic()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and leave torch's random state as it was found."""
    was_training = model.training
    state = torch.get_rng_state()
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
        torch.set_rng_state(state)
