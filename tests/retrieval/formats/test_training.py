"""Training lines: DPR, Tevatron, pairs, triples and scored pairs become the same records."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condenser.errors import UserError
from retrieval.collections import open_collection
from retrieval.formats.base import Collection
from retrieval.formats.lines import text_id
from retrieval.records import Passage, Query, ScoredPair


def passage(text: str, title: str = "") -> Passage:
    return Passage(text_id(title, text), title, text)


def lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def texts(collection: Collection, split: str = "train") -> dict[str, tuple[list[str], list[str]]]:
    """Return, for each query's text, the texts of its positives and of its negatives."""
    store, qrels, negatives = collection.lookup(), collection.qrels(split), collection.negatives(split)
    return {
        query.text: (
            [store[name].text for name in qrels[query.id]],
            [store[name].text for name in negatives.get(query.id, [])],
        )
        for query in collection.queries(split)
    }


DPR = [
    {
        "question": "who",
        "answers": ["A", "B"],
        "positive_ctxs": [{"title": "T", "text": "x", "score": 1000, "passage_id": "7"}],
        "negative_ctxs": [{"title": "U", "text": "y", "psg_id": 8}],
        "hard_negative_ctxs": [{"title": "V", "text": "z"}],
    },
    {
        "question": "what",
        "answers": [],
        "positive_ctxs": [{"title": "T", "text": "x", "passage_id": "7"}, {"title": "", "text": "w"}],
        "negative_ctxs": [{"title": "U", "text": "y", "psg_id": 8}],
        "hard_negative_ctxs": [],
    },
    {"question": "none", "answers": ["C"], "positive_ctxs": [], "negative_ctxs": [], "hard_negative_ctxs": []},
]


@pytest.mark.parametrize("name", ["nq-train.json", "nq-train.json.gz", "nq-train.jsonl"])
def test_dpr(tmp_path: Path, name: str) -> None:
    path = lines(tmp_path / name, DPR if name.endswith("jsonl") else [DPR])
    collection = open_collection(path)
    assert collection.format == "dpr" and collection.splits() == ["train"]
    assert list(collection.passages()) == [
        Passage("7", "T", "x"),
        passage("z", "V"),
        Passage("8", "U", "y"),
        passage("w"),
    ]
    who, what, none = collection.queries("train")
    assert who == Query(text_id("", "who"), "who", ("A", "B"))
    assert collection.qrels("train") == {who.id: {"7": 1}, what.id: {"7": 1, text_id("", "w"): 1}, none.id: {}}
    assert collection.negatives("train") == {who.id: [text_id("V", "z")], what.id: ["8"]}  # what has no hard ones


def test_dpr_with_indentation_names_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps([DPR[0], {**DPR[1], "answers": "B"}], indent=1))
    line = path.read_text().split('"question": "what"')[0].count("\n")
    with pytest.raises(UserError, match=rf"train\.json:{line}: answers is 'B', expected a list of strings"):
        open_collection(path).qrels("train")


TEVATRON = [
    {
        "query_id": 1,
        "query": "who",
        "positive_passages": [{"docid": "p1", "title": "T", "text": "x"}],
        "negative_passages": [{"docid": "n1", "title": None, "text": "y"}, {"docid": "n2", "text": "z"}],
    },
    {"query_id": "2", "query": "what", "positive_passages": [{"docid": "p1", "title": "T", "text": "x"}]},
]


def test_tevatron_with_texts(tmp_path: Path) -> None:
    collection = open_collection(lines(tmp_path / "train.jsonl", TEVATRON))
    assert collection.format == "tevatron"
    assert list(collection.passages()) == [Passage("p1", "T", "x"), Passage("n1", "", "y"), Passage("n2", "", "z")]
    assert list(collection.queries()) == [Query("1", "who"), Query("2", "what")]
    assert collection.qrels("train") == {"1": {"p1": 1}, "2": {"p1": 1}}
    assert collection.negatives("train") == {"1": ["n1", "n2"]}


