"""Data sets whose columns the user names: folders, files, and what `save_to_disk` wrote."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from condenser.errors import UserError
from retrieval.collections import open_collection
from retrieval.formats.lines import text_id
from retrieval.records import Passage, Query, ScoredPair

ROWS = {"q": ["who", "what", "who"], "a": ["x", "y", "z"], "bad": ["n", None, "x"], "n": [1, 2, 3]}
MAPPING = "?query=q&positive=a&negative=bad"


def saved(kind: str, folder: Path) -> str:
    """Write ROWS in one of the forms of a local data set and return its name."""
    rows = datasets.Dataset.from_dict(ROWS)
    if kind == "saved":
        rows.save_to_disk(folder / "set")
    elif kind == "saved splits":
        datasets.DatasetDict({"train": rows, "dev": rows.select([1])}).save_to_disk(folder / "set")
    elif kind == "folder":
        (folder / "set").mkdir()
        rows.to_parquet(folder / "set/train-00000-of-00001.parquet")
    else:
        {"parquet": rows.to_parquet, "csv": rows.to_csv, "jsonl": rows.to_json}[kind](folder / f"set.{kind}")
        return str(folder / f"set.{kind}")
    return str(folder / "set")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["saved", "saved splits", "folder", "parquet", "jsonl"])
def test_columns_by_name(tmp_path: Path, kind: str) -> None:
    collection = open_collection(saved(kind, tmp_path) + MAPPING)
    assert collection.format == "datasets"
    assert collection.splits() == (["dev", "train"] if kind == "saved splits" else ["train"])
    store = collection.lookup()
    assert {passage.text for passage in collection.passages()} == {"x", "y", "z", "n"}
    found = {
        query.text: (
            [store[name].text for name in collection.qrels("train")[query.id]],
            [store[name].text for name in collection.negatives("train").get(query.id, [])],
        )
        for query in collection.queries("train")
    }
    assert found == {"who": (["x", "z"], ["n", "x"]), "what": (["y"], [])}
    if kind == "saved splits":
        assert [query.text for query in collection.queries("dev")] == ["what"]


def test_csv_keeps_text_as_it_stands(tmp_path: Path) -> None:
    """Case B5: 007 is not 7; and NA is a word."""
    path = tmp_path / "mine.csv"
    path.write_text('qid,query,positive\n007,"who, then",NA\n7,what,"two\nlines"\n')
    collection = open_collection(path)
    assert list(collection.queries()) == [Query("007", "who, then"), Query("7", "what")]
    assert [passage.text for passage in collection.passages()] == ["NA", "two lines"]


def test_ids_in_json_stay_what_they_are(tmp_path: Path) -> None:
    """R3: strings and numbers in one column, which a table would make one type of."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"n": "007", "q": "who", "a": "x"}\n{"n": 8, "q": "what", "a": "y"}\n')
    collection = open_collection(f"{path}?query_id=n&query=q&positive=a")
    assert list(collection.queries()) == [Query("007", "who"), Query("8", "what")]
    assert collection.lookup()[text_id("", "y")].text == "y"
    path.write_text(path.read_text() + '{"n": 9, "q": "whom", "answer": "x"}\n')
    with pytest.raises(UserError, match=r"mine\.jsonl:3: expected a field positive .*, found 'query_id', 'query'"):
        open_collection(f"{path}?query_id=n&query=q&positive=a").qrels("train")


def test_tsv_by_format_knows_no_quoting(tmp_path: Path) -> None:
    """Case B3."""
    path = tmp_path / "mine.tsv"
    path.write_text('q\ta\n"open\tx\nwhat\t5" pipe\n')
    collection = open_collection(f"{path}?query=q&positive=a")
    assert [query.text for query in collection.queries()] == ['"open', "what"]
    assert [passage.text for passage in collection.passages()] == ["x", '5" pipe']


def test_rows_can_be_passages(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"pid": ["a", "007"], "body": ["x", "y"], "head": ["T", None]}).to_parquet(
        tmp_path / "c.parquet"
    )
    collection = open_collection(f"{tmp_path / 'c.parquet'}?id=pid&text=body&title=head")
    assert list(collection.passages()) == [Passage("a", "T", "x"), Passage("007", "", "y")]
    assert collection.lookup()["007"] == Passage("007", "", "y")


def test_scores(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"a": ["x", "y"], "b": ["z", "w"], "s": [0.5, 4]})
    rows.to_parquet(tmp_path / "s.parquet")
    collection = open_collection(f"{tmp_path / 's.parquet'}?sentence1=a&sentence2=b&score=s")
    assert collection.scored_pairs("train") == [ScoredPair("x", "z", 0.5), ScoredPair("y", "w", 4.0)]
    teacher = open_collection(f"{tmp_path / 's.parquet'}?query=a&positive=b&score=s")
    assert sorted(value for scores in teacher.teacher_scores("train").values() for value in scores.values()) == [0.5, 4]


def test_fingerprint_follows_rows_and_parts(tmp_path: Path) -> None:
    name = saved("parquet", tmp_path)
    first = open_collection(name + MAPPING).fingerprint()
    assert open_collection(name + MAPPING).fingerprint() == first
    assert open_collection(f"{name}?query=a&positive=q").fingerprint() != first
    datasets.Dataset.from_dict(ROWS | {"a": ["1", "2", "3"]}).to_parquet(name)
    assert open_collection(name + MAPPING).fingerprint() != first


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("?query=q&positive=answer", "[train]: no column 'answer', found 'q', 'a', 'bad', 'n'"),
        ("?query=q&positve=a", "unknown part 'positve' (known parts: query, query_id, positive"),
        ("?query=n&positive=a", "[train]:1: query is 1, expected a string"),
    ],
)
def test_wrong_columns(tmp_path: Path, mapping: str, message: str) -> None:
    name = saved("parquet", tmp_path)
    with pytest.raises(UserError) as caught:
        open_collection(name + mapping).qrels("train")
    assert str(caught.value).startswith(name) and message in str(caught.value)


def test_damaged_file_and_unknown_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"a\.parquet: cannot read this data set: "):
        open_collection(tmp_path / "a.parquet")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no-such/set: cannot read this data set: "):
        open_collection("no-such/set?query=q&positive=a")
    with pytest.raises(
        UserError, match=r"no folder, no file .*for a data set of the Hugging Face hub: datasets:no-such/set"
    ):
        open_collection("no-such/set")
