"""Folders that appear whole or not at all, and carry what made them.

A stage writes into ``NAME.partial`` beside its output. When it is done, ``manifest.json`` is
written last and the folder is renamed to ``NAME``: a folder with a manifest is finished, a folder
without one does not count. What only serves to go on (checkpoints, the lock) lies in its ``.work``.
A killed stage leaves ``NAME.partial``; the same command goes on there.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from condenser.errors import UserError
from condenser.faults import fault_point
from condenser.files import dump_json, prepare_parent, read_json, sha256_file, sync_folder, write_json
from condenser.talk import say

SCHEMA = 1
MANIFEST = "manifest.json"
SCRATCH = ".work"
STARTED = f"{SCRATCH}/started.json"
LOCK = f"{SCRATCH}/lock"
_RECORDED_PACKAGES = (
    "condenser-ir",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "datasets",
    "faiss-cpu",
    "faiss-gpu",
)


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


def write_manifest(folder: Path, header: Mapping[str, Any]) -> None:
    """Flush a written folder to disk and give it a manifest as its last file.

    Args:
        folder: the folder as written.
        header: what the manifest says beside the files' sizes and SHA-256.
    """
    files = {}
    for entry in sorted(folder.rglob("*")):
        name = entry.relative_to(folder).as_posix()
        if name == MANIFEST or name.split("/")[0] == SCRATCH:
            continue
        if entry.is_dir():
            sync_folder(entry)
        elif entry.is_file():
            _sync_file(entry)
            files[name] = describe_file(entry)
    described = {"files": files, "fingerprint": _fingerprint(files), "versions": _versions()}
    write_json(folder / MANIFEST, {"schema": SCHEMA, **header, **described})


def revise_manifest(
    folder: Path, manifest: Mapping[str, Any], *, files: Iterable[str], **sections: Mapping[str, Any]
) -> None:
    """Replace the manifest of a finished folder by one that names other files, at once or not at all.

    Files that the old one names too are taken as they are: an artifact's files are never written twice.

    Args:
        folder: the artifact; new files are in it already.
        manifest: the old manifest.
        files: names of all that belongs to it from now on.
        sections: what else changes, such as ``facts`` or ``inputs``.
    """
    described = {}
    for name in sorted(files):
        known = manifest["files"].get(name)
        if known is None:
            _sync_file(folder / name)
        described[name] = known or describe_file(folder / name)
    sync_folder(folder)
    changed = {name: plain(section) for name, section in sections.items()}
    about = {"files": described, "fingerprint": _fingerprint(described), "versions": _versions()}
    write_json(folder / MANIFEST, {**manifest, **changed, **about})


def publish_folder(draft: Path, final: Path) -> None:
    """Rename ``draft`` to ``final``, a new name on the same disk, so that it survives a power cut."""
    os.rename(draft, final)
    sync_folder(final.absolute().parent)


def seal_folder(draft: Path, final: Path, header: Mapping[str, Any]) -> None:
    """Write the manifest of ``draft`` and publish it as ``final``."""
    write_manifest(draft, header)
    publish_folder(draft, final)


def load_manifest(
    folder: str | Path,
    kind: str | None = None,
    *,
    verify: bool = False,
    facts: Mapping[str, type] | None = None,
) -> dict[str, Any]:
    """Read a finished folder's manifest and check the files it lists.

    Args:
        folder: the artifact.
        kind: the kind expected; None takes any.
        verify: also compare each file's SHA-256 (sizes are always compared).
        facts: the facts that the caller goes by, with their types.

    Raises:
        UserError: no such folder, no manifest (unfinished), another kind, a newer schema, a file
            missing, of another size or damaged, a listed name that points outside the folder, or a fact
            that is missing or of another type.
    """
    manifest = read_manifest(folder, kind, facts=facts)
    for error in damaged_files(folder, manifest, verify=verify).values():
        raise error
    return manifest


def read_manifest(
    folder: str | Path, kind: str | None = None, *, facts: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Read a finished folder's manifest without a look at its files; else like `load_manifest`."""
    folder = Path(folder)
    expected = f"expected {_named(kind)}" if kind else "expected an artifact of this toolkit"
    if not folder.is_dir():
        raise UserError(f"no such folder; {expected}", folder)
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"no {MANIFEST} here; {expected}", folder, "an unfinished stage leaves NAME.partial: run it again"
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        raise UserError(
            f"manifest has schema {manifest.get('schema')!r}, this release reads {SCHEMA}", folder / MANIFEST
        )
    if kind is not None and manifest.get("kind") != kind:
        raise UserError(f"is {_named(manifest.get('kind'))}; {expected}", folder)
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(map(_describes_file, files.values())) or "fingerprint" not in manifest:
        raise UserError("lacks the fingerprint, or files with their bytes and sha256", folder / MANIFEST)
    stored = manifest.get("facts")
    for name, expected_type in (facts or {}).items():
        value = stored.get(name) if isinstance(stored, dict) else None
        if type(value) is not expected_type:
            raise UserError(f"fact {name} is {value!r}, expected {expected_type.__name__}", folder / MANIFEST)
    return manifest


