"""Folders that appear whole or not at all, and carry what made them.

A stage writes into ``NAME.partial`` beside its output. When it is done, ``manifest.json`` is
written last and the folder is renamed to ``NAME``: a folder with a manifest is finished, a folder
without one does not count. What only serves to go on (checkpoints, the lock) lies in its ``.work``.
A killed stage leaves ``NAME.partial``; the same command goes on there.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from condenser.errors import UserError
from condenser.faults import fault_point
from condenser.files import prepare_parent, read_json, sync_folder, write_json
from condenser.manifest import (
    MANIFEST,
    SCHEMA,
    SCRATCH,
    describe_difference,
    load_manifest,
    plain,
    write_manifest,
)
from condenser.talk import say

STARTED = f"{SCRATCH}/started.json"
LOCK = f"{SCRATCH}/lock"


class Workspace:
    """The one way to write an artifact: open, write into ``path``, ``commit``.

    ``scratch`` is a folder inside ``path`` for what serves only to go on: it is not part of the
    artifact, and goes when the artifact is published.

    Args:
        output: the folder that will appear.
        kind: what it is, for example ``"vectors"``; the next stage asks for it by this word.
        config: every option that shapes the result. A finished folder made with the same ``kind``,
            ``config`` and ``inputs`` is up to date: then ``done`` is True and nothing need be written.
        inputs: name -> fingerprint of what the stage reads.
        resumable: keep what a killed run left in ``path``, instead of starting over.

    Raises:
        UserError: the output exists and is something else, was made with other options or inputs
            (the difference is named), or another process is writing it.
    """

    _lock_kind = fcntl.LOCK_EX

    def __init__(
        self,
        output: str | Path,
        kind: str,
        *,
        config: Mapping[str, Any],
        inputs: Mapping[str, str],
        resumable: bool = False,
    ) -> None:
        self.output = Path(output)
        if not self.output.name:
            raise UserError("cannot become a folder of results", repr(str(output)), "give --output a name")
        if self.output.is_symlink():  # one cannot rename a folder over a link: what it points at appears
            self.output = Path(os.path.realpath(self.output))
        self.path = self.output.with_name(self.output.name + ".partial")
        self.scratch = self.path / SCRATCH
        self.kind = kind
        self.done = False
        self._resumable = resumable
        self._started = {"schema": SCHEMA, "kind": kind, "config": plain(config), "inputs": dict(inputs)}
        self._lock_handle: int | None = None

    def __enter__(self) -> Workspace:
        prepare_parent(self.output)
        if self._output_is_up_to_date():
            self.done = True
            return self
        self._take_lock()
        try:
            # Another process may have finished between the look above and the lock.
            if self._output_is_up_to_date():
                shutil.rmtree(self.path, ignore_errors=True)
                self.done = True
            elif not self._finish_interrupted_commit():
                self._prepare_contents()
        except BaseException:
            self._release_lock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock_handle is None:
            return
        if not self.done and (not self._resumable or self._holds_nothing()):
            shutil.rmtree(self.path, ignore_errors=True)
        self._release_lock()

    def published(self) -> bool:
        """Tell whether the folder is finished, by this process or another: then nothing is left to write."""
        self.done = self.done or (self.output / MANIFEST).is_file()
        return self.done

    def commit(self, facts: Mapping[str, Any]) -> Path:
        """Write the manifest, flush everything to disk and rename the folder to its final name.

        Args:
            facts: what the next stage must know (counts, dimension, pooling, ...).

        Returns:
            The finished folder.
        """
        fault_point("commit-begun")
        write_manifest(self.path, self._started | {"facts": plain(facts)})
        fault_point("manifest-written")
        self._publish()
        return self.output

    def _holds_nothing(self) -> bool:
        """Tell whether a stage ended before it wrote anything to go on with."""
        files = {file.relative_to(self.path).as_posix() for file in self.path.rglob("*") if file.is_file()}
        return files <= {STARTED, LOCK}

    def _finish_interrupted_commit(self) -> bool:
        """Publish what a run left that was killed between its manifest and the rename, if it is what is wanted now."""
        if not (self.path / MANIFEST).is_file() or describe_difference(load_manifest(self.path), self._started):
            return False
        self._publish()
        return True

    def _publish(self) -> None:
        if self.output.exists():
            self.output.rmdir()  # only ever an empty folder, see _output_is_up_to_date
        publish_folder(self.path, self.output)
        fault_point("folder-published")
        # Not before: a run killed until here finds its way back by it. Over a network an open lock stays for a while.
        shutil.rmtree(self.output / SCRATCH, ignore_errors=True)
        self.done = True

    def _output_is_up_to_date(self) -> bool:
        if not self.output.exists():
            return False
        if not self.output.is_dir():
            raise UserError("is a file, expected a folder to write", self.output, "choose another --output")
        if not any(self.output.iterdir()):
            return False
        if not (self.output / MANIFEST).is_file():
            raise UserError(
                "folder is not empty and was not made by this toolkit", self.output, "choose another --output"
            )
        self._refuse_difference(load_manifest(self.output), self.output)
        shutil.rmtree(self.output / SCRATCH, ignore_errors=True)  # what a run left that was killed at its very end
        say(f"{self.output}: up to date")
        return True

    def _refuse_difference(self, other: Mapping[str, Any], folder: Path) -> None:
        differences = describe_difference(other, self._started)
        if differences:
            raise UserError(
                f"was made with other settings: {'; '.join(differences)}",
                folder,
                "remove the folder to make it anew, or choose another --output",
            )

    def _take_lock(self) -> None:
        try:
            self.path.mkdir(exist_ok=True)  # not its parents: these are there, unless nothing can be made in them
        except (FileNotFoundError, FileExistsError) as error:
            raise UserError(
                f"cannot make this folder: {error.strerror}", self.path, "choose another --output"
            ) from None
        self.scratch.mkdir(exist_ok=True)
        self._lock_handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock_handle, self._lock_kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._lock_handle, 200).decode(errors="replace") or "unknown"
            os.close(self._lock_handle)
            self._lock_handle = None
            raise UserError(f"another process is writing here ({holder})", self.path) from None
        os.ftruncate(self._lock_handle, 0)
        os.write(self._lock_handle, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _release_lock(self) -> None:
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    def _prepare_contents(self) -> None:
        started = self.path / STARTED
        if self._resumable and started.is_file():
            self._refuse_difference(read_json(started), self.path)
            for torn in self.path.rglob("*.tmp-*"):  # what a killed atomic_write left
                torn.unlink()
            return
        for entry in (*self.path.iterdir(), *self.scratch.iterdir()):
            if entry.is_dir() and entry != self.scratch:
                shutil.rmtree(entry)
            elif entry.is_file() and entry != self.path / LOCK:
                entry.unlink()
        write_json(started, self._started)


def publish_folder(draft: Path, final: Path) -> None:
    """Rename ``draft`` to ``final``, a new name on the same disk, so that it survives a power cut."""
    os.rename(draft, final)
    sync_folder(final.absolute().parent)


def seal_folder(draft: Path, final: Path, header: Mapping[str, Any]) -> None:
    """Write the manifest of ``draft`` and publish it as ``final``."""
    write_manifest(draft, header)
    publish_folder(draft, final)


def refuse_overwriting(output: str | Path, *inputs: str | Path | None) -> None:
    """Refuse an output that is one of the files and folders that are read, or lies in a finished folder that is read.

    Raises:
        UserError: such an output; nothing that does not exist is one.
    """
    output = Path(output)
    for given in inputs:
        source = Path(given) if given else None
        if source is None or not source.exists():
            continue
        if (source / MANIFEST).is_file() and output.resolve().is_relative_to(source.resolve()):
            raise UserError(f"lies in {source}, which is read", output, "choose another --output")
        if output.exists() and os.path.samefile(source, output):
            where = "over" if source.is_file() else "into"
            raise UserError(f"is read, and would be written {where}", output, "choose another --output")


def refuse_one_file(scores: str | Path | None, output: str | Path) -> None:
    """Raise UserError when the file of scores and the output are one."""
    if scores is not None and Path(scores).absolute() == Path(output).absolute():
        raise UserError("--scores and --output are one file", output)


def result_config(options: Any) -> dict[str, Any]:
    """Return the options that shape a stage's result: all fields but those marked ``shapes_result=False``."""
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.metadata.get("shapes_result", True)
    }
