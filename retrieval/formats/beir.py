"""BEIR's layout: corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv in one folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from condenser.errors import UserError, sample
from condenser.files import identifier, read_records
from retrieval.formats.base import Collection, Negatives, Qrels
from retrieval.formats.files import FileCollection, Layout
from retrieval.readers import passage_file

PACKINGS = ("", ".gz", ".zst")


def open_beir(folder: Path, name: str, *, skip_bad: bool = False) -> Collection:
    """Open a folder in BEIR's layout.

    ``corpus.jsonl`` must be there, ``queries.jsonl`` and ``qrels/SPLIT.tsv`` may; besides, ``negatives/SPLIT.jsonl``
    may give hard negatives and ``scores/SPLIT.tsv`` a teacher's scores. Each also ``.gz`` or ``.zst``.

    Raises:
        UserError: no corpus, or the same file twice, packed and not.
    """
    corpus, queries = one_of(folder, "corpus.jsonl"), maybe_one_of(folder, "queries.jsonl")
    negatives: dict[str, tuple[list[Path], Callable[[Qrels], Negatives]]] = {
        split: ([file], partial(_read_negatives, file))
        for split, file in by_split(folder / "negatives", ".jsonl").items()
    }
    layout = Layout(
        corpus=[passage_file(corpus)],
        corpus_paths=[corpus],
        queries={"": queries} if queries else {},
        qrels=by_split(folder / "qrels", ".tsv"),
        negatives=negatives,
        scores=by_split(folder / "scores", ".tsv"),
        no_queries="no queries.jsonl (or .gz, .zst) in this collection",
        qrels_place=folder / "qrels",
    )
    return FileCollection(name, folder, "beir", layout, skip_bad=skip_bad)


def by_split(folder: Path, suffix: str) -> dict[str, Path]:
    """Return the files ``SPLIT<suffix>`` of a folder by split, packed or not."""
    found: dict[str, Path] = {}
    for packing in PACKINGS:
        for file in sorted(folder.glob(f"*{suffix}{packing}")):
            split = file.name.removesuffix(packing).removesuffix(suffix)
            if split in found:
                raise UserError(f"both {found[split].name} and {file.name} are here", folder, "keep one of them")
            found[split] = file
    return found


def one_of(folder: Path, name: str) -> Path:
    """Return the file ``name``, packed or not; UserError when there is none, or both."""
    found = maybe_one_of(folder, name)
    if found is None:
        here = sample(sorted(entry.name for entry in folder.iterdir()), 5) or "nothing"
        raise UserError(f"no {name} (or .gz, .zst) in this collection, found {here}", folder)
    return found


def maybe_one_of(folder: Path, name: str) -> Path | None:
    """Return the file ``name``, packed or not, or None; UserError when there are both."""
    found = [file for packing in PACKINGS if (file := folder / f"{name}{packing}").is_file()]
    if len(found) > 1:
        raise UserError(f"both {found[0].name} and {found[1].name} are here", folder, "keep one of them")
    return found[0] if found else None


def _read_negatives(path: Path, _: Qrels) -> Negatives:
    negatives: Negatives = {}
    for number, record in read_records(path):
        where = f"{path}:{number}"
        if "query_id" not in record or not isinstance(record.get("negatives"), list):
            raise UserError(f"expected query_id and a list negatives, found {sample(record) or 'nothing'}", where)
        query_id = identifier(record["query_id"], where)
        if query_id in negatives:
            raise UserError(f"query id {query_id!r} stands already on an earlier line", where)
        negatives[query_id] = [identifier(passage_id, where) for passage_id in record["negatives"]]
    return negatives
