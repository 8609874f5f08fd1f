"""A retriever for a corpus without judgements, in one command: the verb ``adapt``."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from condenser.artifacts import refuse_overwriting
from condenser.errors import UserError
from condenser.files import write_json
from condenser.talk import say
from retrieval.adapt_chain import Chain
from retrieval.adapt_options import AdaptOptions
from retrieval.collections import open_collection
from retrieval.quickstart import METRICS
from retrieval.stages import command_line, run_stages

_TOO_SMALL = (
    "a corpus too small to train on, or of passages too short: do without by --pretraining false, and by --gain false "
    "or --electric FOLDER"
)


@dataclass
class Adapted:
    """Where the retriever is, its figures where there were judgements, and what made it."""

    output: str
    rows: list[dict[str, Any]]
    commands: list[str]

    def __str__(self) -> str:
        lines = []
        if self.rows:
            width = max(len(row["name"]) for row in self.rows)
            lines = [f"{'':<{width}}" + "".join(f"{metric:>10}" for metric in METRICS)]
            lines += [f"{row['name']:<{width}}" + "".join(f"{row[m]:>10.3f}" for m in METRICS) for row in self.rows]
            lines.append("")
        lines += [
            f"The retriever is {self.output}/encoder, its index {self.output}/index; "
            f"{self.output}/kept/report.md tells of the queries. Made by:"
        ]
        return "\n".join([*lines, *(f"  {command}" for command in self.commands)])


def adapt(options: AdaptOptions) -> Adapted | str:
    """Pretrain on a corpus, write queries for its passages, keep the plausible and answerable ones, train on them.

    Each stage is a command with a folder or file of its own, and is passed over when that is there; a killed run goes
    on where it stopped. No judgement of the corpus is read, but for ``measure``.

    Returns:
        The retriever's place, and with ``measure`` its figures before and after; with ``dry_run`` the commands.

    Raises:
        UserError: no weights to start from, a source without train judgements, and what the stages raise.
    """
    chain = Chain.of(options)
    stages, measured = chain.stages()
    if options.dry_run:
        return "\n".join(command_line(stage) for stage in stages)
    _check_output(options)
    corpus = open_collection(chain.corpus)
    if options.measure is not None:
        corpus.qrels(options.measure)
    if chain.learns_from_source:
        open_collection(options.labelled).qrels("train")
    chain.check_models()
    try:
        run_stages(stages)
    except UserError as error:
        if error.where != str(chain.spans_folder):
            raise
        # The stage speaks of its own options.
        raise UserError(error.what, error.where, _TOO_SMALL) from None
    rows = []
    if options.measure is not None:
        from eval.evaluation import evaluate

        qrels = corpus.qrels(options.measure)
        for name, run in measured.items():
            means = evaluate(qrels, run, METRICS).means
            rows.append({"name": name, **{metric: float(means[metric]) for metric in METRICS}})
            say(f"{name}: {json.dumps(rows[-1])}")
    result = Adapted(options.output, rows, [command_line(stage) for stage in stages])
    write_json(Path(options.output) / "adapt.json", dataclasses.asdict(result))
    return result


def _check_output(options: AdaptOptions) -> None:
    """Raise UserError for an output that is, or lies in, what is read."""
    read = [options.corpus, options.labelled, options.init]
    read += [options.retriever, options.writer, options.electric, options.cross_encoder]
    refuse_overwriting(options.output, *read)
    for name in filter(None, read):
        if Path(options.output).exists() and Path(name).exists() and os.path.samefile(name, options.output):
            raise UserError("is read, and would be written into", options.output, "choose another --output")
