from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condenser.errors import UserError
from eval import run_lines
from eval.runs import RunArrays, load_qrels, load_run, read_json_value, write_run
from eval.sts import load_pairs


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def refusal(call: object, *arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["qrels.beir.tsv", "qrels.headerless3.tsv", "qrels.trec.tsv", "qrels.two_col.tsv"])
def test_every_layout_of_judgements_says_the_same(cases: Path, name: str) -> None:  # case B6
    assert load_qrels(cases / "6" / name) == {"q1": {"d2": 1}, "q2": {"d5": 1}}


@pytest.mark.parametrize(
    "text",
    [
        "q 1\t0\td 2\t-1\n",
        "query-id\tcorpus-id\tscore\r\nq 1\td 2\t-1\r\n",
        "\ufeffq 1\td 2\t-1",
        "q 1\td 2\t-1\n\nq 1\td 2\t-1\n",
        '{"q 1": {"d 2": -1}}',
    ],
)
def test_judgements_with_blanks_in_ids(tmp_path: Path, text: str) -> None:
    assert load_qrels(write(tmp_path / "qrels", text)) == {"q 1": {"d 2": -1}}


def test_ids_stay_what_they_are(cases: Path) -> None:  # case B5
    assert load_qrels(cases / "5" / "qrels.txt") == {"q1": {"007": 1}, "q2": {"1": 1}}
    assert load_run(cases / "5" / "run.txt") == {"q1": {"7": 3.0, "007": 2.0}, "q2": {"1": 1.0}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # case B55: also on the first line, which is no header because its grade is a number
        ("q1 0 d1 0.7\n", "qrels:1: grade '0.7' is not a whole number (scale the grades to whole numbers)"),
        ("q1 0 d1 1\nq1 0 d2 1.0\n", "qrels:2: grade '1.0' is not a whole number (scale the grades to whole numbers)"),
        ("q1\td1\tscore\n", "qrels:1: grade 'score' is not a whole number (scale the grades to whole numbers)"),
        ("q1 0 d1 99999999999\n", "qrels:1: grade 99999999999 is out of range"),
        # case R5
        ("q1 0 d1 1\nq2 0 d1 1\nq1 0 d1 2\n", "qrels:3: query 'q1' and passage 'd1' are judged 2, but 1 on line 1"),
        ("q1 0 d1 1\nq1 0 d2\n", "qrels:2: found columns ['q1', '0', 'd2'], expected 4 as on the first line"),
        ("q1\t0\t\t1\n", "qrels:1: found columns ['q1', '0', '', '1'], expected 4 as on the first line"),
        ("d1\n", "qrels:1: 1 columns, expected 2 to 4: query, (0,) passage, (grade)"),
        (
            "q1 Q0 d1 1 2.0 t\n",
            "qrels:1: 6 columns, expected 2 to 4: query, (0,) passage, (grade) "
            "(a TREC run has 6: are --qrels and --run swapped?)",
        ),
        ("", "qrels: no judgement in this file"),
        ("query-id\tcorpus-id\tscore\n", "qrels: no judgement in this file"),
        (
            '{"q1": {"d1": 0.5}}',
            "qrels: query 'q1': grade '0.5' is not a whole number (scale the grades to whole numbers)",
        ),
        ('{"q1": ["d1"]}', "qrels: expected a JSON object {query id: {passage id: number}}"),
    ],
)
def test_bad_judgements_are_named(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(load_qrels, write(tmp_path / "qrels", text)) == f"{tmp_path}/{line}"


EXPECTED = {"q1": {"b": 2.5, "a": 1.0}, "q2": {"a": -3.0}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trec", "q1 Q0 b 1 2.5 t\nq1 Q0 a 2 1 t\nq2 Q0 a 1 -3e0 t\n"),
        ("no-newline-at-the-end", "q1 Q0 b 1 2.5 t\nq1 Q0 a 2 1 t\nq2 Q0 a 1 -3e0 t"),
        ("tabs", "q1\tQ0\tb\t1\t2.5\tt\nq1\tQ0\ta\t2\t1\tt\nq2\tQ0\ta\t1\t-3\tt\n"),
        ("aligned", "q1  Q0 b   1 2.5 t\n\nq1  Q0 a   2 1   t\n q2 Q0 a 1 -3 t \n"),
        ("windows", "q1 Q0 b 1 2.5 t\r\nq1 Q0 a 2 1 t\r\nq2 Q0 a 1 -3 t\r\n"),
        ("byte-order-mark", "\ufeffq1 Q0 b 1 2.5 t\nq1 Q0 a 2 1 t\nq2 Q0 a 1 -3 t\n"),
        ("not-together", "q1 Q0 b 1 2.5 t\nq2 Q0 a 1 -3 t\nq1 Q0 a 2 1 t\n"),
        ("scores", "q1\tb\t2.5\nq1\ta\t1\nq2\ta\t-3\n"),
        ("blank-lines-first", "\n" * 30 + "q1 Q0 b 1 2.5 t\nq1 Q0 a 2 1 t\nq2 Q0 a 1 -3 t\n"),
        ("json", '{"q1": {"b": 2.5, "a": 1}, "q2": {"a": -3.0}}'),
    ],
)
@pytest.mark.parametrize("block", [1, 20, 1 << 16])
def test_layouts_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, block: int) -> None:
    monkeypatch.setattr(run_lines, "_BLOCK_BYTES", block)
    assert load_run(write(tmp_path / name, text)) == EXPECTED
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert load_run(packed) == EXPECTED


