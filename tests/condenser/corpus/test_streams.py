"""Parallel streams: every token once an epoch, in documents' order, chunk behind chunk."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from condenser.corpus.corruption import IGNORED
from condenser.corpus.spans import build_spans
from condenser.corpus.streams import (
    Streams,
    TextFrame,
    TokenDocuments,
    read_token_documents,
    stored_documents,
    text_frame,
)
from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.errors import UserError
from condenser.options import SpansOptions

FRAME = TextFrame(1, 2)
# Documents 10 11 12 | (empty) | 20 | 30 31 32 33: each token tells where it belongs.
DOCUMENTS = TokenDocuments(np.array([10, 11, 12, 20, 30, 31, 32, 33], np.int32), np.array([0, 3, 3, 4, 8]), words=8)
FRAMED = 8 + 2 * 4


def epoch(streams: Streams, number: int) -> np.ndarray:
    """Return what each stream reads in an epoch (streams, length)."""
    steps = range(number * streams.steps_per_epoch, (number + 1) * streams.steps_per_epoch)
    return torch.cat([streams(step)[0].tokens for step in steps], dim=1).numpy()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_an_epoch_is_all_documents_one_behind_the_other(chunk: int) -> None:
    streams = Streams(DOCUMENTS, FRAME, streams=1, chunk=chunk, apart=True, seed=5)
    assert streams.steps_per_epoch == -(-(FRAMED - 1) // chunk)
    last = streams(streams.steps_per_epoch - 1)[0].targets[0, -1]
    whole = np.append(epoch(streams, 0)[0], last)
    texts = [text.tolist() for text in np.split(whole, np.flatnonzero(whole == FRAME.start)[1:])]
    assert sorted(texts) == [[1, 2], [1, 10, 11, 12, 2], [1, 20, 2], [1, 30, 31, 32, 33, 2]]
    assert any((epoch(streams, number) != epoch(streams, 0)).any() for number in (1, 2))


def test_streams_are_equal_parts_of_it() -> None:
    """15 tokens with one to foresee behind them: 3 streams of 5; 7 streams of 2, one token left over."""
    (whole,) = epoch(Streams(DOCUMENTS, FRAME, streams=1, chunk=4, apart=True, seed=5), 0)
    for count, length in ((3, 5), (7, 2)):
        parts = epoch(Streams(DOCUMENTS, FRAME, streams=count, chunk=4, apart=True, seed=5), 0)
        assert parts.shape == (count, length)
        assert np.array_equal(parts.ravel(), whole[: count * length])


def test_targets_are_the_next_tokens_but_for_those_that_begin_a_text() -> None:
    batch = Streams(DOCUMENTS, FRAME, streams=1, chunk=100, apart=True, seed=5)(0)[0]
    tokens, targets, resets = batch.tokens[0].tolist(), batch.targets[0].tolist(), batch.resets[0].tolist()
    for (_, following), target in zip(pairwise(tokens), targets, strict=False):
        assert target == (IGNORED if following == FRAME.start else following)
    assert resets == [token == FRAME.start for token in tokens]
    assert batch.weight == FRAMED - len(DOCUMENTS.lengths)


def test_without_resets_only_an_epoch_begins_anew() -> None:
    streams = Streams(DOCUMENTS, FRAME, streams=2, chunk=3, apart=False, seed=5)
    first, *others = (streams(step)[0].resets for step in range(streams.steps_per_epoch))
    assert first.tolist() == [[True, False, False]] * 2
    assert not any(other.any() for other in others)
    assert streams(streams.steps_per_epoch)[0].resets[:, 0].all()


def test_a_step_is_a_function_of_its_number() -> None:
    one, other = (Streams(DOCUMENTS, FRAME, streams=2, chunk=3, apart=True, seed=5) for _ in range(2))
    for step in (7, 0, 3):
        assert torch.equal(one(step)[0].tokens, other(step)[0].tokens)
    assert set(one.names(0)) <= {f"document {number}" for number in range(1, 5)}


def test_more_streams_than_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="holds 16 tokens, 20 streams need more"):
        Streams(DOCUMENTS, FRAME, streams=20, chunk=3, apart=True, seed=5)


def test_a_store_gives_back_the_documents_that_files_give(tiny_bert: Path, tmp_path: Path) -> None:
    """Spans of at most four words, joined again, are the text tokenized whole; words are counted either way."""
    records = [
        {"_id": "1", "title": "Fever.", "text": "The cat sings. A dog runs in the old city of the king."},
        {"_id": "2", "text": "water " * 9},
        {"_id": "3", "text": " "},
    ]
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = SpansOptions(
        input=[str(file)], tokenizer=str(tiny_bert), max_length=6, min_tokens=1, output=str(tmp_path / "spans")
    )
    store = TokenStore(build_spans(options))
    assert store.span_count > 4
    tokenizer = load_tokenizer(store.tokenizer_folder)
    stored, read = stored_documents(store), read_token_documents([file], tokenizer)
    for one, other in zip(stored, read, strict=True):
        assert np.array_equal(one, other)
    assert tokenizer.decode(read.document(1)) == " ".join(["water"] * 9)
    assert read.words == 17 + 9
    assert text_frame(tokenizer) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
