"""Measure what a cross-encoder adds to BM25's run, or another: trained on BM25's negatives, depth by dev, test once.

Every step is a command of `condenser` with its result in --work; one that was stopped goes on there. Printed are the
commands, the dev figures by depth, the comparison with the base run on test, and as the last line JSON with the figures
and the processor time of this run.

    python scripts/rerank_study.py --work /tmp/rerank                    # medquad, from the installed MiniLM
    python scripts/rerank_study.py --work /tmp/toy --quick               # a few steps: shows that it runs
    python scripts/rerank_study.py --work /tmp/rerank --base dense.dev.trec dense.test.trec
                                                        # the same cross-encoder on the runs of a bi-encoder

The default start, all-MiniLM-L6-v2, was trained on MS MARCO and Natural Questions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from condenser.errors import UserError
from eval.comparison import compare
from eval.evaluation import evaluate
from eval.runs import Run, load_run
from retrieval.collections import open_collection
from retrieval.fuse import read_ranked
from retrieval.options import Bm25Options, FinetuneOptions, MineOptions, RerankOptions
from retrieval.quickstart import default_weights
from retrieval.stages import Stage, command_line, run_stages

METRIC = "MRR@10"


def training(given: argparse.Namespace, start: str) -> list[Stage]:
    """Return the commands up to the cross-encoder and the dev run that it reranks, at the largest depth."""
    work, collection = given.work, given.collection
    lexical = [
        Stage("bm25", Bm25Options(collection=collection, split=split, k=100, output=str(work / f"bm25.{split}.trec")))
        for split in ("dev", "test")
    ]
    negatives = str(work / "negatives.jsonl")
    mined = MineOptions(collection=collection, bm25=True, depth=max(given.depths), n=20, output=negatives)
    trained = FinetuneOptions(
        encoder=start,
        collection=[collection],
        cross_encoder=True,
        negatives=3,
        negatives_file=[negatives],
        dev_run=str(lexical[0].made),
        dev_depth=min(given.depths),
        dev_queries=100,
        batch_size=given.batch_size,
        max_steps=given.steps,
        learning_rate=given.learning_rate,
        query_max_length=24,
        passage_max_length=32 if given.quick else 104,
        mixed_precision="bf16" if given.bfloat16 else "no",
        save_every=50,
        output=str(work / "cross"),
    )
    return [*lexical, Stage("mine", mined), Stage("finetune", trained), reranking(given, "dev", max(given.depths))]


def base_run(given: argparse.Namespace, split: str) -> str:
    """Return the run of a split that is reranked: BM25's, or that of --base."""
    runs = given.base or [given.work / f"bm25.{name}.trec" for name in ("dev", "test")]
    return str(runs[("dev", "test").index(split)])


def reranking(given: argparse.Namespace, split: str, depth: int) -> Stage:
    """Return the command that reranks the base run of a split."""
    options = RerankOptions(
        model=str(given.work / "cross"),
        run=base_run(given, split),
        collection=given.collection,
        split=split,
        depth=depth,
        dtype="bfloat16" if given.bfloat16 else "auto",
        output=str(given.work / f"reranked.{'base.' if given.base else ''}{split}.trec"),
    )
    return Stage("rerank", options)


def at_depth(base: str, reranked: Mapping[str, Mapping[str, float]], depth: int) -> Run:
    """Return the run with its first hits in their new order and the others below, from one that went deeper."""
    run: Run = {}
    for query, ranked in read_ranked(base).items():
        hits = [name.decode() for name in ranked.ids]
        run[query] = {hit: reranked[query][hit] for hit in hits[:depth]}
        lowest = min(run[query].values())
        run[query] |= {hit: lowest - place for place, hit in enumerate(hits[depth:], 1)}
    return run


def study(given: argparse.Namespace, start: str) -> None:
    """Run the commands, and print what they give."""
    collection = open_collection(given.collection)
    first = training(given, start)
    run_stages(first)
    base, deep = base_run(given, "dev"), load_run(first[-1].made)
    qrels = collection.qrels("dev")
    on_dev = {depth: evaluate(qrels, at_depth(base, deep, depth), (METRIC,))[METRIC] for depth in given.depths}
    chosen = max(on_dev, key=lambda depth: on_dev[depth])
    last = reranking(given, "test", chosen)
    run_stages([last])
    print(*(command_line(stage) for stage in [*first, last]), sep="\n")
    print(f"dev {METRIC}: {evaluate(qrels, base, (METRIC,))[METRIC]:.4f} as the base has it")
    print(*(f"  depth {depth}: {value:.4f}" for depth, value in on_dev.items()), sep="\n")
    compared = compare(
        collection.qrels("test"), base_run(given, "test"), {"reranked": str(last.made)}, [METRIC, "nDCG@10"]
    )
    print(compared)
    measured = evaluate(collection.qrels("test"), str(last.made), (METRIC, "nDCG@10"))
    figures = {"depth": chosen, "dev": on_dev, "test": measured.means, "cpu_seconds": round(time.process_time(), 1)}
    print(json.dumps(figures))


def main() -> int:
    """Read the options and run the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of artifacts")
    parser.add_argument("--collection", default="medquad")
    parser.add_argument("--start", help="folder of an encoder; default: the installed MiniLM")
    parser.add_argument(
        "--base", type=Path, nargs=2, metavar=("DEV", "TEST"), help="runs to rerank in the place of BM25's"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--depths", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--bfloat16", action="store_true", help="compute in it: faster on GPUs and CPUs with AMX")
    parser.add_argument("--quick", action="store_true", help="a toy length: shows that it runs, measures nothing")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.batch_size, given.depths = 2, 2, [2, 3]
    try:
        study(given, given.start or default_weights())
    except UserError as error:
        print(f"rerank_study: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
