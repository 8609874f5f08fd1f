"""Training examples: what is joined, what is left out and counted, what is refused."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from condenser.errors import UserError
from retrieval.collections import Collection, open_collection
from retrieval.examples import Example, Examples, read_examples, read_pairs
from retrieval.records import ScoredPair

Qrels = dict[str, dict[str, int]]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_table(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{query}\t{passage}\t{value}\n" for query, row in rows.items() for passage, value in row.items()]
    path.write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Write a collection of queries q0, q1, ... and passages p0, p1, ..., judged as given."""

    def make_collection(
        qrels: Qrels,
        *,
        queries: int = 5,
        passages: int = 10,
        negatives: dict[str, list[str]] | None = None,
        scores: dict[str, dict[str, float]] | None = None,
    ) -> Collection:
        write_lines(tmp_path / "corpus.jsonl", [{"_id": f"p{i}", "text": f"text {i}"} for i in range(passages)])
        write_lines(tmp_path / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in range(queries)])
        write_table(tmp_path / "qrels" / "train.tsv", qrels)
        if negatives is not None:
            records = [{"query_id": query, "negatives": ids} for query, ids in negatives.items()]
            write_lines(tmp_path / "negatives" / "train.jsonl", records)
        if scores is not None:
            write_table(tmp_path / "scores" / "train.tsv", scores)
        return open_collection(tmp_path)

    return make_collection


def good(count: int = 5) -> Qrels:
    return {f"q{i}": {f"p{i}": 1} for i in range(count)}


