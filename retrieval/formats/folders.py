"""Folders of files tied together by ids: BEIR, MS MARCO (with RocketQA's titles) and Pyserini."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from condenser.errors import UserError, sample
from retrieval.formats.base import Collection
from retrieval.formats.files import FileCollection, Layout
from retrieval.passages import PassageFile, PassageStore
from retrieval.readers import passage_file, passage_parser
from retrieval.records import Passage
from retrieval.sources import PACKED_SUFFIXES, RecordFile, json_suffix, open_source

# What a file in such a folder is, by its name without .gz or .zst; "" is the split of a file for all of them.
CORPORA = ("collection.tsv", "corpus.tsv", "para.txt")  # of MS MARCO
_INNER = ("qrels", "negatives", "scores")
_QUERIES = (r"queries\.(?:(?P<split>.+)\.)?(?:tsv|jsonl)", r"topics\.(?P<split>.+)\.tsv", r"(?P<split>.+)\.query\.txt")
QRELS = (r"qrels/(?P<split>.+)\.(?:tsv|txt)", r"qrels\.(?:(?P<split>.+)\.)?(?:tsv|txt)")
_NEGATIVES = (r"negatives/(?P<split>.+)\.jsonl", r"(?P<split>.+)\.negatives\.tsv", r"qidpidtriples\.(?P<split>\w+)\b.*")
_CANDIDATES = (r"top1000\.(?P<split>\w+)(?:\.tsv|\.txt)?",)
_SCORES = (r"scores/(?P<split>.+)\.tsv", r"scores\.(?P<split>.+)\.tsv")


def open_beir(path: Path, name: str, *, skip_bad: bool = False) -> Collection:
    """Open a folder with ``corpus.jsonl``, or such a file alone.

    Raises:
        UserError: no corpus, or the same file twice, packed and not.
    """
    if path.is_file():
        return _corpus_alone(path, name, "beir", skip_bad)
    corpus = one_of(path, "corpus.jsonl")
    return _collection(path, name, "beir", [passage_file(corpus)], [corpus], skip_bad)


def open_msmarco(path: Path, name: str, *, skip_bad: bool = False) -> Collection:
    """Open a folder with ``collection.tsv``, ``corpus.tsv`` or ``para.txt``, or such a file alone.

    Raises:
        UserError: no corpus, or more than one.
    """
    if path.is_file():
        return _corpus_alone(path, name, "msmarco", skip_bad)
    found = [file for known in CORPORA if (file := maybe_one_of(path, known))]
    if not found:
        here = sample(sorted(entry.name for entry in path.iterdir()), 5) or "nothing"
        raise UserError(f"no collection.tsv, corpus.tsv or para.txt (or .gz, .zst), found {here}", path)
    if len(found) > 1:
        raise UserError(f"both {found[0].name} and {found[1].name} are here", path, "keep one of them")
    titles = maybe_one_of(path, "para.title.txt") if found[0].name.startswith("para.txt") else None
    if titles is None:
        return _collection(path, name, "msmarco", [passage_file(found[0])], found, skip_bad)
    return _collection(path, name, "msmarco", [_titled(found[0], titles)], [found[0], titles], skip_bad)


def open_pyserini(path: Path, name: str, *, skip_bad: bool = False) -> Collection:
    """Open a folder of JSON files of ``{"id", "contents"}``, or such a file alone.

    Raises:
        UserError: no file of passages.
    """
    if path.is_file():
        return _corpus_alone(path, name, "pyserini", skip_bad)
    others = re.compile("queries|topics|qrels|negatives|scores|manifest")
    corpus = [file for file in sorted(path.iterdir()) if json_suffix(file) and not others.match(file.name)]
    if not corpus:
        here = sample(sorted(entry.name for entry in path.iterdir()), 5) or "nothing"
        raise UserError(f"no .json or .jsonl files of passages (or .gz, .zst), found {here}", path)
    return _collection(path, name, "pyserini", [passage_file(file) for file in corpus], corpus, skip_bad)


def one_of(folder: Path, name: str) -> Path:
    """Return the file ``name``, packed or not; UserError when there is none, or both."""
    found = maybe_one_of(folder, name)
    if found is None:
        here = sample(sorted(entry.name for entry in folder.iterdir()), 5) or "nothing"
        raise UserError(f"no {name} (or .gz, .zst) in this collection, found {here}", folder)
    return found


def maybe_one_of(folder: Path, name: str) -> Path | None:
    """Return the file ``name``, packed or not, or None; UserError when there are both."""
    found = [file for packing in ("", *PACKED_SUFFIXES) if (file := folder / f"{name}{packing}").is_file()]
    if len(found) > 1:
        raise UserError(f"both {found[0].name} and {found[1].name} are here", folder, "keep one of them")
    return found[0] if found else None


def by_split(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the files of a folder whose names match, by the split in their names.

    Raises:
        UserError: two files for one split.
    """
    found: dict[str, Path] = {}
    for file in sorted([*folder.iterdir(), *(file for inner in _INNER for file in folder.glob(f"{inner}/*"))]):
        name = file.relative_to(folder).as_posix()
        for packing in PACKED_SUFFIXES:
            name = name.removesuffix(packing)
        match = next((match for pattern in patterns if (match := re.fullmatch(pattern, name))), None)
        if match is None or not file.is_file():
            continue
        split = match["split"] or ""
        if split in found:
            both = f"both {found[split].relative_to(folder)} and {file.relative_to(folder)} are here"
            raise UserError(both, folder, "keep one of them")
        found[split] = file
    return found


def _collection(
    folder: Path, name: str, format: str, corpus: list[PassageFile], corpus_paths: list[Path], skip_bad: bool
) -> Collection:
    here = sample(sorted(entry.name for entry in folder.iterdir()), 5)
    expected = "queries.jsonl (or" if format == "beir" else "queries.SPLIT.tsv (or queries.tsv, SPLIT.query.txt; also"
    qrels = {split or "all": file for split, file in by_split(folder, QRELS).items()}
    negatives = by_split(folder, _CANDIDATES) | by_split(folder, _NEGATIVES)
    layout = Layout(
        corpus=corpus,
        corpus_paths=corpus_paths,
        queries=by_split(folder, _QUERIES),
        qrels=qrels,
        negatives=negatives,
        scores=by_split(folder, _SCORES),
        no_queries=f"no {expected} .gz, .zst) in this collection, found {here}",
        qrels_place=folder / "qrels" if format == "beir" else folder,
    )
    return FileCollection(name, folder, format, layout, skip_bad=skip_bad)


def _corpus_alone(path: Path, name: str, format: str, skip_bad: bool) -> Collection:
    layout = Layout([passage_file(path)], [path], no_queries="a file of passages has no queries", qrels_place=path)
    return FileCollection(name, path.parent, format, layout, skip_bad=skip_bad)


def _titled(texts: Path, titles: Path) -> PassageFile:
    """Join RocketQA's two files, texts and titles by passage id; a passage may have no title."""
    store = cache(lambda: PassageStore([passage_file(titles)]))

    def make_parser() -> Callable[[Any, str], Sequence[Passage]]:
        parse = passage_parser(texts)

        def join(raw: Any, where: str) -> Sequence[Passage]:
            return [
                passage._replace(title=title.text) if (title := store().get(passage.id)) else passage
                for passage in parse(raw, where)
            ]

        return join

    return RecordFile(open_source(texts), make_parser)