def test_rows_with_different_numbers_of_negatives(cases: Path) -> None:
    """Case B24: read as they are; what a step does about them is the trainer's to say."""
    negatives = open_collection(cases / "24/train.jsonl").negatives("train")
    assert {query: len(ids) for query, ids in negatives.items()} == {"q1": 1, "q2": 3, "q3": 10}


def test_tevatron_with_ids(tmp_path: Path) -> None:
    lines(tmp_path / "corpus.jsonl", [{"docid": 1, "text": "x"}, {"docid": "n", "text": "y"}])
    record = {"query_id": "q", "query_text": "who", "positive_document_ids": [1], "negative_document_ids": ["n"]}
    path = lines(tmp_path / "train.jsonl", [record])
    lines(tmp_path / "dev.jsonl", [record | {"query_id": "r", "query_text": "what"}])
    collection = open_collection(tmp_path)
    assert collection.format == "tevatron" and collection.splits() == ["dev", "train"]
    assert texts(collection) == {"who": (["x"], ["y"])} and texts(collection, "dev") == {"what": (["x"], ["y"])}
    assert collection.corpus_files() == [tmp_path / "corpus.jsonl"]
    assert texts(open_collection(path)) == {"who": (["x"], ["y"])}
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(UserError, match=r"dev\.jsonl:1: this line names passages by id, and no corpus\.jsonl"):
        open_collection(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        {"query": [101, 2040], "positives": [[1, 2]], "negatives": [[3]]},
        {"text_id": "7", "text": [1, 2]},
        {"query": "who", "positive": [1, 2]},
    ],
)
def test_token_ids_are_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    path = lines(tmp_path / "train.jsonl", [record])
    with pytest.raises(UserError, match=r"train\.jsonl:1: \w+ holds token ids, expected text .*raw texts"):
        list(open_collection(path).passages())


PAIRS = {"who": (["x"], []), "what": (["y"], [])}
TRIPLES = {"who": (["x"], ["a", "b"]), "what": (["y"], ["a"])}


@pytest.mark.parametrize(
    ("name", "content", "format", "expected"),
    [
        ("a.jsonl", '{"query": "who", "positive": "x"}\n{"query": "what", "positive": "y"}\n', "pairs", PAIRS),
        ("a.jsonl", '{"question": "who", "answer": "x"}\n{"question": "what", "answer": "y"}\n', "pairs", PAIRS),
        (
            "a.json",
            '[{"anchor": "who", "positive": ["x"]},\n{"anchor": "what", "positive": {"text": "y"}}]',
            "pairs",
            PAIRS,
        ),
        ("a.tsv", "query\tpositive\nwho\tx\nwhat\ty\n", "pairs", PAIRS),
        ("a.tsv", "passage\tquery\nx\twho\ny\twhat\n", "pairs", PAIRS),
        ("a.tsv", "answer\tquestion\nx\twho\ny\twhat\n", "pairs", PAIRS),
        (
            "a.jsonl",
            '{"query": "who", "pos": ["x"], "neg": ["a", "b"]}\n{"query": "what", "pos": ["y"], "neg": ["a"]}\n',
            "triples",
            TRIPLES,
        ),
        (
            "a.jsonl",
            '{"anchor": "who", "positive": "x", "negative": "a"}\n{"anchor": "who", "positive": "x", "negative": "b"}\n'
            '{"anchor": "what", "positive": "y", "negative": "a"}\n',
            "triples",
            TRIPLES,
        ),
        (
            "a.jsonl",
            '{"anchor": "who", "positive": "x", "negative_1": "a", "negative_2": "b"}\n'
            '{"anchor": "what", "positive": "y", "negative_1": "a", "negative_2": null}\n',
            "triples",
            TRIPLES,
        ),
        ("a.tsv", "anchor\tpositive\tnegative\nwho\tx\ta\nwho\tx\tb\nwhat\ty\ta\n", "triples", TRIPLES),
        ("triples.train.tsv", "who\tx\ta\nwho\tx\tb\nwhat\ty\ta\n", "triples", TRIPLES),
    ],
)
def test_pairs_and_triples(
    tmp_path: Path, name: str, content: str, format: str, expected: dict[str, tuple[list[str], list[str]]]
) -> None:
    (tmp_path / name).write_text(content)
    collection = open_collection(tmp_path / name)
    assert collection.format == format
    assert texts(collection) == expected
    assert sorted(found.text for found in collection.passages()) == sorted(
        {text for both in expected.values() for some in both for text in some}
    )
    assert collection.teacher_scores("train") == {} and collection.scored_pairs("train") == []


