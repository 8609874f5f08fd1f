"""Readers: every layout gives the same records, and every fault names its file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from condenser.errors import UserError
from retrieval.readers import read_passages, read_queries
from retrieval.records import Passage, Query


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def error_of(path: Path, **options: bool) -> str:
    with pytest.raises(UserError) as caught:
        list(read_passages(path, **options))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"_id": "d1", "title": "T", "text": "x y"}\n{"_id": "d2", "title": "", "text": "z"}\n'),
        ("a.json", '{"docid": "d1", "title": "T", "text": "x y"}\n{"docid": "d2", "text": "z"}'),
        (
            "a.ndjson",
            '{"id": "d1", "title": "T", "contents": "x y"}\r\n\r\n{"id": "d2", "title": null, "contents": "z"}\r\n',
        ),
        ("a.tsv", "d1\tT\tx y\nd2\t\tz\n"),
        ("a.txt", "\ufeffd1\tT\tx y\n\nd2\t\tz"),
        ("dpr.tsv", "id\ttext\ttitle\nd1\tx y\tT\nd2\tz\t\n"),
    ],
)
@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_layouts_of_passages(tmp_path: Path, name: str, content: str, packing: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packing]
    path = write(tmp_path / f"{name}{packing}", pack(content.encode()))
    assert list(read_passages(path)) == [Passage("d1", "T", "x y"), Passage("d2", "", "z")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.jsonl", '{"_id": "q1", "text": "who"}\n{"_id": "q2", "text": "what", "answers": ["a", "b"]}\n'),
        (
            "q.json",
            '{"qid": "q1", "query": "who", "answers": null}\n{"query_id": "q2", "query": "what", "answers": ["a","b"]}',
        ),
    ],
)
def test_layouts_of_queries(tmp_path: Path, name: str, content: str) -> None:
    assert list(read_queries(write(tmp_path / name, content))) == [Query("q1", "who"), Query("q2", "what", ("a", "b"))]


def test_queries_of_tsv_have_no_answers(tmp_path: Path) -> None:
    assert list(read_queries(write(tmp_path / "q.tsv", 'q1\t"who\n07\twhat \n'))) == [
        Query("q1", '"who'),
        Query("07", "what "),
    ]


def test_newline_in_a_json_text_is_a_blank(tmp_path: Path) -> None:
    """Case B2, first half."""
    path = write(tmp_path / "a.jsonl", '{"_id": "d", "title": "a\\rb", "text": "line one\\nline two\\r\\nthree"}')
    assert list(read_passages(path)) == [Passage("d", "a b", "line one line two three")]


def test_newline_in_a_tsv_text_is_an_error(tmp_path: Path) -> None:
    """Cases B2, second half, and R8."""
    path = write(tmp_path / "a.tsv", "d1\tline one\nline two\nd2\tx\n")
    assert error_of(path).startswith(f"{path}:2: line 2 has 1 column, expected 2 (id, text)")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("d1 text without a tab\n", ":1: line 1 has 1 column, expected 2 (id, text) or 3 (id, title, text)"),
        ("d1\ta\tb\tc\n", ":1: line 1 has 4 columns, expected 2 (id, text) or 3 (id, title, text)"),
        ("d1\tT\tx\nd2\tx\n", ":2: line 2 has 2 columns, expected 3 (id, title, text)"),
        ("\tx\n", ":1: id is an empty string, expected a string or a whole number"),
    ],
)
def test_wrong_tsv(tmp_path: Path, content: str, message: str) -> None:
    """Case R8."""
    assert f"a.tsv{message}" in error_of(write(tmp_path / "a.tsv", content))


def test_unbalanced_quotes_are_text(cases: Path) -> None:
    """Cases B3 and R8."""
    expected = json.loads((cases / "3/expected.json").read_text())
    passages = list(read_passages(cases / "3/collection.tsv"))
    assert [passage.id for passage in passages] == expected["ids"]
    assert [passage.text for passage in passages] == expected["texts"]


def test_long_field(cases: Path) -> None:
    """Case B4."""
    expected = json.loads((cases / "4/expected.json").read_text())
    passages = {passage.id: passage.text for passage in read_passages(cases / "4/collection.tsv")}
    assert len(passages) == expected["n_docs"]
    assert len(passages["d2"]) == expected["len_text_d2"]


def test_ids_are_strings(cases: Path) -> None:
    """Case B5."""
    expected = json.loads((cases / "5/expected.json").read_text())
    assert [passage.id for passage in read_passages(cases / "5/corpus.jsonl")] == expected["ids"]


def test_malformed_line_stops(tmp_path: Path) -> None:
    """Case B10, without the skip option."""
    assert error_of(five_lines(tmp_path)).startswith(f"{tmp_path}/corpus.jsonl:3: not valid JSON")


def test_malformed_line_is_skipped_by_wish_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B10, with the skip option."""
    path = five_lines(tmp_path)
    assert [passage.id for passage in read_passages(path, skip_bad=True)] == ["d1", "d2", "d4", "d5"]
    assert f"{path}: 1 line skipped, first {path}:3: not valid JSON" in capsys.readouterr().err


