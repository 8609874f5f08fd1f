"""The parts of gpu_check.py that ask whether numbers are right on the device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_check_machine import Machine, Wrong
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel, BertTokenizer

from condenser.corpus.batches import Frame, PretrainBatch, collate
from condenser.corpus.corruption import IGNORED, Corrupted
from condenser.models.backbone import Backbone
from condenser.models.condenser import CondenserModel
from condenser.objectives.masked_lm import contrastive_losses, masked_lm_losses
from condenser.training.contrastive import span_contrastive_loss
from condenser.training.gradcache import RandomState
from condenser.training.steps import accumulate, cached, split_rows
from retrieval.encoder import Encoder
from retrieval.encoder_files import EncoderConfig
from retrieval.losses import in_batch_softmax

FLOAT32_LIMIT = 1e-4
# Sums of rounded numbers, some of them in another order at each run.
BFLOAT16_LIMIT = 2e-2
FRAME = Frame(101, 102, 0)
# Middles of the ten tenths of medquad's spans of at most 128 tokens, the frame included.
SPAN_LENGTHS = (24, 44, 66, 75, 91, 103, 111, 117, 122, 127)


def golden(machine: Machine, folder: Path) -> dict[str, Any]:
    """Losses and gradients of the reference implementations, in float32: the largest difference, relative to size."""
    worst: dict[str, float] = {}
    for family, differences in (
        ("condenser", _condenser(machine, folder)),
        ("cocondenser", _cocondenser(machine, folder)),
        ("biencoder", _biencoder(machine, folder)),
    ):
        for case, difference in differences:
            if not difference <= FLOAT32_LIMIT:  # NaN is not, either
                raise Wrong(f"{family} {case} is off by {difference:.1e} of its size, expected {FLOAT32_LIMIT:.0e}")
            worst[family] = max(difference, worst.get(family, 0.0))
    return {f"{family}_difference": difference for family, difference in worst.items()}


def replay(machine: Machine) -> dict[str, Any]:
    """Gradient caching under dropout: the same gradient as with the graphs of all chunks in memory, same masks."""
    config = BertConfig(
        vocab_size=2000,
        hidden_size=machine.size(256, 32),
        num_hidden_layers=machine.size(4, 2),
        num_attention_heads=machine.size(4, 2),
        intermediate_size=machine.size(1024, 64),
    )
    batch = spans(SPAN_LENGTHS + SPAN_LENGTHS, config.vocab_size, seed=3).to(machine.device)
    step = cached(lambda cls, batch: span_contrastive_loss(cls), 6)
    figures = {}
    for precision, limit in (("float32", FLOAT32_LIMIT), ("bf16", BFLOAT16_LIMIT)):
        model: Any = random_condenser(config).to(machine.device).train()
        if precision == "bf16":
            model = machine.accelerator.prepare(model)
        plain = _with_all_graphs(machine, model, batch, seed=7)
        other = _with_all_graphs(machine, model, batch, seed=8)
        torch.manual_seed(7)
        step(model, [batch], machine.accelerator)
        difference, effect = (relative(one, plain) for one in (_gradient(model), other))
        if not difference <= limit:
            raise Wrong(f"the cached gradient in {precision} is off by {difference:.1e}, expected at most {limit:.0e}")
        if not effect > 10 * limit:
            raise Wrong(f"other dropout changes the gradient in {precision} by {effect:.1e} only: is there any?")
        figures |= {f"{precision}_difference": difference, f"{precision}_difference_of_other_masks": effect}
    return figures


def bfloat16(machine: Machine) -> dict[str, Any]:
    """Losses and gradient in bfloat16 against float32, dropout off."""
    config = bert_base(machine)
    model = random_condenser(config).to(machine.device).eval()
    lengths = machine.size(SPAN_LENGTHS * 3, (7, 12))
    batch = spans(lengths, config.vocab_size, seed=5).to(machine.device)
    found = {}
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast(machine.device.type, torch.bfloat16, enabled=enabled):
            losses = model(batch.input_ids, batch.attention_mask, batch.labels).losses
        sum(losses.values()).backward()
        found[enabled] = {name: loss.item() / batch.weight for name, loss in losses.items()}, _gradient(model)
    (exact, gradient), (rounded, rounded_gradient) = found[False], found[True]
    difference = max(abs(rounded[name] / exact[name] - 1) for name in exact)
    cosine = nn.functional.cosine_similarity(gradient.double(), rounded_gradient.double(), dim=0).item()
    if not difference <= BFLOAT16_LIMIT:
        raise Wrong(f"losses in bfloat16 are off by {difference:.1e} of their size, expected {BFLOAT16_LIMIT:.0e}")
    if not cosine >= 0.99:
        raise Wrong(f"the gradient in bfloat16 has a cosine of {cosine:.4f} to that in float32, expected .99")
    return {"loss": sum(exact.values()), "loss_difference": difference, "gradient_cosine": cosine}


def bert_base(machine: Machine) -> BertConfig:
    """Return BERT-base's configuration, or a toy's."""
    toy = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertConfig(**machine.size({}, toy), vocab_size=machine.size(30522, 2000))


def random_condenser(config: BertConfig) -> CondenserModel:
    """Return a masked language model with a Condenser head of two layers, the same random weights at each call."""
    torch.manual_seed(0)
    lm = BertForMaskedLM(BertConfig(**config.to_diff_dict()))
    return CondenserModel(Backbone(lm), head_layers=2, skip_from=config.num_hidden_layers // 2)


def spans(lengths: Sequence[int], vocabulary: int, seed: int) -> PretrainBatch:
    """Return spans of random tokens, so long with the frame, 15 % of the tokens masked and asked for."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in rng.permutation(lengths).tolist():
        ids = rng.integers(1000, vocabulary, length - 2)
        asked = rng.permutation(length - 2) < max(1, round(0.15 * (length - 2)))
        rows.append(Corrupted(np.where(asked, 103, ids), np.where(asked, ids, IGNORED)))
    return collate(rows, FRAME)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest number."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return ((found - expected).abs().max() / expected.abs().max()).item()


