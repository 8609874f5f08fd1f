"""ELECTRA from text to two folders, and a generator's draws in the place of masks: same loop, same resume."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
)

from condenser.corpus.batches import PretrainBatch
from condenser.corpus.spans import build_spans
from condenser.errors import UserError
from condenser.models.backbone import load_backbone
from condenser.objectives.masked_lm import filled
from condenser.options import PretrainOptions, SpansOptions
from condenser.pretrain import OBJECTIVES, pretrain
from tests.command import run, start
from tests.folders import assert_same_files

FIGURES = {"generator_accuracy", "discriminator_accuracy", "replaced", "replaced_found"}
WORDS = ["cat", "dog", "bird", "king", "queen", "city"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> str:
    folder = tmp_path_factory.mktemp("electra")
    file = folder / "docs.jsonl"
    texts = [f"the {WORDS[i % 6]} of the {WORDS[i // 6]} is a {WORDS[i % 5]} in peace and war" for i in range(24)]
    file.write_text("".join(json.dumps({"_id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    options = SpansOptions(
        input=[str(file)], tokenizer=str(tiny_bert), max_length=20, min_tokens=3, output=str(folder / "spans")
    )
    return str(build_spans(options))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A discriminator and a generator as they are published, embeddings narrower than states, without dropout."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    shape = {"vocab_size": len(tokenizer), "embedding_size": 16, "max_position_embeddings": 64, "num_hidden_layers": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(3)
    for kind, name, sizes in (
        (
            ElectraForPreTraining,
            "discriminator",
            {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
        ),
        (ElectraForMaskedLM, "generator", {"hidden_size": 12, "num_attention_heads": 1, "intermediate_size": 48}),
    ):
        kind(ElectraConfig(**shape, **quiet, **sizes)).save_pretrained(folder / name)
        weights = folder / name / "model.safetensors"
        positions = {"electra.embeddings.position_ids": torch.arange(64)[None]}  # older releases wrote these down
        save_file(load_file(weights) | positions, weights, metadata={"format": "pt"})
        tokenizer.save_pretrained(folder / name)
    return folder


def options_for(store: str, output: Path, **others: object) -> PretrainOptions:
    settings = {"objective": "electra", "max_steps": 6, "batch_size": 4, "log_every": 1, "device": "cpu"} | others
    if "init" not in settings:
        settings = {"model_size": "tiny"} | settings
    return PretrainOptions(data=store, output=str(output), **settings)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_both_models_learn_and_are_saved_apart(store: str, tmp_path: Path) -> None:
    folder = pretrain(options_for(store, tmp_path / "out", max_steps=60, batch_size=12, learning_rate=2e-3))
    log = log_of(folder)
    assert all(set(line) == {"step", "loss", "generator", "discriminator", "grad_norm", "lr", *FIGURES} for line in log)
    for line in log:
        assert line["loss"] == pytest.approx(line["generator"] + 50 * line["discriminator"], rel=1e-5)
        assert 0 <= line["replaced_found"] <= line["replaced"] <= 0.2
    mean = {name: [sum(line[name] for line in part) / 15 for part in (log[:15], log[-15:])] for name in log[0]}
    assert mean["generator"][1] < 0.9 * mean["generator"][0]
    assert mean["discriminator"][1] < 0.9 * mean["discriminator"][0]
    assert mean["generator_accuracy"][1] > mean["generator_accuracy"][0] + 0.05

    for kind, place in ((ElectraForPreTraining, folder), (ElectraForMaskedLM, folder / "generator")):
        model, report = kind.from_pretrained(place, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert len(AutoTokenizer.from_pretrained(place)) == model.config.vocab_size
    assert AutoModel.from_pretrained(folder).config.hidden_size == 128
    assert AutoModel.from_pretrained(folder / "generator").config.hidden_size == 32
    assert not list((folder / "1_Pooling").glob("tokenizer*"))


def test_a_finished_electra_starts_everything_else(store: str, published: Path, tmp_path: Path) -> None:
    first = pretrain(options_for(store, tmp_path / "electra", init=str(published / "discriminator"), max_steps=1))
    assert AutoModelForMaskedLM.from_pretrained(first / "generator").config.hidden_size == 8  # a quarter
    second = pretrain(options_for(store, tmp_path / "condenser", init=str(first), objective="condenser", max_steps=1))
    assert (second / "condenser_head.safetensors").is_file()
    again = pretrain(options_for(store, tmp_path / "again", init=str(first), max_steps=1, learning_rate=0.0))
    for name in ("model.safetensors", "generator/model.safetensors"):
        before, after = load_file(first / name), load_file(again / name)
        assert all(torch.equal(before[key], after[key]) for key in before), name

    from retrieval.encoder import Encoder

    assert Encoder.load(first).encode_queries(["the cat"]).shape == (1, 32)


def test_published_weights_go_on(
    store: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The discriminator's embeddings are kept; with nothing shared both keep their own."""
    init = {"init": str(published / "discriminator"), "init_generator": str(published / "generator")}
    word_table = "electra.embeddings.word_embeddings.weight"
    for sharing, kept in (("all", "discriminator"), ("none", "generator")):
        options = options_for(store, tmp_path / sharing, **init, embedding_sharing=sharing, learning_rate=0.0)
        folder = pretrain(dataclasses.replace(options, max_steps=1))
        found = load_file(folder / "generator" / "model.safetensors")
        assert torch.equal(found[word_table], load_file(published / kept / "model.safetensors")[word_table])
        assert ("its word embeddings are not those of the discriminator" in capsys.readouterr().err) == (
            sharing == "all"
        )
        layer = "electra.encoder.layer.1.output.dense.weight"
        assert torch.equal(found[layer], load_file(published / "generator" / "model.safetensors")[layer])