def five_lines(folder: Path) -> Path:
    lines = [json.dumps({"docid": f"d{n}", "text": "x"}) for n in range(1, 6)]
    lines[2] = '{"docid": "d3", "text": '
    return write(folder / "corpus.jsonl", "\n".join(lines))


def test_all_faults_can_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = b'{"_id": "%d", "text": "x"}'
    lines = [good % 1, b"\xff", good % 1, b"[1]", b'{"_id": "9"}', b"a\0b", b'{"_id": 1.5, "text": "x"}', good % 2]
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    assert [passage.id for passage in read_passages(path, skip_bad=True)] == ["1", "2"]
    assert "6 lines skipped" in capsys.readouterr().err


def test_duplicate_passage_id_names_both_lines(cases: Path) -> None:
    """Case B11."""
    assert error_of(cases / "11/corpus.jsonl").endswith("corpus.jsonl:3: passage id 'd1' stands already on line 1")


def test_duplicate_query_id_names_both_lines(tmp_path: Path) -> None:
    """Cases B12 and R5."""
    path = write(tmp_path / "queries.tsv", "44\tfirst\n44\tsecond\n")
    with pytest.raises(UserError, match=r"queries\.tsv:2: query id '44' stands already on line 1"):
        list(read_queries(path))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"title": "t", "text": "x"}, "no id: expected a field _id or docid or id, found 'title', 'text'"),
        ({"_id": "1", "body": "x"}, "no text: expected a field text or contents, found '_id', 'body'"),
        ({}, "no text: expected a field text or contents, found none"),
        ({"_id": None, "text": "x"}, "id is None, expected a string or a whole number"),
        ({"_id": True, "text": "x"}, "id is True, expected a string or a whole number"),
        ({"_id": "1", "text": None}, "text is None, expected a string"),
        ({"_id": "1", "text": "x", "title": 3}, "title is 3, expected a string"),
    ],
)
def test_wrong_fields(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps(record))
    assert error_of(path) == f"{path}:1: {message}"


def test_answers_must_be_a_list_of_strings(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", '{"_id": "1", "text": "x", "answers": "yes"}')
    with pytest.raises(UserError, match=r"q\.jsonl:1: answers is 'yes', expected a list of strings"):
        list(read_queries(path))


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ""), ("a.tsv", "\n\n"), ("a.tsv", "id\ttext\n")])
def test_file_without_a_passage(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path / name, content)
    assert error_of(path) == f"{path}: no passage in this file"


def test_file_of_nothing_but_bad_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "{\n{\n")
    assert error_of(path, skip_bad=True).startswith(f"{path}: no passage in this file; {path}:1: not valid JSON")


def test_empty_text_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"_id": "1", "text": ""}\n{"_id": "2", "text": "  "}')
    assert [passage.text for passage in read_passages(path)] == ["", "  "]


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "corpus.jsonl", "")
    assert error_of(tmp_path / "corpse.jsonl").endswith(f"no such file (did you mean {tmp_path / 'corpus.jsonl'}?)")


def test_unknown_kind_of_file(tmp_path: Path) -> None:
    assert "unknown kind of file (expected .jsonl or .tsv" in error_of(write(tmp_path / "corpus.xml.gz", "x"))


FRAGMENTS = [
    b'{"_id": "1", "text": "x"}',
    b'{"_id":',
    b'"text":',
    b'"a"',
    b"{",
    b"}",
    b",",
    b"1",
    b"null",
    b"\t",
    b"\n",
    b"\r",
]


@settings(max_examples=300, deadline=None)
@given(
    content=st.binary(max_size=50)
    | st.lists(st.sampled_from([*FRAGMENTS, b"\xff", b"\0", b"\xef\xbb\xbf"])).map(b"".join),
    name=st.sampled_from(["a.jsonl", "a.tsv", "a.jsonl.gz", "a.tsv.zst"]),
)
def test_any_bytes_give_records_or_an_error_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    path = write(tmp_path_factory.mktemp("any") / name, content)
    for read in (read_passages, read_queries):
        try:
            for record in read(path):
                assert record.id
        except UserError as error:
            assert error.where is not None and error.where.startswith(str(path))


@pytest.mark.parametrize("header", ["id\ttext", "docid\tcontents", "pid\tpassage", "ID\tText"])
def test_a_line_of_column_names_is_no_passage(tmp_path: Path, header: str) -> None:
    assert list(read_passages(write(tmp_path / "c.tsv", f"{header}\n1\ta\n"))) == [Passage("1", "", "a")]
    turned = "\t".join(reversed(header.split("\t")))
    assert list(read_passages(write(tmp_path / "t.tsv", f"{turned}\na\t1\n"))) == [Passage("1", "", "a")]


@pytest.mark.parametrize("header", ["id\ttext", "qid\tquery", "query_id\tquestion"])
def test_a_line_of_column_names_is_no_query(tmp_path: Path, header: str) -> None:
    assert list(read_queries(write(tmp_path / "q.tsv", f"{header}\n1\ta\n"))) == [Query("1", "a")]
    assert list(read_queries(write(tmp_path / "w.tsv", "query\twhat is a query\n"))) == [
        Query("query", "what is a query")
    ]
