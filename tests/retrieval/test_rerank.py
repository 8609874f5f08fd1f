"""The verb `rerank`: scores against plain transformers, the new order and what lies below, resume, teacher's files."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from condenser.errors import UserError
from eval.runs import load_run
from retrieval import pair_scores
from retrieval.cli import main
from retrieval.cross_encoder import CrossEncoder
from retrieval.finetune import finetune
from retrieval.options import FinetuneOptions, RerankOptions
from retrieval.rerank import rerank
from tests.command import start, stop_after
from tests.retrieval.test_check import write
from tests.retrieval.test_mine import PASSAGES, QUERIES, TRAIN, scores_by_hand, write_run
from tests.tiny_models import save_classifier

Run = dict[str, list[tuple[str, float]]]

RUN: Run = {
    query: [(f"p{(place * 5 + number) % 12}", 9.0 - place) for place in range(6)]
    for number, query in enumerate(["q0", "q1", "q2", "q3", "q4"])
}


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rerank") / "data", passages=PASSAGES, queries=QUERIES, train=TRAIN, dev=[])


@pytest.fixture(scope="module")
def judge(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("judge"), tiny_bert, 1)


def options_for(collection: Path, judge: Path, folder: Path, run: Run = RUN, **others: Any) -> RerankOptions:
    file = write_run(folder / "run.trec", run)
    settings = {"output": str(folder / "out.trec"), "device": "cpu"} | others
    return RerankOptions(model=str(judge), run=file, collection=str(collection), **settings)


def order_of(run: dict[str, float]) -> list[str]:
    return sorted(run, key=lambda one: (np.float32(run[one]), one), reverse=True)


def test_the_first_hits_are_in_the_order_of_plain_transformers(
    collection: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand = scores_by_hand(judge)
    found = load_run(rerank(options_for(collection, judge, tmp_path, depth=4)))
    for query, hits in RUN.items():
        first, rest = [one for one, _ in hits[:4]], [one for one, _ in hits[4:]]
        for passage in first:
            assert found[query][passage] == pytest.approx(by_hand[query, passage], abs=1e-5)
        best = sorted(first, key=lambda one: by_hand[query, one], reverse=True)
        assert order_of(found[query]) == [*best, *rest]
        assert found[query][rest[0]] == pytest.approx(found[query][best[-1]] - 1)
    said = capsys.readouterr().err
    assert "reranked the first 4 hits of 5 queries, 20 pairs, 0 of them cut to fit 64 tokens" in said
    assert "10 hits below kept behind them" in said
    made_by = json.loads((tmp_path / "out.trec.json").read_text())
    assert (made_by["depth"], made_by["pairs"], made_by["dtype"]) == (4, 20, "float32")
    assert not (tmp_path / "out.trec.work").exists() and not (tmp_path / "out.trec.work.partial").exists()


def test_hits_below_are_dropped_on_request_and_every_format_is_written(
    collection: Path, judge: Path, tmp_path: Path
) -> None:
    runs = []
    for name in ("a.trec", "a.json", "a.trec.gz", "a.tsv"):
        options = options_for(collection, judge, tmp_path, depth=2, below="drop", output=str(tmp_path / name))
        runs.append(load_run(rerank(options)))
    assert all(len(hits) == 2 for hits in runs[0].values())
    assert runs[0] == runs[1] == runs[2]
    assert [order_of(hits) for hits in runs[3].values()] == [order_of(hits) for hits in runs[0].values()]


def test_two_outputs_are_the_log_odds_and_texts_are_cut_as_sentence_transformers_cuts_them(
    collection: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder as Theirs

    two = save_classifier(tmp_path / "two", tiny_bert, 2)
    pairs = [("river", "old " * 80), ("bank " * 50, "new " * 60), ("river bank", "the bank"), ("a " * 90, "fish")]
    theirs = Theirs(str(two), device="cpu", max_length=64).predict(pairs)
    ours = CrossEncoder.load(two)
    np.testing.assert_allclose(ours.score(pairs), theirs[:, 1] - theirs[:, 0], atol=1e-5)
    assert ours.tokenize(pairs).cut == [True, True, False, True]
    assert CrossEncoder.load(two, max_length=20).tokenize(pairs).cut == [True, True, False, True]


@pytest.mark.parametrize("family", ["electra", "roberta", "distilbert", "modernbert"])
def test_families_with_and_without_token_types_and_padding(family: str, tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    sizes: dict[str, Any] = {"vocab_size": 150, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 1}
    if family == "distilbert":
        sizes |= {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    if family == "modernbert":
        sizes |= {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **sizes)).eval()
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    if family in ("distilbert", "modernbert"):
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(tmp_path)
    pairs = [("where is the cat?", "in the city"), ("king", "old and new " * 5), ("river", "")]
    cross = CrossEncoder.load(tmp_path)
    with torch.no_grad():
        by_hand = [float(model(**tokenizer([q], [p], return_tensors="pt")).logits[0, 0]) for q, p in pairs]
    np.testing.assert_allclose(cross.score(pairs), by_hand, atol=1e-5)


def test_half_precision_leaves_the_classifier_as_it_is(judge: Path) -> None:
    """Scores are rounded on the way and not at the end, where they would tie."""
    pairs = [(query, text) for query in QUERIES.values() for text in PASSAGES.values()]
    exact, cross = CrossEncoder.load(judge).score(pairs), CrossEncoder.load(judge)
    cross._compute_in(torch.bfloat16)
    assert {one.dtype for one in cross.model.bert.parameters()} == {torch.bfloat16}
    rounded = cross.score(pairs)
    np.testing.assert_allclose(rounded, exact, atol=0.03)
    assert len(np.unique(rounded)) > len(np.unique(torch.tensor(exact).bfloat16().float()))


def test_a_query_keeps_to_its_limit_and_the_passage_has_the_rest(tiny_bert: Path) -> None:
    cross, _ = CrossEncoder.start(tiny_bert, query_max_length=6, passage_max_length=10)
    tokens = cross.tokenize([("a b c d e f", "x " * 30), ("a b c d e f", "x"), ("a", "x " * 30), ("a", "x")])
    words = [cross.tokenizer.decode(ids).split("[SEP]") for ids in tokens.ids]
    assert [row[0] for row in words] == ["[CLS] a b c d ", "[CLS] a b c d ", "[CLS] a ", "[CLS] a "]
    assert [row[1].split() for row in words] == [["x"] * 9, ["x"], ["x"] * 12, ["x"]]
    assert tokens.cut == [True, True, True, False]


def test_a_killed_run_goes_on_to_the_same_bytes(
    collection: Path, judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_scores, "_PAIRS_AT_ONCE", 8)  # three blocks
    settings = {"split": "train", "depth": 4}
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    straight = options_for(collection, judge, tmp_path / "straight", scores=str(tmp_path / "straight.tsv"), **settings)
    rerank(straight)
    options = options_for(collection, judge, tmp_path / "killed", scores=str(tmp_path / "killed.tsv"), **settings)
    with monkeypatch.context() as patch:
        patch.setattr(pair_scores, "fault_point", stop_after(2, "block-scored"))
        with pytest.raises(KeyboardInterrupt):
            rerank(options)
    work = tmp_path / "killed" / "out.trec.work.partial"
    assert sorted(file.name for file in work.glob("*.npy")) == ["00000.npy", "00001.npy"]
    assert not (tmp_path / "killed" / "out.trec").exists() and not (tmp_path / "killed.tsv").exists()
    with pytest.raises(UserError, match=r"was made with other settings: .*depth"):
        rerank(dataclasses.replace(options, depth=3))
    asked = []
    score = CrossEncoder.score_tokens
    with monkeypatch.context() as patch:
        patch.setattr(
            CrossEncoder, "score_tokens", lambda self, tokens, **k: asked.append(1) or score(self, tokens, **k)
        )
        rerank(options)
    assert len(asked) == 1
    assert (tmp_path / "killed.tsv").read_bytes() == (tmp_path / "straight.tsv").read_bytes()
    for name in ("out.trec", "out.trec.json"):
        ours, theirs = ((tmp_path / where / name).read_text() for where in ("killed", "straight"))
        assert ours.replace("/killed/", "/straight/") == theirs
    assert not work.exists()


@pytest.mark.slow
def test_a_run_killed_before_it_is_written_goes_on(collection: Path, judge: Path, tmp_path: Path) -> None:
    options = options_for(collection, judge, tmp_path)
    killed = start("rerank", options, CONDENSER_FAULT="folder-published")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "out.trec").exists()
    rerank(options)
    again = rerank(dataclasses.replace(options, output=str(tmp_path / "again.trec")))
    assert (tmp_path / "out.trec").read_bytes() == again.read_bytes()


def test_scores_teach_a_bi_encoder(collection: Path, judge: Path, tiny_bert: Path, tmp_path: Path) -> None:
    """Positives below the depth, and not in the run at all, are scored too; the run does not get them."""
    scores = tmp_path / "scores.tsv"
    found = load_run(rerank(options_for(collection, judge, tmp_path, split="train", depth=3, scores=str(scores))))
    by_hand = scores_by_hand(judge)
    lines = [line.split("\t") for line in scores.read_text().splitlines()]
    assert {(query, passage) for query, passage, _ in lines} == {
        (query, passage) for query, hits in RUN.items() for passage in [*(one for one, _ in hits[:3]), f"p{query[1:]}"]
    }
    for query, passage, score in lines:
        assert float(score) == pytest.approx(by_hand[query, passage], abs=1e-5)
    assert {query: set(hits) for query, hits in found.items()} == {q: {p for p, _ in hits} for q, hits in RUN.items()}
    options = FinetuneOptions(
        encoder=str(tiny_bert), collection=[str(collection)], output=str(tmp_path / "encoder"), device="cpu",
        max_steps=1, batch_size=4, loss="margin_mse", negatives=2, scores_file=[str(scores)],
    )  # fmt: skip
    assert (finetune(options) / "model.safetensors").is_file()


def test_other_queries_of_a_run_are_left_out_with_a_split_and_refused_without(
    judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "data", passages=PASSAGES, queries=QUERIES, train=TRAIN[:2], dev=[])
    run = {query: hits for query, hits in RUN.items() if query != "q1"}
    assert [*load_run(rerank(options_for(folder, judge, tmp_path, run, split="train")))] == ["q0"]
    said = capsys.readouterr().err
    assert "left out 3 queries of the run that split 'train' does not judge" in said
    assert "1 queries of split 'train' are not in the run: 'q1'" in said
    with pytest.raises(UserError, match=r"run.trec:2: query 'other' is not in .*data \(is this a run of another"):
        rerank(options_for(folder, judge, tmp_path, {"q0": [("p1", 1.0)], "other": [("p1", 1.0)]}))
    with pytest.raises(UserError, match="holds no query of split 'train': 'q0', 'q1'"):
        rerank(options_for(folder, judge, tmp_path, {"q3": [("p1", 1.0)]}, split="train"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": {"q0": [("p1", 2.0), ("p99", 1.0)]}}, r"run.trec:2: passage 'p99' is not in .*data"),
        ({"scores": "x.tsv"}, "--scores needs --split, whose positives are scored too"),
        ({"output": "run.xlsx"}, "cannot tell the format from '.xlsx'"),
        ({"model": "/no/such/model"}, "/no/such/model: no such folder"),
        ({"dtype": "float16"}, "--dtype float16 is for GPUs"),
        ({"max_length": 65}, "pairs have up to 65 tokens, the model has positions for 64"),
        ({"collection": "medqaud"}, "did you mean medquad"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    collection: Path, judge: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    options = options_for(collection, judge, tmp_path, change.pop("run", RUN))
    change = {name: str(tmp_path / value) if name == "output" else value for name, value in change.items()}
    with pytest.raises(UserError, match=message) as caught:
        rerank(dataclasses.replace(options, **change))
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["run.trec"]


def test_a_bad_line_of_the_run_is_named(
    collection: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.trec").write_text("q0 Q0 p1 1 2.0 x\nq0 Q0 p2 2 high x\n")
    words = ["--model", str(judge), "--collection", str(collection), "--run", str(tmp_path / "run.trec")]
    assert main(["rerank", *words, "--output", str(tmp_path / "out.trec")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/run.trec:2: " in said and "'high'" in said
    assert main(["rerank", *words, "--output", str(tmp_path / "run.trec")]) == 2
    assert "is read, and would be written over" in capsys.readouterr().err


def test_models_that_are_no_cross_encoders_are_refused(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gives 3 numbers for a pair, expected 1 or 2"):
        CrossEncoder.load(save_classifier(tmp_path / "three", tiny_bert, 3))
    with pytest.raises(UserError, match=r"weights lack .*a cross-encoder has a classifier"):
        CrossEncoder.load(tiny_bert)
    folder = save_classifier(tmp_path / "one", tiny_bert, 1)
    (folder / "cross_encoder.json").write_text('{"query_max_length": "12", "max_length": 32}')
    with pytest.raises(UserError, match=r"cross_encoder.json: query_max_length is '12', expected int"):
        CrossEncoder.load(folder)
