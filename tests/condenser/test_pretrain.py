"""Pretraining from text to a folder: every objective, resume after kill -9, several processes, bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from condenser.corpus.spans import build_spans
from condenser.errors import RunFailed, UserError
from condenser.manifest import fingerprint
from condenser.options import PretrainOptions, SpansOptions
from condenser.pretrain import pretrain
from tests.command import run, start
from tests.folders import assert_same_files

SENTENCES = ["the cat sing to the bird", "a king of war and peace", "fever is a symptom", "water runs in the river"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> str:
    folder = tmp_path_factory.mktemp("pretrain")
    file = folder / "docs.jsonl"
    records = [{"_id": str(i), "text": f"{SENTENCES[i % 4]} {i}. {SENTENCES[(i + 1) % 4]}. " * 2} for i in range(24)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = SpansOptions(
        input=[str(file)], tokenizer=str(tiny_bert), max_length=20, min_tokens=3, output=str(folder / "spans")
    )
    return str(build_spans(options))


def options_for(store: str, output: Path, tiny_bert: Path, **others: object) -> PretrainOptions:
    settings = {"max_steps": 6, "batch_size": 4, "init": str(tiny_bert), "log_every": 1, "device": "cpu"} | others
    return PretrainOptions(data=store, output=str(output), **settings)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("objective", "parts"),
    [
        ("mlm", {"late_mlm"}),
        ("mlm_contrastive", {"late_mlm", "contrastive"}),
        ("condenser", {"late_mlm", "head_mlm"}),
        ("cocondenser", {"late_mlm", "head_mlm", "contrastive"}),
    ],
)
def test_each_objective_learns_and_logs_its_parts(
    store: str, tiny_bert: Path, tmp_path: Path, objective: str, parts: set[str]
) -> None:
    options = options_for(store, tmp_path / "out", tiny_bert, objective=objective, max_steps=60, learning_rate=3e-3)
    folder = pretrain(options)
    log = log_of(folder)
    assert [line["step"] for line in log] == list(range(1, 61))
    assert all(line["loss"] == pytest.approx(sum(line[part] for part in parts)) for line in log)
    mean = [sum(line["loss"] for line in part) / 15 for part in (log[:15], log[-15:])]
    assert mean[1] < 0.9 * mean[0]
    assert (folder / "condenser.json").exists() == ("head_mlm" in parts)
    _, report = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    AutoModel.from_pretrained(folder, add_pooling_layer=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_pretrained_folder_is_a_cls_encoder_everywhere(
    store: str, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B34: where nothing is recorded, sentence-transformers takes the mean over tokens."""
    from sentence_transformers import SentenceTransformer

    from retrieval.encoder import Encoder

    folder = pretrain(options_for(store, tmp_path / "out", tiny_bert, max_steps=1))
    encoder = Encoder.load(folder)
    assert "no pooling recorded" not in capsys.readouterr().err
    assert (encoder.config.query_max_length, encoder.config.passage_max_length) == (32, 64)
    ids = torch.tensor(encoder.tokenize(["river bank money"], "query"))
    cls = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()(ids).last_hidden_state[0, 0]
    for vector in (
        encoder.encode_queries(["river bank money"])[0],
        SentenceTransformer(str(folder), device="cpu").encode("river bank money"),
    ):
        torch.testing.assert_close(torch.tensor(vector), cls.detach(), rtol=0, atol=1e-6)


def test_cocondenser_goes_on_from_the_condenser_head(store: str, tiny_bert: Path, tmp_path: Path) -> None:
    first = pretrain(options_for(store, tmp_path / "a", tiny_bert, skip_from=0, head_layers=1, late_mlm=False))
    second = pretrain(
        options_for(store, tmp_path / "b", first, objective="cocondenser", max_steps=1, learning_rate=0.0)
    )
    settings = json.loads((second / "condenser.json").read_text())
    assert settings == {"skip_from": 0, "head_layers": 1, "late_mlm": False}
    before, after = (load_file(folder / "condenser_head.safetensors") for folder in (first, second))
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(UserError, match="head has skip_from 0, asked for 1"):
        pretrain(options_for(store, tmp_path / "c", first, skip_from=1))


