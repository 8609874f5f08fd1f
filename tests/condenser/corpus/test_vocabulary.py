"""A vocabulary learnt from text: the same each time."""

from __future__ import annotations

import random

import pytest

from condenser.corpus.vocabulary import train_wordpiece
from condenser.errors import UserError


def test_the_same_text_gives_the_same_vocabulary() -> None:
    """With many pieces of equal count, whose order the trainer itself leaves to chance."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefghijklmnop", k=7)) for _ in range(2000)]
    first, *others = (train_wordpiece(lambda: texts, 700).get_vocab() for _ in range(6))
    assert len(first) == 700
    assert all(other == first for other in others)


def test_a_size_without_room_is_refused() -> None:
    with pytest.raises(UserError, match="--train_tokenizer 5 is too small, expected more than 5"):
        train_wordpiece(lambda: ["text"], 5)