def damaged_files(folder: str | Path, manifest: Mapping[str, Any], *, verify: bool = False) -> dict[str, UserError]:
    """Return what is wrong with the files that a manifest lists, by their names.

    Args:
        folder: the artifact.
        manifest: as `read_manifest` gives it.
        verify: also compare each file's SHA-256 (sizes are always compared).

    Raises:
        UserError: a listed name that points outside the folder.
    """
    folder = Path(folder)
    found = {name: damage(folder, name, entry, verify=verify) for name, entry in manifest["files"].items()}
    return {name: error for name, error in found.items() if error is not None}


def _named(kind: object) -> str:
    return f"{'an' if str(kind)[:1] in 'aeiou' else 'a'} {kind} folder"


def _describes_file(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


def describe_file(file: Path) -> dict[str, Any]:
    """Return what a manifest says of a file: its size and SHA-256."""
    return {"bytes": file.stat().st_size, "sha256": sha256_file(file)}


def damage(folder: Path, name: str, entry: Mapping[str, Any], *, verify: bool) -> UserError | None:
    """Return how a file differs from its description, for the caller to raise; None if it does not.

    Raises:
        UserError: the name points outside the folder.
    """
    file = folder / name
    if "\0" in name or Path(name).is_absolute() or not file.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"manifest lists {name!r}, which lies outside the folder", folder / MANIFEST)
    if not file.is_file():
        return UserError("file listed in the manifest is missing", file, "make the folder anew")
    size = file.stat().st_size
    if size != entry["bytes"]:
        return UserError(f"has {size:,} bytes, the manifest says {entry['bytes']:,}", file, "make the folder anew")
    if verify and sha256_file(file) != entry["sha256"]:
        return UserError("contents differ from the manifest's sha256", file, "make the folder anew")
    return None


def refuse_overwriting(output: str | Path, *inputs: str | Path | None) -> None:
    """Refuse an output that is one of the files that are read, or that lies in a finished folder that is read.

    Raises:
        UserError: such an output; nothing that does not exist is one.
    """
    output = Path(output)
    for given in inputs:
        source = Path(given) if given else None
        if source is None or not source.exists():
            continue
        if source.is_file() and output.exists() and os.path.samefile(source, output):
            raise UserError("is read, and would be written over", output, "choose another --output")
        if (source / MANIFEST).is_file() and output.resolve().is_relative_to(source.resolve()):
            raise UserError(f"lies in {source}, which is read", output, "choose another --output")


def fingerprint(path: str | Path) -> str:
    """Return a short digest of what a file or folder contains.

    An artifact's own manifest answers without reading the data; other folders are hashed file by file.
    """
    path = Path(path)
    if path.is_file():
        return sha256_file(path)[:16]
    if not path.is_dir():
        known = path.exists()
        raise UserError(
            "is neither a file nor a folder, and a pipe is read once only" if known else "no such file or folder", path
        )
    if (path / MANIFEST).is_file():
        return str(load_manifest(path)["fingerprint"])
    files = {
        file.relative_to(path).as_posix(): describe_file(file)
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    }
    return _fingerprint(files)


def identity(name: str | Path) -> str:
    """Return what tells one source from another: a local path's fingerprint, or a hub name itself."""
    return fingerprint(name) if Path(name).exists() else str(name)


def describe_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List how two manifests' config and inputs differ, as ``key: old -> new``; of other kinds only that."""
    differences = []
    if old.get("kind") != new.get("kind"):
        return [f"kind: {old.get('kind')} -> {new.get('kind')}"]
    for section in ("config", "inputs"):
        before, after = old.get(section, {}), new.get(section, {})
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                differences.append(f"{key}: {before.get(key)!r} -> {after.get(key)!r}")
    return differences


def result_config(options: Any) -> dict[str, Any]:
    """Return the options that shape a stage's result: all fields but those marked ``shapes_result=False``."""
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.metadata.get("shapes_result", True)
    }


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` as JSON would give them back (Paths as text, tuples as lists)."""
    import orjson

    loaded: dict[str, Any] = orjson.loads(dump_json(dict(values)))
    return loaded


def _fingerprint(files: Mapping[str, Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]['sha256']}\n".encode())
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    versions = {}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
