"""BM25 against the formula written out naively, and against reference figures on real text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import bm25s
import numpy as np
import pytest
import pytrec_eval

from condenser.artifacts import Workspace
from condenser.errors import UserError
from condenser.manifest import describe_file, fingerprint
from eval.runs import load_run
from retrieval.bm25 import Bm25Index
from retrieval.cli import main
from retrieval.collections import open_collection
from retrieval.records import Passage

PASSAGES = [
    Passage("p1", "River", "the bank of a river and another river"),
    Passage("p2", "", "money bank"),
    Passage("p10", "", "money bank"),
    Passage("p3", "", "the fish"),
]


def naive_scores(query: list[str], k1: float, b: float) -> dict[str, float]:
    """Lucene's BM25 by hand, on the words that remain of PASSAGES after stop words and stemming."""
    words = {
        "p1": "river bank river anoth river".split(),
        "p2": ["money", "bank"],
        "p10": ["money", "bank"],
        "p3": ["fish"],
    }
    mean = sum(map(len, words.values())) / len(words)
    scores = dict.fromkeys(words, 0.0)
    for word in query:
        frequency = sum(word in text for text in words.values())
        idf = math.log(1 + (len(words) - frequency + 0.5) / (frequency + 0.5))
        for name, text in words.items():
            if count := text.count(word):
                scores[name] += idf * count / (count + k1 * (1 - b + b * len(text) / mean))
    return {name: score for name, score in scores.items() if score}


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75), (0.0, 0.0)])
@pytest.mark.parametrize(
    ("text", "words"), [("the river bank", ["river", "bank"]), ("Banks, banks!", ["bank", "bank"])]
)
def test_scores_are_the_formula(k1: float, b: float, text: str, words: list[str]) -> None:
    (hits,) = Bm25Index.build(PASSAGES, k1=k1, b=b).search([text], 10)
    assert {hit.passage_id: hit.score for hit in hits} == pytest.approx(naive_scores(words, k1, b), rel=1e-5)


def test_house_order_and_ties_at_the_cut() -> None:
    index = Bm25Index.build(PASSAGES)
    assert [hit.passage_id for hit in index.search(["money"], 10)[0]] == ["p2", "p10"]
    assert [hit.passage_id for hit in index.search(["money"], 1)[0]] == ["p2"]
    assert [hit.passage_id for hit in Bm25Index.build(PASSAGES[::-1]).search(["bank"], 2)[0]] == ["p2", "p10"]


def test_a_shorter_list_is_the_start_of_the_longer_one() -> None:
    random = np.random.default_rng(0)
    words = "red green blue old new".split()
    passages = [Passage(str(n), "", " ".join(random.choice(words, 3))) for n in range(200)]
    index = Bm25Index.build(passages)
    (whole,) = index.search(["red blue"], 200)
    assert whole == sorted(whole, key=lambda hit: (hit.score, hit.passage_id.encode()), reverse=True)
    for k in (1, 7, 50, 150):
        assert index.search(["red blue"], k) == [whole[:k]]


@pytest.mark.parametrize("text", ["", "the of and", "unseen"])
def test_a_query_without_a_known_word_has_no_hits(text: str) -> None:
    nothing, fish = Bm25Index.build(PASSAGES).search([text, "fish"], 3)
    assert nothing == []
    assert [hit.passage_id for hit in fish] == ["p3"]


def test_passages_without_a_word_are_refused() -> None:
    with pytest.raises(UserError, match="none of the 2 passages has a word to search for"):
        Bm25Index.build([Passage("1", "", ""), Passage("2", "", "the")])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c/qrels").mkdir(parents=True)
    (tmp_path / "c/corpus.jsonl").write_text('{"_id": "7", "text": "red fish"}\n{"_id": "007", "text": "red"}\n')
    (tmp_path / "c/queries.jsonl").write_text('{"_id": "q", "text": "fish red"}\n')
    (tmp_path / "c/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t7\t1\n")
    return tmp_path


