"""A retriever for a corpus without judgements, in one command: the verb ``adapt``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from condenser.artifacts import refuse_overwriting
from condenser.errors import UserError
from condenser.files import write_json
from retrieval.adapt_chain import Chain
from retrieval.adapt_options import AdaptOptions
from retrieval.collections import open_collection
from retrieval.quickstart import figure_lines, measure
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
            lines = [*figure_lines(self.rows), ""]
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
    given = (options.retriever, options.writer, options.electric, options.cross_encoder)
    refuse_overwriting(options.output, options.corpus, options.labelled, options.init, *given)
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
        rows = [{"name": name, **measure(corpus, run, options.measure)} for name, run in measured.items()]
    result = Adapted(options.output, rows, [command_line(stage) for stage in stages])
    write_json(Path(options.output) / "adapt.json", dataclasses.asdict(result))
    return result
