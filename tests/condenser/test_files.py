"""Reading names the line of every fault; writing happens whole or not at all."""

from __future__ import annotations

import gzip
import os
import resource
from pathlib import Path

import pytest
import zstandard

from condenser import files
from condenser.errors import UserError
from condenser.files import atomic_write, identifier, prepare_parent, read_json, read_lines, read_records, write_json


def pack(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    return zstandard.ZstdCompressor().compress(content) if name.endswith(".zst") else content


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_lines_end_at_newlines_only(tmp_path: Path, name: str) -> None:
    """Case R9: U+2028, a lone carriage return and a form feed stay inside their line."""
    path = tmp_path / name
    path.write_bytes(pack(name, "\ufeffone\r\ntwo\u2028a\rb\fc\n\nlast".encode()))
    assert list(read_lines(path)) == [(1, "one"), (2, "two\u2028a\rb\fc"), (3, ""), (4, "last")]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_empty_file_has_no_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(pack(name, b""))
    assert list(read_lines(path)) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\ncaf\xe9\n", ":2: byte 0xE9 at column 4 is not UTF-8 (convert the file to UTF-8 first"),
        (b"fine\nfine\na\0b\n", ":3: line contains a NUL byte, expected text"),
    ],
)
def test_bad_bytes_name_their_line(tmp_path: Path, content: bytes, message: str) -> None:
    """Case R7."""
    path = tmp_path / "a.tsv"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_lines(path))
    assert str(caught.value).startswith(f"{path}{message}")


def test_huge_line_is_refused_or_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case R10."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_bytes(b"short\n" + b"x" * 35 + b"\n0123456789\n" + b"y" * 11)
    with pytest.raises(UserError, match=r"a\.txt:2: line is longer than 10 bytes"):
        list(read_lines(path))
    bad: list[UserError] = []
    assert list(read_lines(path, on_bad=bad.append)) == [(1, "short"), (3, "0123456789")]
    assert [error.where for error in bad] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_truncated_compressed_file_is_never_a_short_one(tmp_path: Path, name: str, keep: float) -> None:
    """Case R11: the lines before the cut come out, then the error; there is no quiet end."""
    whole = "".join(f'{{"_id": "{number * number}"}}\n' for number in range(20_000))
    packed = pack(name, whole.encode())
    path = tmp_path / name
    path.write_bytes(packed[: int(len(packed) * keep)])
    seen = []
    with pytest.raises(UserError, match=r"compressed data is damaged or ends early after line [\d,]+") as caught:
        for _, line in read_lines(path):
            seen.append(line)
    assert f"after line {len(seen):,} " in str(caught.value)
    assert whole.startswith("\n".join(seen))


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_file_that_is_not_compressed_at_all(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"plain text, long enough for any header\n")
    with pytest.raises(UserError, match="compressed data is damaged or ends early after line 0"):
        list(read_lines(tmp_path / name))


def test_zst_of_several_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(pack("a.zst", b"one\ntw") + pack("a.zst", b"") + pack("a.zst", b"o\nthree\n"))
    assert [line for _, line in read_lines(path)] == ["one", "two", "three"]


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run.trec").mkdir()
    with (
        pytest.raises(UserError, match=r"run\.trec: is a folder, expected a file to write"),
        atomic_write(tmp_path / "run.trec"),
    ):
        pass


def test_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").symlink_to(tmp_path / "b.tsv")
    with pytest.raises(UserError, match=r"a\.tsv: is a link to a file that is not there"):
        list(read_lines(tmp_path / "a.tsv"))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    """Case R12."""
    (tmp_path / "queries.tsv").touch()
    with pytest.raises(UserError, match=r"querys\.tsv: no such file \(did you mean .*queries\.tsv\?\)"):
        list(read_lines(tmp_path / "querys.tsv"))
    with pytest.raises(UserError, match="is a folder, expected a file"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1', "not valid JSON"),
        ("[1]", "expected a JSON object, found an array"),
        ('"a"', "expected a JSON object, found a string"),
        ("null", "expected a JSON object, found null"),
        ('{"a": NaN}', "not valid JSON"),
    ],
)
def test_records_name_their_line(tmp_path: Path, line: str, message: str) -> None:
    """Cases R1 and R2."""
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n')
    with pytest.raises(UserError) as caught:
        list(read_records(path))
    assert str(caught.value).startswith(f"{path}:3: {message}")


def test_identifiers() -> None:
    """Case R3."""
    assert [identifier(value, "x") for value in ("007", "7", 7, "1a", -1)] == ["007", "7", "7", "1a", "-1"]
    for value in ("", None, 1.0, True, ["a"], {}):
        with pytest.raises(UserError, match=r"^a:1: id is .*, expected a string or a whole number$"):
            identifier(value, "a:1")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_atomic_write(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    with atomic_write(path) as stream:
        stream.write("naïve\n")
        assert not path.exists()
    assert list(read_lines(path)) == [(1, "naïve")]
    first = path.read_bytes()
    with atomic_write(path) as stream:
        stream.write("naïve\n")
    assert path.read_bytes() == first
    assert (first == "naïve\n".encode()) == (name == "a.txt")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as stream:
        stream.write("new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case R39."""

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"new": 1})
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_parent_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/sub: cannot make this folder: Not a directory"):
        prepare_parent(tmp_path / "file" / "sub" / "run.trec")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", r"a\.json:1: not valid JSON"), ("[]", r"a\.json: expected a JSON object, found an array")],
)
def test_bad_json_file(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz", "lines.txt.zst"])
def test_bytes_read_from_the_disk_are_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with atomic_write(path) as stream:
        stream.writelines(f"{number * 7919}\n" for number in range(20_000))
    told: list[int] = []
    lines = read_lines(path, on_read=told.append)
    assert next(lines) == (1, "0")
    assert 0 < sum(told) < path.stat().st_size, "reading ahead is bounded"
    assert sum(1 for _ in lines) == 19_999
    assert sum(told) == path.stat().st_size


def test_json_that_another_process_removes_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the reading; workers of one folder break each other's seals so."""

    def look_and_lose(path: Path) -> Path:
        path.unlink()
        return path

    write_json(tmp_path / "seal.json", {})
    monkeypatch.setattr(files, "existing_file", look_and_lose)
    with pytest.raises(UserError, match=r"seal\.json: no such file"):
        read_json(tmp_path / "seal.json")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.json.zst"])
def test_a_full_disk_is_told_with_the_file(tmp_path: Path, name: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught, atomic_write(tmp_path / name) as stream:
            stream.write(os.urandom(100_000).hex())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / name)
    assert not list(tmp_path.iterdir())
