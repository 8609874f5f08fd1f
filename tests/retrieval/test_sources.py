"""Sources: every record is found again at its position, and a damaged file names its line."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from condenser.errors import UserError
from condenser.files import MAX_LINE_BYTES
from retrieval.sources import ArrayFile, LineFile, open_source

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("packing", PACK)
def test_lines_are_found_again_by_their_offsets(tmp_path: Path, packing: str) -> None:
    """R9: CRLF is stripped, U+2028 and a lone CR stay inside the line; a byte order mark is no text."""
    text = "\ufeffone\r\n\n  \ntwo\u2028still two\rand so\nnaïve 한국\nlast"
    path = tmp_path / f"a.tsv{packing}"
    path.write_bytes(PACK[packing](text.encode()))
    source = open_source(path)
    found = list(source.scan())
    assert [line for _, _, line in found] == ["one", "two\u2028still two\rand so", "naïve 한국", "last"]
    assert [where for _, where, _ in found] == [f"{path}:{number}" for number in (1, 4, 5, 6)]
    for position, where, line in reversed(found):
        assert source.read(position) == line
        assert source.where(position) == where


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("indent", [None, 2])
def test_objects_of_an_array_are_found_again(tmp_path: Path, packing: str, indent: int | None) -> None:
    records: list[dict[str, Any]] = [
        {"a": 'brace } quote " backslash \\ end'},
        {"b": [{"c": {"d": ["]", "[", "{"]}}, {}], "e": None},
        {},
        {"ü": "\u2028"},
    ]
    path = tmp_path / f"a.json{packing}"
    text = json.dumps(records, indent=indent, ensure_ascii=False)
    path.write_bytes(PACK[packing](text.encode()))
    source = open_source(path)
    assert isinstance(source, ArrayFile)
    found = list(source.scan())
    assert [record for _, _, record in found] == records
    for position, where, record in found:
        assert source.read(position) == record
        assert source.where(position) == where
    if indent:
        lines = text.splitlines()
        assert all(lines[int(where.rsplit(":", 1)[1]) - 1].lstrip().startswith("{") for _, where, _ in found)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5),
            st.recursive(
                st.text(max_size=8) | st.integers(-(2**53), 2**53) | st.none() | st.booleans(),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                max_leaves=8,
            ),
            max_size=4,
        ),
        max_size=5,
    ),
    st.sampled_from([None, 1]),
)
def test_any_array_reads_as_the_whole_of_it_does(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]], indent: int | None
) -> None:
    assume(str(records).count("{") <= 8)  # no deeper than what the pattern takes
    path = tmp_path_factory.mktemp("any") / "a.json"
    path.write_text(json.dumps(records, indent=indent))
    assert [record for _, _, record in ArrayFile(path).scan()] == records


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}\n{"b": 2}]', ":2: not a JSON array of objects: expected ',', found '{\"b\": 2}]'"),
        ('[{"a": 1},\n 7]', ":2: not a JSON array of objects: expected an object in braces, which ends, found '7]'"),
        ('[{"a": 1},\n{"b": ', ":2: not a JSON array of objects: expected an object in braces, which ends"),
        ('[{"a": 1},\n{"b": 2\n}', ":3: not a JSON array of objects: expected ',', found 'the end of the file'"),
        ('[{"a": 1},\n{"b":\n oops}]', ":3: not valid JSON"),
        ('[{"a": 1}]\nmore', ":2: not a JSON array of objects: expected nothing after the array, found 'more'"),
        ('[{"a": "\udcff"}]', ":1: not valid JSON"),
    ],
)
def test_damaged_arrays(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        list(ArrayFile(path).scan())
    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_packed_array_that_ends_early(tmp_path: Path, packing: str) -> None:
    """R11."""
    words = random.Random(0)
    whole = PACK[packing](json.dumps([{"a": words.random()} for _ in range(5000)]).encode())
    path = tmp_path / f"a.json{packing}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"a\.json{packing}: compressed data is damaged or ends early"):
        list(open_source(path).scan())


def test_an_array_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "word " * 200} for _ in range(20_000)]))
    size = path.stat().st_size
    tracemalloc.start()
    count = sum(1 for _ in ArrayFile(path).scan())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 20_000
    assert peak < size / 20


def test_source_is_told_by_the_first_character(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text('{"a": 1}\n')
    (tmp_path / "array.jsonl").write_text('\n [{"a": 1}]')
    assert isinstance(open_source(tmp_path / "lines.json"), LineFile)
    assert [record for _, _, record in open_source(tmp_path / "array.jsonl").scan()] == [{"a": 1}]


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_an_array_may_be_one_line_of_any_length(tmp_path: Path, packing: str) -> None:
    """R10: what is too long is an object, not the array."""
    record = json.dumps({"text": "word " * 2000})
    text = f"[{', '.join([record] * (MAX_LINE_BYTES // len(record) + 100))}]".encode()
    assert len(text) > MAX_LINE_BYTES
    path = tmp_path / f"a.json{packing}"
    path.write_bytes(gzip.compress(text, 1) if packing else text)
    assert sum(1 for _ in open_source(path).scan()) == MAX_LINE_BYTES // len(record) + 100
    if not packing:
        path.write_bytes(b'[{"a": 1},\n{"text": "' + b"x" * MAX_LINE_BYTES + b'"}]')
        with pytest.raises(UserError, match=r"a\.json:2: an object is longer than 67,108,864 bytes"):
            list(open_source(path).scan())
