"""A WordPiece vocabulary learnt from the user's own text."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import BertTokenizer, PreTrainedTokenizerBase

from condenser.errors import UserError

_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_wordpiece(texts: Iterable[str], size: int) -> PreTrainedTokenizerBase:
    """Train a lower-casing WordPiece tokenizer with BERT's normalisation and frame.

    Args:
        texts: the text to learn from, read once.
        size: entries in the vocabulary, the five special tokens included.

    Raises:
        UserError: ``size`` has no room for the special tokens.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    if size <= len(_SPECIAL_TOKENS):
        raise UserError(f"--train_tokenizer {size} is too small, expected more than {len(_SPECIAL_TOKENS)}")
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=_SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=True)
