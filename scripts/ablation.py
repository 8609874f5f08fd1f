"""Measure what pretraining brings: arms of equal token budgets, then the same fine-tuning with few labels.

A cell is one collection, start, arm, percentage of the training pairs and seed. Arms, each in two stages:

    none                    no pretraining
    mlm                     masked LM, then masked LM
    condenser               Condenser, then Condenser
    condenser+generator     Condenser, then Condenser whose tokens are drawn by the weights of the arm mlm
    mlm+contrastive         masked LM, then masked LM with the contrastive loss
    condenser+cocondenser   Condenser, then coCondenser
    bm25                    words alone, for comparison (no seed)

Arms share their first stage where its objective is the same. Stages of single spans take as many spans a step as make
the real tokens of the documents of a contrastive one (two spans each). Fine-tuning of all arms meets the same labels in
the same order; 0 % is the pretrained encoder as it is. The search is over a pool: the passages that answer the test
queries, and a sample of others. Figures are higher than over the whole collection, and compare arms only.

    python scripts/ablation.py --output results --work /tmp/ablation              # MiniLM, medquad and nq-qed
    python scripts/ablation.py --gpu --output results --work /tmp/ablation        # from random weights, on one GPU
    python scripts/ablation.py --quick --output toy --work /tmp/toy               # a few steps: shows that it runs
    python scripts/ablation.py --dry_run                                          # what there is to do, and its cost
    python scripts/ablation.py --output results --table --markdown                # the tables of what is there

Each cell is a JSON file in --output, written when the cell is done; cells that are there are passed over, a stopped one
goes on in --work. Start the command once for each core: the processes share the cells. docs/pretraining.md tells more.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from condenser.errors import UserError
from condenser.files import read_json, write_json
from condenser.hub import local_folder
from condenser.manifest import identity
from condenser.options import PretrainOptions, SpansOptions
from condenser.talk import say
from eval.evaluation import evaluate
from retrieval.collections import open_collection
from retrieval.options import Bm25Options, EncodeOptions, FinetuneOptions, SearchOptions
from retrieval.quickstart import default_weights
from retrieval.stages import Stage, command_line, run_stages
from scripts.ablation_data import equal_spans, tokens_read, write_labels, write_pool
from scripts.ablation_settings import (
    ARMS,
    GENERATED,
    LEXICAL,
    MINILM,
    PAIRS,
    RANDOM,
    SEEN,
    Settings,
    described,
    reckoned,
    settings_of,
)
from scripts.ablation_table import METRICS, tables


class Cell(NamedTuple):
    """What one file of results is about; ``percent`` is the share of the training pairs."""

    collection: str
    start: str
    arm: str
    percent: int
    seed: int

    @property
    def name(self) -> str:
        """The name of the file."""
        return "-".join(map(str, (Path(self.collection).name, *self[1:]))) + ".json"

    @property
    def unit(self) -> str:
        """What one process does at a time: the cells that share a first stage of pretraining."""
        first = ARMS[self.arm][0] if ARMS.get(self.arm) else "none"
        return f"{Path(self.collection).name}-{self.start}-{first}-{self.seed}"


class Study:
    """One start with one collection: where its artifacts lie, and the commands that make a cell.

    Args:
        collection: folder or name.
        start: name of the start.
        folder: its weights; None for random ones.
        settings: see `Settings`.
        work: folder of artifacts.
    """

    def __init__(self, collection: str, start: str, folder: str | None, settings: Settings, work: Path) -> None:
        self.collection, self.folder, self.settings = collection, folder, settings
        self.root = work / f"{Path(collection).name}-{start}"
        self.locks = self.root / "locks"
        # On a CPU, making a batch is a few thousandths of a step, and the cores are taken.
        self.workers = 4 if on_gpu() else 0
        self.spans = SpansOptions(
            collection=collection,
            tokenizer=folder,
            train_tokenizer=None if folder else settings.vocabulary,
            max_length=settings.max_length,
            output=str(self.root / "spans"),
        )

    def prepare(self, seeds: list[int]) -> None:
        """Make what cells have in common beyond a stage of pretraining: pool, labels, spans and random weights."""
        collection, settings = open_collection(self.collection), self.settings
        write_pool(collection, self.root / "pool", queries=settings.pool_queries, passages=settings.pool_passages)
        for seed in seeds:
            write_labels(collection, self.labels(seed), percents=[*settings.finetune_steps], seed=seed)
        random = [] if self.folder else [Stage("pretrain", self.random(seed)) for seed in seeds]
        run_stages([Stage("spans", self.spans), *random])

    def labels(self, seed: int) -> Path:
        """Return the folder of a seed's shares of the training pairs."""
        return self.root / f"labels-{seed}"

    def random(self, seed: int) -> PretrainOptions:
        """Return what makes a seed's random weights: one step at rate 0."""
        return PretrainOptions(
            objective="mlm",
            data=self.spans.output,
            model_size=self.settings.model_size,
            max_steps=1,
            batch_size=2,
            learning_rate=0.0,
            seed=seed,
            output=str(self.root / f"random-{seed}"),
        )

    def start(self, seed: int) -> str:
        """Return the folder of the weights that all arms start from."""
        return self.folder or self.random(seed).output

    def pretraining(self, cell: Cell) -> list[PretrainOptions]:
        """Return the stages of a cell's arm, in order."""
        settings = self.settings
        stages: list[PretrainOptions] = []
        for number, objective in enumerate(ARMS[cell.arm]):
            has_head = objective in ("condenser", "cocondenser")
            name = "-".join([*ARMS[cell.arm][: number + 1], str(cell.seed)])
            options = PretrainOptions(
                objective=objective,
                data=self.spans.output,
                init=stages[-1].output if stages else self.start(cell.seed),
                max_steps=settings.second_steps if number else settings.first_steps,
                batch_size=settings.second_documents if number else settings.first_spans,
                learning_rate=settings.pretrain_rate,
                head_warmup_steps=0 if number else settings.head_warmup_steps,
                head_layers=settings.head_layers if has_head else None,
                skip_from=settings.skip_from if has_head else None,
                late_mlm=settings.late_mlm if has_head else None,
                mixed_precision=settings.mixed_precision,
                workers=self.workers,
                # The first stage's seed would deal out the spans that it has read once more.
                seed=cell.seed + 1_000_000 * number,
                save_every=100,
                output=str(self.root / name),
            )
            if number and objective not in PAIRS:
                paired = _draws(dataclasses.replace(options, objective=PAIRS[has_head]))
                options = dataclasses.replace(options, batch_size=equal_spans(options.data, **paired))
            stages.append(options)
        if cell.arm == GENERATED:
            generator = self.pretraining(cell._replace(arm="mlm"))
            stages[-1] = dataclasses.replace(
                stages[-1],
                corruption=f"generator:{generator[-1].output}",
                output=str(self.root / f"{GENERATED}-{cell.seed}"),
            )
            stages = [*generator, *stages]
        return stages

    def retriever(self, cell: Cell, start: str) -> tuple[list[Stage], list[Stage], Path]:
        """Return fine-tuning, then encoding and search, and the run."""
        folder, settings = self.cell_folder(cell), self.settings
        labelled = cell.percent > 0
        finetune = FinetuneOptions(
            encoder=start,
            collection=[str(self.labels(cell.seed))],
            split=f"{cell.percent if labelled else 100}",
            dev_split="none",
            # Without labels: one step at rate 0, which changes no weight and writes down how vectors are made.
            max_steps=settings.finetune_steps[cell.percent] if labelled else 1,
            batch_size=settings.finetune_batch if labelled else 2,
            learning_rate=settings.finetune_rate if labelled else 0.0,
            pooling="cls",
            normalize=True,
            temperature=0.05,
            query_max_length=32,
            passage_max_length=settings.max_length,
            mixed_precision=settings.mixed_precision,
            seed=cell.seed,
            output=str(folder / "encoder"),
        )
        pool = str(self.root / "pool")
        encode = EncodeOptions(
            encoder=finetune.output,
            collection=pool,
            dtype="bfloat16" if settings.mixed_precision == "bf16" else "float32",
            output=str(folder / "vectors"),
        )
        search = SearchOptions(
            index=encode.output, encoder=finetune.output, collection=pool, split="test", output=str(folder / "run.trec")
        )
        return [Stage("finetune", finetune)], [Stage("encode", encode), Stage("search", search)], Path(search.output)

    def lexical(self, cell: Cell) -> tuple[list[Stage], Path]:
        """Return the search with BM25 over the pool, and its run."""
        run = self.cell_folder(cell) / "run.trec"
        return [Stage("bm25", Bm25Options(collection=str(self.root / "pool"), k=100, output=str(run)))], run

    def told(self, stage: Stage) -> str:
        """Return a stage's command without the places of this machine."""
        command = command_line(stage).replace(str(self.root), self.root.name)
        return command.replace(self.folder, "START") if self.folder else command

    def cell_folder(self, cell: Cell) -> Path:
        """Return where a cell's own artifacts lie until it is done."""
        return self.root / "cells" / cell.name.removesuffix(".json")

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Make a cell and return its figures with what made them."""
        cpu_seconds: dict[str, float] = {}
        commands: list[str] = []

        def run(name: str, stages: list[Stage]) -> None:
            began = time.process_time()
            run_stages(stages)
            cpu_seconds[name] = round(cpu_seconds.get(name, 0.0) + time.process_time() - began, 1)
            commands.extend(map(self.told, stages))

        pretraining: list[PretrainOptions] = []
        if cell.arm == LEXICAL:
            stages, found = self.lexical(cell)
            run("search", stages)
        else:
            pretraining = self.pretraining(cell)
            for options in pretraining:
                # Arms of another unit may need the stage at the same moment.
                with held(self.locks / Path(options.output).name, wait=True):
                    run("pretrain", [Stage("pretrain", options)])
            finetune, search, found = self.retriever(
                cell, pretraining[-1].output if pretraining else self.start(cell.seed)
            )
            run("finetune", finetune)
            run("search", search)
        pool = open_collection(self.root / "pool")
        result = evaluate(pool.qrels("test"), found, METRICS)
        return {
            **cell._asdict(),
            "start_files": identity(self.folder) if self.folder else "",
            "note": SEEN if cell.start == MINILM else "",
            "collection_files": open_collection(self.collection).fingerprint(),
            "pool": {"files": pool.fingerprint(), "passages": len(pool.lookup()), "queries": len(result.query_ids)},
            "settings": described(self.settings),
            "tokens": [tokens_read(one.data, **_draws(one)) for one in pretraining[-2:]],
            "commands": commands,
            "cpu_seconds": cpu_seconds,
            "means": result.means,
            # In the order of the queries' ids, as text: a line for each value would make long files.
            "per_query": {name: " ".join(f"{one:.4g}" for one in result.per_query[name]) for name in METRICS},
        }


def _draws(options: PretrainOptions) -> dict[str, int]:
    """Return what decides which spans a stage of pretraining reads."""
    return {
        "pairs": options.objective in PAIRS,
        "steps": options.max_steps or 0,
        "batch_size": options.batch_size,
        "seed": options.seed,
    }


def on_gpu() -> bool:
    """Say whether stages run on a GPU."""
    import torch

    return torch.cuda.is_available()


@contextmanager
def held(file: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock that dies with this process; yields False when another has it and one need not wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def cells_of(given: argparse.Namespace, start: str, percents: list[int]) -> list[Cell]:
    """Return all cells, those that share work one after another, whole seeds before others."""
    cells = []
    for seed in given.seeds:
        for first in ("condenser", "mlm", None):
            arms = [arm for arm, stages in ARMS.items() if (stages[0] if stages else None) == first]
            for collection in given.collections:
                cells += [
                    Cell(collection, start, arm, one, seed) for arm in arms if arm in given.arms for one in percents
                ]
    # Without pretraining and labels, weights that are given are the same for every seed.
    same = {cell for cell in cells if cell.arm == "none" and not cell.percent and start != RANDOM}
    cells = [cell for cell in cells if cell not in same or cell.seed == given.seeds[0]]
    return cells + [Cell(collection, start, LEXICAL, 0, 0) for collection in given.collections]


def run_cells(cells: list[Cell], studies: dict[str, Study], given: argparse.Namespace) -> None:
    """Make the cells that are missing, those of one unit at a time, and leave to others what they have in hand."""
    import torch

    torch.set_num_threads(1)  # as many processes as cores are faster than one process with as many threads
    for collection in given.collections:
        with held(studies[collection].root / "prepare.lock", wait=True):
            studies[collection].prepare(given.seeds)
    for unit in dict.fromkeys(cell.unit for cell in cells):
        with held(given.work / "locks" / unit, wait=False) as mine:
            if not mine:
                say(f"{unit}: another process is at it")
                continue
            for cell in (cell for cell in cells if cell.unit == unit and not (given.output / cell.name).is_file()):
                study = studies[cell.collection]
                write_json(given.output / cell.name, study.measure(cell))
                # An encoder is 90 MB, and there are many; what other cells need lies elsewhere.
                shutil.rmtree(study.cell_folder(cell))


def results_of(cells: list[Cell], settings: Settings, output: Path) -> list[dict[str, Any]]:
    """Return the cells that are there.

    Raises:
        UserError: one was made with other settings.
    """
    arms = [LEXICAL, *ARMS]
    there = [cell for cell in cells if (output / cell.name).is_file()]
    results = [read_json(output / cell.name) for cell in sorted(there, key=lambda cell: arms.index(cell.arm))]
    for one in results:
        other = [name for name, value in described(settings).items() if one["settings"].get(name) != value]
        if other:
            file = output / Cell(*(one[name] for name in Cell._fields)).name
            raise UserError(f"was made with another {other[0]}", file, "choose another --output")
    return results


def parser_of() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/results/ablation"), help="results, one JSON a cell")
    parser.add_argument("--work", type=Path, default=Path("ablation-work"), help="folder of artifacts")
    parser.add_argument("--collections", nargs="+", help="default: medquad and nq-qed; with --gpu medquad")
    parser.add_argument("--start", metavar="NAME=DIR", help="default: the installed MiniLM; with --gpu random weights")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--percents", nargs="+", type=int, help="default: 0 1 10 100")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    parser.add_argument("--gpu", action="store_true", help="from random weights, with the steps of a GPU")
    parser.add_argument("--quick", action="store_true", help="a toy length: shows that it runs, measures nothing")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="change settings")
    parser.add_argument("--dry_run", action="store_true", help="print the cells and what they cost, do nothing")
    parser.add_argument("--table", action="store_true", help="print the tables of the cells that are there, do nothing")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    return parser


def main() -> int:
    """Make the cells that are missing, and print the tables of all."""
    given = parser_of().parse_args()
    given.collections = given.collections or (["medquad"] if given.gpu else ["medquad", "nq-qed"])
    try:
        settings = settings_of(gpu=given.gpu, quick=given.quick, changes=given.set)
        percents = given.percents or list(settings.finetune_steps)
        if unknown := [one for one in percents if one not in settings.finetune_steps]:
            raise UserError(f"--percents {unknown[0]} has no number of steps", hint="0, 1, 10 or 100")
        start, folder = RANDOM, None
        if given.start or not given.gpu:
            start, _, folder = (given.start or f"{MINILM}={default_weights()}").partition("=")
            folder = str(local_folder(folder))
        cells = cells_of(given, start, percents)
        results = results_of(cells, settings, given.output)
        if given.dry_run:
            made: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
            minutes = [reckoned(settings, one.arm, one.percent, made[one.collection, one.seed]) for one in cells]
            print(*(f"{one:6.1f}  {cell.name}" for one, cell in zip(minutes, cells, strict=True)), sep="\n")
            print(json.dumps({"cells": len(cells), "done": len(results), "cpu_minutes": round(sum(minutes))}))
            return 0
        if not given.table:
            studies = {one: Study(one, start, folder, settings, given.work) for one in given.collections}
            run_cells(cells, studies, given)
            results = results_of(cells, settings, given.output)
    except UserError as error:
        print(f"ablation: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"cells": len(results), "missing": len(cells) - len(results)}))
    print(
        *(part if isinstance(part, str) else part.render(markdown=given.markdown) for part in tables(results)),
        sep="\n\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
