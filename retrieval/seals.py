"""Which shards of an unfinished folder are done: each has a seal, written after its files, with their SHA-256."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from condenser.errors import UserError
from condenser.faults import fault_point
from condenser.files import read_json, write_json
from condenser.manifest import damage, describe_file
from retrieval.vectors import Store, shard_files


class Seals:
    """The seals of all shards, in a folder of their own.

    Args:
        folder: where the shards are.
        place: where the seals are.
        store: the type the vectors are kept in, which says what files a shard has.
    """

    def __init__(self, folder: Path, place: Path, store: Store) -> None:
        self._folder, self._place, self._store = folder, place, store

    def adopt(self, files: Mapping[str, Any]) -> None:
        """Seal what a manifest describes, whether it is still so or not: `damaged` will tell."""
        number = 0
        while all(name in files for name in shard_files(number, self._store)):
            write_json(self._file(number), {name: files[name] for name in shard_files(number, self._store)})
            number += 1

    def seal(self, number: int) -> None:
        """Declare that a shard is whole as it lies there."""
        files = {name: describe_file(self._folder / name) for name in shard_files(number, self._store)}
        write_json(self._file(number), files)
        fault_point("shard-sealed")

    def break_seal(self, number: int) -> None:
        """Declare that a shard is being made, or has to be."""
        self._file(number).unlink(missing_ok=True)

    def holds(self, number: int) -> bool:
        """Tell whether a shard is done: it has a seal and files of those sizes."""
        return self._file(number).exists() and self._damage(number, verify=False) is None

    def break_damaged(self, count: int) -> dict[int, UserError]:
        """Read the first ``count`` shards whole, unseal those that differ from their seals, and return how."""
        found = {}
        for number in range(count):
            error = self._damage(number, verify=True)
            if error is not None:
                self.break_seal(number)
                found[number] = error
        return found

    def count(self) -> int:
        """Return how many shards have a seal."""
        return sum(1 for _ in self._place.glob("*.done"))

    def _file(self, number: int) -> Path:
        return self._place / f"{number:05d}.done"

    def _damage(self, number: int, *, verify: bool) -> UserError | None:
        try:
            files = read_json(self._file(number))
            names = shard_files(number, self._store)
            errors = (damage(self._folder, name, files[name], verify=verify) for name in names)
            return next((error for error in errors if error is not None), None)
        except (UserError, KeyError, TypeError):
            return UserError("is not the seal of a shard", self._file(number))
