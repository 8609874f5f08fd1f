"""An Electric model small enough to train and to score with anywhere, without dropout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import save_electric


@pytest.fixture(scope="session")
def electric_folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return save_electric(tmp_path_factory.mktemp("electric"), tiny_bert, positions=24)
