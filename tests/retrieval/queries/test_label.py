"""The verb `queries label`: scores against plain transformers, what is no negative, GPL's files, training, resume."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from condenser.errors import UserError
from condenser.faults import VARIABLE
from condenser.manifest import load_manifest
from retrieval import pair_scores
from retrieval.cli import main
from retrieval.collections import open_collection
from retrieval.cross_encoder import CrossEncoder
from retrieval.finetune import finetune
from retrieval.formats.negatives import read_scores
from retrieval.options import FinetuneOptions
from retrieval.queries.label import label
from retrieval.queries.options import QueriesLabelOptions
from tests.command import stop_after
from tests.folders import assert_same_files
from tests.retrieval.test_check import write
from tests.retrieval.test_mine import PASSAGES, QUERIES, scores_by_hand
from tests.tiny_models import save_classifier

# q0 has two positives; the one of q4 is not in the corpus.
TRAIN = [(f"q{i}", f"p{i}", 1) for i in range(4)] + [("q0", "p5", 2), ("q0", "p8", 0), ("q4", "gone", 1)]
BM25 = {"q0": ["p5", "p6", "p8", "p6"], "q1": ["p2", "lost", "p3"], "q2": ["p2"], "q4": ["p1"], "other": ["p1"]}
DENSE = {"q0": ["p7", "p6"], "q3": ["p0", "blank", "p1", "p2", "p4"]}
# What becomes of them where each file gives two at most.
NEGATIVES = {
    "q0": {"bm25": ["p6", "p8"], "dense": ["p7", "p6"]},
    "q1": {"bm25": ["p2", "p3"], "dense": []},
    "q3": {"bm25": [], "dense": ["p0", "p1"]},
}
POSITIVES = {"q0": ["p0", "p5"], "q1": ["p1"], "q3": ["p3"]}


@pytest.fixture(scope="module")
def judge(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("judge"), tiny_bert, 1)


@pytest.fixture(scope="module")
def options(judge: Path, tmp_path_factory: pytest.TempPathFactory) -> QueriesLabelOptions:
    folder = tmp_path_factory.mktemp("label")
    write(folder / "data", passages=PASSAGES | {"blank": " "}, queries=QUERIES, train=TRAIN, dev=[])
    queries = [{"_id": one, "text": text, "metadata": {"by": "us"}} for one, text in QUERIES.items()]
    (folder / "data" / "queries.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in queries))
    files = []
    for name, mined in (("bm25", BM25), ("dense", DENSE)):
        files.append(folder / f"{name}.jsonl")
        lines = [json.dumps({"query_id": query, "negatives": ids}) + "\n" for query, ids in mined.items()]
        files[-1].write_text("".join(lines))
    return QueriesLabelOptions(
        collection=str(folder / "data"), negatives_file=list(map(str, files)), cross_encoder=str(judge),
        max_negatives=2, output=str(folder / "never"), device="cpu",
    )  # fmt: skip


def labelled(options: QueriesLabelOptions, output: Path, **others: Any) -> Path:
    return label(dataclasses.replace(options, output=str(output), **others))


def lines_of(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_scores_are_those_of_plain_transformers_and_margins_their_differences(
    options: QueriesLabelOptions, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = labelled(options, tmp_path / "out")
    by_hand = scores_by_hand(judge)
    scores = read_scores(folder / "scores" / "train.tsv")
    expected = {
        query: {*POSITIVES[query], *(one for found in miners.values() for one in found)}
        for query, miners in NEGATIVES.items()
    }
    assert {query: set(given) for query, given in scores.items()} == expected
    for query, given in scores.items():
        for passage, score in given.items():
            assert score == pytest.approx(by_hand[query, passage], abs=1e-5)
    assert lines_of(folder / "hard-negatives.jsonl") == [
        {"qid": query, "pos": POSITIVES[query], "neg": NEGATIVES[query]} for query in POSITIVES
    ]
    rows = [line.split("\t") for line in (folder / "gpl-training-data.tsv").read_text().splitlines()]
    assert {(query, right, wrong) for query, right, wrong, _ in rows} == {
        (query, right, wrong)
        for query, passages in expected.items()
        for right in POSITIVES[query]
        for wrong in passages - {*POSITIVES[query]}
    }
    assert len(rows) == 2 * 3 + 2 + 2
    for query, right, wrong, margin in rows:
        assert float(margin) == scores[query][right] - scores[query][wrong]
    assert any(float(margin) < 0 for *_, margin in rows) and any(float(margin) > 0 for *_, margin in rows)
    said = capsys.readouterr().err
    assert "kept 3 of 5 queries, left out 2: 1 without a negative ('q2'), 1 without a positive ('q4')" in said
    assert "left out 2 positives and negatives: not in the corpus (" in said
    assert "left out 1 positives and negatives: blank ('blank')" in said
    assert "left out 2 negatives that are judged positives of their query" in said
    assert "labelled 3 queries, 11 pairs, 0 of them cut to fit 64 tokens" in said
    facts = load_manifest(folder, "labelled queries", verify=True)["facts"]
    assert facts["miners"] == {"bm25": 4, "dense": 4}
    assert facts["left_out"] == {"without a negative": 1, "without a positive": 1}


def test_each_round_of_margins_has_each_query_once(options: QueriesLabelOptions, tmp_path: Path) -> None:
    """GPL's package trains in the order of the file."""
    files = [labelled(options, tmp_path / str(seed), seed=seed) / "gpl-training-data.tsv" for seed in (1, 2)]
    orders = [[line.split("\t")[0] for line in file.read_text().splitlines()] for file in files]
    for order in orders:
        assert sorted(order[:3]) == sorted(order[3:6]) == ["q0", "q1", "q3"]
        assert order[6:] == ["q0"] * 4
    one, other = ([line.split("\t")[:3] for line in file.read_text().splitlines()] for file in files)
    assert one != other and sorted(one) == sorted(other)