def test_columns_without_names_need_the_format(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text("who\tx\nwhat\ty\n")
    with pytest.raises(
        UserError, match=r"mine\.tsv:1: 2 columns without names: .*\(msmarco:.* for id, text; pairs: for"
    ):
        open_collection(path)
    assert texts(open_collection(path, "pairs")) == texts(open_collection(f"pairs:{path}")) == PAIRS
    assert [found.id for found in open_collection(path, "msmarco").passages()] == ["who", "what"]


def test_equal_texts_are_one_passage_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"query": "a", "positive": "same"}, {"query": "b", "positive": "same"}, {"query": "a", "positive": "c"}]
    collection = open_collection(lines(tmp_path / "train.jsonl", records))
    assert list(collection.passages()) == [passage("same"), passage("c")]
    assert texts(collection) == {"a": (["same", "c"], []), "b": (["same"], [])}
    said = capsys.readouterr().err
    assert "2 passages, 1 times one comes again" in said
    assert "1 lines of train repeat a query; what they say of it is joined" in said


def test_scored_texts_are_a_teachers_scores(tmp_path: Path) -> None:
    records = [
        {"query": "who", "positive": "x", "negatives": ["a", "b"], "scores": [9, 1.5, -2]},
        {"query": "what", "pos": ["y"], "neg": ["a"], "pos_scores": [3], "neg_scores": [4]},
    ]
    collection = open_collection(lines(tmp_path / "train.jsonl", records))
    assert collection.format == "scored"
    assert texts(collection) == {"who": (["x"], ["a", "b"]), "what": (["y"], ["a"])}
    scores = {query.text: collection.teacher_scores("train")[query.id] for query in collection.queries()}
    who, what = (
        {text_id("", text): score for text, score in some}
        for some in ([("x", 9.0), ("a", 1.5), ("b", -2.0)], [("y", 3.0), ("a", 4.0)])
    )
    assert scores == {"who": who, "what": what}
    assert collection.scored_pairs("train") == []


