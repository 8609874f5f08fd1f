"""Which format a folder or file is in: told by names first, by the first record then, never guessed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from condenser.errors import UserError, sample
from eval.sts import FIRST_NAMES, SCORE_NAMES, SECOND_NAMES
from retrieval.formats.folders import CORPORA, maybe_one_of
from retrieval.formats.inline import training_files
from retrieval.formats.lines import NEGATIVE_NAMES, POSITIVE_NAMES, QUERY_NAMES, SCORES_NAMES
from retrieval.options import Format
from retrieval.sources import LineFile, json_suffix, open_source, parsed, plain_suffix

_MSMARCO_NAMES = re.compile(r"(collection|corpus|top1000|para)\b", re.I)


def detect(path: Path) -> Format:
    """Return the format of a folder or file.

    Raises:
        UserError: none fits, or the columns of a TSV file have no names; the formats there are are named.
    """
    return _of_folder(path) if path.is_dir() else _of_file(path)


def _of_folder(folder: Path) -> Format:
    if any(maybe_one_of(folder, name) for name in CORPORA) or any(folder.glob("top1000.*")):
        return "msmarco"
    saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if saved or any(folder.glob("*.parquet")) or any(folder.glob("*/*.parquet")):
        return "datasets"
    files = training_files(folder)
    if maybe_one_of(folder, "corpus.jsonl"):
        return "tevatron" if not (folder / "qrels").is_dir() and any(map(_is_tevatron, files)) else "beir"
    if not files:
        here = sample(sorted(entry.name for entry in folder.iterdir()), 5) or "nothing"
        raise _unknown(f"no collection of a known format, found {here}", folder)
    return _of_file(files[0])


def _of_file(file: Path) -> Format:
    suffix = plain_suffix(file)
    if suffix in (".parquet", ".arrow", ".csv"):
        return "datasets"
    if json_suffix(file):
        for _, where, raw in open_source(file).scan():
            return _of_record(parsed(raw, where), where)
        raise UserError("no record in this file", file)
    if _MSMARCO_NAMES.match(file.name):
        return "msmarco"
    if suffix == ".tsv":
        for _, where, line in LineFile(file).scan():
            return _of_columns(file, [cell.strip().lower() for cell in line.split("\t")], where)
        raise UserError("no line in this file", file)
    raise _unknown("unknown kind of file", file)


def _is_tevatron(file: Path) -> bool:
    try:
        return _of_file(file) == "tevatron"
    except UserError:
        return False


def _of_columns(file: Path, cells: list[str], where: str) -> Format:
    if {"id", "text"} <= set(cells):
        return "msmarco"
    if {*QUERY_NAMES, *FIRST_NAMES} & set(cells):
        return _of_record(dict.fromkeys(cells, ""), where)
    if "triples" in file.name and len(cells) == 3:
        return "triples"
    columns = f"{len(cells)} columns without names" if len(cells) > 1 else "one column"
    raise _unknown(
        f"{columns}: expected a first line such as query, positive, negative, or the format by name",
        where,
        f"msmarco:{file} for id, text; pairs: for query, positive; triples: for query, positive, negative; scored: for "
        "text, text, score",
    )


def _of_record(record: dict[str, Any], where: str) -> Format:
    names = {name.lower() for name in record}
    if "positive_ctxs" in names:
        return "dpr"
    if {"positive_passages", "positive_document_ids"} & names:
        return "tevatron"
    if {"query", "positives", "negatives"} <= names and isinstance(record["query"], list):
        return "tevatron"
    if all(names & set(known) for known in (FIRST_NAMES, SECOND_NAMES, SCORE_NAMES)):
        return "scored"
    score_names = {*SCORES_NAMES, *(SCORE_NAMES if "passage" in names else ())}
    has_scores = names & score_names or any(name.endswith(("_score", "_scores")) for name in names)
    if names & set(QUERY_NAMES) and names & {*POSITIVE_NAMES, "passage"}:
        if has_scores:
            return "scored"
        has_negatives = names & set(NEGATIVE_NAMES) or any(name.startswith("negative_") for name in names)
        return "triples" if has_negatives else "pairs"
    if {"id", "contents"} <= names:
        return "pyserini"
    if names & {"_id", "docid", "id"} and names & {"text", "contents"}:
        return "beir"
    if {"text_id", "text"} <= names and isinstance(record["text"], list):
        raise UserError("text holds token ids, expected text", where, "give the raw texts")
    raise _unknown(f"no format has the fields {sample(record, 8) or 'none'}", where)


def _unknown(what: str, where: str | Path, hint: str | None = None) -> UserError:
    formats = ", ".join(name for name in get_args(Format) if name != "auto")
    return UserError(what, where, hint or f"known formats: {formats}; name one as FORMAT:PATH, see docs/formats.md")
