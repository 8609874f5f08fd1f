"""A run becomes numbers: metrics, official scripts, answer recall, paired tests."""

from __future__ import annotations

from typing import Any

__all__ = ["RunArrays", "compare", "evaluate", "load_qrels", "load_run", "write_run"]

_HOMES = {"evaluate": "eval.evaluation", "compare": "eval.comparison"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``import eval`` itself loads nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'eval' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "eval.runs")), name)
