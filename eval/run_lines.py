"""Lines of run files, taken apart in blocks: TREC's six columns and MS MARCO's two or three.

A file of 7 million lines must not take much longer than splitting its lines does. So a block whose every line
looks as expected is taken apart as a whole; any doubt sends it through line by line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import numpy as np

from condenser.errors import UserError
from condenser.files import MAX_LINE_BYTES, open_bytes, read_lines

TEXT_SUFFIXES = (".trec", ".run", ".txt", ".tsv")

_BLOCK_BYTES = 1 << 16  # tokens of one block stay in the processor's cache: twice as fast as blocks of 4 MB
_NEWLINE, _BLANK = 10, 32

Piece = tuple[bytes, list[bytes], np.ndarray]


def text_pieces(path: str | Path) -> Iterator[Piece]:
    """Yield (query id, passage ids, scores as float32) for lines that stand together in one block.

    Raises:
        UserError: a line that does not fit, or damaged data; with ``file:line``.
    """
    layout: _Layout | None = None
    first_line = 1
    for block in _blocks(path):
        if layout is None and not block.isspace():
            layout = _Layout.of(block, path, first_line)
        if layout is None:
            first_line += block.count(b"\n")
            continue
        query_ids, ids, scores, lines = layout.columns(block, first_line)
        first_line += lines
        start = 0
        for query_id, group in groupby(query_ids):
            end = start + len(list(group))
            yield query_id[query_id.rfind(b"\n") + 1 :], ids[start:end], scores[start:end]
            start = end


def _blocks(path: str | Path) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines, each ended by a newline alone; a byte order mark is left out."""
    is_first = True
    with open_bytes(path) as stream:
        while True:
            with explained(path):
                block = stream.read(_BLOCK_BYTES)
                rest = stream.readline(MAX_LINE_BYTES + 1)
                if len(rest) > MAX_LINE_BYTES:
                    raise ValueError("a line is too long")
            if not block:
                return
            block += rest
            if is_first:
                block, is_first = block.removeprefix(b"\xef\xbb\xbf"), False
            if not block.endswith(b"\n"):
                block += b"\n"
            yield block.replace(b"\r\n", b"\n") if b"\r" in block else block


@contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Turn a failure to read into the UserError that names the damage and its place."""
    try:
        yield
    except Exception:
        for _ in read_lines(path):
            pass
        raise


class _Layout:
    """Which column of a line holds what, decided on the first line.

    `columns` takes apart a block whose every line has exactly the expected columns; else `_line` finds the
    fault and names its line, or accepts what is unusual but right.
    """

    def __init__(self, path: str | Path, width: int, separator: bytes, has_scores: bool) -> None:
        self.path, self.width, self.separator, self.has_scores = path, width, separator, has_scores
        self.passage_column = 2 if width == 6 else 1
        self._places: dict[bytes, int] = {}

    @classmethod
    def of(cls, block: bytes, path: str | Path, first_line: int) -> _Layout:
        """Look at the first line that is not blank."""
        number, line = next(
            (number, line) for number, line in enumerate(block.split(b"\n"), start=first_line) if line.strip()
        )
        tabs, blanks = line.strip().split(b"\t"), line.split()
        by_tab = len(tabs) in (2, 3)
        width = len(tabs) if by_tab else len(blanks)
        if width not in (2, 3, 6):
            raise UserError(
                f"{width} columns, expected 6 (query Q0 passage rank score tag), or 3 or 2 (query passage rank)",
                f"{path}:{number}",
                "judgements have 4: are --qrels and --run swapped?" if width == 4 else None,
            )
        third = (tabs if by_tab else blanks)[2] if width == 3 else b""
        return cls(path, width, b"\t" if b"\t" in line else b" ", has_scores=width == 6 or b"." in third)

    def columns(self, block: bytes, first_line: int) -> tuple[list[bytes], list[bytes], np.ndarray, int]:
        """Return the block's query ids, passage ids and scores (float32), line by line, and the number of lines.

        Before a query id there may be other text that ends in a newline.
        """
        codes = np.frombuffer(block, np.uint8)
        count = int(np.count_nonzero(codes == _NEWLINE))
        if self.width > 2 and self._is_regular(block, codes, count):
            query_ids, ids, texts = self._split(block)
            scores = self._scores(texts)
            if scores is not None:
                return query_ids, ids, scores, count
        lines = [
            self._line(raw, f"{self.path}:{number}")
            for number, raw in enumerate(block.split(b"\n")[:-1], start=first_line)
            if raw.strip()
        ]
        query_ids, ids = [line[0] for line in lines], [line[1] for line in lines]
        return query_ids, ids, as_float32(np.array([line[2] for line in lines], np.float64)), count

    def _is_regular(self, block: bytes, codes: np.ndarray, lines: int) -> bool:
        """Tell whether each line is ``width`` non-empty cells, parted by one separator and ended by a newline."""
        ends = np.flatnonzero(codes <= _BLANK)
        separators = np.count_nonzero(codes == self.separator[0])
        return bool(
            len(ends) == lines * self.width
            and separators == lines * (self.width - 1)
            and (codes[ends[self.width - 1 :: self.width]] == _NEWLINE).all()
            and ends[0] > 0
            and (np.diff(ends) > 1).all()
            and _is_text(block)
        )

    def _split(self, block: bytes) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Return the query ids, passage ids and scores of a regular block, as they are written."""
        if self.width == 3:
            tokens = block.split()
            return tokens[0::3], tokens[1::3], tokens[2::3]
        # Split at the separator alone, a line's tag and the next line's query stay one token: a sixth less work.
        # `text_pieces` takes them apart, once for all lines of a query where these have one tag.
        tokens = block.split(self.separator)
        return tokens[0:-1:5], tokens[2::5], tokens[4::5]

    def _scores(self, texts: list[bytes]) -> np.ndarray | None:
        """Return the scores, or None when one of them is not as it should be."""
        try:
            values = np.fromiter(map(float if self.has_scores else int, texts), np.float64, len(texts))
        except (ValueError, OverflowError):
            return None
        if np.isnan(values).any():
            return None
        return as_float32(values if self.has_scores else -values)

    def _line(self, raw: bytes, where: str) -> tuple[bytes, bytes, float]:
        if b"\0" in raw:
            raise UserError("line contains a NUL byte, expected text", where)
        cells = raw.split(b"\t") if self.separator == b"\t" and self.width < 6 else raw.split()
        if len(cells) != self.width or b"" in cells:
            shown = [cell.decode(errors="replace") for cell in cells]
            raise UserError(f"found columns {shown}, expected {self.width} as on the first line", where)
        query_id, passage_id = cells[0], cells[self.passage_column]
        for name in (query_id, passage_id):
            try:
                name.decode()
            except UnicodeDecodeError:
                raise UserError(
                    f"id {name!r} is not UTF-8", where, "convert the file first, for example with iconv"
                ) from None
        if self.width == 2:
            self._places[query_id] = self._places.get(query_id, 0) + 1
            return query_id, passage_id, -float(self._places[query_id])
        return query_id, passage_id, self._score(cells[4 if self.width == 6 else 2].decode(errors="replace"), where)

    def _score(self, text: str, where: str) -> float:
        kind = "score" if self.has_scores else "rank"
        try:
            value = float(text) if self.has_scores else -float(int(text))
        except (ValueError, OverflowError):
            expected = "a number" if self.has_scores else "a whole number"
            raise UserError(f"{kind} is {text!r}, expected {expected}", where) from None
        if value != value:
            raise UserError(f"{kind} is {text!r}, which has no place in an order", where)
        return value


def _is_text(block: bytes) -> bool:
    if block.isascii():
        return True
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return True


def as_float32(scores: np.ndarray) -> np.ndarray:
    """Round scores to float32; what lies beyond becomes infinite, as in trec_eval."""
    with np.errstate(over="ignore"):
        return scores.astype(np.float32)
