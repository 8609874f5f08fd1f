"""Spans of a collection: whatever its format, the documents are its passages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.options import SpansOptions
from retrieval.spans import build_spans_of

PASSAGES = [("1", "Cat", "the cat sing in the new city"), ("2", "", "the dog runs to the bank of the river")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("corpus.jsonl", "".join(json.dumps({"_id": i, "title": t, "text": x}) + "\n" for i, t, x in PASSAGES)),
        ("corpus.json", json.dumps([{"id": i, "title": t, "contents": x} for i, t, x in PASSAGES])),
        ("corpus.tsv", "".join(f"{i}\t{t}\t{x}\n" for i, t, x in PASSAGES)),
        ("psgs_w100.tsv", "id\ttext\ttitle\n" + "".join(f"{i}\t{x}\t{t}\n" for i, t, x in PASSAGES)),
        (
            "dpr.json",
            json.dumps(
                [{"question": "q", "answers": [], "positive_ctxs": [{"title": t, "text": x} for _, t, x in PASSAGES]}]
            ),
        ),
    ],
)
def test_passages_of_any_format(tmp_path: Path, tiny_bert: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    options = SpansOptions(
        collection=str(tmp_path / name),
        tokenizer=str(tiny_bert),
        max_length=16,
        min_tokens=3,
        output=str(tmp_path / "s"),
    )
    store = TokenStore(build_spans_of(options))
    decode = load_tokenizer(store.tokenizer_folder).decode
    assert [decode(store.span(document, 0).ids) for document in range(len(store))] == [
        "cat the cat sing in the new city",
        "the dog runs to the bank of the river",
    ]
