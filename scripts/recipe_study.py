"""Measure what BM25's negatives, mined negatives and fusing with BM25 add, cell by cell; the last lines are a table.

A cell is one collection, start, seed and arm. Arms:

    lexical   BM25 alone (no seed)
    none      fine-tuned with in-batch negatives only
    bm25      + hard negatives from BM25: stage 1 of the recipe
    mined     + those that the bm25 arm's encoder finds, from the same start: stage 2 of the recipe
    fused     the mined arm's run and BM25's, scores normalised for each query, weights chosen on dev

Each cell's figures (dev and test) are a JSON file in --output, written when the cell is done; cells that are there are
passed over, and one that was stopped goes on in --work. All arms train for the same steps of as many queries, so arms
with hard negatives see more passages. Below the table of test figures stand differences of MRR@10 between arms, with
95 % intervals by bootstrap over queries, each query's values averaged over the seeds first.

    python scripts/recipe_study.py --output results --work /tmp/study              # MiniLM, both collections
    python scripts/recipe_study.py --start mine=DIR --seeds 1 2 3 --collections medquad ...
    python scripts/recipe_study.py --quick --output toy --work /tmp/toy            # a few steps: shows that it runs

The default start, all-MiniLM-L6-v2, was trained on MS MARCO and Natural Questions: its figures on nq-qed are not clean.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from condenser.errors import UserError
from condenser.files import read_json, write_json
from condenser.hub import local_folder
from condenser.manifest import identity
from condenser.talk import say
from eval.evaluation import evaluate
from retrieval.collections import open_collection
from retrieval.options import Bm25Options, FuseOptions
from retrieval.quickstart import default_weights
from retrieval.recipe import Recipe, plan, retriever
from retrieval.stages import Stage, command_line, run_stages
from scripts.study_figures import difference, mean_and_spread

ARMS = ("lexical", "none", "bm25", "mined", "fused")
SPLITS = ("dev", "test")
METRICS = ["MRR@10", "nDCG@10", "R@100"]
DIFFERENCES = [("bm25", "none"), ("mined", "none"), ("fused", "mined"), ("fused", "lexical")]
MINILM = "minilm"
SEEN = "has seen MS MARCO and Natural Questions in its own training"


class Cell(NamedTuple):
    """What one file of results is about."""

    collection: str
    start: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the file."""
        return "-".join(map(str, (Path(self.collection).name, self.start, self.arm, self.seed))) + ".json"


class Settings(NamedTuple):
    """How long training lasts, and what is mined."""

    steps: int
    batch_size: int
    negatives: int
    learning_rate: float
    depth: int
    bfloat16: bool


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings; a toy's with --quick."""
    if given.quick:
        return Settings(steps=2, batch_size=4, negatives=1, learning_rate=1e-4, depth=20, bfloat16=False)
    return Settings(given.steps, given.batch_size, given.negatives, given.learning_rate, given.depth, given.bfloat16)


def commands(cell: Cell, start: str, settings: Settings, root: Path) -> tuple[list[Stage], dict[str, str]]:
    """Return the commands that make a cell, and the run of each split; arms share what they have in common."""
    lexical = {
        split: Bm25Options(collection=cell.collection, split=split, output=str(lexical_run(root, split)))
        for split in SPLITS
    }
    by_bm25 = [Stage("bm25", options) for options in lexical.values()]
    if cell.arm == "lexical":
        return by_bm25, {split: options.output for split, options in lexical.items()}
    here = root / f"{cell.start}-{cell.seed}"
    recipe = recipe_of(cell, start, settings)
    if cell.arm == "none":
        stages, _ = retriever(recipe, here, "none", [])
        return stages, {split: str(here / f"none.{split}.trec") for split in SPLITS}
    stages, _ = plan(recipe, here)
    if cell.arm == "bm25":
        last = max(place for place, stage in enumerate(stages) if stage.made.name == f"stage1.{SPLITS[-1]}.trec")
        return stages[: last + 1], {split: str(here / f"stage1.{split}.trec") for split in SPLITS}
    runs = {split: str(here / f"stage2.{split}.trec") for split in SPLITS}
    return (stages if cell.arm == "mined" else stages + by_bm25), runs


def fuse(
    lexical: dict[str, str], dense: dict[str, str], collection: str, folder: Path
) -> tuple[list[Stage], dict[str, str]]:
    """Fuse the runs of both splits with the weights that are best on dev; return the commands and the fused runs."""
    fused = {split: str(folder / f"fused.{split}.trec") for split in SPLITS}
    on_dev, on_test = (
        FuseOptions(runs=[lexical[split], dense[split]], method="minmax", k=100, output=fused[split])
        for split in SPLITS
    )
    chosen = Stage("fuse", replace(on_dev, collection=collection, split="dev"))
    run_stages([chosen])
    weights = read_json(chosen.made.with_name(f"{chosen.made.name}.json"))["weights"]
    applied = Stage("fuse", replace(on_test, weights=weights))
    run_stages([applied])
    return [chosen, applied], fused


def lexical_run(root: Path, split: str) -> Path:
    """Return where BM25's run of a split stands."""
    return root / f"lexical.{split}.trec"


