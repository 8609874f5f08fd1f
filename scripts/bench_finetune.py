"""What a fine-tuning step costs: MiniLM-L6 on medquad pairs at their own lengths, against sentence-transformers.

    python scripts/bench_finetune.py [--quick]

One thread, CPU seconds, the sides in turn in every round, dropout on, AdamW, the same texts, tokenization included, one
process for the times and one each for the peaks. Before, the losses of all sides are compared with dropout off. Ratios
are medians over the rounds of the peer's seconds over ours. The last line is JSON:

- ``cached_ratio``: gradient caching (chunks of 2,048 tokens) against CachedMultipleNegativesRankingLoss (chunks of 16);
- ``cached_tokens_ratio``: the same against that loss with its own token budget of 2,048 (``mini_batch_num_tokens``);
- ``cached_budget_ratio``: with memory for graphs (8 GiB), against CachedMultipleNegativesRankingLoss (chunks of 16);
- ``uncached_ratio``: the plain step against MultipleNegativesRankingLoss;
- ``cached_peak_mb``, ``st_cached_peak_mb``: peak resident memory of a process that makes two cached steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CHUNK = 16
LONGEST = 128
TEMPERATURE = 0.05
OURS = {"cached": (CHUNK * LONGEST, 0), "cached_budget": (CHUNK * LONGEST, 8 * 2**30), "uncached": None}
PEERS = ("st_cached", "st_cached_tokens", "st_uncached")
RATIOS = {
    "cached_ratio": ("st_cached", "cached"),
    "cached_tokens_ratio": ("st_cached_tokens", "cached"),
    "cached_budget_ratio": ("st_cached", "cached_budget"),
    "uncached_ratio": ("st_uncached", "uncached"),
}


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batches of 32 and three rounds: under five minutes")
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "BATCH"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        side, batch_size = given.peak
        step = make_side(side, int(batch_size))
        step(0)
        step(1)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    batch_size, rounds = (32, 3) if given.quick else (128, 5)
    peaks = {side: peak(side, batch_size) for side in ("cached", "st_cached")}
    seconds = measure(batch_size, rounds)
    for side, values in seconds.items():
        print(f"{side:>17}: {statistics.median(values):6.2f} CPU s a step of {batch_size} pairs")
    result: dict[str, Any] = {
        name: round(statistics.median(a / b for a, b in zip(seconds[peer], seconds[ours], strict=True)), 3)
        for name, (peer, ours) in RATIOS.items()
    }
    result |= {"cached_peak_mb": round(peaks["cached"]), "st_cached_peak_mb": round(peaks["st_cached"])}
    print(json.dumps({**result, "batch_size": batch_size, "rounds": rounds}))


def measure(batch_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each side's step in every round, after a first step that does not count."""
    sides = {side: make_side(side, batch_size) for side in (*OURS, *PEERS)}
    compare_losses(batch_size)
    for step in sides.values():
        step(0)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(1, rounds + 1):
        for side, step in sides.items():
            started = time.process_time()
            step(number)
            seconds[side].append(time.process_time() - started)
            print(f"round {number}, {side}: {seconds[side][-1]:.2f}", file=sys.stderr, flush=True)
    return seconds


def compare_losses(batch_size: int) -> None:
    """Stop unless all sides compute the same loss, with dropout off."""
    losses = {side: make_side(side, batch_size, dropout=False)(0) for side in (*OURS, *PEERS)}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the sides do not compute the same loss: {losses}")


def make_side(side: str, batch_size: int, *, dropout: bool = True) -> Callable[[int], float]:
    """Return a function that makes a training step and returns its loss."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    make = _our_side if side in OURS else _their_side
    return make(side, batch_size, dropout)


def _our_side(side: str, batch_size: int, dropout: bool) -> Callable[[int], float]:
    import torch
    from accelerate import Accelerator

    from retrieval.losses import loss_named
    from retrieval.towers import BiEncoder, cached_step, plain_step

    batches, _, encoder = pairs(batch_size)
    model = BiEncoder(encoder).train(dropout)
    accelerator = Accelerator(cpu=True)
    loss_of = loss_named("softmax", temperature=TEMPERATURE)
    setting = OURS[side]
    step = plain_step(loss_of) if setting is None else cached_step(loss_of, *setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run(number: int) -> float:
        (loss,) = step(model, batches(number), accelerator).values()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return run


def _their_side(side: str, batch_size: int, dropout: bool) -> Callable[[int], float]:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    from retrieval.quickstart import default_weights

    batches, texts, _ = pairs(batch_size)
    model = SentenceTransformer(default_weights(), device="cpu").train(dropout)
    model.max_seq_length = LONGEST
    settings = {"scale": 1 / TEMPERATURE}
    loss_of: Any = {
        "st_cached": lambda: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=CHUNK, **settings),
        "st_cached_tokens": lambda: losses.CachedMultipleNegativesRankingLoss(
            model, mini_batch_num_tokens=CHUNK * LONGEST, **settings
        ),
        "st_uncached": lambda: losses.MultipleNegativesRankingLoss(model, **settings),
    }[side]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run(number: int) -> float:
        columns = zip(*(texts[query_id] for query_id in batches.names(number)), strict=True)
        loss = loss_of([model.preprocess(list(column)) for column in columns], None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return run


def pairs(batch_size: int) -> Any:
    """Return the batches, the texts of each query id (query, passage), and a fresh encoder."""
    from retrieval.batches import PairBatches
    from retrieval.collections import open_collection
    from retrieval.encoder import Encoder
    from retrieval.examples import Examples, read_examples
    from retrieval.quickstart import default_weights

    collection = open_collection("medquad")
    examples = Examples(one._replace(positives=one.positives[:1]) for one in read_examples(collection, "train"))
    passages = collection.lookup()
    # one limit for both kinds, because sentence-transformers has but one
    encoder = Encoder.load(default_weights(), query_max_length=LONGEST, passage_max_length=LONGEST)
    batches = PairBatches(examples, passages, encoder, batch_size=batch_size, negatives=0, seed=1)
    texts = {one.query_id: (one.text, encoder.passage_text(passages[one.positives[0]])) for one in examples}
    return batches, texts, encoder


def peak(side: str, batch_size: int) -> float:
    """Return the peak resident memory in MB of a process that makes two steps."""
    words = [sys.executable, __file__, "--peak", side, str(batch_size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
