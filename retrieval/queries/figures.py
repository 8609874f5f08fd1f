"""What is known of written queries, in columns: what stands beside them, what is counted here, what judges scored."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from condenser.errors import UserError, sample
from condenser.files import identifier, read_records
from condenser.talk import Meter, say
from retrieval.bm25 import stems
from retrieval.collections import Collection
from retrieval.passages import FirstLines, hash64
from retrieval.queries.conditions import check_figure_name
from retrieval.queries.pool import QUERIES, Written, written_in
from retrieval.records import batched, folded

NAN = float("nan")
SCORES = "scores"
"""Under which name a query's metadata holds its figures."""

_AT_ONCE = 2048


@dataclass
class Columns:
    """Written queries in the order of their file, without their texts.

    Attributes:
        ids: (queries,) strings.
        passages: (queries,) uint64, the hash of the passage's id.
        texts: (queries,) uint64, the hash of the text, upper and lower case, forms of letters and blanks aside.
        blank: (queries,) bool, whether there is no text.
        words: (queries,) float64, how long the texts are.
        overlap: (queries,) float64, the share of the words that stand in the passage; NaN of a text of stop words.
        figures: (queries,) float64 by name; NaN where a query has none.
    """

    ids: np.ndarray
    passages: np.ndarray
    texts: np.ndarray
    blank: np.ndarray
    words: np.ndarray
    overlap: np.ndarray
    figures: dict[str, np.ndarray]
    _rows: FirstLines = field(repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def add_scores(self, path: str | Path) -> list[str]:
        """Take the figures of a file of JSON lines ``{"_id", NAME: number or null, ...}``, one for each query.

        Returns:
            The names of figures that were here and are those of the file now.

        Raises:
            UserError: with ``file:line`` a query that is not here or stands twice, a name that no condition could
                hold, a value that is no number; queries that the file lacks.
        """
        columns: dict[str, np.ndarray] = {}
        seen = np.zeros(len(self), bool)
        for number, record in read_records(path):
            where = f"{path}:{number}"
            name = identifier(record.pop("_id", None), where)
            row = self._rows.setdefault(name, 0) - 1  # no row is 0 there: this one is not kept
            if row < 0:
                raise UserError(f"query {name!r} is not among the {len(self):,} written ones", where)
            if seen[row]:
                raise UserError(f"query {name!r} stands twice", where)
            seen[row] = True
            for figure, value in record.items():
                if figure not in columns:
                    check_figure_name(figure, where)
                    columns[figure] = np.full(len(self), NAN)
                columns[figure][row] = _number(figure, value, where)
        if not seen.all():
            lacking = self.ids[~seen]
            raise UserError(f"{len(lacking):,} queries have no line, such as {sample(lacking[:4])}", path)
        replaced = sorted(columns.keys() & self.figures.keys())
        self.figures |= columns
        return replaced


def read_columns(folder: Path, collection: Collection) -> Columns:
    """Read a folder of written queries and what they bring with them.

    Those are ``log_prob``, ``tokens``, ``log_prob_per_token`` and ``constrained`` (1 or 0); counted here are ``words``,
    ``overlap`` (the share of a query's words, stop words and repeats left out, that stand in its passage, as BM25 takes
    words; none where nothing is left of it) and ``passages`` (for how many the same text was written). Figures of an
    earlier filtering stay as they are.

    Args:
        folder: of the queries.
        collection: the same folder, opened.

    Raises:
        UserError: with ``file:line`` an id that stands twice, a passage that is not in the corpus, what is no query of
            `condenser queries generate`; no query at all.
    """
    file = folder / QUERIES
    ids: list[np.ndarray] = []
    passages, texts, blank = array("Q"), array("Q"), array("b")
    own = {name: array("d") for name in ("log_prob", "log_prob_per_token", "tokens", "words", "overlap", "constrained")}
    earlier: dict[str, array[float]] = {}
    rows = FirstLines()
    count = 0
    with Meter("queries", unit="queries") as meter:
        for block in batched(_records(file), _AT_ONCE):
            # An array of strings holds short ones in 16 bytes, where a str takes 60.
            ids.append(np.array([query.id for _, query, _ in block], np.dtypes.StringDType()))
            own["overlap"].extend(_overlaps(block, collection))
            for where, query, scores in block:
                count += 1
                if rows.setdefault(query.id, count) != count:
                    raise UserError(f"query id {query.id!r} stands twice", where)
                text = folded(query.text)
                passages.append(hash64(query.passage_id))
                texts.append(hash64(text))
                blank.append(not text)
                own["log_prob"].append(query.log_prob)
                own["log_prob_per_token"].append(query.log_prob / query.tokens if query.tokens else NAN)
                own["tokens"].append(query.tokens)
                own["words"].append(len(query.text.split()))
                own["constrained"].append(query.decoder.get("mode") == "constrained")
                for name, value in scores.items():
                    column = earlier.setdefault(name, array("d"))
                    column.extend([NAN] * (count - 1 - len(column)))
                    column.append(value)
            meter.advance(len(block))
    if not count:
        raise UserError("no query in this file", file)
    figures = {name: np.frombuffer(column) for name, column in own.items()}
    columns = Columns(
        ids=np.concatenate(ids),
        passages=np.frombuffer(passages, np.uint64),
        texts=np.frombuffer(texts, np.uint64),
        blank=np.frombuffer(blank, bool),
        words=figures["words"],
        overlap=figures["overlap"],
        figures=figures,
        _rows=rows,
    )
    columns.figures["passages"] = passages_of_text(columns.texts, columns.passages).astype(np.float64)
    for name, column in earlier.items():
        column.extend([NAN] * (count - len(column)))
        columns.figures[name] = np.frombuffer(column)
    return columns


def passages_of_text(texts: np.ndarray, passages: np.ndarray) -> np.ndarray:
    """Return for each query for how many passages its text was written, (queries,) int64."""
    order, new_text, new_pair = _sorted_pairs(texts, passages)
    starts = np.flatnonzero(new_text)
    counts = np.add.reduceat(new_pair.astype(np.int64), starts) if len(starts) else np.zeros(0, np.int64)
    found = np.empty(len(texts), np.int64)
    found[order] = np.repeat(counts, np.diff(starts, append=len(texts)))
    return found


def repeats(texts: np.ndarray, passages: np.ndarray) -> np.ndarray:
    """Say which queries have the text of an earlier one for the same passage, (queries,) bool."""
    order, _, new_pair = _sorted_pairs(texts, passages)
    found = np.empty(len(texts), bool)
    found[order] = ~new_pair
    return found


def _sorted_pairs(texts: np.ndarray, passages: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an order of the rows by text, passage and row, and where in it a new text and a new pair begin."""
    order = np.lexsort((passages, texts))
    new_text, new_passage = (
        np.r_[True, column[order][1:] != column[order][:-1]][: len(order)] for column in (texts, passages)
    )
    return order, new_text, new_text | new_passage


def _records(file: Path) -> Iterator[tuple[str, Written, dict[str, float]]]:
    """Yield each query with its ``file:line`` and the figures of an earlier filtering."""
    for query, (number, record) in zip(written_in(file), read_records(file), strict=True):
        where = f"{file}:{number}"
        scores = record["metadata"].get(SCORES) or {}
        if not isinstance(scores, dict):
            raise UserError(f"metadata.{SCORES} is {scores!r}, expected an object", where)
        for name in scores:
            check_figure_name(name, where)
        yield where, query, {name: _number(name, value, where) for name, value in scores.items()}


def _overlaps(block: Sequence[tuple[str, Written, Mapping[str, float]]], collection: Collection) -> list[float]:
    """Return the share of each query's words that stand in its passage, NaN where it has none."""
    store = collection.lookup()
    passages: dict[str, Any] = {}  # a passage's queries stand together: each is read and stemmed once for them all
    for where, query, _ in block:
        if query.passage_id not in passages:
            passage = store.get(query.passage_id)
            if passage is None:
                raise UserError(f"its passage {query.passage_id!r} is not in the corpus", where)
            passages[query.passage_id] = passage.whole.casefold()
    words = map(set, stems([*passages.values(), *(query.text.casefold() for _, query, _ in block)]))
    in_passage = {name: next(words) for name in passages}
    asked = ((query.passage_id, next(words)) for _, query, _ in block)
    return [len(own & in_passage[name]) / len(own) if own else NAN for name, own in asked]


def _number(name: str, value: object, where: str) -> float:
    if value is None:
        return NAN
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} is {value!r}, expected a number or null", where)
    return float(value)


def tell_replaced(names: Sequence[str], path: str | Path) -> None:
    """Say in one line which figures a file has replaced."""
    if names:
        say(f"{path}: its {', '.join(names)} in place of those that were there")
