"""Fine-tuning: examples, duplicates, resume, best checkpoint, and folders that open elsewhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModel

from condenser.errors import UserError
from retrieval.collections import open_collection
from retrieval.dev import DevSearch
from retrieval.encoder import Encoder
from retrieval.finetune import finetune
from retrieval.options import FinetuneOptions
from tests.command import run

TOPICS = ["cat", "dog", "bird", "river", "bank", "king", "queen", "fever", "heart", "blood", "cell", "water"]


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collection")
    (folder / "qrels").mkdir()
    (folder / "negatives").mkdir()
    passages = [
        {"_id": f"p{i}", "title": topic, "text": f"the {topic} is in the city"} for i, topic in enumerate(TOPICS)
    ]
    passages += [{"_id": f"x{i}", "title": "", "text": f"old {topic} and new"} for i, topic in enumerate(TOPICS)]
    write_lines(folder / "corpus.jsonl", passages)
    queries = [{"_id": f"q{i}", "text": f"where is the {topic}?"} for i, topic in enumerate(TOPICS)]
    write_lines(
        folder / "queries.jsonl", [*queries, {"_id": "d0", "text": "what cat"}, {"_id": "d1", "text": "what dog"}]
    )
    train = [f"q{i}\tp{i}\t1" for i in range(12)] + ["q0\tx0\t1", "q1\tx1\t0"]
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(train) + "\n")
    (folder / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nd0\tp0\t1\nd1\tp1\t1\n")
    negatives = [{"query_id": "q0", "negatives": ["p1", "x0", "p2"]}, {"query_id": "q1", "negatives": ["x1"]}]
    write_lines(folder / "negatives" / "train.jsonl", negatives)
    return folder


def options_for(collection: Path, output: Path, tiny_bert: Path, **others: object) -> FinetuneOptions:
    settings = {"max_steps": 8, "batch_size": 4, "log_every": 1, "device": "cpu", "passage_max_length": 24} | others
    return FinetuneOptions(encoder=str(tiny_bert), collection=[str(collection)], output=str(output), **settings)


def test_queries_left_over_are_counted(
    collection: Path, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B28."""
    finetune(options_for(collection, tmp_path / "out", tiny_bert, batch_size=5, max_steps=1))
    assert "12 queries (2 left over in each epoch, others each time), 1 steps of 5 queries" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(collection: Path, tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "encoder"
    options = options_for(
        collection,
        output,
        tiny_bert,
        max_steps=60,
        learning_rate=2e-3,
        pooling="mean",
        normalize=True,
        temperature=0.1,
        eval_every=20,
    )
    return finetune(options)


def test_training_learns_and_keeps_the_best_dev_weights(collection: Path, tiny_bert: Path, trained: Path) -> None:
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    scores = [line["dev_mrr@10"] for line in log if "dev_mrr@10" in line]
    assert len(scores) == 3
    search = DevSearch(open_collection(collection), "dev", pool=1000, seed=42)
    assert search(Encoder.load(trained))["dev_mrr@10"] == pytest.approx(max(scores))
    assert not (trained / "best").exists()


def test_the_folder_opens_in_automodel_and_sentence_transformers(trained: Path) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = Encoder.load(trained)
    texts = ["where is the cat?", "what king"]
    ours = encoder.encode_queries(texts)
    np.testing.assert_allclose(SentenceTransformer(str(trained)).encode_query(texts), ours, atol=1e-5)
    _, report = AutoModel.from_pretrained(trained, add_pooling_layer=False, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert "sentence_transformers" in (trained / "README.md").read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"untied": True, "pooling": "last", "projection": 8, "normalize": True, "temperature": 0.1},
        {"lora": 4, "matryoshka": [8, 16], "pooling": "mean"},
        {"gradient_checkpointing": True, "cache_tokens": 32},
        {"eval_pool": 0, "share_negatives": False, "query_prompt": "query: ", "passage_template": "{title}{sep}{text}"},
    ],
    ids=["untied", "lora", "memory", "texts"],
)
def test_what_is_saved_is_what_was_trained(
    collection: Path, tiny_bert: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    """The best dev score of the log is that of the folder, opened again: weights, heads and texts are all there."""
    options = options_for(collection, tmp_path / "out", tiny_bert, eval_every=4, learning_rate=1e-3, **change)
    folder = finetune(options)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    name = next(key for line in log for key in line if key.startswith("dev"))
    best = max(line[name] for line in log if name in line)
    search = DevSearch(open_collection(collection), "dev", pool=options.eval_pool, seed=options.seed)
    assert search(Encoder.load(folder))[name] == pytest.approx(best, abs=1e-6)


def test_two_collections_and_a_teacher(
    collection: Path, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"query": f"where is the {topic}?", "positive": f"the {topic} is in the city",
         "negatives": [f"old {topic} and new"], "scores": [9.0, 1.5]}
        for topic in TOPICS
    ]  # fmt: skip
    for name in ("one", "two"):
        write_lines(tmp_path / f"{name}.jsonl", records)
    options = options_for(
        collection, tmp_path / "out", tiny_bert, loss="margin_mse", negatives=1, dev_collection=str(collection)
    )
    names = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    finetune(dataclasses.replace(options, collection=names, weights=[3.0, 1.0]))
    said = capsys.readouterr().err
    assert "steps by collection: one.jsonl 75.0%, two.jsonl 25.0%" in said
    assert "24 queries, 8 steps of 4 queries (1.33 epochs) to a teacher's scores of 2 passages each" in said


