"""Named places where a test can kill the process, to see that what is on disk then is enough to go on."""

from __future__ import annotations

import os
import signal

VARIABLE = "CONDENSER_FAULT"
_passed: dict[str, int] = {}


def fault_point(name: str) -> None:
    """Die here, as by kill -9, if the environment says so: ``CONDENSER_FAULT=name`` or ``name:times`` passed."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    place, _, times = wanted.partition(":")
    if place == name:
        _passed[name] = _passed.get(name, 0) + 1
        if _passed[name] >= int(times or 1):
            os.kill(os.getpid(), signal.SIGKILL)
