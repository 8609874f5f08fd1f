"""Measure what each link of `condenser adapt` adds: a labelled collection as the source, another without labels.

Arms, each the one before and something more, but for the last two:

    bm25         words alone (no seed)
    source       the start, fine-tuned on the labelled collection
    cocondenser  + Condenser and coCondenser on the target's text before that
    sampled      + fine-tuned further on queries that a model wrote for the target's passages, all drawn freely
    constrained  two of three drawn with a key term of the passage in them
    gain         of these without the worst quarter by Electric's gain
    roundtrip    of these those that find their passage
    labels       with a cross-encoder's margins in the place of right and wrong
    searched     of the queries of `constrained` those with a key term alone
    unpretrained the queries of `constrained`, but trained on from the start of `source`

The target's own queries and judgements are for the test alone; nothing is chosen on them. Each cell (arm and seed) is a
JSON file in --output, written when the cell is done; cells that are there are passed over, and a stopped one goes on in
--work. Below the table of test figures stand differences of MRR@10 between each arm and the one before, and between it
and the source, with 95 % intervals by bootstrap over queries, each query's values averaged over the seeds first.

    python scripts/adapt_study.py --output docs/results/adapt --work /tmp/adapt --bfloat16
    python scripts/adapt_study.py --output docs/results/adapt-plain --work /tmp/adapt --without_pretraining \
        --arms source constrained searched                                      # all from the source's encoder
    python scripts/adapt_study.py --quick --output toy --work /tmp/toy      # a few steps: shows that it runs

The default start, all-MiniLM-L6-v2, was trained on MS MARCO and Natural Questions; the writer's decoder starts from
random weights but for the encoder's word vectors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from condenser.errors import UserError
from condenser.files import read_json, write_json
from condenser.hub import local_folder
from condenser.manifest import identity, load_manifest
from condenser.talk import say
from eval.evaluation import evaluate
from retrieval.adapt_chain import Chain
from retrieval.adapt_options import AdaptOptions, Amounts
from retrieval.collections import open_collection
from retrieval.options import Bm25Options
from retrieval.quickstart import METRICS, default_weights
from retrieval.stages import Stage, command_line, run_stages
from scripts.study_figures import difference, mean_and_spread

LEXICAL = "bm25"
PLAIN = (LEXICAL, "source", "cocondenser")
WRITTEN: dict[str, dict[str, Any]] = {
    "sampled": {"constrained": 0.0},
    "constrained": {},
    "gain": {"gain": True},
    "roundtrip": {"gain": True, "roundtrip": 10},
    "labels": {"gain": True, "roundtrip": 10, "labels": True},
    "searched": {},
    "unpretrained": {},
}
ARMS = (*PLAIN, *WRITTEN)
# what each arm is compared with, the source apart
BEFORE = {
    "cocondenser": "source",
    "sampled": "cocondenser",
    "constrained": "sampled",
    "gain": "constrained",
    "roundtrip": "gain",
    "labels": "roundtrip",
    "searched": "constrained",
    "unpretrained": "constrained",
}
QUICK = Amounts(
    condenser=2, cocondenser=2, source=2, writer=80, electric=2, cross_encoder=2, passages=40, target=2
)  # fmt: skip


def chain_of(arm: str, given: argparse.Namespace, seed: int) -> Chain:
    """Return the chain of an arm; arms share what they have in common."""
    pretraining = arm != "source" and not given.without_pretraining
    folder = given.work / f"{Path(given.target).name}-{seed}"
    root = folder / ("pretrained" if pretraining else "plain")
    links = dict(WRITTEN.get(arm, {}))
    if "roundtrip" in links:
        links["roundtrip"] = _rank(given)
    options = AdaptOptions(
        corpus=given.target,
        labelled=given.labelled,
        init=given.init,
        writer=given.writer,
        electric=given.electric,
        output=str(root),
        pretraining=pretraining,
        **links,
        measure="test",
        max_length=24 if given.quick else 64,
        batch_size=2 if given.quick else 32,
        bfloat16=given.bfloat16,
        seed=seed,
    )
    amounts = QUICK if given.quick else Amounts.within(given.budget)
    queries = "drawn" if arm == "sampled" else "mixed"
    judged = root / queries
    written = given.work / f"{Path(given.target).name}-written" / queries if given.writer else judged / "queries"
    return dataclasses.replace(
        Chain.of(options), amounts=amounts, root=root, written=written, judged=judged, arm=root / arm
    )


def commands(arm: str, given: argparse.Namespace, seed: int) -> list[Stage]:
    """Return the commands that make a cell, the search of the test queries last."""
    if arm == LEXICAL:
        run = given.work / f"{Path(given.target).name}-bm25.trec"
        return [Stage("bm25", Bm25Options(collection=given.target, output=str(run)))]
    chain = chain_of(arm, given, seed)
    stages = [*chain.spans(), *chain.pretraining()] if chain.options.pretraining else []
    stages += chain.source_encoder()
    if arm not in WRITTEN:
        return [
            *stages,
            *chain.index(chain.root, "source-", chain.start),
            *chain.run(chain.root, "source-", chain.start),
        ]
    if given.writer is None:
        stages += [*chain.query_writer(), *chain.queries()]
    else:  # written once
        once = dataclasses.replace(chain.options, seed=AdaptOptions.seed)
        stages += dataclasses.replace(chain, options=once).queries()
    if chain.options.gain:
        # both judges at once: the figures of one file serve all arms, which read of it what they ask for
        both = dataclasses.replace(chain, options=dataclasses.replace(chain.options, roundtrip=_rank(given)))
        stages += [*(chain.electric_model() if given.electric is None else []), *both.scores()]
    stages += _searched_alone(chain.kept()) if arm == "searched" else chain.kept()
    if arm == "unpretrained":
        source = chain_of("source", given, seed)
        stages += source.source_encoder()
        chain = dataclasses.replace(chain, options=dataclasses.replace(chain.options, retriever=source.start))
    if chain.options.labels:
        stages += [*chain.negatives(), *chain.cross_encoder(), *chain.labels()]
    encoder = str(chain.arm / "encoder")
    return [*stages, *chain.target_encoder(), *chain.index(chain.arm, "", encoder), *chain.run(chain.arm, "", encoder)]


def _searched_alone(kept: list[Stage]) -> list[Stage]:
    return [dataclasses.replace(one, options=dataclasses.replace(one.options, keep="constrained == 1")) for one in kept]


def _rank(given: argparse.Namespace) -> int:
    """Return at which rank a query must find its passage; a toy's retriever finds hardly any."""
    return 100 if given.quick else 10


