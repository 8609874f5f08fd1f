"""What tests say of folders."""

from __future__ import annotations

from pathlib import Path


def assert_same_files(found: Path, expected: Path) -> None:
    """Hold that two folders have the same files with the same bytes, those in folders within them too."""
    names = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(found) for path in found.rglob("*") if path.is_file())
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
