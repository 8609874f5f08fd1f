"""Collections: folders in BEIR's layout, and the two that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from condenser.errors import UserError
from retrieval.cli import main
from retrieval.collections import list_collections, open_collection
from retrieval.encode import encode
from retrieval.options import DataOptions, EncodeOptions
from retrieval.records import Passage, Query
from retrieval.vectors import Vectors
from tests import command

SIZES = {
    "medquad": {"passages": 15_780, "queries": {"train": 13_549, "dev": 525, "test": 895}},
    "nq-qed": {"passages": 7_957, "queries": {"train": 6_638, "dev": 529, "test": 1_204}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two passages, three queries, judgements of two splits, negatives of one."""
    folder = tmp_path / "mine"
    for name, content in {
        "corpus.jsonl": '{"_id": "p1", "title": "t", "text": "x"}\n{"_id": "p2", "text": "y"}\n',
        "queries.jsonl": '{"_id": "b", "text": "two"}\n{"_id": "a", "text": "one"}\n{"_id": 7, "text": "seven"}\n',
        "qrels/train.tsv": "query-id\tcorpus-id\tscore\na\tp1\t1\n7\tp1\t1\n7\tp2\t2\n",
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nb\tp2\t1\nunknown\tp2\t1\n",
        "negatives/train.jsonl": '{"query_id": 7, "negatives": ["p2", 3]}\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_folder(folder: Path) -> None:
    collection = open_collection(folder)
    assert collection.name == "mine"
    assert list(collection.passages()) == [Passage("p1", "t", "x"), Passage("p2", "", "y")]
    assert [query.id for query in collection.queries()] == ["b", "a", "7"]
    assert list(collection.queries("train")) == [Query("a", "one"), Query("7", "seven")]
    assert collection.splits() == ["test", "train"]
    assert collection.qrels("train") == {"a": {"p1": 1}, "7": {"p1": 1, "p2": 2}}
    assert collection.negatives("train") == {"7": ["p2", "3"]}
    assert collection.negatives("test") == {}


def test_judged_query_that_is_not_in_the_query_file_is_left_out(folder: Path) -> None:
    """Case B8: the others are searched; the report of the judgements counts it."""
    assert [query.id for query in open_collection(folder).queries("test")] == ["b"]


def test_no_judged_query_in_the_query_file(folder: Path) -> None:
    (folder / "queries.jsonl").write_text('{"_id": "z", "text": "other"}\n')
    with pytest.raises(UserError, match=r"queries\.jsonl: none of the 2 queries judged in split 'train' is here"):
        list(open_collection(folder).queries("train"))


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "negatives/train.jsonl"])
def test_fingerprint_follows_every_file_of_the_collection_and_no_other(folder: Path, name: str) -> None:
    before = open_collection(folder).fingerprint()
    (folder / "notes.txt").write_text("not part of it")
    assert open_collection(folder).fingerprint() == before
    (folder / name).write_text((folder / name).read_text() + "\n")
    assert open_collection(folder).fingerprint() != before


def test_fingerprint_does_not_depend_on_the_place(folder: Path) -> None:
    before = open_collection(folder).fingerprint()
    assert open_collection(folder.rename(folder.with_name("moved"))).fingerprint() == before


def test_only_the_corpus_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "text": "x"}\n')
    collection = open_collection(tmp_path)
    assert collection.splits() == []
    with pytest.raises(
        UserError, match=r"no queries\.jsonl \(or \.gz, \.zst\) in this collection, found 'corpus\.jsonl'"
    ):
        list(collection.queries())
    with pytest.raises(UserError, match=r"no judgements for split 'test' \(splits here: none\)"):
        collection.qrels("test")


def test_missing_corpus_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "passages.csv").touch()
    with pytest.raises(
        UserError, match=r"no corpus\.jsonl \(or \.gz, \.zst\) in this collection, found 'passages\.csv'"
    ):
        open_collection(tmp_path, "beir")
    with pytest.raises(UserError, match=r"no collection of a known format, found 'passages\.csv' .*FORMAT:PATH"):
        open_collection(tmp_path)


def test_two_corpora_are_one_too_many(folder: Path) -> None:
    (folder / "corpus.jsonl.gz").touch()
    with pytest.raises(UserError, match=r"both corpus\.jsonl and corpus\.jsonl\.gz are here \(keep one of them\)"):
        open_collection(folder)