def recipe_of(cell: Cell, start: str, settings: Settings) -> Recipe:
    """Return the two stages of a start and seed as a recipe."""
    finetune = {
        "max_steps": settings.steps,
        "batch_size": settings.batch_size,
        "negatives": settings.negatives,
        "learning_rate": settings.learning_rate,
        "negatives_pool": 30,
        "pooling": "cls",
        "normalize": True,
        "temperature": 0.05,
        "query_max_length": 32,
        "passage_max_length": 64,
        "dev_split": "none",
        "mixed_precision": "bf16" if settings.bfloat16 else "no",
        "seed": cell.seed,
    }
    sections: dict[str, dict[str, Any]] = {
        "finetune": finetune,
        "none": {"negatives": 0, "negatives_pool": None},
        "bm25": {"depth": settings.depth, "seed": cell.seed},
        "mine": {"depth": settings.depth, "seed": cell.seed},
        "encode": {"dtype": "bfloat16" if settings.bfloat16 else "auto"},
        "search": {"k": 100},
    }
    return Recipe(Path(__file__), cell.collection, start, list(SPLITS), sections)


def measure(cell: Cell, start: str, settings: Settings, work: Path) -> dict[str, Any]:
    """Make a cell and return its figures with what made them."""
    root = work / Path(cell.collection).name
    stages, runs = commands(cell, start, settings, root)
    run_stages(stages)
    if cell.arm == "fused":
        lexical = {split: str(lexical_run(root, split)) for split in SPLITS}
        fused, runs = fuse(lexical, runs, cell.collection, root / f"{cell.start}-{cell.seed}")
        stages += fused
    collection = open_collection(cell.collection)
    measured = {split: evaluate(collection.qrels(split), run, METRICS) for split, run in runs.items()}
    return {
        **cell._asdict(),
        "start_files": identity(start),
        "note": SEEN if cell.start == MINILM and cell.arm != "lexical" else "",
        "collection_files": collection.fingerprint(),
        "settings": settings._asdict(),
        "commands": [command_line(stage).replace(str(work), "WORK").replace(start, cell.start) for stage in stages],
        **{split: one.means for split, one in measured.items()},
        "test_queries": {METRICS[0]: measured["test"].per_query[METRICS[0]].round(4).tolist()},
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table: test figures, means over seeds with their spread."""
    yield f"{'collection':<12}{'start':<12}{'arm':<10}{'seeds':>6}" + "".join(f"{name:>18}" for name in METRICS)
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in results:
        groups.setdefault((Path(one["collection"]).name, one["start"], one["arm"]), []).append(one)
    for (collection, start, arm), cells in groups.items():
        figures = [mean_and_spread([cell["test"][name] for cell in cells]) for name in METRICS]
        yield f"{collection:<12}{start:<12}{arm:<10}{len(cells):>6}" + "".join(f"{figure:>18}" for figure in figures)
    yield from differences(groups)
    if any(one["note"] for one in results):
        yield f"{MINILM}: {SEEN}"


def differences(groups: dict[tuple[str, str, str], list[dict[str, Any]]]) -> Iterator[str]:
    """Yield, for each collection and start, how far one arm is above another in MRR@10."""
    metric = METRICS[0]
    for collection, start in dict.fromkeys((collection, start) for collection, start, _ in groups if start):
        for arm, other in DIFFERENCES:
            cells = [groups.get((collection, start if one != "lexical" else "", one)) for one in (arm, other)]
            if None in cells:
                continue
            ours, theirs = ([cell["test_queries"][metric] for cell in some] for some in cells if some)
            mean, low, high = difference(ours, theirs)
            change = f"{mean:+.4f}"
            yield f"{collection:<12}{start:<12}{arm:<10}less {other:<10}{change:>10}  ({low:+.4f} to {high:+.4f})"


def main() -> int:
    """Make the cells that are missing, and print the table of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of results, one JSON a cell")
    parser.add_argument("--work", type=Path, required=True, help="folder of artifacts")
    parser.add_argument("--collections", nargs="+", default=["medquad", "nq-qed"])
    parser.add_argument(
        "--start", action="append", default=[], metavar="NAME=DIR", help="default: the installed MiniLM"
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--negatives", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument(
        "--bfloat16", action="store_true", help="train and encode in it: faster on GPUs and CPUs with AMX"
    )
    parser.add_argument("--quick", action="store_true", help="a toy length: shows that it runs, measures nothing")
    given = parser.parse_args()
    settings = settings_of(given)
    results = []
    try:
        starts = dict(one.split("=", 1) for one in given.start) or {MINILM: default_weights()}
        starts = {name: str(local_folder(folder)) for name, folder in starts.items()}
        cells = [
            Cell(collection, start if arm != "lexical" else "", arm, seed if arm != "lexical" else 0)
            for collection in given.collections
            for start in starts
            for arm in given.arms
            for seed in given.seeds
        ]
        for cell in dict.fromkeys(cells):
            file = given.output / cell.name
            if file.is_file():
                say(f"{file}: up to date")
                results.append(read_json(file))
                if results[-1]["settings"] != settings._asdict():
                    raise UserError("was made with other settings", file, "choose another --output")
                continue
            results.append(measure(cell, starts.get(cell.start, next(iter(starts.values()))), settings, given.work))
            write_json(file, results[-1])
    except UserError as error:
        print(f"recipe_study: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"cells": len(results)}), *table(results), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
