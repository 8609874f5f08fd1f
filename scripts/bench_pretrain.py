"""What a Condenser pretraining step costs on one CPU thread, against the plain way on transformers.

    python scripts/bench_pretrain.py [--quick] [--compile]

MiniLM-L6's size (6 layers of 384, 12 heads, 30,522 tokens) with random weights, two head layers and the late MLM loss;
steps of 32 spans of at most 128 tokens (quick: 4) of medquad: forward, backward, clipping, AdamW, dropout on. The plain
way pads every span to 128 and takes the logits of all positions, as the reference code does. CPU seconds of the
process, the sides in turn in every round, medians over the rounds (5; quick: 7). Before, the losses of both sides are
compared with dropout off. The last line is JSON:

- ``real_spans_ratio``: seconds of the plain way over ours, spans at their own lengths;
- ``full_spans_ratio``: the same, all spans 128 tokens long;
- ``peak_memory_ratio``: our peak over the plain way's, above the loaded model and optimiser, in a step of 32 x 128,
  each in a process of its own;
- ``gemm_share``, ``full_gemm_share``: useful floating-point operations per second of our step over the rate of float32
  2048x384x1536 products by ``torch.mm`` in the same run. Useful are linear layers and attention on real tokens and the
  vocabulary at masked positions, forward and backward; `full` is for spans that are all 128 long;
- ``loader_share``: seconds that making a batch takes, over those of batch and step;
- ``loss_difference``: largest relative difference between the losses of the two sides, at most 1e-5.

With ``--compile`` our step is compared with itself through ``torch.compile`` and nothing else is measured:
``real_compile_ratio`` and ``full_compile_ratio`` are its seconds without over those with, ``compile_seconds`` what two
first steps cost more than later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compilers are children, whose time is counted

import numpy as np
import torch
from accelerate import Accelerator
from plain_peer import plain_copy
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from condenser.corpus.batches import Frame, PretrainBatch, SpanBatches, collate
from condenser.corpus.corruption import IGNORED, Corrupted, masking_policy
from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.models.backbone import Backbone
from condenser.models.condenser import CondenserModel
from condenser.objectives.masked_lm import masked_lm_losses
from condenser.options import SpansOptions
from condenser.training.steps import accumulate
from retrieval.quickstart import default_weights
from retrieval.spans import build_spans_of

LENGTH, VOCABULARY, HEAD_LAYERS, SKIP_FROM = 128, 30522, 2, 3
SIZE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
FRAME = Frame(cls_id=101, sep_id=102, pad_id=0)  # in the vocabulary of BERT and MiniLM
PEAK_BATCH = 32
PRODUCTS = 20


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="steps of 4 spans: under five minutes")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile alone; takes minutes to compile")
    parser.add_argument("--peak", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.peak:
        print(peak_of_step(given.peak))
        return
    batch_size, rounds = (4, 7) if given.quick else (32, 5)
    if given.compile:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(open_batches(Path(folder) / "spans", batch_size), batch_size, rounds, "compiled")
        print(json.dumps(result | {"batch_size": batch_size, "rounds": rounds}, default=float))
        return
    peaks = {side: peak_in_own_process(side) for side in ("ours", "plain")}
    with tempfile.TemporaryDirectory() as folder:
        batches = open_batches(Path(folder) / "spans", batch_size)
        difference = compare_losses(batches(0)[0])
        result = measure(batches, batch_size, rounds, "plain")
    result |= {
        "peak_memory_ratio": peaks["ours"] / peaks["plain"],
        "peak_mb": peaks,
        "loss_difference": difference,
        "batch_size": batch_size,
        "rounds": rounds,
    }
    print(json.dumps(result, default=float))
    if difference > 1e-5:
        sys.exit(f"the losses of the two sides differ by {difference:.1e} of their size, expected at most 1e-5")


def make_plain(dropout: bool = True) -> Callable[[PretrainBatch], dict[str, float]]:
    """Return the plain way's step; without dropout only its losses."""
    model = plain_copy(fresh_model()).train(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: PretrainBatch) -> dict[str, float]:
        short = LENGTH - batch.input_ids.shape[1]
        mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
        padded = [
            nn.functional.pad(one, (0, short), value=value)
            for one, value in ((batch.input_ids, 0), (mask, 0), (batch.labels, IGNORED))
        ]
        losses = model(*padded)
        if dropout:
            sum(losses.values()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {name: loss.item() for name, loss in losses.items()}

    return step


def make_ours(dropout: bool = True, compiled: bool = False) -> Callable[[PretrainBatch], dict[str, float]]:
    """Return our step, as `condenser pretrain` runs it; without dropout only its losses."""
    model = fresh_model().train(dropout)
    if compiled:
        model.compile(dynamic=True)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = accumulate(masked_lm_losses)

    def step(batch: PretrainBatch) -> dict[str, float]:
        losses = run(model, [batch], accelerator)
        if dropout:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        return {name: loss.item() for name, loss in losses.items()}

    return step


SIDES: dict[str, Callable[[], Callable[[PretrainBatch], dict[str, float]]]] = {
    "ours": make_ours,
    "plain": make_plain,
    "compiled": lambda: make_ours(compiled=True),
}


def fresh_model() -> CondenserModel:
    """Return a Condenser, with the same random weights at each call."""
    torch.manual_seed(0)
    backbone = Backbone(BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SIZE)))
    return CondenserModel(backbone, head_layers=HEAD_LAYERS, skip_from=SKIP_FROM)


