"""Tokenizers of other kinds than BERT's, made from a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = ["Testing mask ing whole words. The cat ran to the bank. A dog sings!"] * 50
SPECIAL = {
    "bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>",
    "unk_token": "<unk>", "mask_token": "<mask>",
}  # fmt: skip
NAMES = list(dict.fromkeys(SPECIAL.values()))


def save(engine: Tokenizer, folder: Path) -> Path:
    ids = [(name, engine.token_to_id(name)) for name in ("<s>", "</s>")]
    engine.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    PreTrainedTokenizerFast(tokenizer_object=engine, **SPECIAL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_level_bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RoBERTa's kind: blanks belong to the word behind them."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, special_tokens=NAMES)
    )
    return save(engine, tmp_path_factory.mktemp("byte-level-bpe"))


def metaspace(folder: Path, *, split: bool) -> Path:
    engine = Tokenizer(models.Unigram())
    engine.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    engine.train_from_iterator(LINES, trainers.UnigramTrainer(vocab_size=80, special_tokens=NAMES, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    return save(engine, folder)


@pytest.fixture(scope="session")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XLM-R's kind: a mark before each word."""
    return metaspace(tmp_path_factory.mktemp("metaspace"), split=True)


@pytest.fixture(scope="session")
def wordless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that sees any text as one word."""
    return metaspace(tmp_path_factory.mktemp("wordless"), split=False)
