"""Word vectors in the text formats of word2vec and GloVe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from condenser.corpus.wordvectors import read_word_vectors
from condenser.errors import UserError

WORDS = {"[PAD]": 0, "cat": 1, "dog": 2, "new york": 3}


@pytest.mark.parametrize("header", ["", "4 2\n"])
def test_both_formats(header: str, tmp_path: Path) -> None:
    """Words outside the vocabulary are passed over, one with a blank is read, of a repeated one the first counts."""
    file = tmp_path / "vectors.txt"
    file.write_text(f"{header}dog 1 -2.5\nbird 3 4\nnew york 5 6e-1\ndog 7 8\n")
    rows, vectors = read_word_vectors(file, WORDS)
    assert dict(zip(rows.tolist(), vectors.tolist(), strict=True)) == {2: [1.0, -2.5], 3: [5.0, np.float32(0.6)]}
    assert vectors.dtype == np.float32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat 1 2\ndog 1\n", r"vectors\.txt:2: has 1 numbers behind its word, expected 2"),
        ("cat 1 x\n", r"vectors\.txt:1: holds something else than numbers"),
        ("cat 1 nan\n", r"vectors\.txt:1: holds a number that is not finite"),
        ("cat\n", r"vectors\.txt:1: has 0 numbers"),
        ("bird 1 2\n", r"vectors\.txt: none of the vocabulary's 4 words"),
        ("", r"vectors\.txt: none of the vocabulary's 4 words"),
    ],
)
def test_what_is_no_vector_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "vectors.txt"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_word_vectors(file, WORDS)
