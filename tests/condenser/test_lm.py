"""Language models from a token store to a measured folder: training, resume, given vectors, perplexity, samples."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path

import pytest
import torch

from condenser import lm
from condenser.corpus.spans import build_spans
from condenser.corpus.streams import read_token_documents, text_frame
from condenser.errors import UserError
from condenser.lm import load_lm, measure, perplexity, sample_texts, train_lm
from condenser.lm_options import LmPerplexityOptions, LmSampleOptions, LmTrainOptions
from condenser.options import SpansOptions
from condenser.training import loop
from tests.command import start, stop_after
from tests.folders import assert_same_files

LEARNS = {"batch_size": 8, "chunk": 14, "hidden_size": 24, "learning_rate": 3e-2, "dropout": 0.0, "max_grad_norm": 1.0}
TEXTS = ["the cat sings to the bird", "a king of war and peace", "fever is a symptom", "water runs in the old river"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a vocabulary of words, and its text."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "docs.txt").write_text("".join(f"{TEXTS[i % 4]} and {TEXTS[(i + 1) % 4]}\n" for i in range(24)))
    (folder / "other.txt").write_text("the cat runs in the river\n\na symptom of the king is peace and water\nking\n")
    build_spans(
        SpansOptions(input=[str(folder / "docs.txt")], train_words=40, min_tokens=1, output=str(folder / "spans"))
    )
    return folder


def options_for(folder: Path, output: Path, **others: object) -> LmTrainOptions:
    settings: dict[str, object] = {
        "max_steps": 10, "batch_size": 3, "chunk": 7, "embedding_size": 6, "hidden_size": 8, "log_every": 1,
        "device": "cpu",
    }  # fmt: skip
    return LmTrainOptions(data=str(folder / "spans"), output=str(output), **(settings | others))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "lm"
    return train_lm(options_for(folder, output, **LEARNS, max_steps=150))


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_it_learns_and_stands_alone(folder: Path, trained: Path) -> None:
    first, *_, last = log_of(trained)
    assert last["loss"] < 0.5 < 2.5 < first["loss"]
    options = LmPerplexityOptions(model=str(trained), input=[str(folder / "docs.txt")], device="cpu", json=True)
    found = json.loads(perplexity(options))
    assert found["perplexity_per_token"] < 1.7
    assert found["perplexity_per_token"] == pytest.approx(math.exp(found["nll"] / found["tokens"]))
    assert found["perplexity_per_word"] == found["perplexity_per_token"]  # tokens are words
    shown = perplexity(dataclasses.replace(options, json=False))
    assert shown.startswith(f"perplexity {found['perplexity_per_token']:.2f} per token ({found['tokens']:,} tokens)")


@pytest.mark.parametrize("reset", [True, False])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    folder: Path, tmp_path: Path, reset: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state behind the last chunk is in the checkpoint: without it, later steps would read on from nothing."""
    options = options_for(folder, tmp_path / "out", reset=reset, layers=2, save_every=4)
    straight = train_lm(dataclasses.replace(options, output=str(tmp_path / "straight")))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "fault_point", stop_after(6))
        with pytest.raises(KeyboardInterrupt):
            train_lm(options)
    again = train_lm(options)
    assert "going on after step 4 of 10" in capsys.readouterr().err
    assert_same_files(again, straight)


@pytest.mark.slow
def test_a_run_killed_goes_on_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    options = options_for(folder, tmp_path / "out", save_every=4)
    straight = train_lm(dataclasses.replace(options, output=str(tmp_path / "straight")))
    assert start("lm train", options, CONDENSER_FAULT="step-done:7").wait() == -signal.SIGKILL
    again = start("lm train", options)
    _, said = again.communicate()
    assert again.returncode == 0 and b"going on after step 4" in said
    assert_same_files(tmp_path / "out", straight)


def test_the_best_dev_perplexity_chooses_the_weights(folder: Path, tmp_path: Path) -> None:
    other = str(folder / "other.txt")
    options = options_for(folder, tmp_path / "out", dev=[other], eval_every=10, max_steps=80, **LEARNS)
    out = train_lm(options)
    dev = [line for line in log_of(out) if "dev_perplexity" in line]
    assert len(dev) == 8
    assert all(line["dev_perplexity"] == pytest.approx(math.exp(-line["dev_log_prob"])) for line in dev)
    found = json.loads(perplexity(LmPerplexityOptions(model=str(out), input=[other], device="cpu", json=True)))
    assert found["perplexity_per_token"] == pytest.approx(min(line["dev_perplexity"] for line in dev))
    assert found["perplexity_per_token"] < dev[-1]["dev_perplexity"]


