"""The verb `check`: each finding by a collection that has just that fault, lengths, exit status, memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from condenser.errors import UserError
from retrieval.check import check
from retrieval.check_lengths import PASSAGE_LIMIT, QUERY_LIMIT, Bin, Lengths
from retrieval.cli import main
from retrieval.encoder import Encoder, EncoderConfig
from retrieval.options import CheckOptions

PASSAGES = {f"p{i}": f"passage number {i} of the corpus" for i in range(6)}
QUERIES = {"q1": "where is the cat?", "q2": "what king", "q3": "old river", "q4": "fever and pain"}
TRAIN = [("q1", "p1", 1), ("q2", "p2", 1)]
DEV = [("q3", "p3", 1)]

Files = dict[str, Any]


def write(folder: Path, **changes: Any) -> Path:
    """Write a collection without fault, but for the changes."""
    files: Files = {"passages": PASSAGES, "queries": QUERIES, "train": TRAIN, "dev": DEV, "negatives": {}} | changes
    (folder / "qrels").mkdir(parents=True)
    (folder / "negatives").mkdir()
    for name, file in (("passages", "corpus"), ("queries", "queries")):
        lines = [json.dumps({"_id": one, "text": text}) + "\n" for one, text in files[name].items()]
        (folder / f"{file}.jsonl").write_text("".join(lines))
    for split in ("train", "dev"):
        if files[split]:
            lines = [f"{query}\t{passage}\t{grade}\n" for query, passage, grade in files[split]]
            (folder / "qrels" / f"{split}.tsv").write_text("".join(lines))
    if files["negatives"]:
        lines = [json.dumps({"query_id": one, "negatives": ids}) + "\n" for one, ids in files["negatives"].items()]
        (folder / "negatives" / "train.jsonl").write_text("".join(lines))
    return folder


def look(folder: Path, **options: Any) -> tuple[dict[str, Any], str | None]:
    """Return the JSON report, and the line of the error when there is one."""
    try:
        return json.loads(check(CheckOptions(collection=str(folder), json=True, **options))), None
    except UserError as error:
        assert error.report is not None
        return json.loads(error.report), str(error)


def test_a_sound_collection(tmp_path: Path) -> None:
    report, error = look(write(tmp_path / "sound"))
    assert error is None
    assert report["findings"] == []
    assert (report["passages"], report["queries"]) == (6, 4)
    counts = {"positives": 2, "negatives": 0, "teacher_scores": 0, "scored_pairs": 0}
    assert report["splits"]["train"] == {"queries": 2, "judged_pairs": 2, **counts}
    text = check(CheckOptions(collection=str(tmp_path / "sound")))
    assert text.startswith(f"sound ({tmp_path / 'sound'}): 6 passages, 4 queries\n")
    assert text.endswith("nothing to find fault with")


@pytest.mark.parametrize(
    ("changes", "options", "level", "kind", "split", "count", "words"),
    [
        (
            {"train": [*TRAIN, ("q2", "gone", 1)]}, {}, "error", "missing_positives", "train", 1,
            "train: 1 positives are not in the corpus, such as 'gone'",
        ),
        (
            {"dev": [*DEV, ("q3", "gone", 1)]}, {}, "error", "missing_positives", "dev", 1,
            "dev: 1 positives are not in the corpus",
        ),
        (
            {"train": [*TRAIN, ("q4", "p1", 0)]}, {}, "error", "no_positive", "train", 1,
            "judged queries have no positive (--drop_empty leaves them out), such as 'q4'",
        ),
        ({"dev": [*DEV, ("q4", "p1", 0)]}, {}, "warning", "no_positive", "dev", 1, "such as 'q4'"),
        (
            {"dev": [*DEV, ("q4", "p1", 0)]}, {"split": "dev"}, "error", "no_positive", "dev", 1, "such as 'q4'",
        ),
        (
            {"train": [*TRAIN, ("q9", "p1", 1)]}, {}, "warning", "no_query", "train", 1,
            "judged queries are not among the queries, such as 'q9'",
        ),
        (
            {"train": [("q8", "p1", 1), ("q9", "p1", 1)]}, {}, "error", "no_query", "train", 2, "such as 'q8', 'q9'",
        ),
        (
            {"passages": PASSAGES | {"e": " \u3000", "f": ""}}, {}, "warning", "blank_passages", None, 2,
            "2 passages have neither title nor text, such as 'e', 'f'",
        ),
        (
            {"passages": PASSAGES | {"p1": ""}}, {}, "error", "blank_positives", "train", 1,
            "train: 1 positives have neither title nor text, and are left out, such as 'p1'",
        ),
        (
            {"passages": PASSAGES | {"p1": ""}, "train": [*TRAIN, ("q1", "p4", 1)]}, {},
            "warning", "blank_positives", "train", 1, "train: 1 positives have neither title nor text",
        ),
        ({"queries": QUERIES | {"q1": " "}}, {}, "warning", "blank_queries", None, 1, "1 queries have no text"),
        (
            {"passages": PASSAGES | {"a": "one  text", "b": "one text", "c": "one text"}}, {},
            "warning", "repeated_passages", None, 2, "2 passages have the text of an earlier one, such as 'a' = 'b'",
        ),
        (
            {"negatives": {"q1": ["p3", "p1"], "q2": ["p4"]}}, {}, "warning", "positive_negatives", "train", 1,
            "train: 1 negatives are positives of their query, and are left out, such as 'q1 p1'",
        ),
        (
            {"negatives": {"q1": ["p3"], "q2": ["x"]}}, {}, "warning", "missing_negatives", "train", 1,
            "train: 1 negatives are not in the corpus, such as 'x'",
        ),
        ({"negatives": {"q1": ["y"], "q2": ["x"]}}, {}, "error", "missing_negatives", "train", 2, "such as 'x', 'y'"),
        (
            {"negatives": {"q1": ["p3", "p4", "p1"], "q2": ["p4"]}}, {"negatives": 3}, "warning", "few_negatives",
            "train", 2, "train: 2 queries have fewer than 3 negatives, such as 'q1', 'q2'",
        ),
        ({}, {"negatives": 1}, "warning", "few_negatives", "train", 2, "fewer than 1 negatives"),
        (
            {"queries": QUERIES | {"q3": "Where is  the CAT"}}, {}, "warning", "shared_queries", "dev, train", 1,
            "1 query texts stand in dev and in train, such as 'q3' = 'q1'",
        ),
        ({"train": [], "dev": []}, {}, "error", "no_judgements", None, 1, "there is nothing to train on"),
        (
            {}, {"passage_max_length": 5}, "warning", "cut_passages", None, 6,
            "at least 6 of 6 passages (100.0%) are longer than 5 words and would be cut",
        ),
    ],
)  # fmt: skip
def test_each_fault_is_found(
    tmp_path: Path,
    changes: Files,
    options: Files,
    level: str,
    kind: str,
    split: str | None,
    count: int,
    words: str,
) -> None:
    """Cases R4, R6, R13, R16, R17, R18, B7, B8 and B19: the level, the number and samples, one line of an error."""
    report, error = look(write(tmp_path / "c", **changes), **options)
    (found,) = [one for one in report["findings"] if one["kind"] == kind]
    assert (found["level"], found["split"], found["count"]) == (level, split, count)
    assert words in found["text"]
    assert (error is not None) == (level == "error")
    if error is not None:
        assert error.startswith(f"{tmp_path / 'c'}: not fit for training: ") and words in error


def test_exit_status_and_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 with warnings alone; 2 with an error, whose line follows the report."""
    leaky = write(tmp_path / "leaky", queries=QUERIES | {"q3": "what king"})
    assert main(["check", str(leaky)]) == 0
    assert "warning: 1 query texts stand in dev and in train" in capsys.readouterr().out
    broken = write(tmp_path / "broken", train=[*TRAIN, ("q1", "x", 1), ("q4", "p1", 0)])
    assert main(["check", str(broken), "--json"]) == 2
    shown = capsys.readouterr()
    assert [one["level"] for one in json.loads(shown.out)["findings"]] == ["error", "error"]
    assert shown.err == (
        f"condenser: error: {broken}: not fit for training: train: 1 positives are not in the corpus, "
        "such as 'x'; and 1 more\n"
    )
    assert main(["check", str(broken / "corpus.jsonl")]) == 2
    line = f"condenser: error: {broken}/corpus.jsonl: not fit for training: no split has judgements: there is nothing"
    assert capsys.readouterr().err.startswith(line)
    assert main(["check", str(broken), "--split", "trian"]) == 2
    assert "no judgements for split 'trian' (did you mean train?)" in capsys.readouterr().err


