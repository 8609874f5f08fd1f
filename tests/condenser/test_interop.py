"""The reference's checkpoints and .bin weights, in and out; and that nothing in a pickle is ever run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer

from condenser.models.backbone import load_backbone
from condenser.models.condenser import CondenserModel, read_settings
from retrieval.cli import main
from tests.condenser.families import tiny_folder, tiny_model


class Hostile:
    """A pickle that touches a file when it is opened by the letter."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def plant(file: Path, canary: Path) -> None:
    with file.open("wb") as stream:
        pickle.dump(Hostile(canary), stream)


@pytest.fixture()
def reference(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint as the reference wrote it, to damage."""
    return Path(shutil.copytree(golden / "condenser" / "ckpt_bert", tmp_path / "reference"))


def from_reference(folder: Path, output: Path, *others: str) -> int:
    return main(["convert", "--from", "reference", str(folder), "--allow_pickle", "--output", str(output), *others])


def load_condenser(folder: Path) -> CondenserModel:
    model = CondenserModel(load_backbone(folder)[0], **read_settings(folder))
    model.load_head(folder)
    return model


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_reference_checkpoint_gives_the_references_losses(
    family: str, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = golden / "condenser" / f"ckpt_{family}"
    assert from_reference(folder, tmp_path / "ours") == 0
    assert capsys.readouterr().err.splitlines() == [
        f"{folder}: taken as skip_from 2, late_mlm true; the reference keeps these only in args.pt, "
        "which is not opened: --skip_from and --late_mlm say otherwise",
        f"warning: {folder}: no tokenizer here; put the one of these weights into {tmp_path / 'ours'} "
        "before using them",
    ]
    model = load_condenser(tmp_path / "ours").double()
    batch = load_file(golden / "condenser" / f"{family}_batch.safetensors")
    losses, masked = model(**batch).losses, (batch["labels"] != -100).sum()
    expected = json.loads((golden / "condenser" / f"{family}_expected.json").read_text())
    for name, value in losses.items():
        wanted = expected["cases"]["skip2_head2_late1"]["float64"][f"{name}_loss"]
        assert (value / masked).item() == pytest.approx(wanted, rel=1e-10)
    _, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_what_the_checkpoint_does_not_say_is_taken_from_the_options(reference: Path, tmp_path: Path) -> None:
    assert from_reference(reference, tmp_path / "ours", "--skip_from", "3", "--late_mlm", "no") == 0
    assert read_settings(tmp_path / "ours") == {"head_layers": 2, "skip_from": 3, "late_mlm": False}


def test_args_pt_is_never_opened_and_co_target_is_passed_over(reference: Path, tmp_path: Path) -> None:
    """Case R22."""
    plain = tmp_path / "plain"
    assert from_reference(reference, plain) == 0
    for name in ("args.pt", "training_args.bin", "optimizer.pt"):
        plant(reference / name, tmp_path / "canary")
    head = torch.load(reference / "model.pt", weights_only=True)
    torch.save(head | {"co_target": torch.arange(8)}, reference / "model.pt")
    assert from_reference(reference, tmp_path / "ours") == 0
    assert not (tmp_path / "canary").exists()
    for name in ("model.safetensors", "condenser_head.safetensors", "condenser.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (plain / name).read_bytes()


def test_there_and_back_again(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs, again = tmp_path / "ours", tmp_path / "theirs", tmp_path / "again"
    assert from_reference(reference, ours, "--skip_from", "1", "--late_mlm", "yes") == 0
    capsys.readouterr()
    assert main(["convert", str(ours), "--to", "reference", "--output", str(theirs)]) == 0
    assert "start the reference code with --n_head_layers 2 --skip_from 1 --late_mlm" in capsys.readouterr().err
    for name, left_out in (("pytorch_model.bin", {"bert.embeddings.position_ids"}), ("model.pt", set())):
        written, wanted = (torch.load(folder / name, weights_only=True) for folder in (theirs, reference))
        assert written.keys() == wanted.keys() - left_out
        assert all(torch.equal(written[key], wanted[key]) for key in written)
    assert from_reference(theirs, again, "--skip_from", "1", "--late_mlm", "yes") == 0
    for name in ("model.safetensors", "condenser_head.safetensors", "condenser.json"):
        assert (ours / name).read_bytes() == (again / name).read_bytes()


def test_old_tokenizers_find_their_files(tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tiny_folder("bert", tiny_bert, tmp_path / "own")
    assert not (own / "vocab.txt").exists()
    assert main(["convert", str(own), "--to", "reference", "--output", str(tmp_path / "theirs")]) == 0
    assert "no Condenser head here; the reference code starts a new one" in capsys.readouterr().err
    assert not (tmp_path / "theirs" / "model.pt").exists()
    words = (tmp_path / "theirs" / "vocab.txt").read_text().splitlines()
    assert words[:3] == ["[PAD]", "[UNK]", "[CLS]"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert {word: number for number, word in enumerate(words)} == tokenizer.get_vocab()


def test_the_reference_has_no_other_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("electra").save_pretrained(tmp_path / "electra")
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "electra"), "--to", "reference", "--output", str(tmp_path / "out")]) == 2
    assert "the reference code has no electra, only bert and roberta" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def pickled(folder: Path, shards: int = 1) -> dict[str, Tensor]:
    """Put ``.bin`` files, as older transformers wrote them, in the place of a folder's safetensors."""
    lm = AutoModelForMaskedLM.from_pretrained(folder)
    tensors = dict(lm.state_dict())
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    names = [f"pytorch_model-{number:05d}-of-{shards:05d}.bin" for number in range(1, shards + 1)]
    weight_map = {name: names[number % shards] for number, name in enumerate(tensors)}
    for name in names:
        torch.save({key: value for key, value in tensors.items() if weight_map[key] == name}, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("shards", [1, 2])
def test_bin_weights_become_safetensors(shards: int, tiny_bert: Path, tmp_path: Path) -> None:
    """Case R21: an older public model, which has no others."""
    from retrieval.encoder import Encoder

    folder = tiny_folder("bert", tiny_bert, tmp_path / "old")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    expected = Encoder.load(folder).encode_queries(["river bank"])
    pickled(folder, shards)
    plant(folder / "training_args.bin", tmp_path / "canary")
    words = ["convert", "--from", "transformers", str(folder), "--allow_pickle", "--output", str(tmp_path / "new")]
    assert main(words) == 0 and not (tmp_path / "canary").exists()
    np.testing.assert_array_equal(Encoder.load(tmp_path / "new").encode_queries(["river bank"]), expected)
    assert (tmp_path / "new" / "1_Pooling" / "config.json").is_file()
    lm, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def test_headless_bin_weights_convert_too(tiny_bert: Path, tmp_path: Path) -> None:
    folder = tiny_folder("bert", tiny_bert, tmp_path / "old")
    encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False)
    (folder / "model.safetensors").unlink()
    torch.save(encoder.state_dict(), folder / "pytorch_model.bin")
    words = ["convert", "--from", "transformers", str(folder), "--allow_pickle", "--output", str(tmp_path / "new")]
    assert main(words) == 0
    backbone, fresh = load_backbone(tmp_path / "new")
    assert fresh
    for name, value in encoder.state_dict().items():
        assert torch.equal(backbone.lm.bert.state_dict()[name], value)


def test_a_published_retriever_converts(tiny_bert: Path, tmp_path: Path) -> None:
    """As coCondenser's retriever lies on the hub: a BERT with its pooler, old buffers, a vocabulary, no word more."""
    from retrieval.encoder import Encoder

    folder = tmp_path / "retriever"
    folder.mkdir()
    model = AutoModel.from_config(AutoConfig.from_pretrained(tiny_bert)).eval()
    model.config.save_pretrained(folder)
    tensors = {"embeddings.position_ids": torch.arange(64)[None], **model.state_dict()}
    torch.save(tensors, folder / "pytorch_model.bin")
    shutil.copyfile(tiny_bert / "vocab.txt", folder / "vocab.txt")
    words = ["convert", "--from", "transformers", str(folder), "--allow_pickle", "--output", str(tmp_path / "new")]
    assert main(words) == 0
    inputs = AutoTokenizer.from_pretrained(folder)("River bank", return_tensors="pt")
    expected = model(**inputs).last_hidden_state[0, 0].detach().numpy()
    np.testing.assert_allclose(Encoder.load(tmp_path / "new").encode_queries(["River bank"])[0], expected, atol=1e-6)


def hostile(name: str) -> Callable[[Path], None]:
    return lambda folder: plant(folder / name, folder.parent / "canary")


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 3000)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def head_of(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = torch.load(folder / "model.pt", weights_only=True)
        torch.save(change(tensors), folder / "model.pt")

    return damage


def cut_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")


def gap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("c_head.1.", "c_head.5."): value for name, value in tensors.items()}


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"c_head.1.output.dense.bias": torch.zeros(31)}