@pytest.mark.parametrize("name", ["score", "label", "similarity"])
def test_scored_passages_of_which_none_is_called_positive(tmp_path: Path, name: str) -> None:
    """The one that the teacher scores best is taken as the positive, the others are negatives."""
    path = tmp_path / "train.tsv"
    path.write_text(f"query\tpassage\t{name}\nwho\ta\t1.5\nwho\tx\t9\nwho\tb\t-2\n")
    collection = open_collection(path)
    assert collection.format == "scored"
    ((found, scores),) = collection.teacher_scores("train").items()
    assert found == next(iter(collection.queries("train"))).id
    assert {collection.lookup()[passage].text: score for passage, score in scores.items()} == {
        "a": 1.5,
        "x": 9,
        "b": -2,
    }
    assert texts(collection) == {"who": (["x"], ["a", "b"])}
    assert collection.scored_pairs("train") == [
        ScoredPair("who", "a", 1.5),
        ScoredPair("who", "x", 9.0),
        ScoredPair("who", "b", -2.0),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "sts.jsonl",
            '{"sentence1": "a", "sentence2": "b", "score": 4}\n{"sentence1": "c", "sentence2": "d", "score": 0.5}',
        ),
        ("sts.tsv", "score\tsentence1\tsentence2\n4\ta\tb\n0.5\tc\td\n"),
        ("sts.tsv", "sentence_A\tsentence_B\trelatedness_score\na\tb\t4\nc\td\t.5\n"),
    ],
)
def test_sentence_pairs(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    collection = open_collection(tmp_path / name)
    assert collection.scored_pairs("train") == [ScoredPair("a", "b", 4.0), ScoredPair("c", "d", 0.5)]
    assert collection.qrels("train") == {}
    with pytest.raises(UserError, match="split 'train' holds pairs of sentences and no query"):
        list(collection.queries("train"))
    with pytest.raises(UserError, match="no passage in these training lines"):
        list(collection.passages())


def test_top1000_list_is_a_collection(tmp_path: Path) -> None:
    (tmp_path / "top1000.dev").write_text("1\t7\twho\tx\n1\t8\twho\ty\n2\t7\twhat\tx\n")
    for place in (tmp_path, tmp_path / "top1000.dev"):
        collection = open_collection(place)
        assert list(collection.passages()) == [Passage("7", "", "x"), Passage("8", "", "y")]
        assert list(collection.queries()) == [Query("1", "who"), Query("2", "what")]
    (tmp_path / "qrels.dev.tsv").write_text("1\t0\t8\t1\n")
    collection = open_collection(tmp_path)
    assert collection.splits() == ["dev"] and collection.qrels("dev") == {"1": {"8": 1}}
    assert collection.negatives("dev") == {"1": ["7"], "2": ["7"]}


def test_files_of_a_folder_are_its_splits(tmp_path: Path) -> None:
    for name, query in [("split00.json", "a"), ("split01.hn.json", "b"), ("my-dev.json", "c"), ("queries.jsonl", "d")]:
        lines(tmp_path / name, [TEVATRON[0] | {"query_id": query, "query": query}])
    collection = open_collection(tmp_path)
    assert collection.splits() == ["dev", "train"]
    assert [query.id for query in collection.queries("train")] == ["a", "b"]
    assert [query.id for query in collection.queries("dev")] == ["c"]
    assert {file.name for file in collection.files()} == {"my-dev.json", "split00.json", "split01.hn.json"}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"query": "a", "positive": "x"}, {"query": "b"}], "expected a field positive or positives or pos or answer"),
        ([{"query": "a", "positive": "x"}, {"query": "b", "positive": None}], "positive holds None, expected a text"),
        ([{"query": "a", "positive": "x"}, {"query": 7, "positive": "y"}], "query is 7, expected a string"),
        (
            [{"query": "a", "positive": "x"}, {"query": "b", "positive": [{"body": "y"}]}],
            "positive holds an object without",
        ),
        ([{"query": "a", "positive": "x"}, ["b", "y"]], "expected a JSON object, found an array"),
        (
            [
                {"query_id": "44", "query": "first", "positive": "x"},
                {"query_id": "44", "query": "second", "positive": "x"},
            ],
            "query id '44' has another text on ",
        ),
        (
            [
                {"query": "a", "positive": "x", "negative": "y", "scores": [1, 2]},
                {"query": "b", "positive": "x", "scores": [1, 2]},
            ],
            "scores has 2 numbers for 1 passages (one for each positive",
        ),
        (
            [{"query": "a", "positive": "x", "score": 1}, {"query": "b", "positive": "x", "score": "high"}],
            "score is 'high', expected a finite number",
        ),
        ([{"query": "a", "positive": "x", "score": 1}, {"query": "b", "positive": "x"}], "no field for a score, found"),
    ],
)
def test_wrong_lines(tmp_path: Path, records: list[Any], message: str) -> None:
    """Case B12 among them: one query id with two texts is refused with both lines."""
    path = lines(tmp_path / "train.jsonl", records)
    with pytest.raises(UserError) as caught:
        open_collection(path).qrels("train")
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_one_passage_id_with_two_texts(tmp_path: Path) -> None:
    other = TEVATRON[1] | {"positive_passages": [{"docid": "p1", "title": "T", "text": "another"}]}
    path = lines(tmp_path / "train.jsonl", [TEVATRON[0], other])
    with pytest.raises(UserError, match=r"train\.jsonl:2: passage id 'p1' stands with another title or text on line 1"):
        open_collection(path).lookup()


