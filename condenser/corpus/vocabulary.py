"""A vocabulary learnt from the user's own text: pieces of words, or whole words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from condenser.errors import UserError

_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_wordpiece(texts: Callable[[], Iterable[str]], size: int) -> PreTrainedTokenizerBase:
    """Train a lower-casing WordPiece tokenizer with BERT's normalisation and frame.

    The same text gives the same vocabulary.

    Args:
        texts: starts reading the text to learn from; called twice.
        size: entries in the vocabulary, the five special tokens included; more where the text has more letters,
            which are all kept.

    Raises:
        UserError: ``size`` has no room for the special tokens.
    """
    if size <= len(_SPECIAL_TOKENS):
        raise UserError(f"--train_tokenizer {size} is too small, expected more than {len(_SPECIAL_TOKENS)}")
    # The trainer numbers the letters inside words in an order that changes from run to run, and breaks
    # ties between pieces by these numbers. So they are found first and then given in alphabetical order.
    letters = sorted(token for token in _train(texts(), 0, _SPECIAL_TOKENS) if token.startswith("##"))
    return BertTokenizer(vocab=_train(texts(), size, _SPECIAL_TOKENS + letters), do_lower_case=True)


def train_words(texts: Callable[[], Iterable[str]], size: int) -> PreTrainedTokenizerBase:
    """Make a lower-casing tokenizer of the most frequent words, with BERT's normalisation, word borders and frame.

    Of words that are equally frequent the first in the alphabet is taken.

    Args:
        texts: starts reading the text to learn from; called once.
        size: entries in the vocabulary, the five special tokens included; all other words become [UNK].

    Raises:
        UserError: ``size`` has no room for the special tokens.
    """
    if size <= len(_SPECIAL_TOKENS):
        raise UserError(f"--train_words {size} is too small, expected more than {len(_SPECIAL_TOKENS)}")
    from tokenizers import models, processors, trainers

    engine = _bert_like(models.WordLevel(unk_token="[UNK]"))
    trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=_SPECIAL_TOKENS, show_progress=False)
    engine.train_from_iterator(texts(), trainer)
    cls, sep = ("[CLS]", engine.token_to_id("[CLS]")), ("[SEP]", engine.token_to_id("[SEP]"))
    engine.post_processor = processors.BertProcessing(sep, cls)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=engine, **names)


def _train(texts: Iterable[str], size: int, first_tokens: list[str]) -> dict[str, int]:
    from tokenizers import models, trainers

    engine = _bert_like(models.WordPiece(unk_token="[UNK]"))
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first_tokens, show_progress=False)
    engine.train_from_iterator(texts, trainer)
    return engine.get_vocab()


def _bert_like(model: Any) -> Any:
    """Return a tokenizer's engine that normalises text and finds words as BERT does."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers

    engine = Tokenizer(model)
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return engine
