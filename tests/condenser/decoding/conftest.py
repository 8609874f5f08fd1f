"""Tokenizers of three kinds, small enough to try every text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from condenser.decoding.pieces import Pieces, pieces_of

TEXT = ["the gout and gouty pain of uric acid", "a gout, acidic pain: the uric acids!", "gout gouty acid acidic pain"]


@pytest.fixture(scope="session")
def tokenizers_by_kind(tiny_bert: Path) -> dict[str, PreTrainedTokenizerFast]:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=310, special_tokens=["<end>"], initial_alphabet=letters, show_progress=False),
    )
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    specials = {"special_tokens": ["<end>", "<unk>"], "unk_token": "<unk>", "show_progress": False}
    unigram.train_from_iterator(TEXT * 5, trainers.UnigramTrainer(vocab_size=60, **specials))
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=["<end>", "<unk>"], show_progress=False))
    return {
        "wordpiece": AutoTokenizer.from_pretrained(tiny_bert),
        "bpe": PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>"),
        "unigram": PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="<end>", unk_token="<unk>"),
        "words": PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>"),
    }


@pytest.fixture(scope="session")
def pieces_by_kind(tokenizers_by_kind: dict[str, PreTrainedTokenizerFast]) -> dict[str, Pieces]:
    return {kind: pieces_of(tokenizer) for kind, tokenizer in tokenizers_by_kind.items()}
