"""Spans of a collection: whatever its format, the documents are its passages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.errors import UserError
from condenser.options import SpansOptions
from retrieval.collections import open_collection
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


def test_judged_pairs_are_a_span_each(tmp_path: Path, tiny_bert: Path) -> None:
    folder = tmp_path / "c"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": i, "title": t, "text": x}) + "\n" for i, t, x in PASSAGES)
    )
    (folder / "queries.jsonl").write_text(
        '{"_id": "q1", "text": "what is a cat"}\n{"_id": "q2", "text": "which dog"}\n'
    )
    judged = [("q1", "1", 1), ("q1", "2", 1), ("q2", "1", 0), ("q2", "2", 1), ("q3", "2", 1)]
    (folder / "qrels" / "train.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{p}\t{grade}\n" for q, p, grade in judged)
    )
    options = SpansOptions(
        collection=str(folder), pairs="train", tokenizer=str(tiny_bert), max_length=16, output=str(tmp_path / "s")
    )
    store = TokenStore(build_spans_of(options))
    decode = load_tokenizer(store.tokenizer_folder).decode
    assert [decode(store.span(document, 0).ids) for document in range(len(store))] == [
        "what is a cat [SEP] cat the cat sing in the new city",
        "what is a cat [SEP] the dog runs to the bank of the river",
        "which dog [SEP] the dog runs to the bank of",  # cut at the 14 tokens of room
    ]
    with pytest.raises(UserError, match="--pairs goes with --collection"):
        build_spans_of(SpansOptions(input=["a.txt"], pairs="train", tokenizer="t", output="o"))


def test_a_collection_whose_name_holds_a_slash(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the names of ir_datasets do."""
    (tmp_path / "corpus.tsv").write_text("".join(f"{i}\t{t}\t{x}\n" for i, t, x in PASSAGES))
    collection = open_collection(str(tmp_path / "corpus.tsv"))
    monkeypatch.setattr(collection, "name", "beir/scifact/test")
    monkeypatch.setattr("retrieval.spans.open_collection", lambda name: collection)
    options = SpansOptions(collection="irds:x", tokenizer=str(tiny_bert), min_tokens=3, output=str(tmp_path / "s"))
    assert len(TokenStore(build_spans_of(options))) == 2
