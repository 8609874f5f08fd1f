"""Token stores and tokenizers that were damaged: told in one line, with the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from condenser.artifacts import Workspace
from condenser.corpus.tokens import TOKENS_FILE, TokenStore, load_tokenizer
from condenser.errors import UserError

OTHER = pa.table({"text": ["a"]})


def stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a whole token store"),
        (b"\xff" * 100, "is not a whole token store"),
        (stream(OTHER)[:-60], "is not a whole token store"),
        (stream(OTHER), "has columns ['text'], expected ['id', 'ids', 'word_starts']"),
    ],
)
def test_a_damaged_store_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    """The sizes may fit: then Arrow finds it."""
    with Workspace(tmp_path / "store", "spans", config={}, inputs={}) as work:
        (work.path / TOKENS_FILE).write_bytes(content)
        work.commit({"max_length": 32})
    with pytest.raises(UserError) as caught:
        TokenStore(tmp_path / "store")
    assert str(caught.value).startswith(f"{tmp_path / 'store' / TOKENS_FILE}: {message}")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", content) for content in ("{}", "[]", "null", "{", "")),
        *(("tokenizer_config.json", content) for content in ("[]", "null", "{")),
    ],
)
def test_a_damaged_tokenizer_is_one_line(tiny_bert: Path, tmp_path: Path, name: str, content: str) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(tiny_bert, folder)
    (folder / name).write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder}: no tokenizer could be loaded: ")
