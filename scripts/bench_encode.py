"""How fast passages become vectors on one CPU thread: MiniLM-L6 on medquad, against what others do.

    python scripts/bench_encode.py [--quick]

CPU seconds of the process, tokenization included on all sides, variants interleaved, medians of 5 rounds over 2,000
passages (quick: 3 rounds, 400 passages), taken evenly through the collection and cut at the encoder's 256 tokens. The
last line is JSON:

- ``vs_sentence_transformers``: its time at its defaults (sorted by length, batches of 32 texts) over ours;
- ``vs_file_order``: the same for transformers with padded batches of 32 in the order of the file;
- ``gemm_share``: useful floating-point operations per second over the rate of float32 2048x384x1536 products by
  ``torch.mm`` in the same run. Useful are linear layers and attention on real tokens. The products of the encoder are
  oneDNN's, those of the yardstick the BLAS's of this PyTorch: where the first are faster, the share may pass 1;
- ``max_difference``: largest difference of a number in our vectors to sentence-transformers', at most 1e-5;
- ``int8_ratio``: time in float32 over time with ``--quantize int8``; with it ``int8_cosine``, the smallest and the mean
  cosine of its vectors to the float32 ones, and MRR@10 of both for the queries of medquad's dev and test splits that
  have their answer among the passages, queries in float32;
- ``bfloat16_ratio``, ``bfloat16_cosine``: the same of ``--dtype bfloat16``, on processors with instructions for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from condenser.models.half import cpu_multiplies_bfloat16
from eval import evaluate
from retrieval.collections import open_collection
from retrieval.encoder import Encoder
from retrieval.precision import set_precision
from retrieval.quickstart import default_weights

Vectors = np.ndarray
BATCH = 32
PRODUCTS = 20


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="400 passages, 3 rounds: under five minutes")
    count, rounds = (400, 3) if parser.parse_args().quick else (2000, 5)
    torch.set_num_threads(1)
    encoder, rounded = load_encoder(), {"int8": load_encoder()}
    set_precision(rounded["int8"], "passage", quantize="int8")
    if cpu_multiplies_bfloat16():
        rounded["bfloat16"] = load_encoder()
        set_precision(rounded["bfloat16"], "passage", "bfloat16")
    collection = open_collection("medquad")
    passages = list(collection.passages())
    passages = [passages[row * len(passages) // count] for row in range(count)]
    texts = [encoder.passage_text(passage) for passage in passages]
    variants: dict[str, Callable[[], Vectors]] = {
        "ours": lambda: encoder.encode_passages(passages),
        "sentence_transformers": sentence_transformers_of(texts),
        "file_order": lambda: np.concatenate(list(in_file_order(encoder, texts))),
    }
    variants |= {name: partial(other.encode_passages, passages) for name, other in rounded.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    rates, vectors = [], dict[str, Vectors]()
    for number in range(rounds):
        for name, encode in variants.items():
            rates.append(product_rate())
            began = time.process_time()
            vectors[name] = encode()
            times[name].append(time.process_time() - began)
            print(f"round {number + 1} {name:22} {count / times[name][-1]:6.1f} passages/s", flush=True)
    middle = {name: statistics.median(values) for name, values in times.items()}
    rate = statistics.median(rates)
    useful = useful_operations(encoder, encoder.tokenize(texts, "passage"))
    difference = float(np.abs(vectors["ours"] - vectors["sentence_transformers"]).max())
    result = {
        "passages": count,
        "vs_sentence_transformers": middle["sentence_transformers"] / middle["ours"],
        "vs_file_order": middle["file_order"] / middle["ours"],
        "gemm_share": useful / middle["ours"] / rate,
        "product_gflops": rate / 1e9,
        "passages_per_cpu_s": count / middle["ours"],
        "max_difference": difference,
    }
    for name in rounded:
        cosines = (vectors["ours"] * vectors[name]).sum(axis=1)
        result[f"{name}_ratio"] = middle["ours"] / middle[name]
        result[f"{name}_cosine"] = [float(cosines.min()), float(cosines.mean())]
    qrels, queries = judged_within(collection, {passage.id for passage in passages})
    asked = encoder.encode_queries(list(queries.values()))
    for name in ("ours", *rounded):
        result[f"{name}_mrr10"] = mrr10(
            qrels, list(queries), asked, [passage.id for passage in passages], vectors[name]
        )
    result["queries"] = len(queries)
    print(json.dumps(result, default=float))
    if difference > 1e-5:
        sys.exit(f"vectors differ from sentence-transformers' by {difference:.1e}, expected at most 1e-5")


def load_encoder() -> Encoder:
    """Load MiniLM-L6, its limit as sentence-transformers uses it."""
    return Encoder.load(default_weights(), passage_max_length=256)


def sentence_transformers_of(texts: list[str]) -> Callable[[], Vectors]:
    """Return the same work in sentence-transformers, at its defaults."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(default_weights(), device="cpu")
    return lambda: model.encode(texts, show_progress_bar=False)


def in_file_order(encoder: Encoder, texts: list[str]) -> Iterator[Vectors]:
    """Encode batches as the file has them, padded to their longest text, through transformers."""
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            token_ids = encoder.tokenize(texts[start : start + BATCH], "passage")
            yield encoder(*encoder.pad(token_ids)).numpy()


def product_rate() -> float:
    """Return the floating-point operations per CPU second of a large product in float32."""
    a, b = torch.ones(2048, 384), torch.ones(384, 1536)
    began = time.process_time()
    for _ in range(PRODUCTS):
        torch.mm(a, b)
    return PRODUCTS * 2 * 2048 * 384 * 1536 / (time.process_time() - began)


def useful_operations(encoder: Encoder, token_ids: list[list[int]]) -> float:
    """Count what mean pooling needs: every layer's products and attention, on all real tokens."""
    config = encoder.model.config
    width, inner = config.hidden_size, config.intermediate_size
    lengths = np.array([len(ids) for ids in token_ids], dtype=float)
    linear = 2 * lengths * (4 * width * width + 2 * width * inner)
    attention = 4 * lengths**2 * width
    return float(config.num_hidden_layers * (linear + attention).sum())


def judged_within(collection: object, ids: set[str]) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Return judgements that stay within these passages, and the texts of their queries."""
    qrels = {
        query: {passage: grade for passage, grade in judged.items() if passage in ids}
        for split in ("dev", "test")
        for query, judged in collection.qrels(split).items()  # type: ignore[attr-defined]
    }
    texts = {query.id: query.text for query in collection.queries()}  # type: ignore[attr-defined]
    qrels = {query: judged for query, judged in qrels.items() if any(judged.values())}
    return qrels, {query: texts[query] for query in qrels}


def mrr10(
    qrels: dict[str, dict[str, int]], queries: list[str], asked: Vectors, ids: list[str], vectors: Vectors
) -> float:
    """Return MRR@10 of an exact search."""
    scores = asked @ vectors.T
    run = {query: dict(zip(ids, row.tolist(), strict=True)) for query, row in zip(queries, scores, strict=True)}
    return float(evaluate(qrels, run, ["MRR@10"]).means["MRR@10"])


if __name__ == "__main__":
    main()