def test_run_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K above the corpus is lowered with a word; ids stay as they are."""
    output = folder / "deep/er/run.trec"
    assert main(["bm25", "--collection", str(folder / "c"), "--output", str(output), "--k", "5"]) == 0
    lines = [line.split() for line in output.read_text().splitlines()]
    assert [[*line[:4], line[5]] for line in lines] == [
        ["q", "Q0", "7", "1", "bm25"],
        ["q", "Q0", "007", "2", "bm25"],
    ]
    heard = capsys.readouterr()
    assert heard.out == f"{output}\n"
    assert "k lowered from 5 to the 2 passages there are\n" in heard.err


def test_an_index_gives_the_run_that_the_collection_gives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Built twice the index has the same bytes, built again it is up to date; what made the run stands beside it."""
    collection = str(folder / "c")
    for name in ("index", "again", "index"):
        assert main(["bm25", "index", "--collection", collection, "--output", str(folder / name)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"{folder / 'index'}: up to date"
    assert fingerprint(folder / "index") == fingerprint(folder / "again")
    assert main(["bm25", "--collection", collection, "--output", str(folder / "plain.trec")]) == 0
    searched = ["bm25", "search", "--index", str(folder / "index"), "--output", str(folder / "run.trec")]
    for words in (["--collection", collection, "--split", "test"], ["--queries", f"{collection}/queries.jsonl"]):
        assert main([*searched, *words]) == 0
        assert (folder / "run.trec").read_bytes() == (folder / "plain.trec").read_bytes()
    made_by = json.loads((folder / "run.trec.json").read_text())
    assert made_by["index_fingerprint"] == fingerprint(folder / "index")
    assert (made_by["k1"], made_by["b"], made_by["fields"], made_by["passages"]) == (0.9, 0.4, "both", 2)
    assert "collection_fingerprint" in json.loads((folder / "plain.trec.json").read_text())


def test_an_index_is_found_again_as_it_was(tmp_path: Path) -> None:
    """Its arrays are memory-mapped, and bm25s opens the folder too."""
    built = Bm25Index.build(PASSAGES, k1=1.2, b=0.75)
    with Workspace(tmp_path / "index", "bm25", config={}, inputs={}) as workspace:
        built.save(workspace.path)
        workspace.commit({**built.facts, "passages": len(built)})
    loaded = Bm25Index.load(tmp_path / "index")
    texts = ["river bank", "money", "fish fish", "unseen"]
    assert loaded.search(texts, 3) == built.search(texts, 3)
    assert isinstance(loaded._index.scores["data"], np.memmap)
    theirs = bm25s.BM25.load(tmp_path / "index").get_scores(["money", "bank"])
    assert {hit.passage_id: hit.score for hit in built.search(["money bank"], 9)[0]} == {
        loaded.passage_ids[row]: theirs[row] for row in np.flatnonzero(theirs)
    }


def test_fields(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for fields in ("both", "title", "text"):
        index = Bm25Index.build(PASSAGES, fields=fields)
        found[fields] = [[hit.passage_id for hit in hits] for hits in index.search(["rivers", "bank"], 9)]
    assert found["both"] == [["p1"], ["p2", "p10", "p1"]]
    assert found["title"] == [["p1"], []]
    assert found["text"] == found["both"]
    collection, output = str(folder / "c"), str(folder / "run.trec")
    assert main(["bm25", "search", "--collection", collection, "--fields", "title", "--output", output]) == 2
    assert "none of the 2 passages has a word to search for" in capsys.readouterr().err


def test_any_format_of_collection(tmp_path: Path) -> None:
    (tmp_path / "corpus.tsv").write_text("7\tFish\tred\n8\t\tgreen\n")
    (tmp_path / "queries.dev.tsv").write_text("q\tgreen fishes\n")
    (tmp_path / "qrels.dev.tsv").write_text("q\t0\t7\t1\n")
    words = ["--collection", str(tmp_path), "--format", "msmarco", "--split", "dev"]
    assert main(["bm25", *words, "--output", str(tmp_path / "run.json")]) == 0
    assert set(load_run(tmp_path / "run.json")["q"]) == {"7", "8"}


def broken(folder: Path, how: str) -> Path:
    index = folder / "index"
    assert main(["bm25", "index", "--collection", str(folder / "c"), "--output", str(index)]) == 0
    if how == "flipped":
        data = bytearray((index / "data.csc.index.npy").read_bytes())
        data[-1] ^= 1
        (index / "data.csc.index.npy").write_bytes(data)
    elif how == "lost":
        (index / "ids.json").unlink()
    elif how == "foreign":
        manifest = json.loads((index / "manifest.json").read_text())
        (index / "params.index.json").write_text("[]")
        manifest["files"]["params.index.json"] = describe_file(index / "params.index.json")
        (index / "manifest.json").write_text(json.dumps(manifest))
    return index


@pytest.mark.parametrize(
    ("how", "words", "line"),
    [
        (
            "",
            ["--k1", "1.2"],
            "{0}: was built with k1 0.9, --k1 is 1.2 (leave the option out, or build another index)",
        ),
        ("", ["--fields", "text"], "{0}: was built with fields both, --fields is text (leave the option out,"),
        ("flipped", [], "{0}/data.csc.index.npy: contents differ from the manifest's sha256 (make the folder anew)"),
        ("lost", [], "{0}/ids.json: file listed in the manifest is missing (make the folder anew)"),
        ("foreign", [], "{0}: is not an index that bm25s opens ("),
    ],
)
def test_indexes_that_are_refused(
    folder: Path, how: str, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index, output = broken(folder, how), folder / "run.trec"
    command = ["bm25", "search", "--index", str(index), "--collection", str(folder / "c"), "--output", str(output)]
    assert main([*command, *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("condenser: error: " + line.format(index))
    assert not output.exists() and not Path(f"{output}.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --queries or --collection"),
        (["--queries", "q.tsv"], "give --index, or the --collection whose passages are searched"),
        (["--index", "i", "--queries", "q", "--format", "beir"], "--format goes with --collection"),
        (["--collection", "c", "--queries", "q", "--split", "dev"], "--split chooses queries of a collection, but --q"),
        (["--collection", "c", "--queries", "q", "--index", "i"], "with --index, give one of --queries and --collect"),
    ],
)
def test_options_that_do_not_go_together(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bm25", "search", *words, "--output", str(folder / "run.trec")]) == 2
    assert capsys.readouterr().err.startswith(f"condenser: error: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--k", "0"], "--k is 0, expected 1 or more"),
        (["--b", "1.5"], "--b is 1.5, expected 0 to 1"),
        (["--k1=-1"], "--k1 is -1.0, expected 0 or more"),
    ],
)
def test_wrong_options(folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "run.trec"
    assert main(["bm25", "--collection", str(folder / "c"), "--output", str(output), *words]) == 2
    assert capsys.readouterr().err.endswith(f"condenser: error: {message}\n")
    assert [entry.name for entry in folder.iterdir()] == ["c"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "figures"),
    [
        ("medquad", "dev", (0.418, 0.497, 0.852)),
        ("medquad", "test", (0.428, 0.510, 0.868)),
        ("nq-qed", "dev", (0.756, 0.792, 0.966)),
        ("nq-qed", "test", (0.789, 0.823, 0.983)),
    ],
)
def test_reference_figures(name: str, split: str, figures: tuple[float, float, float]) -> None:
    """MRR@10, nDCG@10 and R@100 as bm25s and trec_eval gave them when the collections were made."""
    collection = open_collection(name)
    queries = list(collection.queries(split))
    hits = Bm25Index.build(collection).search([query.text for query in queries], 100)
    run = {query.id: dict(found) for query, found in zip(queries, hits, strict=True)}
    measures = pytrec_eval.RelevanceEvaluator(collection.qrels(split), {"recip_rank", "ndcg_cut_10", "recall_100"})
    scores = measures.evaluate(run).values()
    reciprocal_ranks = [score["recip_rank"] if score["recip_rank"] > 1 / 10.5 else 0.0 for score in scores]
    found = [
        np.mean(reciprocal_ranks),
        *(np.mean([score[m] for score in scores]) for m in ("ndcg_cut_10", "recall_100")),
    ]
    assert found == pytest.approx(figures, abs=0.002)


def test_other_judgements_and_negatives_leave_an_index_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bm25", "index", "--collection", str(folder / "c"), "--output", str(folder / "index")]
    assert main(words) == 0
    (folder / "c" / "negatives").mkdir()
    (folder / "c" / "negatives" / "test.jsonl").write_text('{"query_id": "q", "negatives": []}\n')
    assert main(words) == 0
    assert capsys.readouterr().err.endswith("index: up to date\n")
