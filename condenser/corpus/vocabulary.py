"""A WordPiece vocabulary learnt from the user's own text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from transformers import BertTokenizer, PreTrainedTokenizerBase

from condenser.errors import UserError

_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_wordpiece(texts: Callable[[], Iterable[str]], size: int) -> PreTrainedTokenizerBase:
    """Train a lower-casing WordPiece tokenizer with BERT's normalisation and frame.

    The same text gives the same vocabulary.

    Args:
        texts: starts reading the text to learn from; called twice.
        size: entries in the vocabulary, the five special tokens included.

    Raises:
        UserError: ``size`` has no room for the special tokens.
    """
    if size <= len(_SPECIAL_TOKENS):
        raise UserError(f"--train_tokenizer {size} is too small, expected more than {len(_SPECIAL_TOKENS)}")
    # The trainer numbers the letters inside words in an order that changes from run to run, and breaks
    # ties between pieces by these numbers. So they are found first and then given in alphabetical order.
    letters = sorted(token for token in _train(texts(), 0, _SPECIAL_TOKENS) if token.startswith("##"))
    return BertTokenizer(vocab=_train(texts(), size, _SPECIAL_TOKENS + letters), do_lower_case=True)


def _train(texts: Iterable[str], size: int, first_tokens: list[str]) -> dict[str, int]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first_tokens, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()
