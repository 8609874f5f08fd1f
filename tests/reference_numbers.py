"""Where numbers of the reference implementations lie, and which cases they hold, asked while tests are collected."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def golden_folder() -> Path:
    """Return the folder of reference numbers; CONDENSER_GOLDEN puts others in their place."""
    return Path(os.environ.get("CONDENSER_GOLDEN", Path(__file__).parent / "golden"))


def golden_json(file: str) -> dict[str, Any]:
    """Read one of its JSON files."""
    read: dict[str, Any] = json.loads((golden_folder() / file).read_text())
    return read
