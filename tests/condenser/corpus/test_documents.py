"""Documents from files and data sets of several kinds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from condenser.corpus.documents import Document, read_dataset, read_documents
from condenser.errors import UserError

RECORDS = [{"id": 7, "title": "T", "text": "one"}, {"id": 8, "title": "", "text": "two"}]
DOCUMENTS = [Document("7", "T", ("one",), False), Document("8", "", ("two",), False)]


def dataset(name: Path, *, split: str = "train", column: str = "text") -> list[Document]:
    return list(read_dataset(str(name), config=None, split=split, column=column))


def test_columns_are_id_title_text(tmp_path: Path) -> None:
    file = tmp_path / "docs.tsv"
    file.write_text("007\tsome \"quoted' text\n\nb\tTitle\tmore text\nc\t\tno title\n")
    assert list(read_documents([file])) == [
        Document("007", "", ("some \"quoted' text",), False),
        Document("b", "Title", ("more text",), False),
        Document("c", "", ("no title",), False),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a", r"docs\.tsv:2: has 1 columns, expected 2 \(id, text\) or 3 \(id, title, text\)"),
        ("a\tb\tc\td", r"docs\.tsv:2: has 4 columns"),
        ("\ttext", r"docs\.tsv:2: id is an empty string"),
    ],
)
def test_other_columns_are_refused_with_the_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "docs.tsv"
    file.write_text(f"x\tfine\n{line}\n")
    with pytest.raises(UserError, match=message):
        list(read_documents([file]))


def test_query_and_passage_are_a_pair_unless_a_text_stands_beside_them(tmp_path: Path) -> None:
    pair = {"query": "what sings", "passage": "the cat"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n" + json.dumps(pair | {"text": "one"}) + "\n")
    assert list(read_documents([tmp_path / "pairs.jsonl"], pairs=True)) == [
        Document("pairs.jsonl:1", "", ("what sings", "the cat"), is_cut=False, is_pair=True),
        Document("pairs.jsonl:2", "", ("one",), is_cut=False),
    ]
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: record has neither text nor spans \(found: query, passage\)"):
        list(read_documents([tmp_path / "pairs.jsonl"]))


def test_packed_files_are_read_by_the_suffix_before(tmp_path: Path) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"7\tT\tone\n8\ttwo\n"))
    read: list[int] = []
    files = [tmp_path / "a.jsonl.zst", tmp_path / "b.tsv.gz"]
    assert list(read_documents(files, read.append)) == DOCUMENTS * 2
    assert sum(read) == sum(file.stat().st_size for file in files)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same two rows as a folder of JSON lines, a Parquet file, and saved with and without splits."""
    from datasets import Dataset, DatasetDict

    root = tmp_path_factory.mktemp("datasets")
    (root / "lines").mkdir()
    (root / "lines" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (root / "damaged").mkdir()
    (root / "damaged" / "train.jsonl").write_text('{"text": "one"}\n{"text": \n')
    rows = Dataset.from_list(RECORDS)
    rows.to_parquet(root / "rows.parquet")
    rows.save_to_disk(root / "saved")
    DatasetDict({"train": rows}).save_to_disk(root / "saved-splits")
    return root


@pytest.mark.parametrize("name", ["lines", "lines/train.jsonl", "rows.parquet", "saved", "saved-splits"])
def test_data_sets_in_every_form_give_the_same_documents(folders: Path, name: str) -> None:
    assert dataset(folders / name) == DOCUMENTS


def test_a_column_of_another_name_and_rows_without_ids(tmp_path: Path) -> None:
    file = tmp_path / "body.csv"
    file.write_text("body\nfirst\nsecond\n")
    assert dataset(file, column="body") == [
        Document(f"body.csv[train]:{number}", "", (text,), False) for number, text in enumerate(("first", "second"))
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("lines", {"column": "body"}, r"neither body nor spans \(found: id, title, text\) \(choose the text with"),
        ("lines", {"split": "dev"}, "cannot read split 'dev' of this data set: .*dev"),
        ("saved-splits", {"split": "dev"}, "cannot read split 'dev' of this data set: no 'dev' is known here"),
        ("nowhere", {}, "nowhere: cannot read split 'train' of this data set: Couldn't find"),
        ("damaged", {}, "damaged: cannot read split 'train' of this data set"),
    ],
)
def test_what_is_not_there_is_one_line(folders: Path, name: str, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        dataset(folders / name, **arguments)
    assert "\n" not in str(caught.value)


def test_a_file_of_an_unknown_kind_and_an_empty_split_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_text("text")
    with pytest.raises(UserError, match="no data file of a known kind"):
        dataset(tmp_path / "a.xyz")
    (tmp_path / "train.csv").write_text("text\n")
    with pytest.raises(UserError, match="split 'train' holds no row"):
        dataset(tmp_path / "train.csv")


@pytest.mark.parametrize("content", [b"", gzip.compress(b'{"text": "a"}' * 999, mtime=0)[:-9], b"no gzip"])
def test_a_damaged_data_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    """Each kind of file fails in its library's own way."""
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot read split 'train' of this data set"):
        dataset(tmp_path / "a.jsonl.gz")


def test_what_a_document_without_an_id_is_called_does_not_depend_on_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.chdir(tmp_path)
    found = [next(read_documents([name])).id for name in ("a.jsonl", str(tmp_path / "a.jsonl"))]
    assert found == ["a.jsonl:1", "a.jsonl:1"]
