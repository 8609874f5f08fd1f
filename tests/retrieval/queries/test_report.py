"""The report of `queries filter`: its text to the letter, and the numbers in it against plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from retrieval.passages import FirstLines
from retrieval.queries.figures import Columns
from retrieval.queries.report import Example, Spread, Step, Summary, report, summarise

NAN = float("nan")

WRITTEN = Summary(
    queries=1200,
    passages=400,
    words=(6.25, 3.0, 6.0, 9.5),
    full_overlap=0.125,
    mean_overlap=0.5,
    repeated=30,
    figures={
        "gain": Spread((-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 12.345678), 7),
        "roundtrip": Spread((), 1200),
    },
)
KEPT = Summary(
    queries=1,
    passages=1,
    words=(3.0, 3.0, 3.0, 3.0),
    full_overlap=0.0,
    mean_overlap=None,
    repeated=0,
    figures={"gain": Spread((2.5,) * 7, 0), "roundtrip": Spread((), 1)},
)

EXPECTED = """\
# Written queries, filtered

- from: `pool`
- `--keep`: `gain > 2`

## Step by step

| step    | dropped |  left |
| ------- | ------: | ----: |
| written |       0 | 1,200 |
| --keep  |   1,199 |     1 |

Each comparison of the condition alone, over the queries that came to it:

| comparison | met by | figure missing |
| ---------- | -----: | -------------: |
| `gain > 2` |      1 |              7 |

## Written and kept

|                                      | written | kept |
| ------------------------------------ | ------: | ---: |
| queries                              |   1,200 |    1 |
| passages with a query                |     400 |    1 |
| words, mean                          |     6.2 |  3.0 |
| words, 10% have at most              |       3 |    3 |
| words, 50% have at most              |       6 |    3 |
| words, 90% have at most              |     9.5 |    3 |
| overlap, mean                        |   0.500 |    - |
| overlap of 1                         |   12.5% | 0.0% |
| text written for other passages, too |      30 |    0 |

## Figures

Quantiles; missing: queries that have no such figure.

| figure               |  0% | 10% | 25% | 50% | 75% | 90% |  100% | missing |
| -------------------- | --: | --: | --: | --: | --: | --: | ----: | ------: |
| `gain`, written      |  -1 |   0 | 0.5 |   1 |   2 |   3 | 12.35 |       7 |
| `gain`, kept         | 2.5 | 2.5 | 2.5 | 2.5 | 2.5 | 2.5 |   2.5 |       0 |
| `roundtrip`, written |   - |   - |   - |   - |   - |   - |     - |   1,200 |
| `roundtrip`, kept    |   - |   - |   - |   - |   - |   - |     - |       1 |

## Kept, at random

- p1-g0: what is \\*gout\\*
    - **A \\<b\\>title** Uric acid.

## Dropped, at random

- p2-g0 (--keep: gain missing): (blank)
    - Two lines.
"""


def test_the_text_to_the_letter() -> None:
    found = report(
        source="pool",
        settings={"`--keep`": "`gain > 2`"},
        steps=[Step("written", 0, 1200), Step("--keep", 1199, 1)],
        alone=[("gain > 2", 1, 7)],
        written=WRITTEN,
        kept=KEPT,
        kept_examples=[Example("p1-g0", "what is *gout*", "p1", "A <b>title", "Uric acid.")],
        dropped_examples=[Example("p2-g0", " ", "p2", "", "Two\nlines.", "--keep: gain missing")],
    )
    assert found == EXPECTED


def test_without_condition_and_examples_their_parts_are_left_out() -> None:
    found = report(
        source="pool",
        settings={},
        steps=[Step("written", 0, 1)],
        alone=[],
        written=WRITTEN,
        kept=KEPT,
        kept_examples=[],
        dropped_examples=[],
    )
    assert "comparison" not in found
    assert "at random" not in found
    assert found.startswith("# Written queries, filtered\n\n- from: `pool`\n\n## Step by step\n")


def test_long_texts_are_cut() -> None:
    example = Example("p1-g0", "long " * 100, "p1", "", "text " * 100)
    settings = {"source": "pool", "settings": {}, "steps": [], "alone": [], "written": WRITTEN, "kept": KEPT}
    found = report(**settings, kept_examples=[example], dropped_examples=[]).splitlines()[-2:]  # type: ignore[arg-type]
    assert found[0].endswith("long ...")
    assert found[1].endswith("text ...")
    assert len(found[0]) < 220 and len(found[1]) < 260


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [0, 1, 3], [4]])
def test_numbers_are_those_of_the_rows(rows: list[int]) -> None:
    texts, passages = [1, 2, 1, 1, 3], [7, 7, 8, 9, 9]
    words, overlap, gain = [3.0, 4, 5, 6, 7], [1.0, 0.5, 0, 1, NAN], [NAN, 1.0, 2, 4, NAN]
    columns = Columns(
        ids=np.array(list("abcde"), np.dtypes.StringDType()),
        passages=np.array(passages, np.uint64),
        texts=np.array(texts, np.uint64),
        blank=np.zeros(5, bool),
        words=np.array(words),
        overlap=np.array(overlap),
        figures={"gain": np.array(gain)},
        _rows=FirstLines(),
    )
    mask = np.isin(np.arange(5), rows)
    found = summarise(columns, mask)
    known = [overlap[row] for row in rows if not math.isnan(overlap[row])]
    gains = [gain[row] for row in rows if not math.isnan(gain[row])]
    assert (found.queries, found.passages) == (len(rows), len({passages[row] for row in rows}))
    chosen = [words[row] for row in rows]
    assert found.words == (np.mean(chosen), *(np.percentile(chosen, share) for share in (10, 50, 90)))
    assert found.mean_overlap == (np.mean(known) if known else None)
    assert found.full_overlap == known.count(1) / len(rows)
    owners = [{passages[other] for other in rows if texts[other] == texts[row]} for row in rows]
    assert found.repeated == sum(len(one) > 1 for one in owners)
    expected = tuple(np.percentile(gains, (0, 10, 25, 50, 75, 90, 100))) if gains else ()
    assert found.figures == {"gain": Spread(expected, len(rows) - len(gains))}
