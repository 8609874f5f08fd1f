"""Training of cross-encoders: losses by hand, the step whatever its parts, resume, folders that open elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from condenser.errors import UserError
from condenser.models.backbone import load_backbone
from condenser.models.condenser import CondenserModel
from condenser.training import loop
from retrieval.collections import open_collection
from retrieval.cross_encoder import CrossEncoder
from retrieval.cross_training import GroupBatches, pair_objective
from retrieval.examples import read_examples
from retrieval.finetune import finetune
from retrieval.losses import localized_contrastive, pairwise_binary
from retrieval.options import FinetuneOptions
from tests.command import run, stop_after
from tests.folders import assert_same_files
from tests.retrieval.test_check import write

TOPICS = ["cat", "dog", "bird", "river", "bank", "king", "queen", "fever"]
PASSAGES = {f"p{i}": f"the {topic} is in the city" for i, topic in enumerate(TOPICS)} | {
    f"x{i}": f"old {topic} and new" for i, topic in enumerate(TOPICS)
}
QUERIES = {f"q{i}": f"where is the {topic}?" for i, topic in enumerate(TOPICS)}
TRAIN = [(f"q{i}", f"p{i}", 1) for i in range(6)]
DEV = [(f"q{i}", f"p{i}", 1) for i in range(6, 8)]
NEGATIVES = {f"q{i}": [f"x{i}", f"x{i + 1}", f"x{i + 2}"][: 1 + i % 3] for i in range(6)}
DEV_RUN = {"q6": ["x6", "x7", "p6"], "q7": ["x7", "p7", "x6"]}


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross") / "data"
    return write(folder, passages=PASSAGES, queries=QUERIES, train=TRAIN, dev=DEV, negatives=NEGATIVES)


def options_for(collection: Path, output: Path, start: Path, **others: Any) -> FinetuneOptions:
    settings = {
        "cross_encoder": True, "negatives": 3, "max_steps": 6, "batch_size": 3, "log_every": 1, "save_every": 2,
        "eval_every": 2, "device": "cpu", "query_max_length": 12, "passage_max_length": 20, "dev_depth": 5,
    } | others  # fmt: skip
    return FinetuneOptions(encoder=str(start), collection=[str(collection)], output=str(output), **settings)


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(collection: Path, tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    hits = [(query, passage, rank) for query, found in DEV_RUN.items() for rank, passage in enumerate(found, 1)]
    (folder / "dev.tsv").write_text("".join(f"{query}\t{passage}\t{rank}\n" for query, passage, rank in hits))
    settings = {"max_steps": 40, "learning_rate": 1e-3, "eval_every": 20, "dev_run": str(folder / "dev.tsv")}
    return finetune(options_for(collection, folder / "cross", tiny_bert, **settings))


def test_losses_are_those_of_each_query_by_itself() -> None:
    scores = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.25, 1.0], dtype=torch.float64)
    targets, owners = torch.tensor([0, 3]), torch.tensor([0, 0, 0, 1, 1, 1])
    groups = scores.unflatten(0, (2, 3))
    by_query = [cross_entropy(group[None], torch.tensor([0])) for group in groups]
    torch.testing.assert_close(localized_contrastive(scores, targets, owners), torch.stack(by_query))
    right = torch.tensor([1.0, 0, 0], dtype=torch.float64)
    by_query = [binary_cross_entropy_with_logits(group, right) for group in groups]
    torch.testing.assert_close(pairwise_binary(scores, targets, owners), torch.stack(by_query))


def test_groups_of_other_sizes_weigh_the_same() -> None:
    scores, targets, owners = torch.zeros(5), torch.tensor([0, 1]), torch.tensor([0, 1, 1, 1, 1])
    assert localized_contrastive(scores, targets, owners).tolist() == pytest.approx([0.0, math.log(4)])
    assert pairwise_binary(scores, targets, owners).tolist() == pytest.approx([math.log(2)] * 2)


def test_a_step_has_the_gradient_of_plain_transformers_however_it_is_parted(collection: Path, tiny_bert: Path) -> None:
    """The oracle reads each query's pairs as one padded batch through the model's own forward pass."""
    torch.manual_seed(3)
    cross, fresh = CrossEncoder.start(tiny_bert, query_max_length=12, passage_max_length=20)
    assert fresh and cross.config.max_length == 32
    examples = read_examples(open_collection(collection), "train", with_negatives=True)
    passages = open_collection(collection).lookup()
    gradients, losses = [], []
    for graph_tokens in (1, 40, 10_000):
        batches = GroupBatches(examples, passages, cross, batch_size=6, negatives=2, graph_tokens=graph_tokens, seed=1)(
            0
        )
        assert len(batches) == {1: 6, 10_000: 1}.get(graph_tokens, len(batches))
        objective = pair_objective("softmax")
        cross.zero_grad()
        loss = sum((objective(cross, batch, share=1 / 6, fraction=1)["softmax"] for batch in batches), torch.zeros(()))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: one.grad.clone() for name, one in cross.named_parameters() if one.grad is not None})
    cross.zero_grad()
    model, tokenizer, total = cross.model, cross.tokenizer, torch.zeros(())
    for index, example in enumerate(examples):
        alone = GroupBatches(examples, passages, cross, batch_size=6, negatives=2, graph_tokens=1, seed=1)
        (group,) = [one for one in alone(0) if tokenizer.decode(one.tokens.ids[0]).count(TOPICS[index]) == 2]
        assert len(group.tokens.ids) == 1 + min(2, len(example.negatives))
        padded = tokenizer.pad(
            {"input_ids": group.tokens.ids, "token_type_ids": group.tokens.types}, return_tensors="pt"
        )
        total = total + cross_entropy(model(**padded).logits.T, torch.tensor([0])) / 6
    total.backward()
    assert losses == pytest.approx([total.item()] * 3, rel=1e-5)
    for name, parameter in cross.named_parameters():
        for found in gradients:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_training_learns_and_keeps_the_best_dev_weights(trained: Path) -> None:
    log = log_of(trained)
    losses = [line["loss"] for line in log if "loss" in line]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    figures = [line["dev_rerank_mrr@10"] for line in log if "dev_rerank_mrr@10" in line]
    assert len(figures) == 2 and max(figures) == 1.0 and not (trained / "best").exists()
    card = (trained / "README.md").read_text()
    assert "| dev_rerank_mrr@10 | 1.0000 |" in card and "the first 5 hits of `dev.tsv`, reranked" in card
    assert json.loads((trained / "manifest.json").read_text())["kind"] == "cross-encoder"


def test_the_folder_opens_in_transformers_and_sentence_transformers(trained: Path) -> None:
    from sentence_transformers import CrossEncoder as Theirs
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pairs = [("where is the cat?", PASSAGES["p0"]), ("what king", "old " * 40)]
    ours = CrossEncoder.load(trained).score(pairs)
    model, report = AutoModelForSequenceClassification.from_pretrained(trained, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert tokenizer.model_max_length == 32
    with torch.no_grad():
        tokens = tokenizer(*map(list, zip(*pairs, strict=True)), truncation=True, padding=True, return_tensors="pt")
        np.testing.assert_allclose(model.eval()(**tokens).logits[:, 0], ours, atol=1e-5)
    np.testing.assert_allclose(Theirs(str(trained), device="cpu").predict(pairs), ours, atol=1e-5)


@pytest.mark.parametrize("change", [{}, {"loss": "binary", "gradient_checkpointing": True}], ids=["softmax", "binary"])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    collection: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    straight = finetune(options_for(collection, tmp_path / "straight", tiny_bert, **change))
    options = options_for(collection, tmp_path / "out", tiny_bert, **change)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "fault_point", stop_after(5))
        with pytest.raises(KeyboardInterrupt):
            finetune(options)
    assert_same_files(finetune(options), straight)


def test_evaluation_does_not_change_training(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    losses = []
    for name, split in (("with", "dev"), ("without", "none")):
        options = options_for(collection, tmp_path / name, tiny_bert, dev_split=split)
        losses.append([line["loss"] for line in log_of(finetune(options)) if "loss" in line])
    assert losses[0] == losses[1]


def test_a_cross_encoder_is_a_start_too(
    collection: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its classifier and its lengths are taken over."""
    options = options_for(collection, tmp_path / "out", trained, query_max_length=None, passage_max_length=None)
    folder = finetune(dataclasses.replace(options, max_steps=1, learning_rate=0.0))
    assert "going on from its scores" in capsys.readouterr().err
    assert json.loads((folder / "cross_encoder.json").read_text()) == {
        "query_max_length": 12, "max_length": 32, "passage_template": "{title} {text}"
    }  # fmt: skip
    pairs = [("where is the cat?", PASSAGES["p0"])]
    assert CrossEncoder.load(folder).score(pairs) == pytest.approx(CrossEncoder.load(trained).score(pairs))