def test_micro_batches_weigh_every_slot_and_every_token_the_same(store: str, published: Path, tmp_path: Path) -> None:
    """Cases B17, B26: what is drawn does not depend on the split, and both losses are means over the whole step."""
    init = {"init": str(published / "discriminator"), "init_generator": str(published / "generator")}
    one, two = (
        log_of(pretrain(options_for(store, tmp_path / str(n), **init, max_steps=3, gradient_accumulation=n)))
        for n in (1, 2)
    )
    for first, second in zip(one, two, strict=True):
        assert all(first[name] == pytest.approx(second[name], rel=1e-4) for name in first)


@pytest.mark.slow
def test_two_processes_equal_one(store: str, published: Path, tmp_path: Path) -> None:
    init = {"init": str(published / "discriminator"), "init_generator": str(published / "generator")}
    base = options_for(store, tmp_path / "one", **init, max_steps=3, special_tokens_judged=False)
    one = pretrain(base)
    run("pretrain", dataclasses.replace(base, output=str(tmp_path / "two")), processes=2)
    for first, second in zip(log_of(one), log_of(tmp_path / "two"), strict=True):
        assert all(first[name] == pytest.approx(second[name], rel=1e-4) for name in first)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(store: str, tmp_path: Path) -> None:
    options = options_for(store, tmp_path / "killed", save_every=2)
    straight = pretrain(dataclasses.replace(options, output=str(tmp_path / "straight")))
    assert start("pretrain", options, CONDENSER_FAULT="step-done:5").wait() == -signal.SIGKILL
    assert_same_files(pretrain(options), straight)


def test_a_generators_draws_stand_where_masks_would(published: Path) -> None:
    generator, _ = load_backbone(published / "generator")
    ids = torch.tensor([[2, 10, 4, 12, 4, 3], [2, 4, 14, 3, 0, 0]])
    labels = torch.tensor([[-100, -100, 11, -100, 13, -100], [-100, 15, -100, -100, -100, -100]])
    batch = PretrainBatch(ids, (ids != 0).long(), labels, seeds=(7, 8))
    seen = []

    def step(model: object, batches: list[PretrainBatch], accelerator: object) -> dict:
        seen.extend(batches)
        return {}

    vocabulary = 30
    run_step = filled(step, generator, vocabulary)
    other = dataclasses.replace(batch, seeds=(7, 9))
    for one in (batch, batch, other):
        run_step(torch.nn.Identity(), [one], Accelerator(cpu=True))
    first, again, changed = (one.input_ids for one in seen)
    asked = labels != -100
    assert torch.equal(first, again) and torch.equal(first[0], changed[0])
    assert torch.equal(first[~asked], ids[~asked]) and (first < vocabulary).all()
    assert not torch.equal(torch.stack([one.input_ids[asked] for one in seen[1:]]).T[:, 0], ids[asked])
    assert all(torch.equal(one.labels, labels) for one in seen)


