"""Passages kept apart from those that a study trains on."""

from __future__ import annotations

from pathlib import Path

from condenser.files import atomic_write_bytes
from retrieval.collections import open_collection

EVERY = 20


def hold_out(collection: str, work: Path) -> tuple[Path, Path]:
    """Write all passages but every 20th into one file and these into another, unless they are there; return both."""
    files = work / "train.jsonl", work / "held-out.jsonl"
    if not all(file.is_file() for file in files):
        with atomic_write_bytes(files[0]) as kept, atomic_write_bytes(files[1]) as left:
            for number, passage in enumerate(open_collection(collection).passages()):
                (kept if number % EVERY else left).write(passage.line)
    return files
