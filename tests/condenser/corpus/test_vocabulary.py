"""A vocabulary learnt from text: the same each time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from condenser.corpus.tokens import load_tokenizer
from condenser.corpus.vocabulary import train_wordpiece, train_words
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
    with pytest.raises(UserError, match="--train_words 5 is too small, expected more than 5"):
        train_words(lambda: ["text"], 5)


def test_the_most_frequent_words_make_a_tokenizer_that_any_folder_can_hold(tmp_path: Path) -> None:
    """Five special tokens, then by count, then by the alphabet."""
    train_words(lambda: ["Bark bark, bark.", "a tree, a leaf"], 10).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bark", ",", "a", ".", "leaf"]
    assert tokenizer.convert_ids_to_tokens(range(10)) == words
    ids = tokenizer("A BARK tree")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "a", "bark", "[UNK]", "[SEP]"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a bark"