def _with_all_graphs(machine: Machine, model: Any, batch: PretrainBatch, seed: int) -> Tensor:
    """Return the gradient of the whole batch, each chunk's dropout being that of the cached step."""
    model.zero_grad()
    torch.manual_seed(seed)
    losses, cls = [], []
    for chunk in split_rows(batch, 6):
        state = RandomState([machine.device])
        with torch.no_grad():
            model(chunk.input_ids, chunk.attention_mask, None)
        with state.restored():
            out = model(chunk.input_ids, chunk.attention_mask, chunk.labels)
        losses += [loss / batch.weight for loss in out.losses.values()]
        cls.append(out.cls)
    (sum(losses) + span_contrastive_loss(torch.cat(cls))).backward()
    gradient = _gradient(model)
    model.zero_grad()
    return gradient


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def _condenser(machine: Machine, folder: Path) -> Iterator[tuple[str, float]]:
    cases = json.loads((folder / "condenser" / "bert_expected.json").read_text())["cases"]
    batch = PretrainBatch(**load_file(folder / "condenser" / "bert_batch.safetensors"))
    exact = load_file(folder / "condenser" / "bert_grads_f64.safetensors")
    for name, case in cases.items():
        model = _reference_model(machine, folder, case)
        losses = accumulate(masked_lm_losses)(model, [batch], machine.accelerator)
        yield f"{name}, loss", relative(sum(losses.values()), torch.tensor(case["float64"]["total_loss"]))
        yield from _gradients(name, _named_gradients(model), case["float64"]["grad_l2_norms"], _of_case(exact, name))


def _cocondenser(machine: Machine, folder: Path) -> Iterator[tuple[str, float]]:
    """Whole, and through gradient caching: our cached step equals the whole batch."""
    expected = json.loads((folder / "cocondenser" / "expected.json").read_text())
    batch = PretrainBatch(**load_file(folder / "cocondenser" / "batch.safetensors"))
    exact = _of_case(load_file(folder / "cocondenser" / "tensors_f64.safetensors"), "plain")
    plain = expected["cases"]["float64"]["plain"]
    steps = {"whole": accumulate(contrastive_losses)}
    steps |= {f"chunks of {rows}": cached(lambda cls, batch: span_contrastive_loss(cls), rows) for rows in (2, 3)}
    for name, step in steps.items():
        model = _reference_model(machine, folder, expected)
        for part, loss in step(model, [batch], machine.accelerator).items():
            yield f"{name}, {part}", relative(loss, torch.tensor(plain[f"{part}_loss"]))
        yield from _gradients(name, _named_gradients(model), plain["grad_l2_norms"], exact)


