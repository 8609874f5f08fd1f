"""Hugging Face data sets, local or from the hub, whose columns the user names."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from condenser.errors import UserError, first_line, sample
from condenser.files import open_bytes, refuse
from eval.sts import FIRST_NAMES
from retrieval.formats.base import Collection
from retrieval.formats.files import FileCollection, Layout
from retrieval.formats.lines import QUERY_NAMES, line_parser
from retrieval.formats.training import TrainingCollection, line_file
from retrieval.readers import passage_of
from retrieval.sources import OnBad, RecordFile, Source, json_suffix, open_source, parsed, plain_suffix

_KINDS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_ROLES = (
    "query query_id positive negative passage score positive_scores negative_scores answers sentence1 sentence2 "
    "id title text"
).split()


class Rows:
    """The rows of a data set in memory-mapped Arrow; a position is a row's number, from 0.

    Args:
        dataset: a `datasets.Dataset`.
        place: how messages call it.
        roles: which column plays which part; empty: a column's name says it.
    """

    def __init__(self, dataset: Any, place: str, roles: Mapping[str, str]) -> None:
        self.place = place
        self._roles = dict(roles) or {name: name for name in dataset.column_names}
        self._dataset = dataset.select_columns(list(dict.fromkeys(self._roles.values())))

    def scan(self, on_bad: OnBad = refuse) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield (row, ``name[split]:row``, values by their parts); messages count rows from 1."""
        for number, row in enumerate(self._dataset):
            yield number, self.where(number), self._named(row)

    def read(self, position: int) -> dict[str, Any]:
        """Return a row's values by their parts."""
        return self._named(self._dataset[position])

    def where(self, position: int) -> str:
        """Return ``name[split]:row``."""
        return f"{self.place}:{position + 1}"

    def _named(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {role: row[column] for role, column in self._roles.items()}


class Objects:
    """The objects of a JSON file with the parts that their fields play; read here, where an id stays what it is.

    Args:
        source: the file.
        roles: which field plays which part; empty: a field's name says it.
    """

    def __init__(self, source: Source, roles: Mapping[str, str]) -> None:
        self.place = source.place
        self._source, self._roles = source, roles

    def scan(self, on_bad: OnBad = refuse) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield (position, ``file:line``, values by their parts)."""
        for position, where, raw in self._source.scan(on_bad):
            try:
                values = self._named(raw, where)
            except UserError as error:
                on_bad(error)
                continue
            yield position, where, values

    def read(self, position: int) -> dict[str, Any]:
        """Return the values at a position by their parts."""
        return self._named(self._source.read(position), self.place)

    def where(self, position: int) -> str:
        """Return ``file:line`` of a position."""
        return self._source.where(position)

    def _named(self, raw: Any, where: str) -> dict[str, Any]:
        record = parsed(raw, where)
        return {role: record[name] for role, name in self._roles.items() if name in record} if self._roles else record


def open_dataset(name: str, *, skip_bad: bool = False) -> Collection:
    """Open a data set by folder, file or hub name: ``NAME?query=COLUMN&positive=COLUMN&config=CONFIG``.

    The parts that columns can play are those of lines of texts (docs/formats.md); with ``id`` and ``text``, maybe
    ``title``, the rows are passages. Without any the columns' own names count. No code that comes with a data set
    is run.

    Raises:
        UserError: an unknown part or column (those there are named), or a data set that cannot be read.
    """
    path, _, query = name.partition("?")
    roles = dict(parse_qsl(query, keep_blank_values=True))
    config = roles.pop("config", None)
    for role in roles:
        if role not in _ROLES and not role.startswith("negative_"):
            raise UserError(f"unknown part {role!r}", name, f"known parts: {', '.join(_ROLES)}, config")
    is_json = json_suffix(path) and Path(path).is_file()
    rows, names, identity = _objects(path, roles) if is_json else _rows(path, roles, config)
    settings: dict[str, Any] = {"skip_bad": skip_bad, "identity": f"{query}\n{identity}"}
    title, paths = Path(path).name, [Path(path)] if is_json else []
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    known = set(roles) or names
    if "text" in known and not known & {*QUERY_NAMES, *FIRST_NAMES}:
        corpus = [RecordFile(source, lambda: lambda row, where: (passage_of(row, where),)) for source in rows.values()]
        layout = Layout(corpus, paths, no_queries="a data set of passages has no queries")
        return FileCollection(title, folder, "datasets", layout, **settings)
    files = {split: [line_file(source, lambda: line_parser("datasets", Path()))] for split, source in rows.items()}
    return TrainingCollection(title, folder, "datasets", files, paths, **settings)


def _objects(path: str, roles: Mapping[str, str]) -> tuple[dict[str, Source], set[str], str]:
    """Return the sources by split, the names of the fields, and nothing more to tell the data by than the file."""
    source = open_source(path)
    names = next((set(parsed(raw, where)) for _, where, raw in source.scan()), set[str]())
    return {"train": Objects(source, roles)}, names, ""


def _rows(path: str, roles: Mapping[str, str], config: str | None) -> tuple[dict[str, Source], set[str], str]:
    """Return the sources by split, the names of the columns, and what the data can be told by."""
    splits = _load(path, config)
    for split, dataset in splits.items():
        missing = sorted(set(roles.values()) - set(dataset.column_names))
        if missing:
            there = sample(dataset.column_names, 12)
            raise UserError(f"no column {missing[0]!r}, found {there}", f"{path}[{split}]", "name it as PART=COLUMN")
    rows: dict[str, Source] = {split: Rows(dataset, f"{path}[{split}]", roles) for split, dataset in splits.items()}
    identity = "\n".join(f"{split} {dataset._fingerprint}" for split, dataset in sorted(splits.items()))
    return rows, {column for dataset in splits.values() for column in dataset.column_names}, identity


def _load(name: str, config: str | None) -> dict[str, Any]:
    import datasets

    path, level = Path(name), datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what it logs of a bad file, its error says too
    try:
        if (path / "state.json").is_file():
            return {"train": datasets.load_from_disk(name)}
        if (path / "dataset_dict.json").is_file():
            return dict(datasets.load_from_disk(name))
        if path.is_file():
            kind = _KINDS.get(plain_suffix(path))
            if kind is None:
                raise UserError(f"is no data file of a known kind, expected {', '.join(_KINDS)}", name)
            options = _as_text(path) if kind == "csv" else {}
            return {"train": datasets.load_dataset(kind, data_files={"train": name}, split="train", **options)}
        return dict(datasets.load_dataset(name, config))
    except UserError:
        raise
    except Exception as error:  # what the library raises depends on the data's kind and on the network
        raise UserError(f"cannot read this data set: {first_line(error)}", name) from None
    finally:
        datasets.logging.set_verbosity(level)


def _as_text(path: Path) -> dict[str, Any]:
    """Return how to read CSV as it stands: "007" stays "007", "NA" is a word, and in TSV a quote is a quote."""
    import datasets

    tabs = plain_suffix(path) == ".tsv"
    # newline="": a header may hold quoted line breaks, which are the csv module's to tell.
    with open_bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(stream)
        columns = next(rows, [])
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    as_it_stands = {"features": features, "keep_default_na": False}
    return as_it_stands | ({"sep": "\t", "quoting": csv.QUOTE_NONE} if tabs else {})
