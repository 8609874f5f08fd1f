"""A model folder that is broken, hostile or of another model: one line through each verb that takes weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertTokenizer

from condenser.corpus.spans import build_spans
from condenser.options import SpansOptions
from condenser.weights import stored_dtypes
from retrieval.cli import main
from tests.condenser.families import tiny_model
from tests.condenser.test_interop import pickled, plant

Verb = Callable[[Path], int]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    file = folder / "docs.jsonl"
    file.write_text("".join(f'{{"_id": "{n}", "text": "the cat sing to the bird {n}."}}\n' for n in range(8)))
    options = SpansOptions(input=[str(file)], tokenizer=str(tiny_bert), max_length=20, output=str(folder / "spans"))
    return Path(build_spans(options))


@pytest.fixture()
def model(tiny_bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


@pytest.fixture(params=["pretrain", "encode"])
def verb(request: pytest.FixtureRequest, store: Path, tmp_path: Path) -> Verb:
    """Run a verb on a model folder and return the exit status."""
    output = ["--output", str(tmp_path / "out")]
    if request.param == "pretrain":
        settings = ["--data", str(store), "--max_steps", "1", "--batch_size", "2", "--device", "cpu"]
        return lambda folder: main(["pretrain", "--init", str(folder), *settings, *output])
    file = tmp_path / "queries.jsonl"
    file.write_text('{"_id": "1", "text": "the cat"}\n')
    settings = ["--input", str(file), "--kind", "query", "--device", "cpu"]
    return lambda folder: main(["encode", "--encoder", str(folder), *settings, *output])


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def text_in(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)  # type: ignore[return-value]


def bin_only(folder: Path) -> None:
    pickled(folder)
    plant(folder / "pytorch_model.bin", folder.parent / "canary")


def cut_short(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20_000)


def cut_in_the_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def index_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')


def shard_lost(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


def manifest_outside(folder: Path) -> None:
    entry = {"bytes": 1, "sha256": "0"}
    manifest = {"schema": 1, "kind": "pretrained", "files": {"../../etc/passwd": entry}, "fingerprint": "0"}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file(
            change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"}
        )

    return damage


def lacking(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if "layer.1.output" not in name}


def shorter(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights | {"bert.embeddings.word_embeddings.weight": torch.zeros(7, 32)}


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (without("config.json"), "no config.json here, expected a Hugging Face model folder"),
        (text_in("config.json", "{"), "config.json:1: not valid JSON"),
        (text_in("config.json", "[1]"), "expected a JSON object, found an array"),
        (without("model.safetensors"), "no weights here, expected model.safetensors"),
        (bin_only, "weights are only there as .bin, which is a pickle and is not opened (condenser convert --from tr"),
        (index_outside, "lists '../secret.safetensors', which lies outside the folder"),
        (shard_lost, "file listed in the weight index is missing"),
        (manifest_outside, "manifest lists '../../etc/passwd', which lies outside the folder"),
        (cut_short, "weights are damaged: 20,000 bytes, the file's header says"),
        (cut_in_the_header, "weights are damaged: no safetensors header in these 100 bytes"),
        (tensors(lacking), "weights lack 4 "),
        (tensors(shorter), "word_embeddings.weight' of shape (7, 32), config.json says ("),
    ],
)
def test_a_broken_folder_is_one_line(
    damage: Callable[[Path], None], line: str, verb: Verb, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases R21, R22, R23, R27 and R28."""
    damage(model)
    capsys.readouterr()
    assert verb(model) == 2
    said = capsys.readouterr().err.splitlines()
    assert line in said[-1] and str(model) in said[-1]
    assert not (model.parent / "out").exists() and not (model.parent / "canary").exists()