def test_bad_lines_can_be_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B10: five lines, the third is cut."""
    path = lines(tmp_path / "train.jsonl", [{"query": str(n), "positive": f"p{n}"} for n in range(5)])
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows[:2], rows[2][:12], *rows[3:]]))
    with pytest.raises(UserError, match=r"train\.jsonl:3: not valid JSON"):
        open_collection(path).qrels("train")
    collection = open_collection(path, skip_bad=True)
    assert len(list(collection.queries("train"))) == 4 == len(list(collection.passages()))
    assert f"{path}: 1 line skipped, first {path}:3: not valid JSON" in capsys.readouterr().err


def test_one_query_id_with_two_texts_in_two_splits(tmp_path: Path) -> None:
    """Case B12."""
    lines(tmp_path / "train.jsonl", [TEVATRON[0]])
    lines(tmp_path / "dev.jsonl", [TEVATRON[0] | {"query": "whom"}])
    with pytest.raises(UserError, match="query id '1' of split 'train' has another text in an earlier split"):
        list(open_collection(tmp_path).queries())


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(UserError, match=r"train\.jsonl: no record in this file"):
        open_collection(tmp_path / "train.jsonl")
    with pytest.raises(UserError, match=r"train\.jsonl: no training line in this file"):
        open_collection(tmp_path / "train.jsonl", "pairs").qrels("train")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["text", "title", "docid", "id", "contents"]), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = (
    "query question anchor query_id id docid text contents positive positives answer answers negative negative_1 "
    "scores score passage pos neg pos_scores sentence1 sentence2 positive_ctxs negative_ctxs hard_negative_ctxs "
    "positive_passages negative_passages positive_document_ids query_text"
).split()


@settings(max_examples=200, deadline=None)
@given(
    records=st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6) | VALUES, max_size=3),
    form=st.sampled_from(["lines", "array"]),
    format=st.sampled_from(["auto", "dpr", "tevatron", "pairs", "triples", "scored", "pyserini", "beir"]),
)
def test_any_json_gives_records_or_an_error_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], form: str, format: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "train.json"
    path.write_text(json.dumps(records) if form == "array" else "\n".join(map(json.dumps, records)))
    read_all(path, format)


@settings(max_examples=200, deadline=None)
@given(
    content=st.lists(
        st.sampled_from(["a", "b", "1", "0.5", "nan", "query", "positive", "score", "\t", "\t", "\n", "\n", '"', ","])
    ).map("".join),
    name=st.sampled_from(["mine.tsv", "top1000.dev", "collection.tsv", "triples.tsv"]),
    format=st.sampled_from(["auto", "pairs", "triples", "scored", "msmarco"]),
)
def test_any_columns_give_records_or_an_error_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, content: str, name: str, format: str
) -> None:
    path = tmp_path_factory.mktemp("any") / name
    path.write_text(content)
    read_all(path, format)


def read_all(path: Path, format: str) -> None:
    """Ask a collection for all it has; a fault may only be a UserError that names the file."""
    try:
        collection = open_collection(path, format)
    except UserError as error:
        assert str(error.where).startswith(str(path))
        return
    asked: list[Callable[[], Any]] = [
        lambda: list(collection.passages()),
        lambda: [collection.lookup()[passage.id] for passage in collection.passages()],
        lambda: list(collection.queries()),
        lambda: [(collection.qrels(split), collection.negatives(split)) for split in collection.splits()],
        lambda: [(collection.teacher_scores(split), collection.scored_pairs(split)) for split in collection.splits()],
    ]
    for ask in asked:
        try:
            ask()
        except UserError as error:
            assert str(error.where).startswith(str(path.parent))
