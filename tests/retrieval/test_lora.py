"""Low-rank updates: what is trained, what is saved, and a stopped run that goes on to the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel

from condenser.artifacts import Workspace
from condenser.errors import UserError
from condenser.training import loop
from condenser.training.loop import LoopSettings, start_accelerator, train
from condenser.training.steps import accumulate
from retrieval.encoder import Encoder
from retrieval.lora import add_lora, without_lora
from tests.condenser.training.test_loop import Batch, Batches, at_step
from tests.folders import assert_same_files

TEXTS = ["the cat in the city", "old river bank", "a queen and a king"]
SETTINGS = LoopSettings(
    max_steps=4, learning_rate=0.05, warmup_ratio=0.0, weight_decay=0.0, max_grad_norm=1.0, seed=1,
    mixed_precision="no", device="cpu", log_every=1, save_every=2, keep_checkpoints=2,
)  # fmt: skip
LINEAR = ("query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense")


class Tower(nn.Module):
    """The module that a run trains."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self) -> Tensor:
        encoder = self.encoder
        kinds = ("query", "passage")
        return torch.cat([encoder(*encoder.pad(encoder.tokenize(TEXTS, kind)), kind=kind) for kind in kinds])


def apart(model: nn.Module, batch: Batch, *, share: float, fraction: float) -> dict[str, Tensor]:
    """Train all vectors to be orthogonal to a given one."""
    return {"apart": (model() @ torch.linspace(-1, 1, 32)).square().mean() * share}


def adapted(tiny_bert: Path, rank: int = 4, seed: int = 3, **config: bool | int) -> Encoder:
    torch.manual_seed(0)  # a new projection draws from it
    encoder = Encoder.load(tiny_bert, **config)
    add_lora(encoder, rank, seed)
    return encoder


def run(output: Path, encoder: Encoder) -> Path:
    with Workspace(output, "encoder", config={}, inputs={}, resumable=True) as workspace:
        accelerator = start_accelerator(SETTINGS)
        train(Tower(encoder), accumulate(apart), Batches(), SETTINGS, accelerator, workspace)
        without_lora(encoder).save(workspace.path, "")
        workspace.commit({})
    return output


def test_every_linear_layer_of_a_tower_has_an_update_and_nothing_else_learns(tiny_bert: Path) -> None:
    encoder = adapted(tiny_bert, untied=True)
    learning = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    towers = ("model", "query_model")
    expected = {
        f"{tower}.encoder.layer.{layer}.{place}{name}.lora_{side}.default.weight"
        for tower in towers
        for layer in (0, 1)
        for side in "AB"
        for name in LINEAR
        for place in (["attention.self."] if name in LINEAR[:3] else [""])
    }
    assert learning == expected


def test_a_projection_learns_as_well(tiny_bert: Path) -> None:
    encoder = adapted(tiny_bert, projection=8)
    assert encoder.head is not None and encoder.head.weight.requires_grad
    assert not encoder.model.embeddings.word_embeddings.weight.requires_grad


def test_the_start_is_the_start_and_the_seed_decides_the_rest(tiny_bert: Path) -> None:
    """B is zero, so vectors are what they were; A is a function of the seed, and of no generator."""
    plain = Encoder.load(tiny_bert)
    state = torch.get_rng_state()
    encoder = Encoder.load(tiny_bert)
    add_lora(encoder, 4, 3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(encoder.encode_queries(TEXTS), plain.encode_queries(TEXTS), rtol=0, atol=1e-6)
    first, again, other = (dict(adapted(tiny_bert, seed=seed).named_parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(
        *(one["model.encoder.layer.0.attention.self.query.lora_A.default.weight"] for one in (first, other))
    )


def test_what_is_saved_is_a_plain_encoder_with_the_sums(tiny_bert: Path, tmp_path: Path) -> None:
    """W + 2 B A, computed here by hand; the folder opens in transformers without a key too many or too few."""
    encoder = adapted(tiny_bert)
    folder = run(tmp_path / "out", encoder)
    layer = encoder.model.encoder.layer[1].intermediate.dense
    weight = layer.base_layer.weight + 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert float((weight - layer.base_layer.weight).detach().abs().max()) > 1e-3, "something was learned"
    stored = load_file(folder / "model.safetensors")["encoder.layer.1.intermediate.dense.weight"]
    torch.testing.assert_close(stored, weight.detach())
    _, report = AutoModel.from_pretrained(folder, add_pooling_layer=False, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(
        Encoder.load(folder).encode_queries(TEXTS), encoder.encode_queries(TEXTS), rtol=0, atol=1e-5
    )
    assert {path.name for path in folder.iterdir()} == {path.name for path in saved(tiny_bert, tmp_path).iterdir()} | {
        "log.jsonl", "manifest.json",
    }  # fmt: skip


def saved(tiny_bert: Path, tmp_path: Path) -> Path:
    Encoder.load(tiny_bert).save(tmp_path / "plain", "")
    return tmp_path / "plain"


def test_the_frozen_weights_are_bit_for_bit_those_of_the_start(tiny_bert: Path, tmp_path: Path) -> None:
    """Saving on the way leaves the run as it was: the sum is made in a copy."""
    encoder, start = adapted(tiny_bert), Encoder.load(tiny_bert)
    run(tmp_path / "out", encoder)
    before = encoder.encode_queries(TEXTS)
    without_lora(encoder)
    assert (encoder.encode_queries(TEXTS) == before).all()
    for name, parameter in start.model.named_parameters():
        trained = dict(encoder.model.named_parameters())
        kept = trained.get(name, trained.get(".base_layer.".join(name.rsplit(".", 1))))
        assert kept is not None and torch.equal(kept, parameter), name


def test_a_stopped_run_goes_on_to_the_same_bytes(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds what is trained; the rest comes from the start again."""
    straight = run(tmp_path / "straight", adapted(tiny_bert, projection=32, untied=True))

    def stop() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stops: Callable[[str], None] = at_step(3, stop)
        patch.setattr(loop, "fault_point", stops)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", adapted(tiny_bert, projection=32, untied=True))
    (checkpoint,) = (tmp_path / "out.partial" / ".work" / "checkpoints").glob("step-*")
    names = load_file(checkpoint / "model.safetensors").keys()
    assert all("lora_" in name or "head" in name for name in names if "weight" in name or "bias" in name)
    resumed = run(tmp_path / "out", adapted(tiny_bert, projection=32, untied=True))
    assert sum(path.is_file() for path in straight.rglob("*")) > 8
    assert_same_files(resumed, straight)


def test_an_encoder_without_updates_is_itself(tiny_bert: Path) -> None:
    encoder = Encoder.load(tiny_bert)
    assert without_lora(encoder) is encoder


def test_a_rank_that_is_no_low_rank_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(UserError, match="--lora is 32, expected less than the 32 of the narrowest layer"):
        add_lora(Encoder.load(tiny_bert), 32, 1)