def test_a_start_in_the_home_folder_has_its_head_too(
    store: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the shell leaves ``--init=~/a`` as it is."""
    pretrain(options_for(store, tmp_path / "a", tiny_bert, max_steps=1))
    monkeypatch.setenv("HOME", str(tmp_path))
    capsys.readouterr()
    folder = pretrain(options_for(store, tmp_path / "b", Path("~/a"), objective="cocondenser", max_steps=1))
    assert "no Condenser head" not in capsys.readouterr().err
    assert json.loads((folder / "manifest.json").read_text())["inputs"]["init"] == fingerprint(tmp_path / "a")


def test_a_warm_up_without_anything_new_is_none(
    store: str, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = pretrain(options_for(store, tmp_path / "a", tiny_bert, max_steps=1))
    second = pretrain(options_for(store, tmp_path / "b", first, max_steps=2, head_warmup_steps=2))
    assert "nothing is new in these weights" in capsys.readouterr().err
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_equal_commands_give_equal_bytes(store: str, tiny_bert: Path, tmp_path: Path) -> None:
    folders = [pretrain(options_for(store, tmp_path / name, tiny_bert, workers=w)) for name, w in (("a", 0), ("b", 2))]
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) for folder in folders]
    assert files[0] == files[1]
    for name in files[0]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


FAULTS = [
    "step-done:3", "step-done:9", "checkpoint-written:1", "checkpoint-written:2", "checkpoint-sealed:1",
    "checkpoint-sealed:3", "commit-begun", "manifest-written", "folder-published",
]  # fmt: skip


@pytest.fixture(scope="module")
def straight(store: str, tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> PretrainOptions:
    output = tmp_path_factory.mktemp("straight") / "out"
    options = options_for(store, output, tiny_bert, max_steps=10, save_every=3, objective="cocondenser")
    assert start("pretrain", options).wait() == 0
    return options


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_killed_anywhere_goes_on_to_the_same_bytes(straight: PretrainOptions, tmp_path: Path, fault: str) -> None:
    options = dataclasses.replace(straight, output=str(tmp_path / "out"))
    killed = start("pretrain", options, CONDENSER_FAULT=fault)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    again = start("pretrain", options)
    _, said = again.communicate()
    assert again.returncode == 0, said
    if fault not in ("step-done:3", "checkpoint-written:1", "folder-published", "manifest-written"):
        assert b"going on after step" in said
    assert_same_files(tmp_path / "out", Path(straight.output))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_saves_and_the_same_command_goes_on(store: str, tiny_bert: Path, tmp_path: Path, workers: int) -> None:
    """To all processes of the run, as a scheduler sends it."""
    options = options_for(store, tmp_path / "out", tiny_bert, max_steps=4000, save_every=100_000, workers=workers)
    process = start("pretrain", options, group=True)
    log = tmp_path / "out.partial" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.stat().st_size):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 143
    assert b"the same command goes on from there" in said
    assert len(list((tmp_path / "out.partial" / ".work" / "checkpoints").glob("step-*"))) == 1


def test_a_damaged_checkpoint_is_passed_over(
    store: str, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(store, tmp_path / "out", tiny_bert, save_every=2)
    straight = pretrain(dataclasses.replace(options, output=str(tmp_path / "straight")))

    with monkeypatch.context() as patch:
        patch.setattr("condenser.pretrain._finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pretrain(options)
    newest = tmp_path / "out.partial" / ".work" / "checkpoints" / "step-00000006" / "model.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    folder = pretrain(options)
    said = capsys.readouterr().err
    assert "checkpoint passed over" in said and "sha256" in said and "going on after step 4 of 6" in said
    for name in ("model.safetensors", "log.jsonl"):
        assert (folder / name).read_bytes() == (straight / name).read_bytes()


def test_other_options_on_resume_are_refused_with_the_difference(
    store: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(store, tmp_path / "out", tiny_bert, save_every=2)
    with monkeypatch.context() as patch:
        patch.setattr("condenser.pretrain._finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pretrain(options)
    with pytest.raises(UserError, match=r"learning_rate: 0\.0001 -> 0\.001"):
        pretrain(dataclasses.replace(options, learning_rate=1e-3))


def test_three_steps_without_a_finite_gradient_stop(
    store: str, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R31."""
    options = options_for(store, tmp_path / "out", tiny_bert, learning_rate=1e30, warmup_ratio=0.0, max_grad_norm=1e30)
    with pytest.raises(RunFailed, match=r"3 steps in a row without a finite gradient, up to step .*checkpoint is none"):
        pretrain(options)
    assert "the step is not applied" in capsys.readouterr().err
    examples = json.loads((tmp_path / "out.partial" / "bad-batch.json").read_text())["examples"]
    assert len(examples) == 3 and all(len(names) == 4 for names in examples.values())
    assert {name for names in examples.values() for name in names} <= {str(i) for i in range(24)}


def test_a_full_gpu_is_told_in_one_line(
    store: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case R32."""

    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    monkeypatch.setattr("condenser.objectives.masked_lm.masked_lm_losses", full)
    with pytest.raises(RunFailed, match=r"step 1: out of GPU memory .*2 GiB\) \(lower --batch_size"):
        pretrain(options_for(store, tmp_path / "out", tiny_bert))


@pytest.mark.slow
def test_a_full_disk_leaves_the_older_checkpoint(store: str, tiny_bert: Path, tmp_path: Path) -> None:
    """Case R39: no file may grow past a limit between the two checkpoints' sizes of their optimiser files."""
    options = options_for(store, tmp_path / "out", tiny_bert, save_every=2, max_steps=4)
    assert start("pretrain", options, CONDENSER_FAULT="step-done:3").wait() == -signal.SIGKILL
    checkpoints = tmp_path / "out.partial" / ".work" / "checkpoints"
    before = {path.name: path.stat().st_size for path in (checkpoints / "step-00000002").iterdir()}
    limited = start("pretrain", options, limit=before["optimizer.safetensors"] - 1)
    _, said = limited.communicate()
    assert limited.returncode == 1
    assert said.decode().splitlines()[-1].startswith(f"condenser: error: {checkpoints}/.draft: File too large (")
    assert {path.name for path in checkpoints.iterdir()} == {"step-00000002"}
    assert start("pretrain", options).wait() == 0


def test_accumulated_micro_batches_weigh_every_masked_token_the_same(
    store: str, tiny_bert: Path, tmp_path: Path
) -> None:
    """Case B26: the mean over all masked tokens of the step, not a mean of means."""
    one, two = (
        pretrain(options_for(store, tmp_path / str(n), quiet(tiny_bert, tmp_path, n), gradient_accumulation=n))
        for n in (1, 2)
    )
    for first, second in zip(log_of(one), log_of(two), strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)


def quiet(tiny_bert: Path, tmp_path: Path, number: int) -> Path:
    """Copy the model with dropout off."""
    from transformers import AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(tiny_bert)
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    folder = tmp_path / f"quiet-{number}"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_two_processes_equal_one(store: str, tiny_bert: Path, tmp_path: Path) -> None:
    """Cases B21, B22: the same loss and gradient norm, masks and order as one process with the whole batch."""
    init = quiet(tiny_bert, tmp_path, 0)
    base = options_for(store, tmp_path / "one", init, objective="cocondenser", max_steps=4)
    one = pretrain(base)
    (tmp_path / "two").mkdir()  # an empty folder is as good as none
    run("pretrain", dataclasses.replace(base, output=str(tmp_path / "two")), processes=2)
    for first, second in zip(log_of(one), log_of(tmp_path / "two"), strict=True):
        for key in first:
            assert first[key] == pytest.approx(second[key], rel=1e-4), key
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, tmp_path / "two"))
    for name in ours:
        # Whatever a key's bias is, attention stays the same: its gradient is rounding alone, which Adam blows up.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_the_same_batches(store: str, tiny_bert: Path, tmp_path: Path) -> None:
    """Case R36."""
    init = quiet(tiny_bert, tmp_path, 0)
    options = options_for(store, tmp_path / "two", init, max_steps=6, save_every=2)
    one = pretrain(dataclasses.replace(options, output=str(tmp_path / "one")))
    assert start("pretrain", options, CONDENSER_FAULT="step-done:5").wait() == -signal.SIGKILL
    said = run("pretrain", options, processes=2)
    assert "going on after step 4 of 6" in said and "of another number of processes" in said
    for first, second in zip(log_of(one), log_of(tmp_path / "two"), strict=True):
        assert all(first[key] == pytest.approx(second[key], rel=1e-4) for key in first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init": None}, "exactly one of --init and --model_size"),
        ({"model_size": "tiny"}, "exactly one of --init and --model_size"),
        ({"max_steps": None}, "exactly one of --max_steps and --epochs"),
        ({"epochs": 1.0}, "exactly one of --max_steps and --epochs"),
        ({"objective": "mlm", "head_layers": 3}, "--head_layers is for condenser, cocondenser; mlm does not take it"),
        ({"objective": "mlm", "late_mlm": False}, "--late_mlm is for condenser, cocondenser"),
        ({"batch_size": 5000}, r"holds \d+ spans, one step needs 5,000"),
        ({"batch_size": 3, "gradient_accumulation": 2}, "cannot be shared out over 1 processes x 2 micro-batches"),
        ({"max_length": 65}, "spans of 65 tokens do not fit the model's 64 positions"),
        ({"max_length": 2}, "leaves no room for text"),
        ({"mixed_precision": "fp16"}, "--mixed_precision fp16 needs a GPU"),
        ({"init": "/no/such/folder"}, "/no/such/folder: no such folder, expected a model folder"),
        ({"objective": "cocondenser", "batch_size": 25}, "holds 24 documents, one step needs 25"),
    ],
)
def test_bad_options_are_one_line(
    store: str, tiny_bert: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        pretrain(options_for(store, tmp_path / "out", tiny_bert, **change))
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_in_the_corpus_is_found(store: str, tiny_bert: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "spans"
    shutil.copytree(store, damaged)
    tokens = bytearray((damaged / "tokens.arrow").read_bytes())
    tokens[len(tokens) // 2] ^= 1
    (damaged / "tokens.arrow").write_bytes(tokens)
    with pytest.raises(UserError, match=r"tokens\.arrow: contents differ from the manifest's sha256"):
        pretrain(options_for(str(damaged), tmp_path / "out", tiny_bert))


def test_random_weights_of_a_named_size(store: str, tmp_path: Path) -> None:
    folder = pretrain(
        PretrainOptions(
            data=store, model_size="tiny", objective="mlm", max_steps=1, batch_size=2, output=str(tmp_path / "out")
        )
    )
    config = AutoModel.from_pretrained(folder, add_pooling_layer=False).config
    assert (config.num_hidden_layers, config.hidden_size) == (2, 128)


def test_epochs_become_steps(store: str, tiny_bert: Path, tmp_path: Path) -> None:
    """24 documents in steps of 4: one and a half times 6."""
    options = options_for(store, tmp_path / "out", tiny_bert, objective="cocondenser", max_steps=None, epochs=1.5)
    folder = pretrain(options)
    assert [line["step"] for line in log_of(folder)] == list(range(1, 10))
    assert json.loads((folder / "manifest.json").read_text())["facts"]["steps"] == 9


def test_weights_without_a_masked_lm_head_start_one(
    store: str, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    bare = tmp_path / "bare"
    AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False).save_pretrained(bare)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(bare)
    options = options_for(store, tmp_path / "out", bare, objective="mlm", max_steps=2, learning_rate=0.01)
    folder = pretrain(dataclasses.replace(options, head_warmup_steps=2))
    assert "no masked-LM head in these weights; a new one is started" in capsys.readouterr().err
    before, after = load_file(bare / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[f"bert.{name}"])}
    assert moved == set(), "the encoder stands still while the head warms up"
    bias = after["cls.predictions.bias"]
    assert bias.argmax() != bias.argmin() and bias.max() > -4 > bias.min(), "log unigram frequencies"


def test_a_vocabulary_may_be_padded_and_not_be_too_small(store: str, tiny_bert: Path, tmp_path: Path) -> None:
    for more in (3, -3):
        model = AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False)
        model.resize_token_embeddings(model.config.vocab_size + more, mean_resizing=False)
        bare = tmp_path / f"bare{more}"
        model.save_pretrained(bare)
        AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(bare)
        options = options_for(store, tmp_path / f"out{more}", bare, objective="mlm", max_steps=1)
        if more > 0:
            pretrain(options)
            continue
        with pytest.raises(UserError, match="entries"):
            pretrain(options)


def test_a_new_model_has_room_for_longer_spans_than_bert(tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join([" ".join(SENTENCES * 60)] * 4))
    options = SpansOptions(
        input=[str(tmp_path / "a.txt")], tokenizer=str(tiny_bert), max_length=600, output=str(tmp_path / "s")
    )
    folder = pretrain(
        PretrainOptions(
            data=str(build_spans(options)), model_size="tiny", objective="mlm", max_steps=1, batch_size=2,
            output=str(tmp_path / "out"),
        )
    )  # fmt: skip
    assert AutoModel.from_pretrained(folder, add_pooling_layer=False).config.max_position_embeddings == 600
