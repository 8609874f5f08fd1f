"""Who does which part of a shared folder: claims of workers that live, lapsed claims of those that died.

A claim is a file that only one worker can create. It says who holds it, and its time is renewed while the
holder lives. A claim is lapsed when its holder is gone: on the same machine as soon as the process is, on
another when its time was not renewed for `LAPSE_S` seconds, by the clock of the disk, so that machines need
not agree on the hour. Then the next worker creates the claim's next generation, ``PART.claim-1`` after
``PART.claim-0``, which again only one can do; and a holder that was only asleep sees that it lost its claim.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from condenser.faults import fault_point

LAPSE_S = 120.0
_BEATS_PER_LAPSE = 6


class Claims:
    """The claims of one worker in a folder; leave the ``with`` block and they are gone.

    Args:
        folder: where the claims of all workers lie.
        lapse_s: seconds after which a claim from another machine that was not renewed has lapsed.
    """

    def __init__(self, folder: Path, lapse_s: float = LAPSE_S) -> None:
        self._folder = folder
        self._lapse_s = lapse_s
        self._held: dict[str, Path] = {}
        self._clock = folder / f"clock-{os.urandom(8).hex()}"
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat of claims", daemon=True)

    def __enter__(self) -> Claims:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._heart.join()
        for part in list(self._held):
            self.release(part)
        self._clock.unlink(missing_ok=True)

    def take(self, part: str) -> bool:
        """Claim a part of the work; False when another worker has it.

        It may have been finished and released by another just before: look again once you have it.

        Raises:
            FileNotFoundError: the folder was published and is no longer here.
        """
        newest = self._newest(part)
        if newest >= 0 and not self._has_lapsed(self._file(part, newest)):
            return False
        file = self._file(part, newest + 1)
        try:
            _create(file, orjson.dumps({"part": part, **_this_process()}))
        except FileExistsError:
            return False
        self._held[part] = file
        fault_point("claim-taken")
        return True

    def holds(self, part: str) -> bool:
        """Tell whether a claim taken is still ours, and not taken for that of a dead worker."""
        file = self._held.get(part)
        return file is not None and file == self._file(part, self._newest(part))

    def is_free(self, part: str) -> bool:
        """Tell whether no living worker has a part."""
        newest = self._newest(part)
        return newest < 0 or self._has_lapsed(self._file(part, newest))

    def release(self, part: str) -> None:
        """Give a claim back, and clear away the lapsed ones before it; one that was lost stays with its new holder."""
        still_ours = self.holds(part)
        file = self._held.pop(part)
        if still_ours:
            for generation in range(int(file.name.rsplit("-", 1)[1]), -1, -1):
                self._file(part, generation).unlink(missing_ok=True)

    def _file(self, part: str, generation: int) -> Path:
        return self._folder / f"{part}.claim-{generation}"

    def _newest(self, part: str) -> int:
        """Return a part's newest generation, -1 when it was not claimed; they are made, and end, without gaps."""
        generation = -1
        while self._file(part, generation + 1).exists():
            generation += 1
        return generation

    def _has_lapsed(self, file: Path) -> bool:
        try:
            written = file.read_bytes()
            age = self._now() - file.stat().st_mtime
        except FileNotFoundError:  # released at this moment
            return False
        holder = _parse(written)
        if holder.get("machine") == _this_machine():
            return not _is_alive(holder)
        return age > self._lapse_s

    def _now(self) -> float:
        """Return the time by the clock that stamps the claims."""
        self._clock.touch()
        return self._clock.stat().st_mtime

    def _beat(self) -> None:
        while not self._closing.wait(self._lapse_s / _BEATS_PER_LAPSE):
            for file in list(self._held.values()):
                with contextlib.suppress(OSError):  # published, or a disk that is away: the claim lapses
                    os.utime(file)


def _create(file: Path, content: bytes) -> None:
    """Write a file that nobody has made yet, else raise FileExistsError; it appears with its content."""
    draft = file.with_name(f"draft-{os.urandom(8).hex()}")
    try:
        draft.write_bytes(content)
        try:
            os.link(draft, file)
        except FileExistsError:
            raise
        except OSError:  # a disk without hard links: who dies between these two lines holds the claim till it lapses
            with file.open("xb") as stream:
                stream.write(content)
    finally:
        draft.unlink(missing_ok=True)


def _parse(claim: bytes) -> dict[str, Any]:
    """Return what a claim says; nothing if its holder died before it wrote."""
    try:
        holder = orjson.loads(claim)
    except orjson.JSONDecodeError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": _this_machine(),
        "birth": _birth(os.getpid()),
    }


@cache
def _this_machine() -> str:
    """Name where process ids mean the same: this boot of this host, and this container's table of processes."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += f" {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return name


def _is_alive(holder: dict[str, Any]) -> bool:
    """Tell whether the process that wrote a claim on this machine still runs."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs for another user
        pass
    return _birth(pid) in (None, holder.get("birth"))


def _birth(pid: int) -> str | None:
    """Return when a process began, which tells it from a later one of its number; None where that cannot be seen."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return "dead" if state in "ZX" else rest[18]  # a dead process has an entry until its parent asks for it
