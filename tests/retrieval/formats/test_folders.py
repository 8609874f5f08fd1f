"""Folders of files tied together by ids: BEIR, MS MARCO, RocketQA and Pyserini give the same records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from condenser.errors import UserError
from retrieval.collections import open_collection
from retrieval.formats.base import Collection
from retrieval.records import Passage, Query

Files = dict[str, str]
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}

MSMARCO: Files = {
    "collection.tsv": '0\tan "open quote\n1\tpara one\n2\tpara two\n',
    "queries.train.tsv": "121\twhat is x\n122\twhat is y\n",
    "queries.dev.small.tsv": "300\twhat is z\n",
    "qrels.train.tsv": "121\t0\t1\t1\n122\t0\t2\t1\n",
    "qrels.dev.small.tsv": "300\t0\t0\t1\n",
    "qidpidtriples.train.full.2.tsv": "121\t1\t2\n121\t1\t0\n122\t2\t0\n",
}
ROCKETQA: Files = {
    "para.txt": '0\tan "open quote\n1\tpara one\n2\tpara two\n',
    "para.title.txt": "2\tTitle two\n0\tTitle nought\n",
    "train.query.txt": "121\twhat is x\n122\twhat is y\n",
    "dev.query.txt": "300\twhat is z\n",
    "qrels.train.tsv": "121\t1\n122\t2\n",
    "train.negatives.tsv": "121\t2,0\n122\t0\n",
}
PASSAGES = [Passage("0", "", 'an "open quote'), Passage("1", "", "para one"), Passage("2", "", "para two")]


def make(folder: Path, files: Files, packing: str = "") -> Path:
    for name, content in files.items():
        path = folder / f"{name}{packing}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PACK[packing](content.encode()))
    return folder


def check(collection: Collection, passages: list[Passage]) -> None:
    assert list(collection.passages()) == passages
    store = collection.lookup()
    assert list(store.values()) == passages and all(store[passage.id] == passage for passage in passages)
    assert list(collection.queries("train")) == [Query("121", "what is x"), Query("122", "what is y")]
    assert {query.id for query in collection.queries()} == {"121", "122", "300"}
    assert collection.qrels("train") == {"121": {"1": 1}, "122": {"2": 1}}
    assert collection.negatives("train") == {"121": ["2", "0"], "122": ["0"]}
    assert collection.teacher_scores("train") == {} and collection.scored_pairs("train") == []


@pytest.mark.parametrize("packing", PACK)
def test_msmarco(tmp_path: Path, packing: str) -> None:
    collection = open_collection(make(tmp_path / "marco", MSMARCO, packing))
    assert collection.format == "msmarco" and collection.name == "marco"
    check(collection, PASSAGES)
    assert collection.splits() == ["dev.small", "train"]
    assert list(collection.queries("dev.small")) == [Query("300", "what is z")]
    assert collection.negatives("dev.small") == {}


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_rocketqa_joins_titles(tmp_path: Path, packing: str) -> None:
    passages = [PASSAGES[0]._replace(title="Title nought"), PASSAGES[1], PASSAGES[2]._replace(title="Title two")]
    check(open_collection(make(tmp_path, ROCKETQA, packing)), passages)


def test_titles_in_one_file(tmp_path: Path) -> None:
    files = {name: text for name, text in ROCKETQA.items() if not name.startswith("para")}
    files["corpus.tsv"] = '0\tTitle nought\tan "open quote\n1\t\tpara one\n2\tTitle two\tpara two\n'
    passages = [PASSAGES[0]._replace(title="Title nought"), PASSAGES[1], PASSAGES[2]._replace(title="Title two")]
    check(open_collection(make(tmp_path, files)), passages)


def test_pyserini(tmp_path: Path) -> None:
    files = {
        "docs00.jsonl": '{"id": "0", "contents": "an \\"open quote"}\n{"id": 1, "contents": "para one"}\n',
        "docs01.json": '[{"id": "2", "contents": "para two"}]',
        "queries.train.tsv": MSMARCO["queries.train.tsv"],
        "topics.dev.tsv": MSMARCO["queries.dev.small.tsv"],
        "qrels/train.txt": "121 0 1 1\n122 0 2 1\n",
        "train.negatives.tsv": ROCKETQA["train.negatives.tsv"],
    }
    collection = open_collection(make(tmp_path, files))
    assert collection.format == "pyserini"
    check(collection, PASSAGES)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("collection.tsv", MSMARCO["collection.tsv"]),
        ("mine.jsonl", "".join(json.dumps({"id": p.id, "contents": p.text}) + "\n" for p in PASSAGES)),
        ("other.json", json.dumps([{"docid": p.id, "title": None, "text": p.text} for p in PASSAGES])),
        ("psgs_w100.tsv", "id\ttext\ttitle\n" + "".join(f"{p.id}\t{p.text}\t\n" for p in PASSAGES)),
    ],
)
def test_a_file_of_passages_alone(tmp_path: Path, name: str, content: str) -> None:
    path = make(tmp_path, {name: content}) / name
    collection = open_collection(path)
    assert list(collection.passages()) == PASSAGES and collection.corpus_file == path and collection.splits() == []
    assert collection.lookup()["1"] == PASSAGES[1]
    with pytest.raises(UserError, match="a file of passages has no queries"):
        list(collection.queries())


@pytest.mark.parametrize("layout", ["beir", "headerless3", "trec", "two_col"])
def test_layouts_of_judgements(tmp_path: Path, cases: Path, layout: str) -> None:
    """Case B6: each layout gives the same judgements, and none loses its first line."""
    folder = make(tmp_path, {"collection.tsv": "d2\tx\nd5\ty\n", "queries.dev.tsv": "q1\ta\nq2\tb\n"})
    (folder / "qrels.dev.tsv").write_bytes((cases / f"6/qrels.{layout}.tsv").read_bytes())
    collection = open_collection(folder)
    assert collection.qrels("dev") == {"q1": {"d2": 1}, "q2": {"d5": 1}}
    assert [query.id for query in collection.queries("dev")] == ["q1", "q2"]


def test_one_pair_judged_twice_with_two_grades(tmp_path: Path) -> None:
    """R5."""
    folder = make(tmp_path, MSMARCO | {"qrels.train.tsv": "121\t0\t1\t1\n122\t0\t2\t1\n121\t0\t1\t2\n"})
    with pytest.raises(
        UserError, match=r"qrels\.train\.tsv:3: query '121' and passage '1' are judged 2, but 1 on line 1"
    ):
        open_collection(folder).qrels("train")


def test_one_query_id_with_two_texts(tmp_path: Path) -> None:
    """Case B12, in one file and over two."""
    folder = make(tmp_path, MSMARCO | {"queries.train.tsv": "44\tfirst\n44\tsecond\n"})
    with pytest.raises(UserError, match=r"queries\.train\.tsv:2: query id '44' stands already on line 1"):
        list(open_collection(folder).queries())
    make(tmp_path, {"queries.train.tsv": "121\twhat is x\n122\tsame\n300\tother\n"})
    with pytest.raises(UserError, match=r"queries\.train\.tsv: query id '300' has another text in .*dev\.small\.tsv"):
        list(open_collection(folder).queries())


def test_a_query_in_two_files_with_one_text_comes_once(tmp_path: Path) -> None:
    folder = make(tmp_path, MSMARCO | {"queries.dev.tsv": "299\tw\n300\twhat is z\n"})
    assert [query.id for query in open_collection(folder).queries()] == ["300", "299", "121", "122"]


def test_teacher_scores(tmp_path: Path) -> None:
    folder = make(tmp_path, MSMARCO | {"scores.train.tsv": "qid\tpid\tscore\n121\t1\t9.5\n121\t2\t-1e1\n"})
    assert open_collection(folder).teacher_scores("train") == {"121": {"1": 9.5, "2": -10.0}}
    make(folder, {"scores.train.tsv": "121\t1\t9.5\n121\t2\tnan\n"})
    with pytest.raises(UserError, match=r"scores\.train\.tsv:2: score is 'nan', expected a finite number"):
        open_collection(folder).teacher_scores("train")


def test_candidates_are_negatives_where_they_are_not_judged(tmp_path: Path) -> None:
    files = {name: text for name, text in MSMARCO.items() if "triples" not in name}
    files["top1000.train.tsv"] = "121\t1\twhat is x\tpara one\n121\t2\twhat is x\tpara two\n"
    assert open_collection(make(tmp_path, files)).negatives("train") == {"121": ["2"]}


def test_of_many_negatives_in_triples_some_are_kept_and_always_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    triples = "".join(f"q\tp\t{number}\n" for number in range(5000)) + "r\tp\tn\n"
    folder = make(tmp_path, MSMARCO | {"qidpidtriples.train.full.2.tsv": triples})
    kept = open_collection(folder).negatives("train")
    assert kept["r"] == ["n"] and len(set(kept["q"])) == 200
    numbers = sorted(map(int, kept["q"]))
    assert 2000 < sum(numbers) / 200 < 3000  # from the whole file, not from its beginning
    assert open_collection(folder).negatives("train") == kept
    assert "of 1 queries with more than 200 negatives, 200 are kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.negatives.tsv": "1\t2,3\n4\n"}, "train.negatives.tsv:2: found 1 columns, expected 2"),
        ({"train.negatives.tsv": "1\t2,3\n1\t4\n"}, "train.negatives.tsv:2: query id '1' stands already"),
        ({"train.negatives.tsv": "1\n"}, "train.negatives.tsv:1: 1 columns, expected 2 (query; passages with commas)"),
        ({"corpus.tsv": "1\tx\n"}, "both collection.tsv and corpus.tsv are here (keep one of them)"),
        ({"collection.tsv.gz": ""}, "both collection.tsv and collection.tsv.gz are here (keep one of them)"),
        ({"qrels/train.tsv": ""}, "both qrels/train.tsv and qrels.train.tsv are here (keep one of them)"),
    ],
)
def test_wrong_folders(tmp_path: Path, files: Files, message: str) -> None:
    plain = {name: text for name, text in MSMARCO.items() if "triples" not in name}
    with pytest.raises(UserError) as caught:
        open_collection(make(tmp_path, plain | files)).negatives("train")
    assert message in str(caught.value)


def test_bad_lines_can_be_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B10, for the passages, the store and the queries of one collection."""
    folder = make(tmp_path, MSMARCO | {"collection.tsv": "0\tx\n1\n2\ty\n", "queries.train.tsv": "121\tq\n122\n"})
    with pytest.raises(UserError, match=r"collection\.tsv:2: line 2 has 1 column, expected 2"):
        open_collection(folder).lookup()
    collection = open_collection(folder, skip_bad=True)
    assert [passage.id for passage in collection.passages()] == ["0", "2"] == list(collection.lookup())
    assert [query.id for query in collection.queries("train")] == ["121"]
    assert capsys.readouterr().err.count("1 line skipped, first") == 3


def test_latin1_names_its_line(tmp_path: Path) -> None:
    """R7, case B9: nothing is repaired in silence."""
    (tmp_path / "collection.tsv").write_bytes("0\tx\n1\tcaf\u00e9\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"collection\.tsv:2: byte 0xE9 at column 6 is not UTF-8"):
        list(open_collection(tmp_path).passages())


def test_fingerprint_follows_every_file(tmp_path: Path) -> None:
    folder = make(tmp_path, ROCKETQA)
    seen = {open_collection(folder).fingerprint()}
    for name in ROCKETQA:
        (folder / name).write_text((folder / name).read_text() + "\n")
        seen.add(open_collection(folder).fingerprint())
    assert len(seen) == len(ROCKETQA) + 1
