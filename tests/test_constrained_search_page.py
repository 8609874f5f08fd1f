"""docs/constrained-search.md tells the truth: its code is run, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/constrained-search.md"


def test_code_prints_what_the_page_says() -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```\n)?", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8 and sum(bool(said) for _, said in blocks) == 7
    for code, said in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == said, code
