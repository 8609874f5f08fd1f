"""A folder that several processes write together, on one machine or on many that share a disk.

Whoever makes the same artifact with the same settings joins in. Who does which part is for the stage to
say (`retrieval.claims`). Nothing here relies on a lock that reaches from machine to machine: what must
happen once is a rename or a link, which a shared disk does once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from condenser.artifacts import LOCK, STARTED, Workspace
from condenser.errors import UserError, sample
from condenser.faults import fault_point
from condenser.files import dump_json, prepare_parent, read_json, sync_folder
from condenser.manifest import MANIFEST, SCRATCH, damaged_files, read_manifest
from condenser.talk import say

_WITHDRAWN = f"{SCRATCH}/withdrawn.json"


class SharedWorkspace(Workspace):
    """A resumable workspace that many processes may hold at once.

    - Others with the same settings are let in. Another stage, other settings, and whoever wants the folder for
      himself are refused as ever.
    - A finished folder is compared with its manifest, SHA-256 and all. If a file was lost or changed, the folder
      goes back to ``NAME.partial``; `withdrawn` tells what it held, so that only what is missing is made anew.
    - Two may `commit`: the second finds it done.

    Raises:
        UserError: as `Workspace`; also a folder ``NAME.partial`` of unknown origin.
    """

    _lock_kind = fcntl.LOCK_SH

    def __init__(self, output: str | Path, kind: str, *, config: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
        super().__init__(output, kind, config=config, inputs=inputs, resumable=True)

    def __enter__(self) -> SharedWorkspace:
        prepare_parent(self.output)
        while not self.done:
            seen = self._places()
            try:
                self.done = self._output_is_up_to_date()
                if not self.done and self._join():
                    return self
            except (OSError, UserError):
                # A folder that another moved under this process's eyes looks damaged, foreign or empty: look again.
                if self._places() == seen:
                    raise
        self._sweep_empty()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock_handle is not None:
            # Once it is published, what is here is no more than what a late worker made before it saw that.
            if self.done or _is_alone(self._lock_handle):
                self._sweep_empty()
            self._release_lock()

    def withdrawn(self) -> dict[str, dict[str, Any]]:
        """Return the files, with bytes and sha256, of the finished folder that this was until one was damaged."""
        record = self.path / _WITHDRAWN
        try:
            files: dict[str, dict[str, Any]] = read_json(record)["files"]
        except UserError:
            if record.exists():
                raise
            return {}
        return files

    def forget_withdrawn(self) -> None:
        """Say that what `withdrawn` tells has been taken note of."""
        (self.path / _WITHDRAWN).unlink(missing_ok=True)

    def commit(self, facts: Mapping[str, Any]) -> Path:
        """Publish the folder as `Workspace.commit` does, unless another has."""
        return self.output if self.published() else super().commit(facts)

    def _publish(self) -> None:
        try:
            super()._publish()
        except OSError:
            if not self.published():
                raise

    def _join(self) -> bool:
        """Share the lock and agree on what is made; False when the folder was moved meanwhile, to look again."""
        try:
            self._take_lock()
            # A finished folder, or one that is about to go back to NAME.partial, is looked at first.
            settled = not any((self.output / name).is_file() for name in (MANIFEST, _WITHDRAWN))
            if settled and not self._has_moved():
                self._agree()
                if not self._has_moved():
                    return True
        except (FileNotFoundError, FileExistsError):
            pass
        except UserError:
            self._release_lock()
            raise
        self._release_lock()
        return False

    def _places(self) -> list[tuple[int, int] | None]:
        """Return what changes when a worker withdraws, moves, sweeps or publishes the folder."""
        return [
            *(_identity(folder / name) for folder in (self.output, self.path) for name in (MANIFEST, _WITHDRAWN)),
            _identity(self.path / SCRATCH),
        ]

    def _has_moved(self) -> bool:
        """Tell whether another published or swept the folder after this process opened the lock in it."""
        if self._lock_handle is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._lock_handle), os.stat(self.path / LOCK))
        except FileNotFoundError:
            return True

    def _agree(self) -> None:
        """Write down what is made here, or compare it with what the first one wrote."""
        started, withdrawn = self.path / STARTED, self.path / _WITHDRAWN
        if withdrawn.is_file():
            self._refuse_difference(read_json(withdrawn), self.path)
        elif not started.is_file():
            strangers = sorted(entry.name for entry in self.path.iterdir() if entry.name != SCRATCH)
            if strangers:
                raise UserError(
                    f"holds {sample(strangers)}, which no unfinished run left here",
                    self.path,
                    "remove the folder, or choose another --output",
                )
        _write_once(started, dump_json(self._started))
        self._refuse_difference(read_json(started), self.path)

    def _finish_interrupted_commit(self) -> bool:
        return False  # a manifest here may be that of one who is about to rename the folder

    def _output_is_up_to_date(self) -> bool:
        if not (self.output / MANIFEST).is_file():
            if (self.output / _WITHDRAWN).is_file():
                self._move_back()  # one was killed in the midst of it
            return super()._output_is_up_to_date()
        manifest = read_manifest(self.output)
        self._refuse_difference(manifest, self.output)
        damaged = list(damaged_files(self.output, manifest, verify=True).values())
        if damaged:
            more = f", and {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
            say(f"{damaged[0].where}: {damaged[0].what}{more}; it is made anew")
            self._withdraw()
            return False
        return super()._output_is_up_to_date()

    def _withdraw(self) -> None:
        """Turn a finished folder into an unfinished one. Whoever renames the manifest does it, others look again."""
        try:
            (self.output / SCRATCH).mkdir(exist_ok=True)
            os.rename(self.output / MANIFEST, self.output / _WITHDRAWN)
        except FileNotFoundError:
            return
        sync_folder(self.output)
        fault_point("manifest-withdrawn")
        self._move_back()
        fault_point("folder-withdrawn")

    def _move_back(self) -> None:
        while True:
            self._sweep_empty()
            try:
                os.rename(self.output, self.path)
                break
            except FileNotFoundError:
                return
            except OSError as error:
                # another may have put its lock there just now, and will look again
                in_passing = error.errno in (errno.ENOTEMPTY, errno.EEXIST) and (
                    not self.path.is_dir() or self._holds_nothing()
                )
                if not in_passing:
                    raise UserError(
                        f"stands in the way of {self.output}, which has to be mended there", self.path, "remove it"
                    ) from None
        sync_folder(self.output.absolute().parent)

    def _holds_nothing(self) -> bool:
        try:
            return super()._holds_nothing()
        except FileNotFoundError:  # another takes it away at this moment
            return not self.path.exists()

    def _sweep_empty(self) -> None:
        """Remove an unfinished folder in which nothing was done."""
        if self.path.is_dir() and self._holds_nothing():
            shutil.rmtree(self.path, ignore_errors=True)


def _identity(file: Path) -> tuple[int, int] | None:
    """Tell a file from a later one of its name; None if there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, 0 if file.name == SCRATCH else status.st_ctime_ns


def _is_alone(lock: int) -> bool:
    """Take the whole of a shared lock, which only its last holder can."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_once(file: Path, content: bytes) -> None:
    """Write a whole file unless there is one: of several writers, the first wins."""
    draft = file.with_name(f"{file.name}.{os.urandom(8).hex()}")
    try:
        with draft.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(draft, file)
        except FileExistsError:
            pass
        except OSError:  # a disk without hard links
            os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