def test_queries_are_joined_with_positives_and_negatives(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    qrels = {"q0": {"p0": 1, "p1": 2, "p2": 0}, "q1": {"p1": 1}}
    collection = make(qrels, negatives={"q0": ["p5", "p4", "p5"], "q1": []})
    examples = read_examples(collection, "train", with_negatives=True)
    assert list(examples) == [
        Example("q0", "query 0", ("p0", "p1"), ("p5", "p4")),
        Example("q1", "query 1", ("p1",), ()),
    ]
    assert examples[-1] == examples[1:][0] and len(examples) == 2
    with pytest.raises(IndexError):
        examples[2]
    assert read_examples(collection, "train")[0].negatives == ()
    assert capsys.readouterr().err == ""


def test_queries_without_a_positive_are_refused_and_named(make: Any) -> None:
    """Case R16: the first five ids."""
    qrels = good(2) | {f"q{i}": {"p0": 0} for i in range(2, 9)}
    with pytest.raises(UserError) as caught:
        read_examples(make(qrels, queries=9), "train")
    assert str(caught.value).endswith(
        "7 of 9 queries of split 'train' cannot be trained on: "
        "7 without a positive ('q2', 'q3', 'q4', 'q5', 'q6', ...) (--drop_empty leaves them out)"
    )


def test_dropped_queries_are_counted_by_reason(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases B13, R16: kept 3 of 5, dropped 2."""
    collection = make(good(3) | {"q3": {"p3": 0}, "q4": {"gone": 1}})
    with pytest.raises(UserError, match="2 of 5 queries of split 'train' cannot be trained on"):
        read_examples(collection, "train")
    assert read_examples(collection, "train", drop_empty=True).query_ids.tolist() == ["q0", "q1", "q2"]
    reasons = "1 without a positive ('q3'), 1 with no positive in the corpus ('q4')"
    told = f"warning: {collection.name}, train: kept 3 of 5 queries, dropped 2: {reasons}\n"
    assert told in capsys.readouterr().err


def test_nothing_left_is_refused_whatever_is_asked(make: Any) -> None:
    with pytest.raises(UserError, match="2 of 2 queries of split 'train' cannot be trained on") as caught:
        read_examples(make({"q0": {"gone": 1}, "q1": {"p0": 0}}), "train", drop_empty=True)
    assert "--drop_empty" not in str(caught.value)


def test_positives_outside_the_corpus_are_refused_or_counted(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases B7, R13."""
    collection = make({"q0": {"p0": 1, "d_gone": 1}, "q1": {"p1": 1}})
    with pytest.raises(UserError, match=r"1 judged positives of split 'train' are not in the corpus: 'd_gone'.*--drop"):
        read_examples(collection, "train")
    examples = read_examples(collection, "train", drop_empty=True)
    assert [example.positives for example in examples] == [("p0",), ("p1",)]
    assert ", train: left out 1 judged positives that are not in the corpus ('d_gone')" in capsys.readouterr().err


def test_blank_passages_are_left_out_and_counted(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case R6."""
    collection = make({"q0": {"p0": 1, "p8": 1}, "q1": {"p1": 1}}, negatives={"q0": ["p9", "p2"]})
    texts = {"p8": "", "p9": "  "}
    passages = [{"_id": f"p{i}", "text": texts.get(f"p{i}", "text")} for i in range(10)]
    write_lines(tmp_path / "corpus.jsonl", passages)
    examples = read_examples(collection, "train", with_negatives=True)
    assert [(one.positives, one.negatives) for one in examples] == [(("p0",), ("p2",)), (("p1",), ())]
    told = ", train: left out 2 positives and hard negatives that have neither title nor text ('p8', 'p9')"
    assert told in capsys.readouterr().err
    write_table(tmp_path / "qrels" / "train.tsv", {"q0": {"p0": 1}, "q1": {"p8": 1}})
    with pytest.raises(
        UserError, match=r"1 of 2 queries .*: 1 with no positive that has a text \('q1'\) \(--drop_empty"
    ):
        read_examples(open_collection(tmp_path), "train")


def test_judged_queries_without_a_text_are_counted(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B8."""
    assert len(read_examples(make(good(3), queries=2), "train")) == 2
    assert ", train: left out 1 judged queries that are not in the query file ('q2')" in capsys.readouterr().err


def test_a_query_id_with_two_texts_is_refused(make: Any, tmp_path: Path) -> None:
    """Case B12."""
    make({"44": {"p0": 1}})
    write_lines(tmp_path / "queries.jsonl", [{"_id": "44", "text": "first"}, {"_id": "44", "text": "second"}])
    with pytest.raises(UserError, match=r"queries\.jsonl:2: .*'44'.*1"):
        read_examples(open_collection(tmp_path), "train")


def test_one_text_under_two_ids_is_two_queries(make: Any, tmp_path: Path) -> None:
    make(good(2))
    write_lines(tmp_path / "queries.jsonl", [{"_id": "q0", "text": "same"}, {"_id": "q1", "text": "same"}])
    assert read_examples(open_collection(tmp_path), "train").texts.tolist() == ["same", "same"]


def test_negatives_that_cannot_be_used_are_counted(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Case R16: a positive that is given as a negative, and passages that are not there."""
    collection = make(good(2), negatives={"q0": ["p0", "p5", "gone"], "q1": ["gone", "lost"]})
    assert [example.negatives for example in read_examples(collection, "train", with_negatives=True)] == [("p5",), ()]
    told = capsys.readouterr().err
    assert ", train: left out 1 hard negatives that are judged positives of their query" in told
    assert ", train: left out 2 hard negatives that are not in the corpus ('gone', 'lost')" in told


def test_negatives_of_another_corpus_are_refused(make: Any) -> None:
    with pytest.raises(UserError, match="name passages of another corpus: none of 2 is here, such as 'x1', 'x2'"):
        read_examples(make(good(2), negatives={"q0": ["x1", "x2"]}), "train", with_negatives=True)


def test_a_teacher_scores_positives_and_all_other_passages(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"q0": {"p7": 1.5, "p0": 9.25, "p8": -3.0}, "q1": {"p1": 2.0}, "q2": {"p7": 1.0, "p8": 0.5}}
    collection = make(good(4), scores=scores, negatives={"q0": ["p6"]})
    examples = read_examples(collection, "train", with_negatives=True, with_scores=True, drop_empty=True)
    assert list(examples) == [Example("q0", "query 0", ("p0",), ("p7", "p8"), (9.25,), (1.5, -3.0))]
    reason = "3 without a score of a positive and of another passage ('q1', 'q2', 'q3')"
    assert f"train: kept 1 of 4 queries, dropped 3: {reason}" in capsys.readouterr().err
    with pytest.raises(UserError, match=re.escape(reason)):
        read_examples(collection, "train", with_scores=True)


def test_no_scores_are_refused(make: Any) -> None:
    with pytest.raises(UserError, match=r"no teacher's scores for split 'train' \(--loss softmax needs none\)"):
        read_examples(make(good()), "train", with_scores=True)


def test_columns_take_little_memory() -> None:
    """A list of ids takes 8 bytes an id and 50 a string; MS MARCO has 15 million negatives."""
    rng = np.random.default_rng(0)

    def build() -> Examples:
        return Examples(
            Example(f"q{i}", f"query {i}", ("1",), tuple(str(one) for one in rng.integers(8_000_000, size=30)))
            for i in range(2000)
        )

    tracemalloc.start()
    examples = build()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(examples[7].negatives) == 30
    assert size / 60_000 < 4 + 16 + 10  # a row, an id that comes once, and the query's share


class Pairs:
    """As much of a collection as holds scored pairs."""

    folder = Path("sts")

    def __init__(self, *scores: float) -> None:
        self._pairs = [ScoredPair(f"a {score}", f"b {score}", score) for score in scores]

    def scored_pairs(self, split: str) -> list[ScoredPair]:
        return self._pairs


@pytest.mark.parametrize(
    ("given", "scaled"), [((0.0, 2.5, 5.0), [0, 0.5, 1]), ((1.0, 4.0), [0, 1]), ((0.2, 0.7), [0.2, 0.7])]
)
def test_scores_of_pairs_are_scaled(
    given: tuple[float, ...], scaled: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [pair.score for pair in read_pairs(Pairs(*given), "train")] == scaled  # type: ignore[arg-type]
    told = f"scores {given[0]:g} to {given[-1]:g} of {len(given)} pairs of split 'train' become 0 to 1"
    assert (told in capsys.readouterr().err) == (max(given) > 1)


def test_pairs_that_say_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="sts: no scored pairs in split 'train'"):
        read_pairs(Pairs(), "train")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="all 2 pairs of split 'train' have the score 3"):
        read_pairs(Pairs(3, 3), "train")  # type: ignore[arg-type]
