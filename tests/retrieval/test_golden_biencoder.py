"""Encoder and losses against the numbers of Tevatron (v1, v2), GradCache and DPR on the same weights."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel, BertTokenizer

from condenser.training.gradcache import GradCache
from retrieval.batches import PairBatch
from retrieval.encoder import Encoder
from retrieval.encoder_files import EncoderConfig
from retrieval.losses import in_batch_correct, in_batch_softmax, loss_named
from tests.condenser.reference import TOLERANCE
from tests.condenser.training.test_distributed import join, leave, run_in_two
from tests.reference_numbers import golden_json

V1 = golden_json("biencoder/tevatron_v1_expected.json")
V2 = golden_json("biencoder/tevatron_v2_expected.json")["cases"]
WORLD2 = golden_json("biencoder/tevatron_v1_world2_expected.json")
DPR = golden_json("biencoder/dpr_nll_expected.json")["cases"]
DTYPES = ["float64", "float32"]


def tower(golden: Path, name: str) -> BertModel:
    model = BertModel(BertConfig.from_pretrained(golden / "biencoder" / "config.json"), add_pooling_layer=False)
    model.load_state_dict(load_file(golden / "biencoder" / f"{name}.safetensors"))
    return model


def reference_encoder(
    golden: Path, dtype: str, *, untied: bool = False, pooler: bool = False, **config: Any
) -> Encoder:
    """Build the encoder that the reference ran; its ids come from the batch, so any small tokenizer will do."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.txt"
        vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
        tokenizer = BertTokenizer(str(vocabulary))
    head = None
    if pooler:
        tensors = load_file(golden / "biencoder" / "tevatron_v1_tensors_f64.safetensors")
        weight, bias = tensors["pooler.linear_q.weight_f32"], tensors["pooler.linear_q.bias_f32"]
        head = nn.Linear(*reversed(weight.shape))
        head.load_state_dict({"weight": weight, "bias": bias})
        config["projection"] = len(bias)
    limits = {"query_max_length": 8, "passage_max_length": 16}
    encoder = Encoder(
        tower(golden, "passage_encoder" if untied else "encoder"),
        tokenizer,
        EncoderConfig(untied=untied, **limits, **config),
        query_model=tower(golden, "encoder") if untied else None,
        head=head,
    )
    return encoder.to(getattr(torch, dtype)).train()


def inputs(golden: Path, file: str = "batch") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the padded queries and passages, as keywords of the encoder."""
    batch = load_file(golden / "biencoder" / f"{file}.safetensors")
    queries, passages = (
        {name: batch[f"{kind}_{name}"] for name in ("input_ids", "attention_mask")} for kind in ("q", "p")
    )
    return queries, passages


def pair_batch(queries: int, passages: int, first: int = 0) -> PairBatch:
    """Say that every passage is another one, and each query's positive the first of its own."""
    targets = torch.arange(0, passages, passages // queries)
    rows = first + torch.arange(passages)
    return PairBatch([[]] * queries, [[]] * passages, targets, rows, rows[targets][:, None])


def gradients(encoder: Encoder, names: dict[str, str]) -> dict[str, Tensor]:
    """Return all gradients under the reference's names; ``names`` maps the beginnings of ours to theirs."""
    found = {}
    for name, parameter in encoder.named_parameters():
        ours = next(beginning for beginning in names if name.startswith(f"{beginning}."))
        assert parameter.grad is not None, name
        found[names[ours] + name.removeprefix(f"{ours}.")] = parameter.grad
    return found


def assert_gradients(found: dict[str, Tensor], norms: dict[str, float], dtype: str) -> None:
    largest, tolerance = max(norms.values()), TOLERANCE[dtype]
    assert found.keys() == norms.keys()
    for name, norm in norms.items():  # a key's bias has no gradient but for rounding
        assert found[name].norm().item() == pytest.approx(norm, rel=tolerance, abs=tolerance * largest), name


def assert_close(found: Tensor, expected: Any, dtype: str) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        found.detach().double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


V1_CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "v1_tied": ({}, {"model": "lm_q."}),
    "v1_untied": ({"untied": True}, {"model": "lm_p.", "query_model": "lm_q."}),
    "v1_tied_pooler8_normalize": (
        {"pooler": True, "normalize": True},
        {"model": "lm_q.", "head": "pooler.linear_q."},
    ),
}


