"""What gradient caching costs and saves: coCondenser steps on medquad spans, MiniLM-L6 with two head layers.

    python scripts/bench_gradcache.py [--quick]

Each measurement runs in a process of its own (one thread), so that peaks do not add up. Peak memory is counted above
the loaded model and optimiser, after a first small step. The last line is JSON:

- ``cached_peak_mb``: peak of a step at each number of documents, 16 spans per chunk;
- ``flatness``: the largest over the smallest of these;
- ``uncached_peak_mb``, ``time_ratio``: the uncached step at 64 documents, and the cached step's CPU seconds over its.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHUNK = 16


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer documents and one round: under five minutes")
    parser.add_argument("--measure", nargs=4, metavar=("STORE", "DOCUMENTS", "CHUNK", "STEPS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        store, documents, chunk, steps = given.measure
        print(json.dumps(measure(store, int(documents), int(chunk), int(steps))))
        return
    sizes, rounds = ([32, 64, 128], 1) if given.quick else ([64, 256, 1024], 3)
    compared = sizes[0] if given.quick else 64
    with tempfile.TemporaryDirectory() as folder:
        store = build_store(Path(folder))
        cached = {size: child(store, size, CHUNK, 1)["peak_mb"] for size in sizes}
        pairs = [(child(store, compared, CHUNK, 2), child(store, compared, 0, 2)) for _ in range(rounds)]
    ratio = statistics.median(a["cpu_s"] / b["cpu_s"] for a, b in pairs)
    result = {
        "cached_peak_mb": cached,
        "flatness": round(max(cached.values()) / min(cached.values()), 3),
        "uncached_peak_mb": pairs[0][1]["peak_mb"],
        "compared_documents": compared,
        "time_ratio": round(ratio, 3),
    }
    for size, peak in cached.items():
        print(f"{size:>5} documents, {CHUNK} spans per chunk: {peak:,.0f} MB above model and optimiser")
    print(
        f"{compared:>5} documents, uncached: {result['uncached_peak_mb']:,.0f} MB; cached takes {ratio:.2f} x its time"
    )
    print(json.dumps(result))


def build_store(folder: Path) -> str:
    """Cut medquad into spans of at most 64 tokens."""
    from condenser.options import SpansOptions
    from retrieval.quickstart import default_weights
    from retrieval.spans import build_spans_of

    options = SpansOptions(
        collection="medquad", tokenizer=default_weights(), max_length=64, output=str(folder / "spans")
    )
    return str(build_spans_of(options))


def child(store: str, documents: int, chunk: int, steps: int) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    words = [sys.executable, __file__, "--measure", store, str(documents), str(chunk), str(steps)]
    # glibc keeps large blocks that were freed and hands them out in pieces: without a fixed threshold the peak says
    # more of that than of the step (765 and 950 MB for 64 and 256 documents, in the place of 534 and 537)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(store_folder: str, documents: int, chunk: int, steps: int) -> dict[str, float]:
    """Return peak memory (MB) and CPU seconds per step; ``chunk`` 0 is the uncached step."""
    import torch

    from condenser.corpus.tokens import TokenStore, load_tokenizer
    from condenser.options import PretrainOptions
    from condenser.pretrain import OBJECTIVES, build_batches, loop_settings
    from condenser.training.loop import start_accelerator
    from retrieval.quickstart import default_weights

    torch.set_num_threads(1)
    options = PretrainOptions(
        objective="cocondenser",
        data=store_folder,
        init=default_weights(),
        max_steps=steps,
        batch_size=documents,
        cache_chunk=chunk or None,
        output="unused",
        device="cpu",
    )
    objective, store = OBJECTIVES["cocondenser"], TokenStore(store_folder)
    tokenizer = load_tokenizer(store.tokenizer_folder)
    torch.manual_seed(0)
    model, _, config = objective.start(options, store, tokenizer)
    batches = build_batches(options, objective, store, tokenizer, config)
    accelerator = start_accelerator(loop_settings(options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    step, model = objective.step(options, store, tokenizer), model.train()

    def run(number: int, rows: int | None = None) -> None:
        (batch,) = batches(number)
        if rows:
            mask = None if batch.attention_mask is None else batch.attention_mask[:rows]
            small = {"input_ids": batch.input_ids[:rows], "attention_mask": mask, "labels": batch.labels[:rows]}
            batch = dataclasses.replace(batch, **small, paired_rows=rows)
        step(model, [batch], accelerator)
        optimizer.step()
        optimizer.zero_grad()

    run(0, rows=2)  # the optimiser's moments are there from now on
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    began = time.process_time()
    for number in range(steps):
        run(number)
    return {"peak_mb": round(resident("VmHWM") - before, 1), "cpu_s": (time.process_time() - began) / steps}


def resident(name: str) -> float:
    """Return a line of this process's memory figures in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