def measure(arm: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Make a cell and return its figures with what made them."""
    stages = commands(arm, given, seed)
    began = time.process_time()
    run_stages(stages)
    seconds = time.process_time() - began
    collection = open_collection(given.target)
    measured = evaluate(collection.qrels("test"), stages[-1].made, METRICS)
    queries = {}
    if arm in WRITTEN:
        chain = chain_of(arm, given, seed)
        written, kept = (load_manifest(folder)["facts"] for folder in (chain.written, chain.arm / "kept"))
        queries = {"written": written["queries"], "kept": kept["queries"]}
    return {
        "arm": arm,
        "seed": seed,
        "target": Path(given.target).name,
        "labelled": Path(given.labelled).name,
        "start_files": identity(given.init),
        "settings": settings_of(given),
        **({"electric_files": identity(given.electric)} if given.electric and WRITTEN.get(arm, {}).get("gain") else {}),
        "queries": queries,
        # stages that other cells had made before are not in it
        "cpu_seconds": round(seconds, 1),
        "commands": [_without_places(command_line(stage), given) for stage in stages],
        "test": measured.means,
        "test_queries": {METRICS[0]: measured.per_query[METRICS[0]].round(4).tolist()},
    }


def _without_places(command: str, given: argparse.Namespace) -> str:
    """Return a command with names in the place of this machine's folders."""
    places = {given.writer: "WRITER", given.electric: "ELECTRIC", str(given.work): "WORK", given.init: "START"}
    for place, name in places.items():
        command = command.replace(place, name) if place else command
    return command


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return what must be the same of all cells."""
    amounts = QUICK if given.quick else Amounts.within(given.budget)
    shared: dict[str, Any] = {"writer_files": identity(given.writer)} if given.writer else {}
    if given.without_pretraining:
        shared["pretraining"] = False
    return {**dataclasses.asdict(amounts), "bfloat16": given.bfloat16, **shared}


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of both tables."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        by_arm.setdefault(one["arm"], []).append(one)
    yield f"{'arm':<13}{'seeds':>6}" + "".join(f"{name:>18}" for name in METRICS) + f"{'written':>10}{'kept':>8}"
    for arm, cells in by_arm.items():
        figures = [mean_and_spread([cell["test"][name] for cell in cells]) for name in METRICS]
        counts = [
            f"{statistics.mean(cell['queries'][name] for cell in cells):.0f}" if cells[0]["queries"] else ""
            for name in ("written", "kept")
        ]
        yield f"{arm:<13}{len(cells):>6}" + "".join(f"{one:>18}" for one in figures) + f"{counts[0]:>10}{counts[1]:>8}"
    pairs = list(BEFORE.items())
    pairs += [(arm, "source") for arm in WRITTEN]
    pairs += [(arm, LEXICAL) for arm in WRITTEN]
    for arm, other in pairs:
        if arm in by_arm and other in by_arm:
            yield compared(by_arm, arm, other)


def compared(by_arm: dict[str, list[dict[str, Any]]], arm: str, other: str) -> str:
    """Return how far one arm is above another in MRR@10, over the seeds that both have."""
    ours = {cell["seed"]: cell["test_queries"][METRICS[0]] for cell in by_arm[arm]}
    theirs = {cell["seed"]: cell["test_queries"][METRICS[0]] for cell in by_arm[other]}
    seeds = sorted(ours) if other == LEXICAL else sorted(ours.keys() & theirs.keys())
    found = difference([ours[seed] for seed in seeds], [theirs[0 if other == LEXICAL else seed] for seed in seeds])
    mean, low, high = found
    return f"{arm:<13}less {other:<13}{mean:+.4f}  ({low:+.4f} to {high:+.4f})"


def main() -> int:
    """Make the cells that are missing, and print the tables of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of results, one JSON a cell")
    parser.add_argument("--work", type=Path, required=True, help="folder of artifacts")
    parser.add_argument("--target", default="medquad")
    parser.add_argument("--labelled", default="nq-qed")
    parser.add_argument("--init", default=None, help="default: the installed MiniLM")
    parser.add_argument("--writer", help="the model that writes queries; with it, all seeds share what it writes")
    parser.add_argument("--electric", help="the model that says what a passage tells of a query, for all seeds")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    parser.add_argument("--budget", type=float, default=60.0, help="as of `condenser adapt`")
    parser.add_argument("--without_pretraining", action="store_true", help="the arms of written queries too")
    parser.add_argument("--bfloat16", action="store_true", help="train and encode in it")
    parser.add_argument("--quick", action="store_true", help="a toy length: shows that it runs, measures nothing")
    given = parser.parse_args()
    results = []
    if given.without_pretraining and "unpretrained" in given.arms:
        given.arms.remove("unpretrained")  # which is `constrained` then
    try:
        given.init = str(local_folder(given.init or default_weights()))
        cells = [(arm, seed if arm != LEXICAL else 0) for seed in given.seeds for arm in given.arms]
        for arm, seed in dict.fromkeys(cells):
            file = given.output / f"{Path(given.target).name}-{arm}-{seed}.json"
            if file.is_file():
                say(f"{file}: up to date")
                results.append(read_json(file))
                if results[-1]["settings"] != settings_of(given):
                    raise UserError("was made with other settings", file, "choose another --output")
                continue
            results.append(measure(arm, given, seed))
            write_json(file, results[-1])
    except UserError as error:
        print(f"adapt_study: error: {error}", file=sys.stderr)
        return 2
    print(*table(results), json.dumps({"cells": len(results)}), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