def _biencoder(machine: Machine, folder: Path) -> Iterator[tuple[str, float]]:
    """Tevatron's loss and gradients, and vectors from the forward pass without padding."""
    folder = folder / "biencoder"
    expected = json.loads((folder / "tevatron_v1_expected.json").read_text())
    batch = load_file(folder / "batch.safetensors")
    tensors = load_file(folder / "tevatron_v1_tensors_f64.safetensors")
    case, exact = expected["cases"]["v1_tied"]["float64"], _of_case(tensors, "v1_tied")
    model = BertModel(BertConfig.from_pretrained(folder / "config.json"), add_pooling_layer=False)
    model.load_state_dict(load_file(folder / "encoder.safetensors"))
    with tempfile.TemporaryDirectory() as place:
        tokenizer = tokenizer_of(["a"], Path(place))  # ids come from the batch
    config = EncoderConfig(query_max_length=8, passage_max_length=16)
    encoder = Encoder(model, tokenizer, config).to(machine.device).train()
    vectors = []
    for kind in ("q", "p"):
        ids, mask = batch[f"{kind}_input_ids"], batch[f"{kind}_attention_mask"]
        vectors.append(encoder(ids.to(machine.device), mask.to(machine.device)))
        packed = encoder.encode_token_ids([row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)])
        yield f"vectors {kind}", relative(vectors[-1], exact[f"{kind}_reps"])
        yield f"vectors {kind} without padding", relative(torch.from_numpy(packed), exact.pop(f"{kind}_reps"))
    loss = in_batch_softmax(*vectors, torch.tensor(expected["target"], device=machine.device))
    loss.backward()
    yield "loss", relative(loss, torch.tensor(case["loss"]))
    norms = {name.removeprefix("lm_q."): norm for name, norm in case["grad_l2_norms"].items()}
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    yield from _gradients("v1_tied", found, norms, exact)


def _gradients(
    case: str, found: dict[str, Tensor | None], norms: dict[str, float | None], exact: dict[str, Tensor]
) -> Iterator[tuple[str, float]]:
    """Compare norms, of nearly vanishing gradients relative to a hundredth of the largest, and whole gradients."""
    floor = max(norm for norm in norms.values() if norm) / 100
    for name, norm in norms.items():
        gradient = found.get(name)
        if norm is not None and "decoder" not in name:  # the reference lists the tied decoder twice
            difference = torch.inf if gradient is None else abs(gradient.norm().item() - norm) / max(norm, floor)
            yield f"{case}, norm of the gradient of {name}", difference
    for name, gradient in exact.items():
        if name != "cls":
            yield f"{case}, gradient of {name}", relative(found[name], gradient)  # type: ignore[arg-type]


def _named_gradients(model: CondenserModel) -> dict[str, Tensor | None]:
    """Return gradients under the reference's names: ``lm.`` for the backbone, ``c_head.`` for the head."""
    return {
        name.removeprefix("backbone.") if name.startswith("backbone.") else f"c_{name}": parameter.grad
        for name, parameter in model.named_parameters()
    }


def _of_case(tensors: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{case}."): one for name, one in tensors.items() if name.startswith(f"{case}.")}


def _reference_model(machine: Machine, folder: Path, case: dict[str, Any]) -> CondenserModel:
    folder = folder / "condenser"
    lm = BertForMaskedLM(BertConfig.from_pretrained(folder / "ckpt_bert"))
    state = load_file(folder / "bert_full_state.safetensors")
    lm.load_state_dict(_of_case(state, "lm"), strict=False)  # the tied decoder is left out there
    lm.tie_weights()
    settings = {"head_layers": case["n_head_layers"], "skip_from": case["skip_from"], "late_mlm": case["late_mlm"]}
    model = CondenserModel(Backbone(lm), **settings)
    head = _of_case(state, "c_head")
    model.head.load_state_dict({name: head[name] for name in model.head.state_dict()})
    return model.to(machine.device).train()


def tokenizer_of(words: Sequence[str], folder: Path) -> BertTokenizer:
    """Return a WordPiece tokenizer whose vocabulary is BERT's special tokens and these words."""
    file = folder / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    return BertTokenizer(str(file))