def test_lengths_are_those_of_the_encoder(tmp_path: Path, tiny_bert: Path) -> None:
    """Case B19: what is over the limit is what encoding will cut."""
    passages = {f"p{i}": "the river bank " * i for i in range(1, 7)}
    folder = write(tmp_path / "c", passages=passages)
    report, _ = look(folder, encoder=str(tiny_bert), passage_max_length=11, query_max_length=4)
    encoder = Encoder.load(tiny_bert, passage_max_length=11, query_max_length=4)
    _, cut = encoder.tokenize_and_count(list(passages.values()), "passage")
    lengths = report["lengths"]
    assert (lengths["unit"], lengths["passages"]["limit"], lengths["passages"]["over"]) == ("tokens", 11, cut)
    assert lengths["passages"]["longest"] == 6 * 3 + 2
    _, cut = encoder.tokenize_and_count(list(QUERIES.values()), "query")
    assert lengths["queries"]["over"] == cut > 0
    assert "3 of 6 passages (50.0%) are longer than 11 tokens" in report["findings"][0]["text"]


def test_limits_without_an_encoder_are_the_default_ones() -> None:
    default = EncoderConfig()
    assert (default.query_max_length, default.passage_max_length) == (QUERY_LIMIT, PASSAGE_LIMIT)


