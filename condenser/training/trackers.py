"""The log of a run, also sent to TensorBoard or Weights & Biases through accelerate; and the pace of a run."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from condenser.errors import UserError

NO_TRACKER = "none"

_PROJECT = "condenser-ir"


def tracker_settings(tracker: str, output: str | Path) -> dict[str, Any]:
    """Return what `Accelerator` needs to know of a tracker.

    TensorBoard's files go to ``tensorboard/`` beside the output: their bytes hold times, and an artifact's do not.

    Raises:
        UserError: the tracker's package is not installed.
    """
    if tracker == NO_TRACKER:
        return {}
    if importlib.util.find_spec(tracker) is None:
        raise UserError(
            f"--tracker {tracker}: the package {tracker} is not installed",
            hint='pip install "condenser-ir[trackers]"',
        )
    folder = Path(output).absolute().parent / "tensorboard"
    return {"log_with": tracker, "project_config": ProjectConfiguration(logging_dir=str(folder))}


@contextmanager
def tracked(accelerator: Accelerator, output: str | Path, settings: Mapping[str, Any], done: int) -> Iterator[None]:
    """Start the accelerator's trackers for a block, if it has any; `Accelerator.log` reaches them.

    Not ended by `Accelerator.end_training`, which would also take the processes apart.

    Args:
        accelerator: made with `tracker_settings`.
        output: the run is called by its last part.
        settings: numbers and words that describe the run.
        done: steps done before; TensorBoard forgets what a killed run sent of later ones.
    """
    name = Path(output).name
    accelerator.init_trackers(
        # TensorBoard makes the project's name a folder
        name if any(str(tracker) == "tensorboard" for tracker in accelerator.log_with) else _PROJECT,
        config=dict(settings) if accelerator.log_with else None,
        init_kwargs={"wandb": {"name": name}, "tensorboard": {"purge_step": done + 1}},
    )
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()


class Pace:
    """How many examples a second are trained on; time between `pause` and `go_on` does not count.

    Args:
        per_step: examples of a step, over all processes.
    """

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step
        self._seconds, self._steps = 0.0, 0
        self.go_on()

    def go_on(self) -> None:
        """Begin to count time."""
        self._since = time.monotonic()

    def pause(self) -> None:
        """Stop to count time: a step is done."""
        self._seconds += time.monotonic() - self._since
        self._steps += 1

    def take(self) -> float:
        """Return examples per second since the last call."""
        rate = self._per_step * self._steps / max(self._seconds, 1e-9)
        self._seconds, self._steps = 0.0, 0
        return rate


def idle_gpus(visible: int, processes: int) -> str | None:
    """Return a line about GPUs that one process leaves idle (nothing is spread over them behind the user's back)."""
    if visible < 2 or processes > 1:
        return None
    return (
        f"{visible} GPUs are visible and one is used; "
        f"torchrun --nproc_per_node {visible} --no-python condenser ... uses all of them"
    )
