"""The verb `mine`: what becomes a negative and what does not, from a run, BM25 or an encoder, and in which files."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from condenser.errors import UserError
from retrieval.bm25 import search_bm25
from retrieval.cli import main
from retrieval.collections import open_collection
from retrieval.encode import encode
from retrieval.examples import read_examples
from retrieval.finetune import finetune
from retrieval.mine import Mined, mine
from retrieval.options import Bm25Options, EncodeOptions, FinetuneOptions, MineOptions, SearchOptions
from retrieval.search import search
from tests.command import start
from tests.retrieval.test_check import write
from tests.tiny_models import save_classifier

PASSAGES = {f"p{i}": f"passage number {i} about the {'river' if i % 2 else 'bank'}" for i in range(12)}
QUERIES = {f"q{i}": text for i, text in enumerate(["river", "bank", "number 2", "passage", "number 4"])}
TRAIN = [(f"q{i}", f"p{i}", 1) for i in range(5)]

Hits = list[tuple[str, float]]


@pytest.fixture()
def collection(tmp_path: Path) -> Path:
    return write(tmp_path / "data", passages=PASSAGES, queries=QUERIES, train=TRAIN, dev=[])


def write_run(file: Path, run: dict[str, Hits]) -> str:
    lines = [
        f"{query} Q0 {passage} {rank} {score} x\n"
        for query, hits in run.items()
        for rank, (passage, score) in enumerate(hits, 1)
    ]
    file.write_text("".join(lines))
    return str(file)


def mined(collection: Path, file: Path, **options: Any) -> tuple[dict[str, list[str]], str]:
    """Return the negatives by query and what the verb says."""
    said = mine(MineOptions(collection=str(collection), output=str(file), **options))
    return {line["query_id"]: line["negatives"] for line in map(json.loads, file.read_text().splitlines())}, str(said)


def error_of(collection: Path, file: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        mine(MineOptions(collection=str(collection), output=str(file), **options))
    assert not file.exists() and not list(file.parent.glob("*.tmp-*"))
    return str(caught.value)


def ranking(*passages: str) -> Hits:
    return [(passage, 20.0 - place) for place, passage in enumerate(passages)]


def test_queries_without_a_positive_in_depth_are_kept_unless_asked_otherwise(collection: Path, tmp_path: Path) -> None:
    """Case B13."""
    hits = {f"q{i}": ranking(f"p{i}", "p8", "p9") for i in range(3)} | {"q3": ranking("p8", "p9", "p10")}
    run = write_run(tmp_path / "run.trec", hits | {"q4": ranking("p9", "p8", "p4")})
    found, said = mined(collection, tmp_path / "all.jsonl", run=run, depth=2)
    assert found == {"q0": ["p8"], "q1": ["p8"], "q2": ["p8"], "q3": found["q3"], "q4": found["q4"]}
    assert sorted(found["q3"]) == sorted(found["q4"]) == ["p8", "p9"]
    assert "kept 5 of 5 queries\n" in said and "2 queries have no positive among the hits looked at" in said
    found, said = mined(collection, tmp_path / "some.jsonl", run=run, depth=2, require_positive=True)
    assert sorted(found) == ["q0", "q1", "q2"]
    assert "kept 3 of 5 queries, dropped 2: no positive in top 2 ('q3', 'q4')\n" in said


def test_each_reason_for_a_dropped_query_is_told(tmp_path: Path) -> None:
    judged = [("q0", "p0", 1), ("q1", "gone", 1), ("q2", "p2", 0), ("q3", "p3", 1), ("q4", "p4", 1)]
    folder = write(tmp_path / "data", passages=PASSAGES, queries=QUERIES, train=judged, dev=[])
    run = write_run(tmp_path / "run.trec", {f"q{i}": ranking("p0", "p4") for i in (0, 1, 2, 4)} | {"qx": ranking("p1")})
    _, said = mined(folder, tmp_path / "out.jsonl", run=run, depth=1)
    assert said.splitlines()[1] == (
        "kept 1 of 5 queries, dropped 4: 1 no positive in the corpus ('q1'), 1 no positive ('q2'), "
        "1 not in the run ('q3'), 1 no hit left that may be a negative ('q0')"
    )


def test_neither_a_positive_nor_what_says_the_same_is_a_negative(tmp_path: Path) -> None:
    texts = {
        "p1": "The cat  sat.",
        "p2": "the CAT sat.",
        "p3": "\uff54\uff48\uff45 cat sat.",
        "p4": "The dog sat.",
        "p5": "a cat",
    }
    judged = [("q1", "p1", 1), ("q1", "p5", 2), ("q1", "p4", 0)]
    folder = write(tmp_path / "data", passages=texts, queries={"q1": "cat"}, train=judged, dev=[])
    run = write_run(tmp_path / "run.trec", {"q1": ranking("p3", "p1", "p4", "p2", "gone", "p5")})
    found, said = mined(folder, tmp_path / "out.jsonl", run=run)
    assert found == {"q1": ["p4"]}
    assert "hits left out: 2 known positives, 1 not in the corpus, 2 with the text of a positive" in said


def test_a_document_that_is_the_query_can_be_left_out(collection: Path, tmp_path: Path) -> None:
    """Case B51: the same option as in search and evaluation, and the count is told."""
    folder = tmp_path / "self"
    shutil.copytree(collection, folder)
    lines = [json.dumps({"_id": f"p{i}", "text": f"passage number {i}"}) + "\n" for i in range(3)]
    (folder / "queries.jsonl").write_text("".join(lines))
    (folder / "qrels" / "train.tsv").write_text("p0\tp5\t1\n")
    run = write_run(tmp_path / "run.trec", {"p0": ranking("p0", "p5", "p6")})
    assert sorted(mined(folder, tmp_path / "with.jsonl", run=run)[0]["p0"]) == ["p0", "p6"]
    found, said = mined(folder, tmp_path / "without.jsonl", run=run, ignore_self=True)
    assert found == {"p0": ["p6"]}
    assert "1 the query itself" in said


@pytest.mark.parametrize(("positive", "kept"), [(10.0, ["p7", "p8"]), (-10.0, ["p8"])])
def test_what_scores_nearly_as_high_as_the_positive_is_left_out(
    collection: Path, tmp_path: Path, positive: float, kept: list[str]
) -> None:
    """With a margin of a tenth the bound is 9 below a positive of 10, and -11 below one of -10."""
    hits = [("p0", positive), ("p5", 9.5), ("p6", 9.01), ("p7", 9.0), ("p8", -11.0), ("p9", -10.99)]
    if positive > 0:
        hits[-1] = ("p9", 12.0)
    run = write_run(tmp_path / "run.trec", {"q0": hits})
    found, said = mined(collection, tmp_path / "out.jsonl", run=run, margin=0.1, choice="top")
    assert found == {"q0": kept}
    assert f"{5 - len(kept)} scored too high" in said


def test_without_a_positive_in_depth_the_margin_leaves_nothing_out(collection: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.trec", {"q0": ranking("p5", "p6", "p0")})
    assert mined(collection, tmp_path / "in.jsonl", run=run, margin=0.0, choice="top", depth=2)[0] == {
        "q0": ["p5", "p6"]
    }
    assert "no hit left" in error_of(collection, tmp_path / "out.jsonl", run=run, margin=0.0)


def test_ranks_are_no_scores(collection: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.tsv"
    run.write_text("q0\tp5\t1\nq0\tp6\t2\n")
    assert mined(collection, tmp_path / "out.jsonl", run=str(run), choice="top")[0] == {"q0": ["p5", "p6"]}
    assert "this run has ranks and no scores" in error_of(collection, tmp_path / "no.jsonl", run=str(run), margin=0.1)


def test_the_choice_is_that_of_a_naive_version(collection: Path, tmp_path: Path) -> None:
    """Random rankings with ties: sets of candidates by hand, the best n, and samples within them."""
    draw = random.Random(0)
    run = {
        query: [(passage, float(draw.randint(0, 4))) for passage in draw.sample(sorted(PASSAGES), 9)]
        for query in QUERIES
    }
    file = write_run(tmp_path / "run.trec", run)
    for depth, skip, n in ((9, 0, 3), (6, 2, 2), (4, 3, 5)):
        allowed = {}
        for query, hits in run.items():
            order = sorted(hits, key=lambda hit: (hit[1], hit[0].encode()), reverse=True)
            allowed[query] = [one for one, _ in order[:depth][skip:] if one != f"p{query[1:]}"]
        settings = {"run": file, "depth": depth, "skip": skip, "n": n}
        top, _ = mined(collection, tmp_path / "top.jsonl", choice="top", **settings)
        assert top == {query: names[:n] for query, names in allowed.items() if names}
        drawn, _ = mined(collection, tmp_path / "sample.jsonl", **settings)
        assert drawn.keys() == top.keys()
        for query, names in drawn.items():
            assert len(names) == len(set(names)) == min(n, len(allowed[query])) and set(names) <= set(allowed[query])


def test_the_sample_depends_on_seed_and_query_alone(collection: Path, tmp_path: Path) -> None:
    hits = {f"q{i}": ranking(*PASSAGES) for i in range(5)}
    run, turned = (
        write_run(tmp_path / name, one) for name, one in (("a.trec", hits), ("b.trec", dict(reversed(hits.items()))))
    )
    outputs = [tmp_path / f"{i}.jsonl" for i in range(4)]
    first, _ = mined(collection, outputs[0], run=run, n=4)
    mined(collection, outputs[1], run=run, n=4)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert mined(collection, outputs[2], run=turned, n=4)[0] == first
    assert mined(collection, outputs[3], run=run, n=4, seed=1)[0] != first
    assert len({tuple(names) for names in first.values()}) > 1


def test_every_place_in_the_ranking_is_drawn_alike(tmp_path: Path) -> None:
    """400 queries draw 3 of 12: each place is taken about 100 times."""
    queries = {f"q{i}": "river" for i in range(400)}
    folder = write(tmp_path / "data", passages=PASSAGES | {"right": "x"}, queries=queries,
                   train=[(query, "right", 1) for query in queries], dev=[])  # fmt: skip
    run = write_run(tmp_path / "run.trec", {query: ranking(*PASSAGES) for query in queries})
    found, _ = mined(folder, tmp_path / "out.jsonl", run=run, n=3)
    counts = [sum(name in names for names in found.values()) for name in PASSAGES]
    assert sum(counts) == 1200 and all(65 < count < 135 for count in counts), counts


def test_bm25_is_its_own_run(collection: Path, tmp_path: Path) -> None:
    search_bm25(Bm25Options(collection=str(collection), split="train", output=str(tmp_path / "run.trec"), k=7))
    by_run, _ = mined(collection, tmp_path / "run.jsonl", run=str(tmp_path / "run.trec"), depth=7, n=4)
    assert mined(collection, tmp_path / "bm25.jsonl", bm25=True, depth=7, n=4)[0] == by_run


def test_an_encoder_is_its_own_run(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    vectors = encode(EncodeOptions(encoder=str(tiny_bert), collection=str(collection), output=str(tmp_path / "v")))
    run = str(tmp_path / "run.trec")
    search(SearchOptions(index=str(vectors), collection=str(collection), split="train", k=6, output=run))
    by_run, _ = mined(collection, tmp_path / "run.jsonl", run=run, depth=6, n=4)
    found, _ = mined(collection, tmp_path / "own.jsonl", encoder=str(tiny_bert), depth=6, n=4, work=str(tmp_path / "w"))
    assert found == by_run


@pytest.mark.slow
def test_a_killed_encoder_goes_on_to_the_same_bytes(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    options = MineOptions(collection=str(collection), encoder=str(tiny_bert), output=str(tmp_path / "out.jsonl"))
    killed = start("mine", options, CONDENSER_FAULT="shard-sealed")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out.jsonl").exists()
    mine(options)
    mine(dataclasses.replace(options, output=str(tmp_path / "straight.jsonl")))
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "straight.jsonl").read_bytes()
    assert (tmp_path / "out.jsonl.work" / "vectors" / "manifest.json").is_file()


@pytest.mark.parametrize("format", ["tevatron", "dpr"])
def test_other_formats_hold_the_same(collection: Path, tmp_path: Path, format: Any) -> None:
    """What is written is read back by the readers of these formats: queries, positives, negatives."""
    run = write_run(tmp_path / "run.trec", {f"q{i}": ranking(*PASSAGES) for i in range(5)})
    own, _ = mined(collection, tmp_path / "own.jsonl", run=run, n=3)
    folder = tmp_path / format
    folder.mkdir()
    file = folder / ("train.json" if format == "dpr" else "train.jsonl")
    mine(MineOptions(collection=str(collection), run=run, n=3, format=format, output=str(file)))
    if format == "tevatron":
        shutil.copy(collection / "corpus.jsonl", folder)
    again = open_collection(folder)
    assert again.format == format
    texts = {query.id: query.text for query in again.queries("train")}
    names = {text: query_id for query_id, text in QUERIES.items()}
    assert {names[texts[one]]: passages for one, passages in again.negatives("train").items()} == own
    assert {names[texts[one]]: [*grades] for one, grades in again.qrels("train").items()} == {
        query: [passage] for query, passage, _ in TRAIN
    }
    assert again.lookup()["p3"].text == PASSAGES["p3"]


@pytest.fixture(scope="module")
def judge(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random cross-encoder with one output."""
    return save_classifier(tmp_path_factory.mktemp("judge"), tiny_bert, 1)


