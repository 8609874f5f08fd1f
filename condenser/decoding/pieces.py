"""What each token of a tokenizer adds to a text, blanks and all."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from condenser.corpus.tokens import bare_tokenizer, no_text
from condenser.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for each byte of a character that is cut into several tokens.
BROKEN = "\N{REPLACEMENT CHARACTER}"
_BLANK_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # of SentencePiece


@dataclass(frozen=True, eq=False)
class Pieces:
    """The tokens of a vocabulary as pieces of text: a text is its pieces joined, less one blank at its beginning.

    WordPiece and whole words: a piece is a blank and the word, behind ``##`` (or another prefix) it is the rest of the
    word alone; punctuation stands between blanks. Byte-level BPE and SentencePiece: the blank is where they put it.

    Attributes:
        texts: piece of each token (vocabulary,), "" for tokens that are no text: padding, end, unknown.
        goes_on: whether a token continues the word before it (vocabulary,), bool.
        tokenizer: what made them.
    """

    texts: list[str]
    goes_on: np.ndarray
    tokenizer: PreTrainedTokenizerBase
    _engine: Any = field(repr=False)

    # Every automaton asks for these, and there may be one for each query.

    @cached_property
    def ordinary(self) -> np.ndarray:
        """Whether a token is text (vocabulary,), bool."""
        return np.array([bool(text) for text in self.texts])

    @cached_property
    def begins_in_word(self) -> np.ndarray:
        """Whether a token's first character is one of a word's (vocabulary,), bool."""
        return np.array([bool(text) and in_word(text[0]) for text in self.texts])

    @cached_property
    def ends_in_word(self) -> np.ndarray:
        """Whether a token's last character is one of a word's (vocabulary,), bool."""
        return np.array([bool(text) and in_word(text[-1]) for text in self.texts])

    def join(self, tokens: Iterable[int]) -> str:
        """Return the text of these tokens."""
        return "".join(self.texts[token] for token in tokens).removeprefix(" ")

    def cuts(self, phrase: str) -> list[tuple[int, ...]]:
        """Return the ways in which the tokenizer cuts a phrase: at the beginning of a text, and behind a blank.

        Raises:
            UserError: a blank phrase, or one with a part that is not in the vocabulary.
        """
        ways = [tuple(self._engine.encode(text, add_special_tokens=False).ids) for text in (phrase, f" {phrase}")]
        ways = [way for way in dict.fromkeys(ways) if way]
        if not ways:
            raise UserError(f"phrase {phrase!r} holds no text")
        if not all(self.texts[token] for token in ways[0]):
            raise UserError(f"phrase {phrase!r} holds what the tokenizer does not know", self.tokenizer.name_or_path)
        return [way for way in ways if self.join(way) == self.join(ways[0])]

    def words_first(self) -> np.ndarray:
        """Return all token ids, whole words of several small letters first: samples read better of these."""
        plain = [text[1:].isascii() and text[1:].islower() and text[1:].isalpha() for text in self.texts]
        word = np.array(
            [good and text[0] == " " and len(text) > 3 for good, text in zip(plain, self.texts, strict=True)]
        )
        return np.argsort(~word, kind="stable")


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return what each token of a tokenizer adds to a text.

    Raises:
        UserError: it joins its tokens in another way than those in `Pieces`.
    """
    names = {number: name for name, number in tokenizer.get_vocab().items()}
    textless = no_text(tokenizer)
    engine = bare_tokenizer(tokenizer)
    texts, inner = [], []
    decoder = json.loads(engine.to_str())["decoder"] or {"type": "Blank"}
    to_text = _text_of(decoder, str(tokenizer.name_or_path))
    for number in range(max(names) + 1):
        text = "" if number in textless or number not in names else to_text(names[number])
        texts.append(text)
        inner.append(decoder["type"] == "WordPiece" and names.get(number, "").startswith(decoder["prefix"]))
    goes_on = np.array([bool(text) and (inside or in_word(text[0])) for text, inside in zip(texts, inner, strict=True)])
    return Pieces(texts, goes_on, tokenizer, engine)


def in_word(character: str) -> bool:
    """Say whether a character is one of those that words are made of: letter, digit, mark or underscore."""
    return character.isalnum() or character in ("_", BROKEN) or unicodedata.category(character)[0] == "M"


def _text_of(decoder: dict[str, Any], where: str) -> Any:
    """Return the function from a token's name to its piece."""
    kinds = {part["type"] for part in decoder.get("decoders", [decoder])}
    if kinds == {"WordPiece"}:
        prefix = decoder["prefix"]
        return lambda name: name[len(prefix) :] if name.startswith(prefix) else f" {name}"
    if kinds == {"Blank"}:
        return lambda name: f" {name}"
    if "ByteLevel" in kinds:
        byte_of = _bytes_by_letter()

        def decoded(name: str) -> str:
            # tokens that were added may be plain text; what has a letter that is no byte's is taken as it is
            known = all(letter in byte_of for letter in name)
            return (bytes(map(byte_of.__getitem__, name)) if known else name.encode()).decode(errors="replace")

        return decoded
    if "Metaspace" in kinds or "Replace" in kinds:
        return lambda name: BROKEN if name.startswith("<0x") and len(name) == 6 else name.replace(_BLANK_MARK, " ")
    raise UserError(
        f"tokenizer joins its tokens by {', '.join(sorted(kinds))}, expected WordPiece, ByteLevel or Metaspace", where
    )


def _bytes_by_letter() -> dict[str, int]:
    """Return the byte for which each letter stands in byte-level BPE: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