@pytest.mark.parametrize("text", ["q1\tb\t1\nq1\ta\t2\nq 2\ta\t1\n", "q1\tb\nq1\ta\nq 2\ta\n"])
@pytest.mark.parametrize("block", [1, 1 << 16])
def test_ms_marco_ranks_become_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, block: int) -> None:
    monkeypatch.setattr(run_lines, "_BLOCK_BYTES", block)
    assert load_run(write(tmp_path / "run.tsv", text)) == {"q1": {"b": -1.0, "a": -2.0}, "q 2": {"a": -1.0}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "q1 Q0 a 1 2.0 t\nq1 Q0 b 2 t\n",
            "run:2: found columns ['q1', 'Q0', 'b', '2', 't'], expected 6 as on the first line",
        ),
        # five and seven columns: as many words as two good lines have
        (
            "q1 Q0 a 1 2.0\nq1 Q0 b 2 1.0 t t\nq1 Q0 c 3 0.5 t\n",
            "run:1: 5 columns, expected 6 (query Q0 passage rank score tag), or 3 or 2 (query passage rank)",
        ),
        (
            "q1 Q0 c 1 3 t\nq1 Q0 a 2 2.0\nq1 Q0 b 3 1.0 t t\n",
            "run:2: found columns ['q1', 'Q0', 'a', '2', '2.0'], expected 6 as on the first line",
        ),
        ("q1 Q0 a 1 high t\n", "run:1: score is 'high', expected a number"),
        ("q1 Q0 a 1 2 t\nq1 Q0 b 2 nan t\n", "run:2: score is 'nan', which has no place in an order"),
        ("q1\ta\t1\nq1\tb\t1.5\n", "run:2: rank is '1.5', expected a whole number"),
        (f"q1\ta\t{10**310}\n", f"run:1: rank is '{10**310}', expected a whole number"),
        ("q1\ta\t1\nq1\t\t2\n", "run:2: found columns ['q1', '', '2'], expected 3 as on the first line"),
        (
            "q1 0 a 1\n",
            "run:1: 4 columns, expected 6 (query Q0 passage rank score tag), or 3 or 2 (query passage rank) "
            "(judgements have 4: are --qrels and --run swapped?)",
        ),
        (
            "q1 Q0 a 1 2 t\nq2 Q0 a 1 2 t\nq1 Q0 a 2 1 t\n",
            "run:3: passage 'a' stands more than once in the ranking of query 'q1', first on line 1 "
            "(--duplicates best keeps the better score)",
        ),
        (
            "q1\ta\t1\nq1\ta\t2\n",
            "run:2: passage 'a' stands more than once in the ranking of query 'q1', first on line 1 "
            "(--duplicates best keeps the better score)",
        ),
        ("q1 Q0 a 1 2 t\nq1 Q0 a\0 2 1 t\n", "run:2: line contains a NUL byte, expected text"),
        ('{"q1": {"a": "2"}}', "run: query 'q1': score of passage 'a' is '2', expected a number"),
        ('{"q1": {"a": NaN}}', "run:1: not valid JSON (unexpected character, expected a JSON value)"),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 16])
def test_bad_runs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str, block: int) -> None:
    monkeypatch.setattr(run_lines, "_BLOCK_BYTES", block)
    assert refusal(load_run, write(tmp_path / "run", text)) == f"{tmp_path}/{line}"


def test_an_id_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_bytes(b"q1 Q0 a 1 2 t\nq1 Q0 caf\xe9 2 1 t\n")
    assert refusal(load_run, path).startswith(f"{path}:2: id b'caf\\xe9' is not UTF-8")


def test_a_run_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    text = "".join(f"q{number} Q0 a 1 2 t\n" for number in range(100_000))
    path.write_bytes(gzip.compress(text.encode())[:-1000])
    assert "compressed data is damaged or ends early after line" in refusal(load_run, path)


def test_a_missing_run_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "bm25.trec", "")
    assert refusal(load_run, tmp_path / "bm52.trec") == (
        f"{tmp_path}/bm52.trec: no such file (did you mean {tmp_path}/bm25.trec?)"
    )


@pytest.mark.parametrize(
    "text", ["q1 Q0 a 1 1 t\nq1 Q0 a 2 3 t\nq1 Q0 a 3 2 t\n", "q1 Q0 a 1 1 t\nq2 Q0 b 1 1 t\nq1 Q0 a 2 3 t\n"]
)
def test_the_best_of_duplicates_is_kept_on_request(tmp_path: Path, text: str) -> None:
    assert load_run(write(tmp_path / "run", text), duplicates="best")["q1"] == {"a": 3.0}


