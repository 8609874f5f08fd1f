"""Fixtures shared by all tests: where the golden numbers lie, and a BERT small enough to run anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.reference_numbers import golden_folder

# Tiny models gain nothing from a second thread, and lose much where the processor is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

WORDS = (
    "the a of in to and is what who where when how river bank money water fish heart blood cell disease treat ment "
    "symptom s fever pain doctor cat dog bird sing runs red green blue old new city king queen war peace one two three"
).split()
PIECES = ["##s", "##ing", "##ed", "##er", "##ly", "##ment", "##a", "##b", "##c", "##d", "##e"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz0123456789.,?!-'")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of numbers from the reference implementations; CONDENSER_GOLDEN puts others in their place."""
    return golden_folder()


@pytest.fixture(scope="session")
def cases() -> Path:
    """Folder of bug reports from similar tools, turned into input files and right values."""
    return Path(__file__).parent / "cases"


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that AutoModel opens: random BERT, 2 layers of 32, 64 positions, WordPiece tokenizer."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    folder = tmp_path_factory.mktemp("tiny-bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS + LETTERS + PIECES)]
    vocabulary += [f"##{letter}" for letter in LETTERS if f"##{letter}" not in vocabulary]
    vocabulary_file = folder / "vocab.txt"
    vocabulary_file.write_text("\n".join(vocabulary) + "\n")
    BertTokenizer(str(vocabulary_file), do_lower_case=True).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return folder