def test_the_folder_is_a_collection_that_training_takes_as_it_is(
    options: QueriesLabelOptions, tiny_bert: Path, tmp_path: Path
) -> None:
    folder = labelled(options, tmp_path / "out")
    source = Path(options.collection)
    assert (folder / "corpus.jsonl").read_bytes() == (source / "corpus.jsonl").read_bytes()
    assert lines_of(folder / "queries.jsonl") == [
        line for line in lines_of(source / "queries.jsonl") if line["_id"] in POSITIVES
    ]
    collection = open_collection(folder)
    assert collection.splits() == ["train"]
    assert collection.qrels("train") == {"q0": {"p0": 1, "p5": 2}, "q1": {"p1": 1}, "q3": {"p3": 1}}
    assert collection.negatives("train") == {"q0": ["p6", "p8", "p7"], "q1": ["p2", "p3"], "q3": ["p0", "p1"]}
    settings: dict[str, Any] = {"max_steps": 1, "batch_size": 3, "loss": "margin_mse", "negatives": 2, "device": "cpu"}
    output = str(tmp_path / "encoder")
    trained = finetune(FinetuneOptions(encoder=str(tiny_bert), collection=[str(folder)], output=output, **settings))
    assert (trained / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("queries.tsv", "q0\triver\nq1\tbank\n", {"_id": "q0", "text": "river"}),
        (
            "queries.jsonl",
            '{"qid": "q0", "query": "river"}\n\n{"qid": 1, "query": "x"}\n',
            {"qid": "q0", "query": "river"},
        ),
    ],
)
def test_other_splits_and_ways_to_write_queries(
    options: QueriesLabelOptions, tmp_path: Path, name: str, text: str, kept: dict[str, str]
) -> None:
    source = tmp_path / "data"
    write(source, passages=PASSAGES, queries={}, train=[], dev=[("q0", "p0", 1)])
    (source / "queries.jsonl").unlink()
    (source / name).write_text(text)
    folder = labelled(options, tmp_path / "out", collection=str(source), split="dev")
    assert lines_of(folder / "queries.jsonl") == [kept]
    assert (folder / "qrels" / "dev.tsv").read_text() == "query-id\tcorpus-id\tscore\nq0\tp0\t1\n"
    assert [*read_scores(folder / "scores" / "dev.tsv")["q0"]] == ["p0", "p5", "p6", "p7"]
    assert lines_of(folder / "negatives" / "dev.jsonl") == [{"query_id": "q0", "negatives": ["p5", "p6", "p7"]}]


def interrupted(options: QueriesLabelOptions, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pair_scores, "fault_point", stop_after(2, "block-scored"))
        with pytest.raises(KeyboardInterrupt):
            labelled(options, output)


