"""Data sets of ir_datasets, here of files that a test registers with it: nothing is downloaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from condenser.errors import UserError
from retrieval.collections import open_collection
from retrieval.records import Passage, Query

ir_datasets = pytest.importorskip("ir_datasets")


@pytest.fixture
def registered(tmp_path: Path) -> Iterator[None]:
    """Register test-collection with its splits train and dev/small, and take them away again."""
    for name, content in {
        "docs.tsv": "7\tone\n007\ttwo\n",
        "queries.tsv": "a\twho\nb\twhat\n",
        "train.qrels": "a 0 7 1\n",
        "dev.qrels": "b 0 007 2\nb 0 7 0\n",
    }.items():
        (tmp_path / name).write_text(content)
    docs, queries = str(tmp_path / "docs.tsv"), str(tmp_path / "queries.tsv")
    sets = {
        "test-collection": ir_datasets.create_dataset(docs_tsv=docs, queries_tsv=queries),
        "test-collection/train": ir_datasets.create_dataset(
            docs_tsv=docs, queries_tsv=queries, qrels_trec=str(tmp_path / "train.qrels")
        ),
        "test-collection/dev/small": ir_datasets.create_dataset(
            docs_tsv=docs, queries_tsv=queries, qrels_trec=str(tmp_path / "dev.qrels")
        ),
    }
    for name, dataset in sets.items():
        ir_datasets.registry.register(name, dataset)
    yield
    for name in sets:
        del ir_datasets.registry._registered[name]


@pytest.mark.usefixtures("registered")
def test_a_data_set_with_its_splits() -> None:
    collection = open_collection("irds:test-collection")
    passages = [Passage("7", "", "one"), Passage("007", "", "two")]
    assert list(collection.passages()) == passages
    assert list(collection.lookup().in_order()) == passages and collection.lookup()["007"] == passages[1]
    assert collection.splits() == ["dev/small", "train"]
    assert list(collection.queries()) == [Query("a", "who"), Query("b", "what")]
    assert list(collection.queries("dev/small")) == [Query("b", "what")]
    assert collection.qrels("dev/small") == {"b": {"007": 2, "7": 0}}
    assert collection.negatives("train") == {} == collection.teacher_scores("train")


@pytest.mark.usefixtures("registered")
def test_an_id_with_judgements_is_its_own_split() -> None:
    collection = open_collection("test-collection/train", "ir_datasets")
    assert collection.splits() == ["train"] and collection.qrels("train") == {"a": {"7": 1}}


def test_unknown_id() -> None:
    with pytest.raises(UserError, match=r"ir_datasets knows no 'vaswanie' \(did you mean irds:vaswani\?\)"):
        open_collection("irds:vaswanie")


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(UserError, match=r"ir_datasets is not installed \(pip install 'condenser-ir\[ir_datasets\]'\)"):
        open_collection("irds:vaswani")