def open_batches(folder: Path, batch_size: int) -> SpanBatches:
    """Build medquad's spans and return what draws steps of them."""
    build_spans_of(
        SpansOptions(collection="medquad", tokenizer=default_weights(), max_length=LENGTH, output=str(folder))
    )
    store = TokenStore(folder)
    tokenizer = load_tokenizer(store.tokenizer_folder)
    policy = masking_policy(
        len(tokenizer),
        tokenizer.all_special_ids,
        mask_id=tokenizer.mask_token_id,
        probability=0.15,
        random_tokens="ordinary",
    )
    return SpanBatches(
        store, pairs=False, batch_size=batch_size, micro_batches=1, policy=policy, frame=FRAME, room=LENGTH - 2, seed=1
    )


def all_full(batches: SpanBatches, step: int) -> PretrainBatch:
    """Return a step whose spans are all of the full length: the tokens of three steps, one after the other."""
    ids, labels = [], []
    for batch in (batches(3 * step + more)[0] for more in range(3)):
        for row, asked in zip(batch.input_ids, batch.labels, strict=True):
            text = ~torch.isin(row, torch.tensor(astuple(FRAME)))
            ids.append(row[text])
            labels.append(asked[text])
    rows = len(batch.input_ids)
    parts = [torch.cat(one)[: rows * (LENGTH - 2)].view(rows, -1).numpy() for one in (ids, labels)]
    return collate([Corrupted(*row) for row in zip(*parts, strict=True)], FRAME)


def compare_losses(batch: PretrainBatch) -> float:
    """Return the largest relative difference of a loss between the two sides, dropout off."""
    ours, plain = make_ours(dropout=False)(batch), make_plain(dropout=False)(batch)
    return max(abs(ours[name] / plain[name] - 1) for name in plain)