@pytest.mark.parametrize("kind", ["electra", "condenser", "bare"])
def test_any_encoder_is_a_start(kind: str, tiny_bert: Path, tmp_path: Path) -> None:
    """The encoder's weights are all there, whatever head stood on them, and the classifier alone is new."""
    from transformers import AutoModel, AutoTokenizer, ElectraConfig, ElectraForPreTraining

    sizes = {"embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "electra":
        config = ElectraConfig(vocab_size=150, intermediate_size=64, max_position_embeddings=64, **sizes)
        ElectraForPreTraining(config).save_pretrained(tmp_path)
    elif kind == "condenser":
        backbone, _ = load_backbone(tiny_bert)
        CondenserModel(backbone, head_layers=1, skip_from=1).save(tmp_path)
    else:
        AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    cross, fresh = CrossEncoder.start(tmp_path)
    assert fresh and (cross.config.query_max_length, cross.config.max_length) == (32, 64)
    stored = AutoModel.from_pretrained(tmp_path).state_dict()
    for name, weight in cross.model.base_model.state_dict().items():
        if not name.startswith("pooler."):
            torch.testing.assert_close(weight, stored[name])


def test_queries_without_negatives_are_left_out_and_counted(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = {name: ids for name, ids in NEGATIVES.items() if name != "q0"}
    folder = write(tmp_path / "data", passages=PASSAGES, queries=QUERIES, train=TRAIN, dev=[], negatives=some)
    finetune(options_for(folder, tmp_path / "out", tiny_bert, max_steps=1))
    said = capsys.readouterr().err
    assert "left out 1 queries without a hard negative" in said
    assert "5 queries (2 left over in each epoch, others each time), 1 steps of 3 queries" in said
    assert "each with its positive and 3 negatives at most" in said
    folder = write(tmp_path / "none", passages=PASSAGES, queries=QUERIES, train=TRAIN, dev=[])
    with pytest.raises(UserError, match="no query has a hard negative"):
        finetune(options_for(folder, tmp_path / "out2", tiny_bert))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"negatives": 0}, "--cross_encoder needs --negatives"),
        ({"loss": "kl"}, r"--loss kl does not go with --cross_encoder \(losses: softmax, binary\)"),
        ({"pooling": "mean"}, "--pooling does not go with --cross_encoder"),
        ({"cross_encoder": False, "loss": "binary", "dev_depth": 20}, "--loss binary goes with --cross_encoder"),
        ({"cross_encoder": False}, "--dev_depth goes with --cross_encoder"),
        ({"passage_max_length": 60}, r"pairs have up to 72 tokens \(12 for the query, 60 for the passage\), the model"),
        ({"query_max_length": 2}, "2 and 20 tokens for query and passage leave no room"),
        ({"dev_run": "/no/such.trec"}, "/no/such.trec: no such file"),
    ],
)
def test_bad_options_are_one_line(
    collection: Path, tiny_bert: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        finetune(options_for(collection, tmp_path / "out", tiny_bert, **change))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_equal_one(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    AutoModelForMaskedLM.from_pretrained(tiny_bert, **still).save_pretrained(tmp_path / "init")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "init")
    options = options_for(collection, tmp_path / "one", tmp_path / "init", max_steps=3, batch_size=4, dev_split="none")
    one = finetune(options)
    run("finetune", dataclasses.replace(options, output=str(tmp_path / "two")), processes=2)
    for a, b in zip(log_of(one), log_of(tmp_path / "two"), strict=True):
        assert all(a[key] == pytest.approx(b[key], rel=1e-4) for key in a)
