"""Lines and records with ``file:line`` errors, compressed or not, and writes that happen whole or not at all."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from condenser.errors import UserError, nearest

MAX_LINE_BYTES = 64 * 2**20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says of a write that finds no room."""

_ZSTD_CHUNK_BYTES = 2**14
_COPY_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


def existing_file(path: str | Path) -> Path:
    """Return ``path`` as a Path; raise UserError when it is missing or a folder."""
    path = Path(path)
    if path.is_dir():
        raise UserError("is a folder, expected a file", path)
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        if path.is_symlink():
            raise UserError("is a link to a file that is not there", path)
        close = nearest(path.name, siblings)
        hint = f"did you mean {path.parent / close}?" if close else None
        raise UserError("no such file", path, hint)
    return path


@contextmanager
def open_bytes(path: str | Path, on_read: Callable[[int], None] | None = None) -> Iterator[BinaryIO]:
    """Open a plain, ``.gz`` or ``.zst`` file for reading bytes.

    Args:
        path: the file.
        on_read: told how many bytes were read from the disk (packed ones, if the file is) each time.
    """
    path = existing_file(path)
    with path.open("rb") if on_read is None else io.BufferedReader(_CountedFile(path, on_read)) as raw:
        if path.suffix == ".gz":
            with gzip.open(raw, "rb") as stream:
                yield stream  # type: ignore[misc]
        elif path.suffix == ".zst":
            with io.BufferedReader(_ZstdReader(raw)) as reader:
                yield reader
        else:
            yield raw


class _CountedFile(io.FileIO):
    """A file that tells how far it has been read."""

    def __init__(self, path: Path, on_read: Callable[[int], None]) -> None:
        super().__init__(path)
        self._on_read = on_read

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._on_read(count)
        return count


class _ZstdReader(io.RawIOBase):
    """Unpacks Zstandard frames; unlike the library's own reader it tells when the last one is cut short."""

    def __init__(self, packed: BinaryIO) -> None:
        import zstandard

        self._packed = packed
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            if self._frame is not None and self._frame.eof:
                chunk, self._frame = self._frame.unused_data, None
            else:
                chunk = b""
            chunk = chunk or self._packed.read(_ZSTD_CHUNK_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the last frame is incomplete")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._text = memoryview(self._frame.decompress(chunk))
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count


def refuse(error: UserError) -> None:
    """Raise ``error``: what is done about a bad line unless the caller asks otherwise."""
    raise error from None


def read_lines(
    path: str | Path,
    *,
    encoding: str = "utf-8",
    on_bad: Callable[[UserError], None] = refuse,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, str]]:
    r"""Yield ``(line number, text)`` for each line of a file, numbered from 1.

    Lines end at ``\n`` only (a ``\r`` before it is dropped), so that U+2028 or a lone ``\r`` inside a
    text does not cut a record in two. A byte order mark at the start is skipped.

    Args:
        path: the file; ``.gz`` and ``.zst`` are unpacked.
        encoding: how its bytes are read.
        on_bad: called with the error of a line that cannot be read; when it returns, the line is passed over.
        on_read: see `open_bytes`.

    Raises:
        UserError: missing file, bytes that are not ``encoding``, a NUL byte, a line over 64 MiB, or
            compressed data that ends early; each with ``file:line``. The last is never passed over.
    """
    for _, number, text in located_lines(path, encoding=encoding, on_bad=on_bad, on_read=on_read):
        yield number, text


def located_lines(
    path: str | Path,
    *,
    encoding: str = "utf-8",
    on_bad: Callable[[UserError], None] = refuse,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, int, str]]:
    """Yield ``(offset, line number, text)`` for each line, as `read_lines` does.

    The offset is that of the text's first byte in the file, unpacked.
    """
    place, number, end = str(path), 0, 0
    with open_bytes(path, on_read) as stream:
        while True:
            raw = _next_line(stream, place, number)
            if not raw:
                return
            number, start, end = number + 1, end, end + len(raw)
            where = f"{place}:{number}"
            if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                on_bad(
                    UserError(f"line is longer than {MAX_LINE_BYTES:,} bytes", where, "one record per line is expected")
                )
                while raw and not raw.endswith(b"\n"):
                    raw = _next_line(stream, place, number)
                    end += len(raw)
                continue
            if number == 1 and raw.startswith(_BOM):
                raw, start = raw[len(_BOM) :], len(_BOM)
            raw = raw.removesuffix(b"\n").removesuffix(b"\r")
            if b"\0" in raw:
                on_bad(UserError("line contains a NUL byte, expected text", where))
                continue
            try:
                text = raw.decode(encoding)
            except UnicodeDecodeError as error:
                on_bad(
                    UserError(
                        f"byte 0x{raw[error.start]:02X} at column {error.start + 1} is not {encoding.upper()}",
                        where,
                        "convert the file to UTF-8 first, for example with iconv",
                    )
                )
                continue
            yield start, number, text