def test_perplexity_is_that_of_each_document_alone(
    folder: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However documents are batched, and read in parts where they are long."""
    model, tokenizer = load_lm(trained)
    documents, frame = read_token_documents([folder / "other.txt"], tokenizer), text_frame(tokenizer)
    nll = 0.0
    for number in range(3):
        text = torch.tensor([[frame.start, *documents.document(number), frame.end]])
        with torch.no_grad():
            features, _ = model(text[:, :-1], model.initial_state(1))
            nll -= float(model.log_probs(features)[0].gather(1, text[0, 1:, None]).sum())
    for at_once in (8192, 12, 4):
        monkeypatch.setattr(lm, "_TOKENS_AT_ONCE", at_once)
        found = measure(model, documents, frame)
        assert found.nll == pytest.approx(nll, rel=1e-5)
        assert (found.tokens, found.words) == (6 + 9 + 1 + 3, 6 + 9 + 1 + 3)


def test_words_of_several_tokens_are_counted_once(tmp_path: Path, tiny_bert: Path) -> None:
    """'treatment' is two pieces: perplexity per word is over 3 words and the end, per token over 4 and the end."""
    from condenser.corpus.tokens import load_tokenizer

    (tmp_path / "one.txt").write_text("the treatment is\n")
    found = read_token_documents([tmp_path / "one.txt"], load_tokenizer(tiny_bert))
    assert (len(found.tokens), found.words) == (4, 3)
    figures = lm.Perplexity(10.0, len(found.tokens) + 1, found.words + 1)
    assert (figures.per_token, figures.per_word) == (math.exp(2), math.exp(2.5))


def test_given_vectors_are_taken_and_stand_still_where_asked(folder: Path, tmp_path: Path) -> None:
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("cat 1 2 3 4\nunheard 1 1 1 1\nking -1 0 .5 2\n")
    for freeze in (True, False):
        out = train_lm(
            options_for(
                folder, tmp_path / f"out-{freeze}", embedding_size=None, vectors=str(vectors), freeze_vectors=freeze
            )
        )
        model, tokenizer = load_lm(out)
        kept = model.embedding.weight[[tokenizer.vocab["cat"], tokenizer.vocab["king"]]]
        assert torch.equal(kept, torch.tensor([[1.0, 2, 3, 4], [-1, 0, 0.5, 2]])) == freeze
    with pytest.raises(UserError, match=r"--embedding_size is 6, the vectors have 4 numbers"):
        train_lm(options_for(folder, tmp_path / "other", vectors=str(vectors)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"freeze_vectors": True}, "--freeze_vectors needs --vectors"),
        ({"eval_every": 3}, "--eval_every needs --dev"),
        ({"batch_size": 5000}, "streams need more"),
        ({"vectors": "/no/such/file"}, "/no/such/file: no such file"),
    ],
)
def test_bad_options_are_one_line(folder: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_lm(options_for(folder, tmp_path / "out", **change))
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_kind_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(UserError, match=r"no language_model\.json here, expected a language model"):
        load_lm(tiny_bert)


def test_samples_are_texts_of_the_corpus(trained: Path) -> None:
    """A model that knows its corpus by heart draws from it; text i does not depend on how many are drawn."""
    options = LmSampleOptions(model=str(trained), count=6, temperature=0.1, device="cpu")
    texts = sample_texts(options).splitlines()
    corpus = {f"{one} and {other}" for one, other in zip(TEXTS, [*TEXTS[1:], TEXTS[0]], strict=True)}
    assert len(texts) == 6 and set(texts) <= corpus
    assert sample_texts(dataclasses.replace(options, count=2)).splitlines() == texts[:2]
    prompted = sample_texts(dataclasses.replace(options, prompt="Fever is", count=3)).splitlines()
    assert all(text.startswith("fever is a symptom") for text in prompted)
    wild = sample_texts(dataclasses.replace(options, temperature=1000.0, count=20))
    assert "[" not in wild and wild != sample_texts(dataclasses.replace(options, temperature=1000.0, count=20, seed=1))
