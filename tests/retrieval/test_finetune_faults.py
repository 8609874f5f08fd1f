"""What happens around a fine-tuning run: outputs that cannot be, runs that are killed, data that has changed."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from condenser import files
from condenser.errors import RunFailed, UserError
from condenser.training import loop
from retrieval import finetune as verb
from retrieval.cli import main
from retrieval.finetune import finetune
from retrieval.options import FinetuneOptions
from tests.command import start, stop_after
from tests.folders import assert_same_files
from tests.retrieval.test_check import write


@pytest.fixture()
def collection(tmp_path: Path) -> Path:
    return write(tmp_path / "data")


def options_for(collection: Path, output: Path, tiny_bert: Path, **others: Any) -> FinetuneOptions:
    settings = {"max_steps": 6, "batch_size": 2, "log_every": 1, "save_every": 2, "eval_every": 3, "device": "cpu"}
    return FinetuneOptions(
        encoder=str(tiny_bert), collection=[str(collection)], output=str(output), **(settings | others)
    )


def unloadable(options: FinetuneOptions) -> None:
    pytest.fail("the model was loaded first")


def test_the_folder_of_the_output_is_made(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    """Case B42."""
    finetune(options_for(collection, tmp_path / "a" / "b" / "out", tiny_bert, max_steps=1))
    assert (tmp_path / "a" / "b" / "out" / "model.safetensors").is_file()


def test_an_output_that_cannot_be_is_refused_before_the_model_is_loaded(
    collection: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B42: below a file; in a folder that nobody may write into (which root always may: so it is said here)."""
    monkeypatch.setattr(verb, "load_encoder", unloadable)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot make this folder: "):
        finetune(options_for(collection, tmp_path / "file" / "out", tiny_bert))
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(UserError, match=f"{tmp_path}: cannot write into this folder"):
        finetune(options_for(collection, tmp_path / "out", tiny_bert))


def test_a_folder_of_something_else_is_not_written_into(
    collection: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case R38."""
    monkeypatch.setattr(verb, "load_encoder", unloadable)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="out: "):
        finetune(options_for(collection, tmp_path / "out", tiny_bert))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_data_that_changed_since_a_run_was_stopped_is_refused_by_name(
    collection: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case R35: on resume, and when the run is finished."""
    options = options_for(collection, tmp_path / "out", tiny_bert)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "fault_point", stop_after(3))
        with pytest.raises(KeyboardInterrupt):
            finetune(options)
    corpus = collection / "corpus.jsonl"
    before = corpus.read_text()
    corpus.write_text(before.replace("passage number 1", "passage number one"))
    with pytest.raises(UserError, match=r"out.partial: .*collection"):
        finetune(options)
    with pytest.raises(UserError, match=r"out.partial: .*learning_rate"):
        finetune(dataclasses.replace(options, learning_rate=1e-3))
    corpus.write_text(before)
    assert finetune(options) == tmp_path / "out"
    corpus.write_text(before.replace("passage number 1", "passage number one"))
    with pytest.raises(UserError, match=r"out: .*collection"):
        finetune(options)


def test_a_finished_run_does_nothing_again(
    collection: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(collection, tmp_path / "out", tiny_bert, max_steps=1)
    finetune(options)
    monkeypatch.setattr(verb, "load_encoder", unloadable)
    assert finetune(dataclasses.replace(options, log_every=7)) == tmp_path / "out"


@pytest.mark.parametrize("kind", [{}, {"lora": 2, "projection": 8}, {"gradient_checkpointing": True}], ids=str)
def test_a_stopped_run_of_each_kind_goes_on_to_the_same_bytes(
    collection: Path, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    straight = finetune(options_for(collection, tmp_path / "straight", tiny_bert, **kind))
    options = options_for(collection, tmp_path / "out", tiny_bert, **kind)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "fault_point", stop_after(5))
        with pytest.raises(KeyboardInterrupt):
            finetune(options)
    assert_same_files(finetune(options), straight)


def test_the_start_line_says_what_a_step_is(
    collection: Path, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B30: processes, queries of a step, candidates of a query; loss and learning rate."""
    finetune(options_for(collection, tmp_path / "out", tiny_bert, max_steps=1, learning_rate=3e-4))
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("finetune: ") and "epochs" in line
    ]
    assert line == (
        "finetune: 2 queries, 1 steps of 2 queries (1.00 epochs) against 2 candidates at most, on 1 process; "
        "loss softmax, learning rate 0.0003"
    )


def test_the_card_has_the_figures_of_the_log(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    folder = finetune(options_for(collection, tmp_path / "out", tiny_bert))
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    best = max((line for line in log if "dev_mrr@10" in line), key=lambda line: line["dev_mrr@10"])
    card = (folder / "README.md").read_text()
    assert f"after step {best['step']}, whose weights these are" in card
    assert f"| dev_mrr@10 | {best['dev_mrr@10']:.4f} |" in card


def test_numbers_that_run_away_name_the_queries(collection: Path, tiny_bert: Path, tmp_path: Path) -> None:
    """Case R31."""
    options = options_for(collection, tmp_path / "out", tiny_bert, temperature=1e-44, dev_split="none")
    with pytest.raises(RunFailed, match="3 steps in a row without a finite gradient"):
        finetune(options)
    named = json.loads((tmp_path / "out.partial" / "bad-batch.json").read_text())
    assert {step: set(ids) for step, ids in named["examples"].items()} == {step: {"q1", "q2"} for step in "123"}


def test_wrong_options_end_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Case B30: words run together, a letter missing."""
    assert main(["finetune", "--epochs", "53--log_every", "2"]) == 2
    assert "--epochs is '53--log_every', expected a number" in capsys.readouterr().err
    assert main(["finetune", "--share_negative", "true"]) == 2
    assert "unknown option --share_negative (did you mean --share_negatives?)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["checkpoint-written:2", "checkpoint-sealed:1", "step-done:5", "manifest-written"])
def test_a_run_killed_anywhere_goes_on_to_the_same_bytes(
    collection: Path, tiny_bert: Path, tmp_path: Path, fault: str
) -> None:
    """Case R33."""
    straight = finetune(options_for(collection, tmp_path / "straight", tiny_bert))
    options = options_for(collection, tmp_path / "out", tiny_bert)
    killed = start("finetune", options, CONDENSER_FAULT=fault)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    finetune(options)
    for name in ("model.safetensors", "log.jsonl", "manifest.json", "README.md"):
        assert (tmp_path / "out" / name).read_bytes() == (straight / name).read_bytes(), name
