"""The parts of gpu_check.py that measure how fast the device gets its work done, beside what it could do."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from gpu_check_machine import Machine, Wrong
from gpu_check_numbers import FLOAT32_LIMIT, SPAN_LENGTHS, bert_base, random_condenser, spans, tokenizer_of
from plain_peer import plain_copy
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from condenser.corpus.batches import PretrainBatch
from condenser.corpus.corruption import IGNORED
from condenser.hub import quiet_transformers
from condenser.objectives.masked_lm import masked_lm_losses
from condenser.training.contrastive import span_contrastive_loss
from condenser.training.steps import Step, accumulate, cached
from retrieval.encoder import Encoder
from retrieval.encoder_files import EncoderConfig
from retrieval.exact_torch import TorchBlocks
from retrieval.precision import set_precision
from retrieval.vectors import Matrix

LENGTH, HEAD_LAYERS = 128, 2
BATCH = 256
# What sentence-transformers encodes at once; its default of 32 leaves a large GPU idle.
PEER_BATCH = 256


def pretrain(machine: Machine) -> dict[str, Any]:
    """Condenser steps of BERT-base in bfloat16, ours and the plain way: forward, backward, clipping, AdamW."""
    config = bert_base(machine)
    count, rounds = machine.size((BATCH, 10), (4, 1))
    kinds = {"natural": np.resize(SPAN_LENGTHS, count).tolist(), "full": [LENGTH] * count}
    batches = {kind: spans(lengths, config.vocab_size, seed=1) for kind, lengths in kinds.items()}
    figures: dict[str, Any] = {"spans": count, "loss_difference": _difference_of_losses(machine, config)}
    for side, prepare in (("ours", _our_step), ("plain", _plain_step)):
        step = prepare(machine, config)
        for kind, batch in batches.items():
            found = _pace_of_step(machine, config, step, batch, rounds)
            figures |= {f"{kind}_{side}_{name}": figure for name, figure in found.items()}
        del step
        machine.free()
    for kind in batches:
        ours, plain = (figures[f"{kind}_{side}_tokens_per_s"] for side in ("ours", "plain"))
        figures[f"{kind}_ratio"] = None if isinstance(ours, str) or isinstance(plain, str) else ours / plain
    return figures


def cocondenser(machine: Machine) -> dict[str, Any]:
    """One coCondenser step of BERT-base through gradient caching, in bfloat16, all spans of the full length."""
    config = bert_base(machine)
    count, rows, length = machine.size((4096, 64, LENGTH), (16, 4, 16))
    step = _step(machine, config, cached(lambda cls, batch: span_contrastive_loss(cls), rows))
    step(spans([length] * 2 * rows, config.vocab_size, seed=1))  # from here on AdamW has its moments
    batch = spans([length] * count, config.vocab_size, seed=2)
    machine.reset_peak()
    took = machine.seconds(lambda: step(batch), rounds=1, warm_up=0)
    return {
        "spans": count,
        "spans_per_chunk": rows,
        "step_s": took,
        "tokens_per_s": batch.tokens / took,
        "mfu": machine.utilisation(3 * _forward_operations(config, batch), took),
        "peak_gib": machine.peak_gib(),
    }


def encode(machine: Machine) -> dict[str, Any]:
    """Texts to vectors with BERT-base, tokenization included: here, and with sentence-transformers where it is."""
    config = bert_base(machine)
    count = machine.size(16384, 24)
    words = _words(machine.size(20000, 900))
    rng = np.random.default_rng(0)
    lengths = np.resize(SPAN_LENGTHS, count)
    texts = [" ".join(words[word] for word in rng.integers(0, len(words), length - 2)) for length in lengths]
    torch.manual_seed(0)
    model = BertModel(config, add_pooling_layer=False)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokenizer = tokenizer_of(words, folder)
        with quiet_transformers():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        encoder = Encoder(model, tokenizer, EncoderConfig(pooling="mean")).to(machine.device)
        figures: dict[str, Any] = {"passages": count, "dtype": set_precision(encoder, "passage")}
        ours, rate = _passages_per_second(machine, texts, encoder.encode_passages)
        useful = sum(_linear_and_attention(config, float(length)) for length in lengths)
        figures |= {"passages_per_s": rate, "mfu": machine.utilisation(config.num_hidden_layers * useful, count / rate)}
        if importlib.util.find_spec("sentence_transformers") is None:
            return figures | {"sentence_transformers": "not installed"}
        theirs, rate = _passages_per_second(machine, texts, _peer(machine, folder, figures["dtype"]))
    cosine = float(nn.functional.cosine_similarity(torch.from_numpy(ours), torch.from_numpy(theirs)).min())
    if not cosine >= 0.99:
        raise Wrong(f"a vector has a cosine of {cosine:.4f} to sentence-transformers', expected .99")
    return figures | {
        "sentence_transformers_passages_per_s": rate,
        "ratio": figures["passages_per_s"] / rate,
        "smallest_cosine": cosine,
    }


def search(machine: Machine) -> dict[str, Any]:
    """Exact search of float16 vectors, for one query and many, beside what reading and multiplying take at least."""
    count, dimension, many, best = machine.size((4_000_000, 768, 1024, 100), (5000, 128, 8, 10))
    shards = [_random_shard(machine, rows, dimension, seed) for seed, rows in _shard_rows(count)]
    planted = np.arange(many) * (count // many)
    queries = _rows_of(shards, planted)
    place = "cpu" if machine.device.type == "cpu" else "cuda:0"  # "cuda" would be all GPUs
    machine.reset_peak()
    blocks = TorchBlocks(shards, dimension, place)
    figures: dict[str, Any] = {"vectors": count, "dimension": dimension}
    for name, number in (("one_query", 1), ("many_queries", many)):
        took = machine.seconds(lambda number=number: blocks.fetch(queries[:number], best))  # type: ignore[misc]
        reading = 2 * count * dimension / machine.limits.bandwidth
        multiplying = 2 * count * dimension * number / machine.limits.float32
        figures |= {
            f"{name}_s": took,
            f"{name}_limit_s": max(reading, multiplying),
            f"{name}_share_of_limit": max(reading, multiplying) / took,
        }
    scores, rows = blocks.fetch(queries, best)
    if not (rows[np.arange(many), scores.argmax(axis=1)] == planted).all():
        raise Wrong("a stored vector is not the best for itself")
    exact = _best_scores(machine, shards, queries[:4], best)
    off = np.abs(np.sort(scores[:4]) - exact).max() / np.abs(exact).max()
    if not off <= FLOAT32_LIMIT:
        raise Wrong(f"the best scores are off by {off:.1e} of their size, expected {FLOAT32_LIMIT:.0e}")
    return figures | {"many_queries": many, "score_difference": float(off), "peak_gib": machine.peak_gib()}


def _pace_of_step(
    machine: Machine, config: BertConfig, step: Callable[[PretrainBatch], None], batch: PretrainBatch, rounds: int
) -> dict[str, Any]:
    machine.reset_peak()
    try:
        took = machine.seconds(lambda: step(batch), rounds=rounds)
    except torch.OutOfMemoryError:
        return {"tokens_per_s": "out of memory"}
    return {
        "tokens_per_s": batch.tokens / took,
        "mfu": machine.utilisation(3 * _forward_operations(config, batch), took),
        "peak_gib": machine.peak_gib(),
    }


def _our_step(machine: Machine, config: BertConfig) -> Callable[[PretrainBatch], None]:
    return _step(machine, config, accumulate(masked_lm_losses))


def _step(machine: Machine, config: BertConfig, gradient: Step) -> Callable[[PretrainBatch], None]:
    """Return a training step as `condenser pretrain` runs it on a GPU."""
    accelerator = machine.accelerator
    model: Any = accelerator.prepare(random_condenser(config).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: PretrainBatch) -> None:
        gradient(model, [batch], accelerator)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plain_step(machine: Machine, config: BertConfig) -> Callable[[PretrainBatch], None]:
    """Return the plain way's step: padded rows, the vocabulary at all positions, AdamW at its defaults."""
    model: Any = machine.accelerator.prepare(plain_copy(random_condenser(config)).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: PretrainBatch) -> None:
        sum(model(*_padded(batch, machine.device)).values()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _padded(batch: PretrainBatch, device: torch.device) -> list[Tensor]:
    """Return ids, mask and labels (rows, LENGTH) on a device."""
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    short = (0, LENGTH - batch.input_ids.shape[1])
    parts = ((batch.input_ids, 0), (mask, 0), (batch.labels, IGNORED))
    return [nn.functional.pad(one, short, value=value).to(device) for one, value in parts]


@torch.no_grad()
def _difference_of_losses(machine: Machine, config: BertConfig) -> float:
    """Return the largest relative difference between the losses of the two sides, float32, dropout off."""
    ours = random_condenser(config).eval()
    plain = plain_copy(ours).to(machine.device).eval()
    ours.to(machine.device)
    batch = spans(SPAN_LENGTHS, config.vocab_size, seed=9)
    expected = plain(*_padded(batch, machine.device))
    placed = batch.to(machine.device)
    losses = ours(placed.input_ids, placed.attention_mask, placed.labels).losses
    off = max(abs(losses[name].item() / batch.weight / expected[name].item() - 1) for name in expected)
    if not off <= FLOAT32_LIMIT:
        raise Wrong(f"losses are off the plain way's by {off:.1e} of their size, expected {FLOAT32_LIMIT:.0e}")
    return off


def _forward_operations(config: BertConfig, batch: PretrainBatch) -> float:
    """Count what a forward pass needs: real tokens, and the vocabulary at masked positions, for both losses."""
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    per_layer = sum(_linear_and_attention(config, float(length)) for length in mask.sum(dim=1))
    words = 2 * batch.weight * 2 * config.hidden_size * (config.hidden_size + config.vocab_size)
    return (config.num_hidden_layers + HEAD_LAYERS) * per_layer + words


def _linear_and_attention(config: BertConfig, length: float) -> float:
    """Count the operations of one layer on one text."""
    width, inner = config.hidden_size, config.intermediate_size
    return 2 * length * (4 * width * width + 2 * width * inner) + 4 * length**2 * width


def _words(count: int) -> list[str]:
    """Return words of one token each."""
    letters = product(ascii_lowercase, repeat=4)
    return ["".join(next(letters)) for _ in range(count)]


def _passages_per_second(
    machine: Machine, texts: list[str], encode: Callable[[list[str]], np.ndarray]
) -> tuple[np.ndarray, float]:
    """Return the vectors, and how many were made in a second; a first part is encoded for practice."""
    encode(texts[: len(texts) // 8])
    machine.synchronize()
    began = time.perf_counter()
    vectors = encode(texts)
    machine.synchronize()
    return vectors, len(texts) / (time.perf_counter() - began)


def _peer(machine: Machine, folder: Path, dtype: str) -> Callable[[list[str]], np.ndarray]:
    """Return sentence-transformers' way with the same weights; a folder without its files means mean pooling there."""
    from sentence_transformers import SentenceTransformer

    with quiet_transformers():
        model = SentenceTransformer(str(folder), device=str(machine.device)).to(getattr(torch, dtype))
    model.max_seq_length = LENGTH

    def encode(texts: list[str]) -> np.ndarray:
        found: Tensor = model.encode(texts, batch_size=PEER_BATCH, convert_to_tensor=True, show_progress_bar=False)
        return found.float().cpu().numpy()  # numpy has no bfloat16

    return encode


def _shard_rows(count: int, most: int = 250_000) -> Iterator[tuple[int, int]]:
    yield from enumerate(min(most, count - start) for start in range(0, count, most))


def _random_shard(machine: Machine, rows: int, dimension: int, seed: int) -> Matrix:
    """Return random vectors as a folder of float16 vectors would hold them: in the host's memory."""
    generator = torch.Generator(machine.device).manual_seed(seed)
    return Matrix(torch.randn(rows, dimension, generator=generator, device=machine.device).half().cpu().numpy())


def _rows_of(shards: Sequence[Matrix], rows: np.ndarray) -> np.ndarray:
    """Return some vectors (n, dimension) float32 by their number over all shards."""
    size = len(shards[0])
    return np.stack([shards[row // size][slice(row % size, row % size + 1)][0] for row in rows.tolist()])


def _best_scores(machine: Machine, shards: Sequence[Matrix], queries: np.ndarray, best: int) -> np.ndarray:
    """Return each query's best scores in ascending order, from products in float64."""
    asked = torch.from_numpy(queries).to(machine.device).double()
    scores = [asked @ torch.from_numpy(shard.codes).to(machine.device).double().T for shard in shards]
    return torch.cat(scores, 1).topk(best).values.flip(1).cpu().numpy()