def scores_by_hand(judge: Path) -> dict[tuple[str, str], float]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    scores = {}
    with torch.no_grad():
        for query, question in QUERIES.items():
            for passage, text in PASSAGES.items():
                logits = model(**tokenizer(question, text, return_tensors="pt")).logits
                scores[query, passage] = float(logits[0, 0])
    return scores


def test_a_cross_encoder_drops_what_it_takes_for_right(collection: Path, judge: Path, tmp_path: Path) -> None:
    by_hand = scores_by_hand(judge)
    bound = sorted(by_hand.values())[len(by_hand) // 2] + 1e-4
    run = write_run(tmp_path / "run.trec", {query: ranking(*PASSAGES) for query in QUERIES})
    settings: dict[str, Any] = {"run": run, "cross_encoder": str(judge), "cross_threshold": bound, "choice": "top"}
    scores = tmp_path / "scores.tsv"
    found, said = mined(collection, tmp_path / "out.jsonl", n=3, scores=str(scores), **settings)
    dropped = 0
    for query in QUERIES:
        right = [one for one in PASSAGES if one != f"p{query[1:]}" and by_hand[query, one] <= bound]
        assert found.get(query, []) == right[:3]
        last = [*PASSAGES].index(right[2]) if len(right) > 2 else len(PASSAGES)
        dropped += sum(by_hand[query, one] > bound for one in [*PASSAGES][:last] if one != f"p{query[1:]}")
    assert f"{dropped:,} scored too high by the cross-encoder" in said
    lines = [line.split("\t") for line in scores.read_text().splitlines()]
    assert {(query, passage) for query, passage, _ in lines} == {
        (query, passage) for query, names in found.items() for passage in [f"p{query[1:]}", *names]
    }
    for query, passage, score in lines:
        assert float(score) == pytest.approx(by_hand[query, passage], abs=1e-5)


def test_scores_of_a_cross_encoder_are_trained_on(
    collection: Path, judge: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    scores = str(tmp_path / "scores.tsv")
    mined(collection, tmp_path / "out.jsonl", bm25=True, n=3, cross_encoder=str(judge), scores=scores)
    options = FinetuneOptions(
        encoder=str(tiny_bert), collection=[str(collection)], output=str(tmp_path / "encoder"), device="cpu"
    )
    options = dataclasses.replace(options, max_steps=1, batch_size=2, loss="margin_mse", negatives=2)
    with pytest.raises(UserError, match="no teacher's scores"):
        finetune(options)
    assert (finetune(dataclasses.replace(options, scores_file=[scores])) / "model.safetensors").is_file()


def test_a_model_without_a_classifier_is_no_cross_encoder(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.trec", {"q0": ranking("p5")})
    said = error_of(
        collection, tmp_path / "out.jsonl", run=run, cross_encoder=str(tiny_bert), scores=str(tmp_path / "s")
    )
    assert "weights lack" in said and "a cross-encoder has a classifier" in said
    assert not (tmp_path / "s").exists()


def test_finetune_takes_mined_files_beside_the_collection(tmp_path: Path, tiny_bert: Path) -> None:
    negatives = {"q0": ["p7"], "q1": ["p8"]}
    folder = write(tmp_path / "data", passages=PASSAGES, queries=QUERIES, train=TRAIN, dev=[], negatives=negatives)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text('{"query_id": "q0", "negatives": ["p9", "p7"]}\n{"query_id": "other", "negatives": ["p9"]}\n')
    files[1].write_text('{"query_id": "q2", "negatives": ["p2", "p10"]}\n')
    examples = read_examples(open_collection(folder), "train", with_negatives=True, negatives_files=files)
    assert [example.negatives for example in examples] == [("p7", "p9"), ("p8",), ("p10",), (), ()]
    assert open_collection(folder).negatives("train") == negatives

    options = FinetuneOptions(
        encoder=str(tiny_bert),
        collection=[str(folder)],
        negatives_file=[str(file) for file in files],
        negatives=1,
        max_steps=1,
        batch_size=2,
        device="cpu",
        output=str(tmp_path / "encoder"),
    )
    finetune(options)
    files[1].write_text('{"query_id": "q2", "negatives": ["p11"]}\n')
    with pytest.raises(UserError, match="was made with other settings: negatives_file 2: "):
        finetune(options)


def test_a_source_with_many_negatives_does_not_crowd_out_the_others(tmp_path: Path) -> None:
    many = {"q0": [f"p{i}" for i in range(1, 11)], "q1": ["p0", "p2"]}
    folder = write(tmp_path / "data", passages=PASSAGES, queries=QUERIES, train=TRAIN, dev=[], negatives=many)
    file = tmp_path / "mined.jsonl"
    file.write_text('{"query_id": "q0", "negatives": ["p11", "p10", "p9", "p8"]}\n')

    def drawn(seed: int) -> list[tuple[str, ...]]:
        settings: dict[str, Any] = {"negatives_files": [file], "negatives_pool": 3, "seed": seed}
        found = read_examples(open_collection(folder), "train", with_negatives=True, **settings)
        return [example.negatives for example in found]

    first, second, *others = drawn(1)
    assert first[:3] == tuple(sorted(first[:3], key=lambda name: int(name[1:]))) and set(first[:3]) <= set(many["q0"])
    assert len({*first[3:]} - {"p8", "p9", "p10", "p11"}) == 0 and 4 <= len(first) <= 6
    assert second == ("p0", "p2") and others == [(), (), ()]
    assert drawn(1) == drawn(1) and len({drawn(seed)[0] for seed in range(9)}) > 1


def test_negatives_that_are_asked_for_and_not_there_are_told(
    collection: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_examples(open_collection(collection), "train", with_negatives=True)
    assert capsys.readouterr().err == "warning: data, train: hard negatives are asked for, and there are none\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"negatives": 0}, "--negatives_file needs --negatives"),
        ({"loss": "kl"}, "--negatives_file does not go with --loss kl"),
        ({"collection": ["data", "medquad"]}, "go with one --collection"),
        ({"negatives_file": [], "scores_file": ["x"]}, "--scores_file does not go with --loss softmax"),
        ({"negatives_file": ["mind.jsonl"]}, r"mind.jsonl: no such file \(did you mean mined.jsonl\?\)"),
        ({}, "mined.jsonl: none of its 1 queries is judged in split 'train': 'other'"),
    ],
)
def test_files_that_finetune_can_do_nothing_with(
    collection: Path,
    tiny_bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mined.jsonl").write_text('{"query_id": "other", "negatives": ["p9"]}\n')
    options = FinetuneOptions(
        encoder=str(tiny_bert), collection=["data"], negatives_file=["mined.jsonl"], negatives=1, output="out"
    )
    with pytest.raises(UserError, match=words):
        finetune(dataclasses.replace(options, **changes))
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of --run, --bm25 and --encoder: where the negatives come from"),
        (["--bm25", "--run", "x"], "give one of --run, --bm25 and --encoder: where the negatives come from"),
        (["--bm25", "--skip", "200"], "--skip 200 leaves nothing of --depth 200"),
        (["--bm25", "--work", "x"], "--work goes with --encoder"),
        (["--bm25", "--scores", "x"], "--cross_encoder is missing: the model that gives the scores"),
        (["--bm25", "--cross_encoder", "x"], "say what for (--cross_threshold, --scores or both)"),
        (["--bm25", "--n", "0"], "--n is 0, expected 1 or more"),
        (["--bm25", "--margin", "-1"], "--margin is -1.0, expected 0 or more"),
        (["--bm25", "--split", "trian"], "no judgements for split 'trian' (did you mean train?)"),
        (["--run", "none.trec"], "none.trec: no such file"),
    ],
)  # fmt: skip
def test_what_is_refused(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    output = tmp_path / "out.jsonl"
    assert main(["mine", "--collection", str(collection), "--output", str(output), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("condenser: error: ") and line.endswith(message)
    assert not output.exists()


def test_a_run_of_other_queries_or_in_pieces_is_refused(collection: Path, tmp_path: Path) -> None:
    strange = write_run(tmp_path / "strange.trec", {"x1": ranking("p1")})
    said = error_of(collection, tmp_path / "out.jsonl", run=strange)
    assert said.startswith(f"{strange}: no query of split 'train' is in this run: 'q0', 'q1', 'q2', ...")
    torn = tmp_path / "torn.trec"
    torn.write_text("q0 Q0 p5 1 3 x\nq1 Q0 p5 1 3 x\nq0 Q0 p6 2 2 x\n")
    said = error_of(collection, tmp_path / "out.jsonl", run=str(torn))
    assert said == f"{torn}: the lines of query 'q0' are not together (sort the run by query)"


def test_faults_of_a_collection_are_those_of_the_readers(collection: Path, cases: Path, tmp_path: Path) -> None:
    """Cases B10, B11, B12: with file and line, and nothing written."""
    output = tmp_path / "out.jsonl"
    (collection / "queries.jsonl").write_text('{"_id": "44", "text": "first"}\n{"_id": "44", "text": "second"}\n')
    (collection / "qrels" / "train.tsv").write_text("44\td1\t1\n")
    said = error_of(collection, output, bm25=True)
    assert said == f"{collection / 'queries.jsonl'}:2: query id '44' stands already on line 1"
    (collection / "queries.jsonl").write_text('{"_id": "44", "text": "first"}\n')
    shutil.copy(cases / "11" / "corpus.jsonl", collection)
    assert "corpus.jsonl:3: passage id 'd1' stands already on line 1" in error_of(collection, output, bm25=True)
    lines = [json.dumps({"docid": f"d{i}", "text": f"first {i}"}) for i in range(1, 6)]
    lines[2] = '{"docid": "d3", "text": '
    (collection / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    assert "corpus.jsonl:3: not valid JSON" in error_of(collection, output, bm25=True)


def test_bad_lines_are_passed_over_by_choice(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B10."""
    with (collection / "corpus.jsonl").open("a") as stream:
        stream.write('{"_id": "p99", "text": \n')
    found, _ = mined(collection, tmp_path / "out.jsonl", bm25=True, skip_bad=True)
    assert len(found) == 5 and "1 line skipped" in capsys.readouterr().err


def test_quotes_and_ids_stay_what_they_are(cases: Path, tmp_path: Path) -> None:
    """Cases B3 and B5: four passages of a TSV with open quotes; 007 is not 7, and the number 1 is "1"."""
    quotes = tmp_path / "quotes"
    quotes.mkdir()
    shutil.copy(cases / "3" / "collection.tsv", quotes)
    (quotes / "queries.tsv").write_text("q\tquote line plain pipe\n")
    (quotes / "qrels.train.tsv").write_text("q\t0\td2\t1\n")
    assert sorted(mined(quotes, tmp_path / "quotes.jsonl", bm25=True)[0]["q"]) == ["d1", "d3", "d4"]

    ids = tmp_path / "ids"
    (ids / "qrels").mkdir(parents=True)
    shutil.copy(cases / "5" / "corpus.jsonl", ids)
    shutil.copy(cases / "5" / "qrels.txt", ids / "qrels" / "train.tsv")
    (ids / "queries.jsonl").write_text('{"_id": "q1", "text": "delta"}\n{"_id": "q2", "text": "alpha"}\n')
    found, said = mined(ids, tmp_path / "ids.jsonl", run=str(cases / "5" / "run.txt"))
    assert found == {"q1": ["7"]}
    assert "dropped 1: no hit left that may be a negative ('q2')" in said


def test_ids_are_those_of_the_file_and_a_line_break_is_a_blank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases B1, B2 and B9, and a passage that is judged and not there (B7), as is a query (B8)."""
    texts = {"7": "red fox", "3": "red dog", "doc-x": "red\nnaïve ¼ 한국", "é": "red naïve ¼ 한국"}
    judged = [("q", "doc-x", 1), ("q", "gone", 1), ("r", "7", 1), ("nowhere", "7", 1)]
    folder = write(tmp_path / "data", passages=texts, queries={"q": "red", "r": "red dog"}, train=judged, dev=[])
    found, said = mined(folder, tmp_path / "out.jsonl", bm25=True)
    assert {query: sorted(names) for query, names in found.items()} == {"q": ["3", "7"], "r": ["3", "doc-x", "é"]}
    assert "1 with the text of a positive" in said
    told = capsys.readouterr().err
    assert "data, train: left out 1 judged queries that are not in the query file ('nowhere')\n" in told
    assert "data, train: left out 1 judged positives that are not in the corpus ('gone')\n" in told


@pytest.mark.parametrize("layout", ["beir", "headerless3", "trec", "two_col"])
def test_every_layout_of_judgements_gives_the_same_negatives(cases: Path, tmp_path: Path, layout: str) -> None:
    """Case B6: none loses its first line."""
    folder = write(tmp_path / "data", passages={f"d{i}": "x" * i for i in range(1, 7)}, queries=QUERIES, train=TRAIN)
    shutil.copy(cases / "6" / f"qrels.{layout}.tsv", folder / "qrels" / "train.tsv")
    run = write_run(tmp_path / "run.trec", {"q1": ranking("d2", "d5"), "q2": ranking("d2", "d5")})
    assert mined(folder, tmp_path / "out.jsonl", run=run)[0] == {"q1": ["d5"], "q2": ["d2"]}


def test_lines_of_a_tsv_that_are_long_broken_or_in_another_encoding(cases: Path, tmp_path: Path) -> None:
    """Cases B4, B2 and B9: a long field is text, the others are refused by line."""
    corpus, output = tmp_path / "data" / "collection.tsv", tmp_path / "out.jsonl"
    corpus.parent.mkdir()
    shutil.copy(cases / "4" / "collection.tsv", corpus)
    (corpus.parent / "queries.tsv").write_text("q\tshort word\n")
    (corpus.parent / "qrels.train.tsv").write_text("q\t0\td1\t1\n")
    assert sorted(mined(corpus.parent, tmp_path / "long.jsonl", bm25=True)[0]["q"]) == ["d2", "d3"]
    corpus.write_text("d1\tline one\nline two\n")
    assert error_of(corpus.parent, output, bm25=True).startswith(f"{corpus}:2: line 2 has 1 column, expected 2")
    corpus.write_bytes("d1\tx\nd2\tnaïve\n".encode("latin-1"))
    assert error_of(corpus.parent, output, bm25=True).startswith(f"{corpus}:2: ")


def test_the_result_has_its_counts(collection: Path, tmp_path: Path) -> None:
    result = mine(MineOptions(collection=str(collection), bm25=True, n=2, output=str(tmp_path / "out.jsonl.gz")))
    assert isinstance(result, Mined) and result.counts.kept == 5 and result.counts.negatives == 10
    assert read_examples(
        open_collection(collection), "train", with_negatives=True, negatives_files=[result.output]
    )[0].negatives  # fmt: skip


def test_what_is_read_is_not_written_over(collection: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.trec", {"q0": ranking("p1")})
    before = Path(run).read_bytes()
    with pytest.raises(UserError, match=r"run\.trec: is read, and would be written over"):
        mine(MineOptions(collection=str(collection), run=run, output=run))
    assert Path(run).read_bytes() == before
    same = str(tmp_path / "one.jsonl")
    said = error_of(collection, Path(same), run=run, cross_encoder="any", scores=same)
    assert said == f"{same}: --scores and --output are one file"
