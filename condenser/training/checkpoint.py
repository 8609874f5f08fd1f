"""Checkpoints that appear whole or not at all, without a pickle: weights, optimiser, random states, position."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from condenser.artifacts import seal_folder
from condenser.errors import RunFailed, UserError
from condenser.faults import fault_point
from condenser.files import disk_faults, read_json, write_json
from condenser.manifest import load_manifest
from condenser.talk import warn
from condenser.training.distributed import gather_with_gradient, rank, world_size

_STEP = "step-{:08d}"
_DRAFT = ".draft"


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    random: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> None:
    """Write ``folder/step-N`` and remove all but the ``keep`` newest.

    Args:
        folder: where checkpoints live.
        step: optimiser steps done.
        model: its trainable parameters and buffers are saved once each, tied tensors under one name.
        optimizer: its moments are saved by parameter name.
        random: from `random_states`.
        state: everything else that a run needs to go on, as JSON values.
        keep: how many to leave in place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / _DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        with disk_faults(draft):
            save_file(_once_each(model), draft / "model.safetensors")
            save_file(_optimizer_tensors(model, optimizer), draft / "optimizer.safetensors")
            save_file(dict(random), draft / "random.safetensors")
        write_json(draft / "state.json", dict(state) | {"step": step})
    except OSError:
        shutil.rmtree(draft)  # a full disk is not helped by half a checkpoint
        raise
    fault_point("checkpoint-written")
    final = folder / _STEP.format(step)
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step, passed over on resume
    seal_folder(draft, final, {"kind": "checkpoint"})
    fault_point("checkpoint-sealed")
    found = sorted(folder.glob("step-*"))
    place = found.index(final)
    # later ones are damaged and were passed over on resume: they must not count as kept
    for other in (*found[: max(0, place + 1 - keep)], *found[place + 1 :]):
        shutil.rmtree(other)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Restore the newest sound checkpoint in place and return its state; None when there is none.

    A damaged checkpoint is passed over with a warning.

    Raises:
        UserError: checkpoints exist and none is sound: going on from nothing would hide the loss.
    """
    steps = sorted(folder.glob("step-*"), reverse=True)
    for path in steps:
        try:
            load_manifest(path, "checkpoint", verify=True)
        except UserError as error:
            warn(f"checkpoint passed over: {error}")
            continue
        _restore_model(model, load_file(path / "model.safetensors"))
        _restore_optimizer(model, optimizer, load_file(path / "optimizer.safetensors"))
        state = read_json(path / "state.json")
        if not restore_random_states(load_file(path / "random.safetensors")):
            warn(
                "the checkpoint is of another number of processes: the batches stay the same, dropout is drawn anew, "
                "so results agree with an uninterrupted run but for that"
            )
        return state
    if steps:
        raise UserError("no checkpoint here is sound", folder, "remove the folder to start over")
    return None


def require_space(folder: Path, model: nn.Module, count: int) -> None:
    """See that the disk holds ``count`` checkpoints at one time in ``folder``, and the weights of the run's end.

    Raises:
        RunFailed: it does not, counting what lies there already.
    """
    trained = sum(tensor.nbytes for tensor in _tensors(model).values())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    needed = 3 * trained * count + weights  # AdamW keeps two moments of each weight
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free + there:
        raise RunFailed(
            f"checkpoints and weights need {(needed - there) / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            place,
            "free some, or lower --keep_checkpoints",
        )


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return torch's random states of all processes, as ``cpu.RANK`` and ``cuda.RANK``; all of them must call it."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {
        f"{kind}.{number}": row.cpu()
        for kind, state in states.items()
        for number, row in enumerate(gather_with_gradient(state[None].to(device)))
    }


def restore_random_states(states: Mapping[str, Tensor]) -> bool:
    """Put this process's random states back; False, and nothing is changed, when the number of processes differs."""
    if len([name for name in states if name.startswith("cpu.")]) != world_size():
        return False
    torch.set_rng_state(states[f"cpu.{rank()}"])
    if f"cuda.{rank()}" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[f"cuda.{rank()}"])
    return True


def _once_each(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(model).items()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what training may change by name, a tied tensor only under its first name: parameters and buffers.

    Parameters that stand still come from the run's start, which its manifest names.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return trained | dict(model.named_buffers())


def _restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    tensors = _tensors(model)
    if tensors.keys() != saved.keys():
        raise UserError(f"checkpoint holds {len(saved)} tensors, the model {len(tensors)}, with other names")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}::{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for parameter, moments in optimizer.state.items()
        for key, value in moments.items()
    }


def _restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for key, value in saved.items():
        name, _, moment = key.rpartition("::")
        parameter = parameters[name]
        # the fused AdamW counts its steps where the weights are
        optimizer.state[parameter][moment] = value.to(parameter.device)


def remove_drafts(folder: Path) -> None:
    """Remove what a killed save left behind."""
    if (folder / _DRAFT).is_dir():
        shutil.rmtree(folder / _DRAFT)


def truncate(path: Path, size: int) -> None:
    """Cut a log back to the length it had at a checkpoint; make it when it is missing."""
    path.touch()
    os.truncate(path, size)