def test_only_some_queries(tmp_path: Path) -> None:
    path = write(tmp_path / "run", "q1 Q0 a 1 1 t\nq2 Q0 b 1 1 t\n")
    assert load_run(path, only={"q2", "q3"}) == {"q2": {"b": 1.0}}


def test_an_empty_run_has_no_rankings(tmp_path: Path) -> None:
    assert load_run(write(tmp_path / "run", "")) == {}


# No blanks, and no format characters: U+FEFF at the start of a file is a byte order mark.
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Zs", "Zl", "Zp")), min_size=1, max_size=6)
RUNS = st.dictionaries(
    WORDS, st.dictionaries(WORDS, st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), max_size=4
)


@settings(max_examples=40, deadline=None)
@given(run=RUNS, suffix=st.sampled_from([".trec", ".trec.gz", ".json", ".json.gz", ".run", ".txt", ".tsv"]))
def test_a_run_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, run: dict[str, dict[str, float]], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"written{suffix}"
    write_run(path, ((query_id, list(hits.items())) for query_id, hits in run.items()))
    if suffix == ".tsv":  # MS MARCO's format keeps the order alone
        run = {query_id: {name: -rank for rank, name in enumerate(hits, start=1)} for query_id, hits in run.items()}
    assert load_run(path) == run


ODD_BYTES = st.binary(max_size=40) | st.lists(
    st.sampled_from(
        [b"q1", b"Q0", b"d1", b"1", b"1e999", b"-inf", b"nan", b" ", b"\t", b"\r", b"\n", b"\xc3", b"{", b'"']
    )
).map(b"".join)


@settings(deadline=None)
@given(content=ODD_BYTES, suffix=st.sampled_from(["", ".trec", ".json", ".trec.gz", ".zst"]))
def test_any_bytes_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"odd{suffix}"
    path.write_bytes(content)
    for load in (load_run, load_qrels, read_json_value, load_pairs):
        try:
            load(path)
        except UserError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)


def test_what_a_written_run_looks_like(tmp_path: Path) -> None:
    rows = [("q1", [("b", np.float32(0.1)), ("a", 16777216.0), ("c", np.float32(1e-7))])]
    write_run(tmp_path / "run.trec", rows, tag="bm25")
    assert (
        tmp_path / "run.trec"
    ).read_text() == "q1 Q0 b 1 0.1 bm25\nq1 Q0 a 2 1.6777216e+07 bm25\nq1 Q0 c 3 1e-07 bm25\n"
    write_run(tmp_path / "run.tsv", rows)
    assert (tmp_path / "run.tsv").read_text() == "q1\tb\t1\nq1\ta\t2\nq1\tc\t3\n"
    write_run(tmp_path / "run.json", rows)
    assert json.loads((tmp_path / "run.json").read_text()) == {"q1": {"b": 0.1, "a": 16777216.0, "c": 1e-7}}


@pytest.mark.parametrize(
    ("name", "rows", "line"),
    [
        # case R46
        (
            "run.trec",
            [("q1", [("d 1", 1.0)])],
            "run.trec: id 'd 1': this format carries no empty id and no blanks (write .tsv or .json instead)",
        ),
        (
            "run.trec",
            [("q\u00a01", [("d1", 1.0)])],
            "run.trec: id 'q\\xa01': this format carries no empty id and no blanks (write .tsv or .json instead)",
        ),
        (
            "run.tsv",
            [("q1", [("d\t1", 1.0)])],
            "run.tsv: id 'd\\t1': this format carries no empty id and no tabs or line ends (write .json instead)",
        ),
        (
            "run.trec",
            [("q1", [("d1", float("nan"))])],
            "run.trec: a score of query 'q1' is nan, expected a finite number",
        ),
        ("run.csv", [], "run.csv: cannot tell the format from '.csv' (expected .trec, .tsv or .json)"),
        ("run", [], "run: cannot tell the format from 'no suffix' (expected .trec, .tsv or .json)"),
    ],
)
def test_what_cannot_be_written_leaves_no_file(
    tmp_path: Path, name: str, rows: list[tuple[str, list[tuple[str, float]]]], line: str
) -> None:
    assert refusal(write_run, tmp_path / name, [("q0", [("d0", 1.0)]), *rows]) == f"{tmp_path}/{line}"
    assert list(tmp_path.iterdir()) == []


def test_arrays_become_dicts() -> None:
    arrays = RunArrays(["q1", "q2"], np.array([[2, 0], [1, -1]]), np.array([[3.0, 1.0], [2.0, -9.0]]), ["a", "b", "c"])
    assert arrays.as_run() == {"q1": {"c": 3.0, "a": 1.0}, "q2": {"b": 2.0}}


@pytest.mark.parametrize("load", [load_run, load_qrels])
def test_a_pipe_is_refused(tmp_path: Path, load: Any) -> None:
    """Its first byte would be read to tell the format, and be gone: the run would look empty."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is a pipe, which can be read once only"):
        load(tmp_path / "pipe")