@pytest.mark.parametrize("objective", ["condenser", "cocondenser"])
def test_condenser_learns_from_a_generators_corruption(
    store: str, tiny_bert: Path, published: Path, tmp_path: Path, objective: str
) -> None:
    """The encoder reads no mask token; the generator stands still; equal commands give equal bytes."""
    documents = {"store": store}
    if objective == "cocondenser":
        file = tmp_path / "docs.jsonl"
        file.write_text(
            "".join(json.dumps({"_id": str(i), "spans": [SPANS[i], SPANS[i + 1]]}) + "\n" for i in range(8))
        )
        spans = SpansOptions(
            input=[str(file)], tokenizer=str(tiny_bert), max_length=20, min_tokens=3, output=str(tmp_path / "spans")
        )
        documents["store"] = str(build_spans(spans))
    common = {"objective": objective, "init": str(tiny_bert), "corruption": f"generator:{published / 'generator'}"}
    if objective == "cocondenser":
        common["cache_chunk"] = 3
    folders = [pretrain(options_for(documents["store"], tmp_path / name, **common, max_steps=3)) for name in "ab"]
    masked = pretrain(options_for(documents["store"], tmp_path / "c", **common | {"corruption": "mask"}, max_steps=3))
    logs = [log_of(folder) for folder in (*folders, masked)]
    assert logs[0] == logs[1] != logs[2]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (*folders, masked)]
    assert weights[0] == weights[1] != weights[2]
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    assert "corruption" in manifest["inputs"] and "corruption" not in manifest["config"]


@pytest.mark.parametrize(
    ("options", "words", "masked", "random", "generator"),
    [
        ({"objective": "mlm"}, True, 0.8, 0.1, False),
        ({"objective": "mlm", "whole_words": False}, False, 0.8, 0.1, False),
        ({"objective": "condenser", "corruption": "generator:folder"}, True, 1.0, 0.0, True),
        ({"objective": "electra"}, False, 1.0, 0.0, True),
        ({"objective": "electra", "masked_share": 0.85, "whole_words": True}, True, 0.85, 0.0, True),
    ],
)
def test_what_is_masked_by_objective(
    tiny_bert: Path, options: dict, words: bool, masked: float, random: float, generator: bool
) -> None:
    given = PretrainOptions(data="data", output="out", **options)
    policy = OBJECTIVES[given.objective].policy(given, AutoTokenizer.from_pretrained(tiny_bert))
    assert (policy.whole_words, policy.masked, policy.random) == (words, masked, random)
    assert policy.generator is generator and policy.probability == 0.15 and policy.mask_id in policy.special


SPANS = [f"the {WORDS[i % 6]} of war and peace is a {WORDS[i % 4]}" for i in range(9)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skip_from": 1}, "--skip_from is for condenser, cocondenser; electra does not take it"),
        ({"random_tokens": "all"}, "--random_tokens is for .*; electra does not take it"),
        ({"objective": "mlm", "generator_size": 0.5}, "--generator_size is for electra, electric; mlm does not"),
        ({"generator_hidden": 48, "generator_size": 0.5}, "--generator_hidden stands in the place of --generator_size"),
        ({"init": "BERT/roberta", "model_size": None}, "'roberta' is not supported, expected one of electra, bert"),
        ({"init_generator": "PUBLISHED/generator", "generator_size": 0.5}, "--generator_size is for a new generator"),
        ({"init_generator": "PUBLISHED/generator"}, "embedding_size is 16, the discriminator's 128"),
        ({"init_generator": "BERT"}, "model family 'bert' cannot be ELECTRA's generator"),
        ({"objective": "mlm", "corruption": "noise"}, "--corruption is 'noise', expected mask or generator:DIR"),
        ({"objective": "mlm", "corruption": "generator:/no/such"}, "/no/such: no such file or folder|no such folder"),
        (
            {"objective": "mlm", "corruption": "generator:PUBLISHED/discriminator"},
            "has no masked-LM head to draw tokens with",
        ),
    ],
)
def test_bad_options_are_one_line(
    store: str, tiny_bert: Path, published: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    roberta = tmp_path / "roberta"
    shutil.copytree(tiny_bert, roberta)
    config = json.loads((roberta / "config.json").read_text()) | {"model_type": "roberta"}
    (roberta / "config.json").write_text(json.dumps(config))
    places = {"BERT/roberta": str(roberta), "PUBLISHED": str(published), "BERT": str(tiny_bert)}
    for key, value in change.items():
        for name, place in places.items():
            value = value.replace(name, place) if isinstance(value, str) else value
        change = change | {key: value}
    with pytest.raises(UserError, match=message):
        pretrain(options_for(store, tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()