@pytest.mark.parametrize("name", V1_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tevatron_v1(golden: Path, name: str, dtype: str) -> None:
    settings, names = V1_CASES[name]
    encoder, (queries, passages) = reference_encoder(golden, dtype, **settings), inputs(golden)
    q, p = encoder(**queries, kind="query"), encoder(**passages, kind="passage")
    batch = pair_batch(len(q), len(p))
    assert batch.targets.tolist() == V1["target"]
    loss = loss_named("softmax")(q, p, batch)
    loss.backward()
    expected = V1["cases"][name][dtype]
    assert loss.item() == pytest.approx(expected["loss"], rel=TOLERANCE[dtype])
    assert_close(q @ p.T, expected["scores"], dtype)
    found = gradients(encoder, names)
    assert_gradients(found, expected["grad_l2_norms"], dtype)
    tensors = load_file(golden / "biencoder" / "tevatron_v1_tensors_f64.safetensors")
    if name == "v1_tied":
        assert_close(q, tensors["v1_tied.q_reps"], dtype)
        assert_close(p, tensors["v1_tied.p_reps"], dtype)
    theirs = {"v1_tied.": "lm_q.", "v1_untied.q.": "lm_q.", "v1_untied.p.": "lm_p."}
    for case, beginning in theirs.items():
        for key, gradient in tensors.items():
            if case.split(".")[0] == name and key.startswith(case) and not key.endswith("_reps"):
                assert_close(found[beginning + key.removeprefix(case)], gradient, dtype)


@pytest.mark.parametrize("name", V2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tevatron_v2(golden: Path, name: str, dtype: str) -> None:
    pooling, normalize, temperature = re.fullmatch(r"(\w+)_norm([01])_T([\d.]+)", name).groups()  # type: ignore[union-attr]
    encoder = reference_encoder(golden, dtype, pooling=pooling, normalize=normalize == "1")
    q, p = (encoder(**one) for one in inputs(golden))
    loss = loss_named("softmax", temperature=float(temperature))(q, p, pair_batch(len(q), len(p)))
    loss.backward()
    expected = V2[name][dtype]
    assert loss.item() == pytest.approx(expected["loss"], rel=TOLERANCE[dtype])
    assert_close(q @ p.T, expected["scores"], dtype)
    assert_gradients(gradients(encoder, {"model": "encoder."}), expected["grad_l2_norms"], dtype)


@pytest.mark.parametrize("name", [name for name in V1["cases"] if "gradcache" in name])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_caching_with_chunks(golden: Path, name: str, dtype: str) -> None:
    sizes = [int(size) for size in re.findall(r"_[qp](\d+)", name)]
    encoder, whole = reference_encoder(golden, dtype), reference_encoder(golden, dtype)
    queries, passages = inputs(golden)
    batch = pair_batch(len(queries["input_ids"]), len(passages["input_ids"]))
    loss = GradCache([encoder, encoder], sizes, loss_named("softmax"))(queries, passages, batch=batch)
    assert loss.item() == pytest.approx(V1["cases"][name][dtype]["loss"], rel=TOLERANCE[dtype])
    loss_named("softmax")(whole(**queries), whole(**passages), batch).backward()
    expected = gradients(whole, {"model": "lm_q."})
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in gradients(encoder, {"model": "lm_q."}).items():
        atol = TOLERANCE[dtype] * largest
        torch.testing.assert_close(gradient, expected[key], rtol=TOLERANCE[dtype], atol=atol)
    assert_gradients(gradients(encoder, {"model": "lm_q."}), V1["cases"]["v1_tied"][dtype]["grad_l2_norms"], dtype)


@pytest.mark.parametrize("name", DPR)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dpr_negative_log_likelihood(name: str, dtype: str) -> None:
    case, kind = DPR[name], getattr(torch, dtype)
    q, p = (torch.tensor(case[key], dtype=kind, requires_grad=True) for key in ("q", "ctx"))
    targets = torch.tensor(case["positive_idx_per_question"])
    loss = in_batch_softmax(q, p, targets) * (case["loss_scale"] or 1)
    loss.backward()
    expected = case[dtype]
    assert loss.item() == pytest.approx(expected["loss"], rel=TOLERANCE[dtype])
    assert in_batch_correct(q, p, targets) == expected["correct"]
    assert q.grad is not None and p.grad is not None
    assert_close(q.grad, expected["grad_q"], dtype)
    assert_close(p.grad, expected["grad_ctx"], dtype)


class Both(nn.Module):
    """Both kinds of text in one forward pass, as DDP wants it."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, queries: dict[str, Tensor], passages: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.encoder(**queries), self.encoder(**passages)


WORLD2_CASES = [case for case, value in WORLD2.items() if "loss_rank0" in str(value)]


def one_step_each(number: int, place: str, golden: Path, output: Path) -> None:
    accelerator = join(number, place)
    for case in WORLD2_CASES:
        encoder = reference_encoder(golden, "float64")
        queries, passages = (
            {name: tensor.chunk(2)[number] for name, tensor in one.items()} for one in inputs(golden, "batch_world2")
        )
        n, m = len(queries["input_ids"]), len(passages["input_ids"])
        batch, loss_of = pair_batch(n, m, first=number * m), loss_named("softmax", share_negatives=case != "local_only")
        if "gradcache" in case:
            tower = DistributedDataParallel(encoder)
            cache = GradCache([tower, tower], [1, 3], loss_of)
            loss = cache(queries, passages, no_sync_except_last=case.endswith("1"), batch=batch)
        else:
            both = DistributedDataParallel(Both(encoder))
            loss = loss_of(*both(queries, passages), batch)
            loss.backward()
        found = gradients(encoder, {"model": ""})
        save_file(found | {"loss": loss.detach()}, output / f"{case}-{number}.safetensors")
    leave(accelerator)


@pytest.fixture(scope="module")
def two_processes(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world2")
    run_in_two(one_step_each, folder, golden, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", WORLD2_CASES)
def test_two_processes(golden: Path, two_processes: Path, case: str) -> None:
    """The reference multiplies a shared loss by the number of processes and reports it so; ours is a mean."""
    expected, single = WORLD2[case], WORLD2["single_process_full_batch"]
    first, second = (load_file(two_processes / f"{case}-{number}.safetensors") for number in (0, 1))
    reported = (expected["loss_rank0"] + expected["loss_rank1"]) / 2
    loss, again = first.pop("loss").item(), second.pop("loss").item()
    assert loss == again == pytest.approx(reported if case == "local_only" else reported / 2, rel=1e-10)
    assert all(torch.equal(first[name], second[name]) for name in first)

    whole, (queries, passages) = reference_encoder(golden, "float64"), inputs(golden, "batch_world2")
    q, p = whole(**queries), whole(**passages)
    assert_close(q @ p.T, single["scores"], "float64")
    full = loss_named("softmax")(q, p, pair_batch(len(q), len(p)))
    assert full.item() == pytest.approx(single["loss"], rel=1e-10)
    full.backward()
    alone = gradients(whole, {"model": ""})
    assert_gradients(alone, single["grad_l2_norms"], "float64")
    difference = max(float((first[name] - gradient).abs().max()) for name, gradient in alone.items())
    assert difference == pytest.approx(expected["max_abs_grad_diff_vs_single_process"], rel=1e-10, abs=1e-14)
    norms = [torch.cat([one[name].flatten() for name in alone]).norm().item() for one in (first, alone)]
    assert norms[0] / norms[1] == pytest.approx(expected["grad_norm_ratio_to_single_process"], rel=1e-10)