def test_lengths_without_texts_and_at_the_edges() -> None:
    empty = Lengths(5)
    assert (empty.longest, empty.over, empty.share_over, empty.at_most(0.5)) == (0, 0, 0.0, 0)
    lengths = Lengths(16)
    values = [1, 8, 9, 16, 17, 5000]
    lengths.extend(values)
    assert lengths.histogram()[:3] == [Bin(8, 2), Bin(16, 2), Bin(32, 1)]
    assert lengths.histogram()[-1] == Bin(None, 1)
    assert sum(one.count for one in lengths.histogram()) == len(values)
    assert (lengths.over, lengths.longest) == (2, 5000)
    for share in (0.1, 0.5, 0.9, 1.0):
        at_most = lengths.at_most(share)
        assert np.mean(np.array(values) <= at_most) >= share and at_most in values


def test_bad_lines_are_named_or_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    with (folder / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"_id": "p9"\n')
    with pytest.raises(UserError, match=r"corpus.jsonl:7"):
        check(CheckOptions(collection=str(folder)))
    assert look(folder, skip_bad=True)[0]["passages"] == 6


def test_memory_does_not_hold_the_texts(tmp_path: Path) -> None:
    """6 MB of passages pass through less."""
    filler = "word " * 200
    folder = write(tmp_path / "large", passages=PASSAGES | {f"x{i}": f"{i} {filler}" for i in range(6_000)})
    tracemalloc.start()
    try:
        report, _ = look(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report["passages"] == 6_006
    assert peak < 4.5e6


def test_scored_pairs_have_findings_of_their_own(tmp_path: Path) -> None:
    texts = {"train": ["a cat\ta dog\t1", " \tking\t1", "river\tbank\t1"], "dev": ["River\tbank\t0.5", "a\tb\t1"]}
    for split, lines in texts.items():
        header = "sentence1\tsentence2\tscore"
        (tmp_path / f"{split}.tsv").write_text("\n".join([header, *lines]) + "\n")
    report, error = look(tmp_path)
    assert [report["splits"][split]["scored_pairs"] for split in ("train", "dev")] == [3, 2]
    assert {one["kind"]: one["count"] for one in report["findings"]} == {
        "one_score": 3, "blank_pairs": 1, "shared_queries": 1,
    }  # fmt: skip
    assert error is not None and "train: all 3 scored pairs have the score 1.0" in error
    assert sum(one["count"] for one in report["lengths"]["queries"]["histogram"]) == 10


def test_pairs_without_a_teachers_score_are_counted(tmp_path: Path) -> None:
    lines = [
        {"query": "q one", "positive": "p one", "negative": "n one", "scores": [3.0, 1.0]},
        {"query": "q two", "positive": "p two", "negative": "n two"},
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report, _ = look(file, format="triples")
    (found,) = [one for one in report["findings"] if one["kind"] == "no_teacher_score"]
    assert found["count"] == 2