def test_a_flipped_bit_is_found(verb: Verb, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case R27: an artifact's own weights are compared with its manifest before they are used."""
    pickled(model)
    ours = tmp_path / "ours"
    assert main(["convert", "--from", "transformers", str(model), "--allow_pickle", "--output", str(ours)]) == 0
    damaged = bytearray((ours / "model.safetensors").read_bytes())
    damaged[-3] ^= 1
    (ours / "model.safetensors").write_bytes(damaged)
    assert verb(ours) == 2
    said = capsys.readouterr().err
    assert f"{ours / 'model.safetensors'}: contents differ from the manifest's sha256" in said


def test_code_named_by_a_folder_is_not_run(verb: Verb, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case R24."""
    (model / "evil.py").write_text(f"open({str(model.parent / 'canary')!r}, 'w')\n")
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForMaskedLM": "evil.Model"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    assert verb(model) == 0
    assert (
        f"warning: {model / 'config.json'}: names code of its own (auto_map); it is not run" in capsys.readouterr().err
    )
    assert not (model.parent / "canary").exists()


def test_a_longer_limit_than_positions_is_refused(
    store: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R26: before the first batch."""
    words = ["--data", str(store), "--init", str(model), "--max_steps", "1", "--output", str(tmp_path / "out")]
    assert main(["pretrain", *words, "--batch_size", "2", "--max_length", "65"]) == 2
    assert "spans of 65 tokens do not fit the model's 64 positions" in capsys.readouterr().err


def test_the_data_of_another_tokenizer_is_refused(
    store: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R25: equal sizes are not enough."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(size - 5))]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(model)
    (model / "vocab.txt").unlink(missing_ok=True)
    command = ["pretrain", "--data", str(store), "--init", str(model), "--max_steps", "1", "--batch_size", "2"]
    assert main([*command, "--output", str(tmp_path / "out")]) == 2
    line = (
        f"the data's tokenizer (BertTokenizer of {size} entries) is not the model's (BertTokenizer of {size} entries)"
    )
    assert line in capsys.readouterr().err


def test_ids_beyond_the_models_vocabulary_are_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R25: a GPU would only say that an index is out of bounds."""
    tiny_model("bert").save_pretrained(tmp_path / "small")
    command = ["pretrain", "--data", str(store), "--init", str(tmp_path / "small"), "--max_steps", "1"]
    assert main([*command, "--batch_size", "2", "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{store}: the data's tokenizer has 138 entries, the model's vocabulary 120" in said
    assert not (tmp_path / "out").exists()


def test_heads_that_do_not_fit_are_one_line(
    store: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R27 for the head, and settings that are none."""
    settings = ["--data", str(store), "--max_steps", "1", "--batch_size", "2", "--device", "cpu"]
    first = tmp_path / "first"
    assert main(["pretrain", "--init", str(model), *settings, "--output", str(first)]) == 0
    (first / "manifest.json").unlink()
    command = ["pretrain", "--init", str(first), *settings, "--output", str(tmp_path / "out")]
    head, stored = first / "condenser_head.safetensors", first / "condenser.json"
    whole, right = head.read_bytes(), stored.read_text()
    for file, content, line in (
        (head, whole[:5000], f"{head}: weights are damaged: 5,000 bytes, the file's header says"),
        (stored, right.replace("true", '"yes"'), f"{stored}: late_mlm is 'yes', expected true or false"),
        (stored, right.replace("2", "3"), f"{head}: Condenser head has '2."),
        (stored, "{}", f"{stored}: head_layers is None, expected a whole number"),
    ):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        capsys.readouterr()
        assert main(command) == 2
        assert line in capsys.readouterr().err.splitlines()[-1]
        head.write_bytes(whole)
        stored.write_text(right)


def test_kinds_of_numbers_are_read_from_the_files(tmp_path: Path) -> None:
    tiny_model("bert").half().save_pretrained(tmp_path)
    assert stored_dtypes(tmp_path) == {"float16"}


@pytest.mark.parametrize(("others", "said_of_it"), [([], True), (["--head_warmup_steps", "1"], False)])
def test_a_new_head_is_announced(
    others: list[str], said_of_it: bool, store: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--data", str(store), "--max_steps", "1", "--batch_size", "2", "--device", "cpu", *others]
    assert main(["pretrain", "--init", str(model), *settings, "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert f"{model}: no Condenser head in these weights; 2 new layers are started" in said
    assert ("--head_warmup_steps N would let what is new settle" in said) == said_of_it
