"""Given word vectors: the text formats of word2vec and GloVe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from condenser.errors import UserError
from condenser.files import read_lines


def read_word_vectors(path: str | Path, words: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Read the vectors of a vocabulary's words from a file with a word and its numbers on each line.

    A first line of two whole numbers (word2vec: how many words, how many numbers) is passed over. Of a word that
    stands twice the first counts.

    Args:
        path: the file; ``.gz`` and ``.zst`` are unpacked.
        words: word -> row.

    Returns:
        ``(rows, vectors)``: int64 (n,) and float32 (n, length), the words that were found.

    Raises:
        UserError: with ``file:line``: a line with other than the first one's number of numbers, or one that is not
            a number or not finite; no word of the vocabulary in the file.
    """
    length = 0
    found: dict[int, np.ndarray] = {}
    for number, line in read_lines(path):
        fields = line.rstrip().split(" ")
        if number == 1 and len(fields) == 2 and all(field.isdigit() for field in fields):
            length = int(fields[1])
            continue
        length = length or len(fields) - 1
        # GloVe has words with blanks in them, so the numbers are counted from the end
        word, numbers = " ".join(fields[:-length]), fields[-length:]
        if not word or length < 1 or len(numbers) != length:
            raise UserError(f"has {len(fields) - 1} numbers behind its word, expected {length}", f"{path}:{number}")
        if word in words and words[word] not in found:
            found[words[word]] = _parsed(numbers, f"{path}:{number}")
    if not found:
        raise UserError(f"none of the vocabulary's {len(words):,} words stands in this file", path)
    return np.array(list(found)), np.stack(list(found.values()))


def _parsed(numbers: list[str], where: str) -> np.ndarray:
    try:
        vector = np.array(numbers, np.float32)
    except ValueError as error:
        raise UserError(f"holds something else than numbers ({error})", where) from None
    if not np.isfinite(vector).all():
        raise UserError("holds a number that is not finite", where)
    return vector