def test_bad_negatives_name_their_line(folder: Path) -> None:
    (folder / "negatives/train.jsonl").write_text('{"query_id": "a", "negatives": []}\n{"query_id": "b"}\n')
    with pytest.raises(UserError, match=r"train\.jsonl:2: expected query_id and a list negatives, found 'query_id'"):
        open_collection(folder).negatives("train")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("medquat", "did you mean medquad?"), ("xyz", "embedded collections: medquad, nq-qed")],
)
def test_unknown_name(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bm25", "--collection", name, "--output", "run.trec"]) == 2
    line = f"condenser: error: '{name}' is no folder, no file and no embedded collection ({hint})\n"
    assert capsys.readouterr().err == line


def test_a_name_of_no_letters() -> None:
    with pytest.raises(UserError, match="collection has no name"):
        open_collection("")


def test_unknown_split(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "run.trec"
    assert main(["bm25", "--collection", "nq-qed", "--split", "tests", "--output", str(output)]) == 2
    assert capsys.readouterr().err.endswith("no judgements for split 'tests' (did you mean test?)\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SIZES)
def test_embedded_collection_is_whole(name: str) -> None:
    """No empty text, every judged id is there, no query in two splits."""
    collection = open_collection(name)
    passage_ids = {passage.id for passage in collection.passages() if passage.text.strip()}
    query_ids = {query.id for query in collection.queries() if query.text.strip()}
    assert len(passage_ids) == SIZES[name]["passages"]
    seen: set[str] = set()
    for split in collection.splits():
        qrels = collection.qrels(split)
        assert not seen & qrels.keys()
        seen |= qrels.keys()
        assert {passage_id for grades in qrels.values() for passage_id in grades} <= passage_ids
    assert seen == query_ids


def test_listing_tells_sizes_licences_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--json"]) == 0
    listing = {about["name"]: about for about in json.loads(capsys.readouterr().out)}
    assert {
        name: {"passages": about["passages"], "queries": about["queries"]} for name, about in listing.items()
    } == SIZES
    assert [listing[name]["licence"] for name in SIZES] == ["CC-BY-4.0", "CC-BY-SA-3.0"]
    assert all(about["citations"] for about in listing.values())
    table = list_collections(DataOptions()).splitlines()
    assert table[0].split() == ["name", "passages", "judged", "queries", "licence", "source"]
    assert "dev 529, test 1,204, train 6,638" in table[2]


@pytest.mark.slow
def test_locale_changes_neither_vectors_nor_ids(tiny_bert: Path, tmp_path: Path) -> None:
    """Case B9, through the command: the one process has a C locale and no UTF-8 mode, the other is this one."""
    (tmp_path / "corpus.jsonl").write_text('{"_id": "ï", "text": "naïve café 1/4 ¼ 한국 🇫🇷"}\n', encoding="utf-8")
    common = {"encoder": str(tiny_bert), "input": str(tmp_path / "corpus.jsonl")}
    plain = encode(EncodeOptions(**common, output=str(tmp_path / "plain")))
    bare = EncodeOptions(**common, output=str(tmp_path / "bare"))
    command.run("encode", bare, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    files = {file.name for file in plain.iterdir() if file.name.startswith(("vectors-", "ids-"))}
    assert len(files) == 2
    assert all((plain / name).read_bytes() == (tmp_path / "bare" / name).read_bytes() for name in files)
    assert "ï" in Vectors.load(tmp_path / "bare").ids


def test_queries_that_nobody_judged_are_there_by_their_split(tmp_path: Path) -> None:
    """A file of queries for a split without judgements, such as a leaderboard's."""
    (tmp_path / "collection.tsv").write_text("0\tone\n1\ttwo\n")
    (tmp_path / "queries.dev.tsv").write_text("7\tfirst\n8\tsecond\n")
    (tmp_path / "queries.eval.tsv").write_text("9\tthird\n")
    (tmp_path / "qrels.dev.tsv").write_text("7\t0\t1\t1\n")
    collection = open_collection(tmp_path)
    assert [query.id for query in collection.queries("dev")] == ["7"]
    assert [query.id for query in collection.queries("eval")] == ["9"]
    assert collection.splits() == ["dev"]
    with pytest.raises(UserError, match="no judgements for split 'test'"):
        list(collection.queries("test"))