def _next_line(stream: BinaryIO, place: str, number: int) -> bytes:
    try:
        return stream.readline(MAX_LINE_BYTES + 1)
    except (EOFError, OSError, zlib.error, _zstd_error()) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"compressed data is damaged or ends early after line {number:,} ({error})", place) from None


def unpack(path: str | Path, target: BinaryIO) -> None:
    """Copy a file's bytes to ``target``, unpacked; raise UserError when compressed data is damaged or ends early."""
    with open_bytes(path) as stream:
        try:
            shutil.copyfileobj(stream, target, _COPY_BYTES)
        except (EOFError, OSError, zlib.error, _zstd_error()) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise UserError(f"compressed data is damaged or ends early ({error})", path) from None


def _zstd_error() -> type[Exception]:
    """Return zstandard's exception class if the library is in use, else a class nothing raises."""
    import sys

    module = sys.modules.get("zstandard")
    return module.ZstdError if module else _NeverRaised


class _NeverRaised(Exception):
    pass


def read_records(
    path: str | Path, on_read: Callable[[int], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, object)`` for each line of a JSON lines file; blank lines are passed over.

    ``on_read`` is that of `open_bytes`.

    Raises:
        UserError: a line that is not JSON or not an object, with ``file:line`` and the column.
    """
    for number, line in read_lines(path, on_read=on_read):
        if not line.strip():
            continue
        yield number, parse_record(line, f"{path}:{number}")


def parse_record(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object in ``line``; raise UserError at ``where`` when it is something else."""
    import orjson

    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UserError(
            f"not valid JSON ({error.msg} at column {error.colno})", where, "one JSON object per line"
        ) from None
    if not isinstance(record, dict):
        raise UserError(f"expected a JSON object, found {_json_kind(record)}", where)
    return record


def _json_kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return kinds.get(type(value), "null")


def identifier(value: object, where: str) -> str:
    """Return an id as text: a string as it is, a JSON integer as its decimal text.

    Raises:
        UserError: an empty id, null, a fraction, a boolean or an object.
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    shown = "an empty string" if value == "" else repr(value)
    raise UserError(f"id is {shown}, expected a string or a whole number", where)


@contextmanager
def atomic_write(path: str | Path) -> Iterator[TextIO]:
    """Open a text file that appears under ``path`` only when the block ends without an error.

    ``.gz`` and ``.zst`` paths are compressed (without a time stamp, so that equal text gives equal bytes).
    """
    with atomic_write_bytes(path) as raw, ExitStack() as stack:
        target: Any = raw
        if Path(path).suffix == ".gz":
            target = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
        elif Path(path).suffix == ".zst":
            import zstandard

            target = stack.enter_context(zstandard.ZstdCompressor().stream_writer(raw, closefd=False))
        text = io.TextIOWrapper(target, encoding="utf-8", newline="\n")
        try:
            yield text
        finally:
            text.detach()


@contextmanager
def atomic_write_bytes(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears under ``path`` only when the block ends without an error."""
    path = Path(path)
    if path.is_dir():
        raise UserError("is a folder, expected a file to write", path, "choose another name")
    prepare_parent(path)
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        try:
            opened = draft.open("wb")
        except FileNotFoundError:  # what says that one may write there and means it not, such as /proc
            raise UserError("cannot write into this folder", path.parent) from None
        with opened as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in NO_SPACE and error.filename is None:  # a full disk that does not say for which file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        draft.unlink(missing_ok=True)


def prepare_parent(path: str | Path) -> None:
    """Make the folder that will hold ``path``; raise UserError when it cannot be written.

    Call it before the work, not after: nobody wants to learn about a read-only disk after a night.
    """
    parent = Path(path).absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make this folder: {error.strerror}", parent) from None
    if not os.access(parent, os.W_OK):
        raise UserError("cannot write into this folder", parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries to disk, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def disk_faults(path: str | Path) -> Iterator[None]:
    """Raise the OSError behind an error of a library written in Rust (safetensors, tokenizers), with its path.

    These put the system's error number into the text of a class of their own.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from None


def write_json(path: str | Path, value: object) -> None:
    """Write ``value`` as indented JSON with sorted keys, whole or not at all."""
    with atomic_write_bytes(path) as stream:
        stream.write(dump_json(value))


def dump_json(value: object) -> bytes:
    """Return indented JSON with sorted keys and a final newline; Paths become strings."""
    import orjson

    return orjson.dumps(
        value, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    )


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object; raise UserError when the file is missing or holds something else."""
    import orjson

    path = existing_file(path)
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:  # another process took it away since the look
        raise UserError("no such file", path) from None
    except orjson.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error.msg})", f"{path}:{error.lineno}") from None
    if not isinstance(value, dict):
        raise UserError(f"expected a JSON object, found {_json_kind(value)}", path)
    return value


def sha256_file(path: str | Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
