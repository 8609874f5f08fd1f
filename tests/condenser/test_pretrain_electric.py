"""Electric from text to a folder that scores: same loop, same resume, every split of a step the same."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, ElectraForPreTraining

from condenser.corpus.spans import build_spans
from condenser.errors import UserError
from condenser.options import PretrainOptions, SpansOptions
from condenser.pretrain import pretrain
from condenser.scorer import Scorer
from tests.command import run, start
from tests.folders import assert_same_files

NOISE = "noise_model.safetensors"
WORDS = ["cat", "dog", "bird", "king", "queen", "city"]
TEXTS = [f"the {WORDS[i % 6]} of the {WORDS[i // 6]} is a {WORDS[i % 5]} in peace and war" for i in range(24)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> str:
    folder = tmp_path_factory.mktemp("electric-store")
    file = folder / "docs.jsonl"
    texts = [*TEXTS[:22], "cat", "what is the cat"]  # one token is data or noise, never both
    file.write_text("".join(json.dumps({"_id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    options = SpansOptions(
        input=[str(file)], tokenizer=str(tiny_bert), max_length=20, min_tokens=1, output=str(folder / "spans")
    )
    return str(build_spans(options))


def options_for(store: str, output: Path, **others: object) -> PretrainOptions:
    settings = {"objective": "electric", "max_steps": 6, "batch_size": 4, "log_every": 1, "device": "cpu"} | others
    if "init" not in settings:
        settings = {"model_size": "tiny"} | settings
    return PretrainOptions(data=store, output=str(output), **settings)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_both_models_learn_and_are_saved_together(store: str, tmp_path: Path) -> None:
    folder = pretrain(options_for(store, tmp_path / "out", max_steps=40, batch_size=12, learning_rate=2e-3))
    log = log_of(folder)
    parts = {"nce", "noise_mle", "noise_hits", "noise_found"}
    assert all(set(line) == {"step", "loss", "grad_norm", "lr", *parts} for line in log)
    assert all(line["loss"] == pytest.approx(50 * line["nce"] + line["noise_mle"], rel=1e-5) for line in log)
    mean = {name: [sum(line[name] for line in part) / 10 for part in (log[:10], log[-10:])] for name in log[0]}
    assert mean["noise_mle"][1] < 0.9 * mean["noise_mle"][0]
    assert mean["nce"][1] < 0.9 * mean["nce"][0]

    _, report = ElectraForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert AutoModel.from_pretrained(folder).config.hidden_size == 128
    scorer = Scorer.load(folder)
    assert scorer.method == "electric" and len(scorer.score(TEXTS)) == len(TEXTS)


def test_a_finished_folder_goes_on_with_its_noise_model(
    store: str, electric_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = pretrain(options_for(store, tmp_path / "a", init=str(electric_folder), learning_rate=0.0, max_steps=1))
    assert "a new one is started" not in capsys.readouterr().err
    for name in ("model.safetensors", NOISE):
        before, after = (load_file(folder / name) for folder in (electric_folder, still))
        assert all(torch.equal(before[key], after[key]) for key in before), name
    moved = pretrain(options_for(store, tmp_path / "b", init=str(electric_folder), max_steps=2))
    for name in ("model.safetensors", NOISE):
        before, after = (load_file(folder / name) for folder in (electric_folder, moved))
        assert not any(torch.equal(before[key], after[key]) for key in before if not key.endswith("key.bias")), name


def test_a_bert_becomes_the_energy_model(
    store: str, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_for(store, tmp_path / "a", init=str(tiny_bert), max_steps=2, head_warmup_steps=2)
    folder = pretrain(dataclasses.replace(options, generator_size=0.5))
    said = capsys.readouterr().err
    assert "no discriminator's head in these weights" in said and "no noise model in these weights" in said
    assert json.loads((folder / "electric.json").read_text())["noise_model"]["hidden_size"] == 16
    energy, bert = ElectraForPreTraining.from_pretrained(folder).electra, AutoModel.from_pretrained(tiny_bert)
    assert torch.equal(energy.embeddings.word_embeddings.weight, bert.embeddings.word_embeddings.weight)


@pytest.mark.parametrize("released", [False, True])
def test_micro_batches_weigh_every_token_the_same(
    store: str, electric_folder: Path, tmp_path: Path, released: bool
) -> None:
    others = {"nce_over": "attended", "nce_ratio": "released"} if released else {}
    common = {"init": str(electric_folder), "max_steps": 3} | others
    one, two = (
        log_of(pretrain(options_for(store, tmp_path / str(n), **common, gradient_accumulation=n))) for n in (1, 2)
    )
    for first, second in zip(one, two, strict=True):
        assert all(first[name] == pytest.approx(second[name], rel=1e-4) for name in first)


@pytest.mark.slow
def test_two_processes_equal_one(store: str, electric_folder: Path, tmp_path: Path) -> None:
    base = options_for(store, tmp_path / "one", init=str(electric_folder), max_steps=3)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "mlm", "nce_weight": 1.0}, "--nce_weight is for electric; mlm does not take it"),
        ({"whole_words": True}, "--whole_words is for .*; electric does not take it"),
    ],
)
def test_options_of_other_objectives_are_refused(store: str, tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pretrain(options_for(store, tmp_path / "out", **change))