@pytest.mark.parametrize(
    ("damage", "file", "line"),
    [
        (hostile("pytorch_model.bin"), "pytorch_model.bin", "is damaged, or holds more than plain tensors"),
        (hostile("model.pt"), "model.pt", "is damaged, or holds more than plain tensors"),
        (cut("pytorch_model.bin"), "pytorch_model.bin", "is damaged, or holds more than plain tensors"),
        (cut("model.pt"), "model.pt", "is damaged, or holds more than plain tensors"),
        (cut_safetensors, "model.safetensors", "weights are damaged: 10 bytes, the file's header says 24"),
        (without("model.pt"), "", "no model.pt here, the Condenser head of the reference code"),
        (without("pytorch_model.bin"), "", "no weights here, expected pytorch_model.bin or model.safetensors"),
        (without("config.json"), "", "no config.json here"),
        (head_of(lambda tensors: [1, 2]), "model.pt", "holds something else than named tensors"),
        (head_of(lambda tensors: {}), "model.pt", "expected tensors named c_head.0..., found none"),
        (
            head_of(lambda tensors: tensors | {"x": torch.ones(1)}),
            "model.pt",
            "expected tensors named c_head.0..., found 'x'",
        ),
        (head_of(gap), "model.pt", "'1.attention.output.LayerNorm.bias' of shape None, this encoder's layers (32,)"),
        (head_of(wide), "model.pt", "'1.output.dense.bias' of shape (31,), this encoder's layers (32,)"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    damage: Callable[[Path], None],
    file: str,
    line: str,
    reference: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cases R21, R22, R27 and R28."""
    damage(reference)
    assert from_reference(reference, tmp_path / "ours") == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and line in said[0] and str(reference / file) in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reference"], "no canary, nothing half written"


def test_a_pickle_stays_closed_without_the_wish(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R22."""
    for name in ("pytorch_model.bin", "model.pt"):
        plant(reference / name, tmp_path / "canary")
    for source in ("reference", "transformers"):
        assert main(["convert", "--from", source, str(reference), "--output", str(tmp_path / "ours")]) == 2
        assert "pytorch_model.bin: is a pickle, which is opened only with --allow_pickle" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reference"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "give exactly one of --from and --to"),
        (["--from", "reference", "--to", "reference"], "give exactly one of --from and --to"),
        (["--to", "reference", "--skip_from", "1"], "--skip_from and --late_mlm are for --from reference"),
        (["--from", "tevatron"], "--from is 'tevatron', expected one of reference, transformers"),
        (
            ["--from", "reference", "--allow_pickle", "--skip_from", "9"],
            "--skip_from 9 is beyond the encoder's 4 layers",
        ),
    ],
)
def test_wrong_options(
    words: list[str], line: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(reference), "--output", str(tmp_path / "ours"), *words]) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_safetensors_need_no_conversion(tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--from", "transformers", str(tiny_bert), "--output", str(tmp_path / "ours")]) == 2
    assert "has model.safetensors already; there is nothing to convert" in capsys.readouterr().err
