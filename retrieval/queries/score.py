"""The verb ``queries score``: a folder of written queries to a line of figures for each, in a file beside it."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from condenser.artifacts import Workspace, refuse_overwriting, result_config
from condenser.errors import RunFailed, UserError, nearest
from condenser.faults import fault_point
from condenser.files import atomic_write, atomic_write_bytes, prepare_parent, read_records, write_json
from condenser.manifest import identity
from condenser.options import is_given
from condenser.talk import Meter, say
from retrieval.collections import open_collection
from retrieval.queries.options import QueriesScoreOptions
from retrieval.queries.pool import QUERIES, Written, check_written, written_in
from retrieval.records import Passage, batched

if TYPE_CHECKING:
    from retrieval.queries.judges import Judge

# Queries that are judged and kept at once: a killed run loses no more than these.
_AT_ONCE = 2048
# The option that names each judge's model, and others that are for it alone.
_MODELS = {"lm": "writer", "electric": "electric", "roundtrip": "encoder"}
_SETTINGS = {
    "lm": ("passage_max_length", "prompt"),
    "electric": ("passage_max_length",),
    "roundtrip": ("depth", "dtype"),
}


def score_queries(options: QueriesScoreOptions) -> Path:
    """Judge the queries of a folder and write a JSON line for each, in the folder's order.

    A line has the query's ``_id`` and the figures of the judges that are asked for, see `retrieval.queries.judges`;
    the folder itself stays as it is. Vectors of the passages, for ``roundtrip``, stay in OUTPUT.work. A killed run
    goes on after its last block of queries, to the same bytes.

    Returns:
        The file, beside which OUTPUT.json holds what made it, and the means.

    Raises:
        UserError: judges that are not known or lack their model, a model without its judge, a folder that holds no
            written queries, a query for a passage that is not there, and what loading the models raises.
    """
    judges = _judges_of(options)
    models = {name: str(getattr(options, _MODELS[name])) for name in judges}
    refuse_overwriting(options.output, options.queries, *models.values())
    output, folder = Path(options.output), Path(options.queries)
    if output.is_dir():
        raise UserError("is a folder, expected a file to write", output, "choose another name")
    prepare_parent(output)
    manifest = check_written(folder)
    passages = open_collection(folder, "beir").lookup()
    count = _count(folder, passages)
    inputs = {"queries": str(manifest["fingerprint"])} | {name: identity(model) for name, model in models.items()}
    config = result_config(options) | {"with_": ",".join(judges)}
    work = output.with_name(f"{output.name}.work")
    workspace = Workspace(work / "scores", "scores of queries", config=config, inputs=inputs, resumable=True)
    try:
        with workspace:
            if not workspace.done:
                _judge(options, judges, passages, count, work, workspace.path)
                workspace.commit({"queries": count})
        means = _join(sorted(workspace.output.glob("*.jsonl")), output, options.depth)
        made_by: dict[str, Any] = {"queries": options.queries, "queries_fingerprint": inputs["queries"]}
        for name, model in models.items():
            made_by |= {_MODELS[name]: model, f"{_MODELS[name]}_fingerprint": inputs[name]}
            made_by |= {setting: getattr(options, setting) for setting in _SETTINGS[name]}
        write_json(f"{output}.json", made_by | {"with": judges, "count": count, "means": means})
        shutil.rmtree(workspace.output)
    finally:
        with suppress(OSError):
            work.rmdir()  # where no vectors are in it
    say(f"scored {count:,} queries: " + ", ".join(f"{name} {value:.4g}" for name, value in means.items()))
    return output


def _judges_of(options: QueriesScoreOptions) -> list[str]:
    """Return the judges that are asked for, each once, in the order of their figures."""
    asked = [name.strip() for name in options.with_.split(",")]
    for name in asked:
        if name not in _MODELS:
            close = nearest(name, _MODELS)
            hint = f"did you mean {close}?" if close else f"judges: {', '.join(_MODELS)}"
            raise UserError(f"--with has an unknown judge {name!r}", hint=hint)
    for name, model in _MODELS.items():
        if name in asked and not getattr(options, model):
            raise UserError(f"--{model} is missing, which --with {name} asks")
        for setting in (model, *_SETTINGS[name]):
            of_asked = any(setting in _SETTINGS[one] for one in asked)
            if name not in asked and not of_asked and is_given(options, setting):
                raise UserError(f"--{setting} goes with --with {name}", hint=f"--with {','.join([*asked, name])}")
    return [name for name in _MODELS if name in asked]


def _count(folder: Path, passages: Mapping[str, Passage]) -> int:
    """Return the number of queries; UserError where there is none, or one whose passage is not here."""
    count = 0
    for query in written_in(folder / QUERIES):
        count += 1
        if query.passage_id not in passages:
            raise UserError(
                f"query {query.id!r} was written for passage {query.passage_id!r}, which is not here", folder
            )
    if not count:
        raise UserError("holds no query", folder / QUERIES)
    return count


def _judge(
    options: QueriesScoreOptions,
    names: Sequence[str],
    passages: Mapping[str, Passage],
    count: int,
    work: Path,
    place: Path,
) -> None:
    """Write a file of lines for each block of queries, but for those that are there."""
    judges = {name: _load(name, options, passages, work) for name in names}
    with Meter("queries score", count, "queries") as meter:
        for number, block in enumerate(batched(written_in(Path(options.queries) / QUERIES), _AT_ONCE)):
            file = place / f"{number:06d}.jsonl"
            if not file.is_file():
                lines: list[dict[str, Any]] = [{"_id": query.id} for query in block]
                for name, judge in judges.items():
                    for line, query, figures in zip(lines, block, judge(block), strict=True):
                        _refuse_infinite(figures, query, str(getattr(options, _MODELS[name])))
                        line.update(figures)
                with atomic_write_bytes(file) as stream:
                    stream.writelines(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
                fault_point("block-scored")
            meter.advance(len(block))


def _load(name: str, options: QueriesScoreOptions, passages: Mapping[str, Passage], work: Path) -> Judge:
    # Imported here, because mistakes up to here should show before torch is loaded.
    from condenser.scorer import Scorer
    from retrieval.corpus_index import index_of_corpus
    from retrieval.queries.judges import ElectricJudge, LanguageModelJudge, RoundTripJudge
    from retrieval.queries.writers import load_writer

    device, batch_tokens = options.device, options.batch_tokens
    if name == "lm":
        length, prompt = options.passage_max_length, options.prompt
        writer = load_writer(str(options.writer), device=device, passage_max_length=length, prompt=prompt)
        return LanguageModelJudge(writer, passages, length, batch_tokens)
    if name == "electric":
        model = str(options.electric)
        scorer = Scorer.load(model, method="electric", device=device, batch_tokens=batch_tokens)
        return ElectricJudge(scorer, passages, options.passage_max_length)
    index = index_of_corpus(
        options.queries, str(options.encoder), work, device=device, dtype=options.dtype, batch_tokens=batch_tokens
    )
    return RoundTripJudge(index, options.depth, batch_tokens)


def _refuse_infinite(figures: Mapping[str, float], query: Written, model: str) -> None:
    for name, value in figures.items():
        if not math.isfinite(value):
            raise RunFailed(f"gives {name} {value} to query {query.id!r}, expected a finite number", model)


def _join(blocks: Sequence[Path], output: Path, depth: int) -> dict[str, float]:
    """Write the blocks one behind the other, and return the mean of each figure.

    Of the ranks these are the shares of queries whose passage is found first, and within the depth.
    """
    totals: dict[str, float] = defaultdict(float)
    count = 0
    with atomic_write(output) as stream:
        for block in blocks:
            for _, line in read_records(block):
                stream.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE).decode())
                count += 1
                line.pop("_id")
                if (rank := line.pop("roundtrip", None)) is not None:
                    line.update(roundtrip_first=rank == 1, roundtrip_found=rank <= depth)
                for name, value in line.items():
                    totals[name] += value
    return {name: total / count for name, total in totals.items()}
