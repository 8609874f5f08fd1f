"""Files of training lines: DPR, Tevatron, pairs, triples and scored pairs of texts, MS MARCO's top-1000 lists."""

from __future__ import annotations

import re
from pathlib import Path

from condenser.errors import UserError, sample
from retrieval.formats.base import Collection
from retrieval.formats.folders import CORPORA, QRELS, by_split, maybe_one_of
from retrieval.formats.lines import line_parser
from retrieval.formats.training import LineFile, TrainingCollection, line_file
from retrieval.readers import passage_file
from retrieval.sources import json_suffix, open_source, plain_suffix

_SPLITS = ("train", "dev", "validation", "valid", "eval", "test")
_NO_TRAINING_LINES = re.compile(r"(corpus|collection|queries|topics|qrels|manifest|readme|dataset_infos?)\b", re.I)


def open_training(path: Path, name: str, format: str, *, skip_bad: bool = False) -> Collection:
    """Open a file of training lines as the split ``train``, or a folder of them by the splits in their names.

    A file belongs to the split that its name holds as a word (dev.jsonl, biencoder-nq-dev.json), else to train.
    A ``corpus.jsonl`` beside the lines of Tevatron holds the passages.

    Raises:
        UserError: no file of training lines; lines of ids alone without a corpus.
    """
    folder = path if path.is_dir() else path.parent
    files = training_files(path) if path.is_dir() else [path]
    if not files:
        here = sample(sorted(entry.name for entry in path.iterdir()), 5) or "nothing"
        raise UserError(f"no .json, .jsonl or .tsv file of training lines (or .gz, .zst), found {here}", path)
    splits: dict[str, list[LineFile]] = {}
    for file in files:
        splits.setdefault(split_of(file) if path.is_dir() else "train", []).append(_open_lines(file, format))
    corpus = maybe_one_of(folder, "corpus.jsonl") if format == "tevatron" else None
    if format == "tevatron" and corpus is None:
        _refuse_ids_alone(files[0])
    return TrainingCollection(
        name,
        folder,
        format,
        splits,
        files,
        corpus=[passage_file(corpus)] if corpus else [],
        corpus_paths=[corpus] if corpus else [],
        skip_bad=skip_bad,
        qrels=by_split(folder, QRELS) if format == "msmarco" and path.is_dir() else None,
    )


def training_files(folder: Path) -> list[Path]:
    """Return the files of a folder that may hold training lines."""
    return [
        file
        for file in sorted(folder.iterdir())
        if (json_suffix(file) or plain_suffix(file) == ".tsv" or file.name.startswith("top1000."))
        and file.is_file()
        and not _NO_TRAINING_LINES.match(file.name)
    ]


def is_top1000(path: Path) -> bool:
    """Tell whether this is one of MS MARCO's top-1000 lists, or a folder of them without another corpus."""
    if path.is_file():
        return path.name.startswith("top1000.")
    return not any(maybe_one_of(path, name) for name in CORPORA) and any(path.glob("top1000.*"))


def split_of(file: Path) -> str:
    """Return the split that a file's name holds as a word; train when it holds none."""
    words = re.split(r"[^a-z]+", file.name.lower())
    return next((split for split in _SPLITS if split in words), "train")


def _open_lines(file: Path, format: str) -> LineFile:
    return line_file(open_source(file), lambda: line_parser(format, file))


def _refuse_ids_alone(file: Path) -> None:
    for _, where, lines in _open_lines(file, "tevatron").scan(lambda error: None):
        if lines and not lines[0].passages and lines[0].positives:
            what = "this line names passages by id, and no corpus.jsonl (or .gz, .zst) stands beside it"
            raise UserError(what, where, "put the corpus, with docid and text, into the same folder")
        return