def test_scored_pairs_are_regressed(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    pairs = [
        {"sentence1": f"the {a}", "sentence2": f"the {b}", "score": float(i % 6)}
        for i, (a, b) in enumerate(zip(TOPICS * 2, TOPICS[1:] + TOPICS, strict=False))
    ]
    folder = tmp_path / "pairs"
    folder.mkdir()
    write_lines(folder / "train.jsonl", pairs)
    write_lines(folder / "dev.jsonl", pairs[:9])
    options = options_for(collection, tmp_path / "out", tiny_bert, loss="regression", pooling="mean", eval_every=4)
    log = finetune(dataclasses.replace(options, collection=[str(folder)])) / "log.jsonl"
    assert "dev_spearman" in log.read_text()


def test_evaluation_does_not_change_training(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    """Case B31: the losses are those of a run without evaluation."""
    losses = []
    for name, split in (("with", "dev"), ("without", "none")):
        options = options_for(collection, tmp_path / name, tiny_bert, eval_every=2, dev_split=split)
        log = [json.loads(line) for line in (finetune(options) / "log.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in log if "loss" in line])
    assert losses[0] == losses[1]


def test_a_stopped_run_goes_on_to_the_same_bytes(
    collection: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(collection, tmp_path / "out", tiny_bert, save_every=3, eval_every=2, negatives=1)
    straight = finetune(dataclasses.replace(options, output=str(tmp_path / "straight")))

    evaluations = 0

    search = DevSearch.__call__

    def stop_at_the_third(self: DevSearch, encoder: Encoder) -> dict[str, float]:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 3:
            raise KeyboardInterrupt
        return search(self, encoder)

    with monkeypatch.context() as patch:
        patch.setattr("retrieval.finetune.DevSearch.__call__", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            finetune(options)
    assert not (tmp_path / "out").exists()
    folder = finetune(options)
    for name in ("model.safetensors", "log.jsonl", "manifest.json"):
        assert (folder / name).read_bytes() == (straight / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{}, {"cache_tokens": 40, "untied": True}, {"cache_tokens": 20, "graph_memory": 0.0005}],
    ids=["plain", "cached-untied", "cached-with-graphs"],
)
def test_two_processes_equal_one(collection: Path, tiny_bert: Path, tmp_path: Path, change: dict[str, object]) -> None:
    """Negatives are shared over processes: loss and gradient norm are those of the whole batch."""
    model = AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False)
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    init = tmp_path / "init"
    Encoder(model, Encoder.load(tiny_bert).tokenizer, Encoder.load(tiny_bert).config).save(init, "")
    options = options_for(collection, tmp_path / "one", init, max_steps=3, negatives=1, dev_split="none", **change)
    one = finetune(options)
    (tmp_path / "two").mkdir()  # an empty folder is as good as none
    run("finetune", dataclasses.replace(options, output=str(tmp_path / "two")), processes=2)
    logs = [(folder / "log.jsonl").read_text().splitlines() for folder in (one, tmp_path / "two")]
    for first, second in zip(*logs, strict=True):
        a, b = json.loads(first), json.loads(second)
        assert all(a[key] == pytest.approx(b[key], rel=1e-4) for key in a)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 13}, "12 training queries, one step needs 13"),
        ({"split": "trian"}, "no judgements for split 'trian' .*did you mean train"),
        ({"passage_max_length": 65}, "passage_max_length is 65, the model has positions for 64"),
        ({"encoder": "/no/such/encoder"}, "/no/such/encoder: no such folder"),
        ({"collection": ["medqaud"]}, "did you mean medquad"),
        ({"mixed_precision": "fp16"}, "--mixed_precision fp16 needs a GPU"),
        ({"weights": [1.0, 2.0]}, "--weights gives 2 numbers for 1 collections"),
        ({"graph_memory": 1.0}, "--graph_memory goes with --cache_tokens"),
        ({"negatives_pool": 3}, "--negatives_pool needs --negatives"),
        ({"matryoshka": [8, 32]}, "--matryoshka 32 is not below the 32 numbers of the vectors"),
        ({"loss": "regression", "negatives": 1}, "--negatives does not go with --loss regression"),
        ({"loss": "kl"}, "--loss kl compares a positive with others that a teacher scored"),
        ({"loss": "kl", "negatives": 1}, "no teacher's scores for split 'train'"),
    ],
)
def test_bad_options_are_one_line(
    collection: Path, tiny_bert: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        finetune(dataclasses.replace(options_for(collection, tmp_path / "out", tiny_bert), **change))
    assert not (tmp_path / "out").exists()