def killed(options: QueriesLabelOptions, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = os.fork()
    if process == 0:
        try:
            torch.set_num_threads(1)  # those of OpenMP do not come along
            os.environ[VARIABLE] = "block-scored:2"
            labelled(options, output)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("stop", [interrupted, killed])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    options: QueriesLabelOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop: Callable[[QueriesLabelOptions, Path, pytest.MonkeyPatch], None],
) -> None:
    monkeypatch.setattr(pair_scores, "_PAIRS_AT_ONCE", 3)  # one query a block
    straight = labelled(options, tmp_path / "straight")
    stop(options, tmp_path / "out", monkeypatch)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"was made with other settings: max_negatives: 2 -> 3"):
        labelled(options, tmp_path / "out", max_negatives=3)
    asked = []
    score = CrossEncoder.score_tokens
    with monkeypatch.context() as patch:
        patch.setattr(
            CrossEncoder, "score_tokens", lambda self, tokens, **k: asked.append(1) or score(self, tokens, **k)
        )
        folder = labelled(options, tmp_path / "out")
        assert len(asked) == 1
        labelled(options, tmp_path / "out")
    assert len(asked) == 1 and "out: up to date" in capsys.readouterr().err
    assert_same_files(folder, straight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cross_encoder": "/no/such/model"}, "/no/such/model: no such folder"),
        ({"collection": "medqaud"}, "did you mean medquad"),
        ({"split": "trian"}, r"no judgements for split 'trian' \(did you mean train\?\)"),
        ({"negatives_file": ["none.jsonl"]}, "none.jsonl: no such file"),
        ({"negatives_file": ["a/mined.jsonl", "mined.jsonl.gz"]}, "is called 'mined', as is a/mined.jsonl"),
        ({"negatives_file": ["strange.jsonl"]}, "none of its 1 queries is judged in split 'train': 'x'"),
        ({"negatives_file": ["empty.jsonl"]}, "empty.jsonl: holds no negatives"),
        ({"negatives_file": ["useless.jsonl"]}, "no query of split 'train' can be labelled: 4 without a negative"),
        ({"max_length": 65}, "pairs have up to 65 tokens, the model has positions for 64"),
        ({"dtype": "float16"}, "--dtype float16 is for GPUs"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    options: QueriesLabelOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.jsonl").write_text('{"query_id": "x", "negatives": ["p1"]}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "useless.jsonl").write_text('{"query_id": "q1", "negatives": ["p1", "gone"]}\n')
    with pytest.raises(UserError, match=message) as caught:
        labelled(options, tmp_path / "out", **change)
    assert "\n" not in str(caught.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.jsonl", "strange.jsonl", "useless.jsonl"]


def test_a_folder_of_ours_that_was_changed_is_refused(options: QueriesLabelOptions, tmp_path: Path) -> None:
    folder = labelled(options, tmp_path / "out")
    queries = (folder / "queries.jsonl").read_text()
    (folder / "queries.jsonl").write_text(queries.replace("river", "rivet"))
    with pytest.raises(UserError, match=r"queries.jsonl: contents differ from the manifest's sha256"):
        labelled(options, tmp_path / "again", collection=str(folder))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_an_id_that_scores_cannot_hold_is_refused(options: QueriesLabelOptions, tmp_path: Path) -> None:
    write(tmp_path / "data", passages=PASSAGES | {"a\tb": "a bird"}, queries=QUERIES, train=TRAIN, dev=[])
    (tmp_path / "mined.jsonl").write_text(json.dumps({"query_id": "q1", "negatives": ["a\tb"]}) + "\n")
    with pytest.raises(UserError, match="holds a tab or a line break"):
        labelled(
            options,
            tmp_path / "out",
            collection=str(tmp_path / "data"),
            negatives_file=[str(tmp_path / "mined.jsonl")],
        )
    assert not list(tmp_path.glob("out*"))


def test_files_of_negatives_must_be_given(
    options: QueriesLabelOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--collection", options.collection, "--cross_encoder", options.cross_encoder]
    assert main(["queries", "label", *words, "--output", str(tmp_path / "out")]) == 2
    assert "--negatives_file is missing: files of `condenser mine`" in capsys.readouterr().err
