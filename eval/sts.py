"""Semantic textual similarity: do vector similarities order sentence pairs as people do?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from condenser.errors import UserError, sample
from condenser.files import read_lines, read_records

FIRST_NAMES = ("sentence1", "source1", "sentence_a", "text1")
SECOND_NAMES = ("sentence2", "source2", "sentence_b", "text2")
SCORE_NAMES = ("score", "label", "similarity", "relatedness_score")


class Pair(NamedTuple):
    """Two sentences and how alike people find them."""

    first: str
    second: str
    score: float


class Sts(NamedTuple):
    """Correlations of people's scores with each similarity of the vectors."""

    pairs: int
    spearman_cosine: float
    pearson_cosine: float
    spearman_dot: float
    pearson_dot: float


def load_pairs(path: str | Path) -> list[Pair]:
    """Read scored sentence pairs.

    JSON lines hold ``sentence1``, ``sentence2`` and ``score``. Tab-separated lines (quotes are text) have a first line
    of column names with these, or none: then three columns are sentence, sentence, score, and seven or more are those
    of the STS benchmark (score, sentence, sentence in columns 5 to 7). Also known are ``source1``, ``sentence_A``,
    ``text1`` and ``label``, ``similarity``, ``relatedness_score``. ``.gz`` and ``.zst`` too.

    Raises:
        UserError: a column that is missing, a score that is not a number, fewer than two pairs; with ``file:line``.
    """
    suffixes = Path(path).suffixes
    pairs = list(_json_pairs(path) if ".jsonl" in suffixes else _tsv_pairs(path))
    if len(pairs) < 2:
        raise UserError(f"{len(pairs)} scored pairs, expected two or more", path)
    if len({pair.score for pair in pairs}) == 1:
        raise UserError(f"all {len(pairs)} pairs have the score {pairs[0].score}: nothing to correlate", path)
    return pairs


def _json_pairs(path: str | Path) -> list[Pair]:
    pairs = []
    for number, record in read_records(path):
        where = f"{path}:{number}"
        names = {name.lower(): name for name in record}
        first, second, score = (
            record[names[_find(names, known, where)]] for known in (FIRST_NAMES, SECOND_NAMES, SCORE_NAMES)
        )
        pairs.append(_pair(first, second, score, where))
    return pairs


def _tsv_pairs(path: str | Path) -> list[Pair]:
    pairs = []
    columns: tuple[int, int, int] | None = None
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        cells = line.split("\t")
        if columns is None:
            columns, is_header = _columns(cells, where)
            if is_header:
                continue
        if max(columns) >= len(cells):
            raise UserError(f"{len(cells)} columns, expected at least {max(columns) + 1}", where)
        first, second, score = (cells[column] for column in columns)
        pairs.append(_pair(first, second, score, where))
    return pairs


def _columns(cells: list[str], where: str) -> tuple[tuple[int, int, int], bool]:
    """Return where the two sentences and the score stand, and whether this line only names them."""
    names = [cell.strip().lower() for cell in cells]
    if any(name in names for name in FIRST_NAMES):
        first, second, score = (
            names.index(_find(names, known, where)) for known in (FIRST_NAMES, SECOND_NAMES, SCORE_NAMES)
        )
        return (first, second, score), True
    if len(cells) == 3:
        return (0, 1, 2), False
    if len(cells) >= 7:
        return (5, 6, 4), False
    raise UserError(f"{len(cells)} columns, expected 3 (sentence, sentence, score) or names in the first line", where)


def _find(names: Any, known: Sequence[str], where: str) -> str:
    for name in known:
        if name in names:
            return name
    raise UserError(f"no column {known[0]!r}, found {sample(names, 8)}", where)


def _pair(first: object, second: object, score: Any, where: str) -> Pair:
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"score is {score!r}, expected a number", where)
    if not isinstance(first, str) or not isinstance(second, str):
        raise UserError("a sentence is not a text", where)
    return Pair(first, second, number)


def correlate(first: np.ndarray, second: np.ndarray, scores: Sequence[float]) -> Sts:
    """Correlate scores with the similarities of paired vectors.

    Args:
        first: vectors of the first sentences, shape (pairs, dimension).
        second: those of the second ones.
        scores: people's scores, (pairs,).

    Raises:
        UserError: a vector of length zero, or similarities that are all the same.
    """
    first, second = first.astype(np.float64), second.astype(np.float64)
    dot = (first * second).sum(axis=1)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    if not lengths.all():
        raise UserError(f"the vectors of pair {int(np.argmin(lengths)) + 1} have length zero: no cosine")
    cosine = dot / lengths
    if np.ptp(dot) == 0 or np.ptp(cosine) == 0:
        raise UserError("all similarities are the same: nothing to correlate")
    judged = np.asarray(scores, dtype=np.float64)
    return Sts(
        len(judged), spearman(cosine, judged), pearson(cosine, judged), spearman(dot, judged), pearson(dot, judged)
    )


def pearson(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation of two arrays of one length."""
    return float(np.corrcoef(first, second)[0, 1])


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return Spearman's correlation: Pearson's of the ranks, equal values sharing their mean rank."""
    return pearson(_mean_ranks(first), _mean_ranks(second))


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[inverse]