def measure(batches: SpanBatches, batch_size: int, rounds: int, other: str) -> dict[str, Any]:
    """Return the ratios of another side and ours over rounds, after two first steps that do not count."""
    sides = ["ours", other]
    steps = {side: SIDES[side]() for side in sides}
    first = dict.fromkeys(sides, 0.0)
    for batch in (all_full(batches, 0), batches(0)[0]):
        for side, step in steps.items():
            began = cpu_seconds()
            step(batch)
            first[side] += cpu_seconds() - began
    seconds: dict[tuple[str, str], list[float]] = {(kind, side): [] for kind in ("real", "full") for side in sides}
    loading, rates, useful, tokens = [], [], {"real": 0.0, "full": 0.0}, {"real": 0, "full": 0}
    for number in range(1, rounds + 1):
        began = time.process_time()
        (real,) = batches(number)
        loading.append(time.process_time() - began)
        for kind, batch in (("real", real), ("full", all_full(batches, number))):
            useful[kind] += useful_operations(batch) / rounds
            tokens[kind] += batch.tokens
            for side, step in steps.items():
                rates.append(product_rate())
                began = time.process_time()
                step(batch)
                seconds[kind, side].append(time.process_time() - began)
                print(f"round {number}, {kind} {side:8}: {seconds[kind, side][-1]:6.2f} CPU s", flush=True)
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    rate = statistics.median(rates)
    for (kind, side), value in middle.items():
        pace = tokens[kind] / rounds / value
        print(f"{kind} {side:8}: {value:6.2f} CPU s a step of {batch_size}, {pace:7.0f} real tokens per CPU s")
    if other == "compiled":
        later = sum(middle[kind, other] for kind in useful)
        ratios = {f"{kind}_compile_ratio": middle[kind, "ours"] / middle[kind, other] for kind in useful}
        return ratios | {"compile_seconds": first[other] - later}
    shares = {kind: useful[kind] / middle[kind, "ours"] / rate for kind in useful}
    result: dict[str, Any] = {
        f"{kind}_spans_ratio": statistics.median(
            plain / ours for plain, ours in zip(seconds[kind, "plain"], seconds[kind, "ours"], strict=True)
        )
        for kind in useful
    }
    result |= {"gemm_share": shares["real"], "full_gemm_share": shares["full"], "product_gflops": rate / 1e9}
    load = statistics.median(loading)
    result["loader_share"] = load / (load + middle["real", "ours"])
    return result


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has ended, such as compilers."""
    return sum(os.times()[:4])


def product_rate() -> float:
    """Return the floating-point operations per CPU second of a large product in float32."""
    a, b = torch.ones(2048, 384), torch.ones(384, 1536)
    began = time.process_time()
    for _ in range(PRODUCTS):
        torch.mm(a, b)
    return PRODUCTS * 2 * 2048 * 384 * 1536 / (time.process_time() - began)


def useful_operations(batch: PretrainBatch) -> float:
    """Count what a step needs: backward is twice forward, the vocabulary is asked twice, at masked positions."""
    width, inner = SIZE["hidden_size"], SIZE["intermediate_size"]
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    lengths = mask.sum(dim=1).double().numpy()
    linear = 2 * lengths * (4 * width * width + 2 * width * inner)
    attention = 4 * lengths**2 * width
    layers = (SIZE["num_hidden_layers"] + HEAD_LAYERS) * float(np.sum(linear + attention))
    words = 2 * batch.weight * 2 * width * (width + VOCABULARY)
    return 3 * (layers + words)


def peak_of_step(side: str) -> float:
    """Return the resident megabytes that a step of 32 x 128 tokens takes above the loaded model and optimiser."""
    rows = np.random.default_rng(0).integers(1000, 30000, (PEAK_BATCH, LENGTH - 2))
    asked = np.random.default_rng(1).random(rows.shape) < 0.15
    spans = [Corrupted(ids, np.where(chosen, ids, IGNORED)) for ids, chosen in zip(rows, asked, strict=True)]
    step = SIDES[side]()
    step(collate([Corrupted(rows[0, :6], rows[0, :6])], FRAME))  # from here on AdamW has its moments
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    step(collate(spans, FRAME))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - pages * resource.getpagesize() / 2**20


def peak_in_own_process(side: str) -> float:
    """Return `peak_of_step` of a fresh process."""
    done = subprocess.run([sys.executable, __file__, "--peak", side], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
