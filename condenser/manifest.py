"""What stands in a folder's ``manifest.json``: what made it, and its files with size and SHA-256."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from condenser.errors import UserError
from condenser.files import dump_json, read_json, sha256_file, sync_folder, write_json

SCHEMA = 1
MANIFEST = "manifest.json"
SCRATCH = ".work"
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
    path = Path(name).expanduser()
    return fingerprint(path) if path.exists() else str(name)


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


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` as JSON would give them back (Paths as text, tuples as lists)."""
    import orjson

    loaded: dict[str, Any] = orjson.loads(dump_json(dict(values)))
    return loaded


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
