"""The verb `queries filter`: figures, steps, ties, what is missing; what training reads; resume; messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condenser.artifacts import Workspace
from condenser.errors import UserError
from condenser.manifest import load_manifest
from retrieval.cli import main
from retrieval.collections import open_collection
from retrieval.examples import read_examples
from retrieval.mine import mine
from retrieval.options import MineOptions
from retrieval.passages import FirstLines
from retrieval.queries.figures import Columns, passages_of_text, read_columns, repeats
from retrieval.queries.filter import filter_queries, select
from retrieval.queries.options import QueriesFilterOptions
from retrieval.queries.pool import KIND, Written, check_written, read_written, write_qrels
from tests.folders import assert_same_files

PASSAGES = {
    "p1": ("Gout", "Uric acid crystals cause pain in the joints."),
    "p2": ("", "The Rhine is a river of 1,230 km."),
    "p3": ("Straße", "A street in German, and no cause of gout."),
}
# id -> passage, text, log-probability, tokens, constrained
POOL = {
    "p1-g0": ("p1", "what causes gout", -4.0, 4, 0),
    "p1-g1": ("p1", "gout pains in a joint", -6.0, 6, 1),
    "p1-g2": ("p1", "what is it", -2.0, 4, 0),
    "p1-g3": ("p1", "What causes  GOUT", -3.0, 4, 0),
    "p1-g4": ("p1", "  ", -0.5, 1, 0),
    "p2-g0": ("p2", "how long is the rhine", -8.0, 4, 1),
    "p2-g1": ("p2", "what is it", -4.0, 4, 0),
    "p3-g0": ("p3", "STRASSE streets", -9.0, 3, 0),
}
SCORES = [  # log-probabilities by another writer are in place of the queries' own
    {"_id": "p2-g0", "gain": 3, "roundtrip": 1, "log_prob": -1.5},
    {"_id": "p1-g0", "gain": 2.5, "roundtrip": 1, "log_prob": -1.5},
    {"_id": "p1-g1", "gain": 0.5, "roundtrip": 3, "log_prob": -1.5},
    {"_id": "p1-g2", "gain": None, "roundtrip": 101, "log_prob": -1.5},
    {"_id": "p1-g3", "gain": 9, "roundtrip": 1, "log_prob": -1.5},
    {"_id": "p1-g4", "gain": -1, "roundtrip": 101, "log_prob": -1.5},
    {"_id": "p2-g1", "gain": 1, "roundtrip": 7, "log_prob": -1.5},
    {"_id": "p3-g0", "roundtrip": 2, "log_prob": -1.5},
]


def write_pool(folder: Path, pool: dict[str, tuple[str, str, float, int, int]] = POOL, **metadata: Any) -> Path:
    """Write a folder as `queries generate` does; ``metadata`` goes into each query's."""
    with Workspace(folder, KIND, config={}, inputs={}) as workspace:
        passages = [{"_id": one, "title": title, "text": text} for one, (title, text) in PASSAGES.items()]
        (workspace.path / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in passages))
        lines = []
        for name, (passage, text, log_prob, tokens, constrained) in pool.items():
            mode = {"mode": "constrained" if constrained else "sample", "seed": 7}
            record = json.loads(Written(name, text, passage, mode, None, log_prob, tokens).line)
            record["metadata"] |= metadata
            lines.append(json.dumps(record) + "\n")
        (workspace.path / "queries.jsonl").write_text("".join(lines))
        write_qrels(workspace.path, ((name, one[0]) for name, one in pool.items()))
        return workspace.commit({"queries": len(pool), "collection": "mine"})


def write_lines(file: Path, records: list[Any]) -> str:
    file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return str(file)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pool(tmp_path_factory.mktemp("filter") / "pool")


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lines(tmp_path_factory.mktemp("scores") / "scores.jsonl", SCORES)


Filter = Callable[..., list[str]]


@pytest.fixture()
def kept(pool: Path, scores: str, tmp_path: Path) -> Filter:
    """Filter the pool and return the ids that are left."""

    def keep(**options: Any) -> list[str]:
        given = {"queries": str(pool), "scores": [scores], "output": str(tmp_path / "out")} | options
        return [one.id for one in read_written(filter_queries(QueriesFilterOptions(**given)))]

    return keep


def test_figures_by_hand(pool: Path) -> None:
    columns = read_columns(pool, open_collection(pool))
    assert columns.ids.tolist() == list(POOL)
    figures = {name: column.tolist() for name, column in columns.figures.items()}
    assert figures["log_prob"] == [one[2] for one in POOL.values()]
    assert figures["log_prob_per_token"] == [-1.0, -1.0, -0.5, -0.75, -0.5, -2.0, -1.0, -3.0]
    assert figures["tokens"] == [4, 6, 4, 4, 1, 4, 4, 3]
    assert figures["words"] == [3, 5, 3, 3, 0, 5, 3, 2]
    assert figures["constrained"] == [0, 1, 0, 0, 0, 1, 0, 0]
    assert figures["passages"] == [1, 1, 2, 1, 1, 1, 2, 1]
    # stems: what, caus, gout; gout, pain, joint; nothing but stop words and short ones; ... how, long, rhine; ...
    expected = [2 / 3, 1, 0, 2 / 3, np.nan, 1 / 3, 0, 1]
    assert figures["overlap"] == pytest.approx(expected, nan_ok=True)


def test_blank_texts_and_repeats_go_in_any_case(kept: Filter, capsys: pytest.CaptureFixture[str]) -> None:
    assert kept() == ["p1-g0", "p1-g1", "p1-g2", "p2-g0", "p2-g1", "p3-g0"]
    said = capsys.readouterr().err
    assert "blank texts: 1 dropped, 7 left" in said
    assert "repeats for the same passage: 1 dropped, 6 left" in said
    assert "scores.jsonl: its log_prob in place of those that were there" in said
    assert "kept 6 of 8 queries, for 3 passages" in said


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("gain > 1", ["p1-g0", "p2-g0"]),
        # the median of all that were written and have a gain: -1, 0.5, 1, 2.5, 3, 9
        ("gain >= q0.5", ["p1-g0", "p2-g0"]),
        ("not gain >= q0.5", ["p1-g1", "p1-g2", "p2-g1", "p3-g0"]),
        ("roundtrip <= 3 and not passages > 1", ["p1-g0", "p1-g1", "p2-g0", "p3-g0"]),
        ("log_prob == -1.5 and log_prob_per_token == -0.5", ["p1-g2"]),
        ("constrained == 1 or overlap == 1", ["p1-g1", "p2-g0", "p3-g0"]),
    ],
)
def test_a_condition(kept: Filter, keep: str, expected: list[str]) -> None:
    assert kept(keep=keep) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"per_passage": 1}, ["p1-g2", "p2-g1", "p3-g0"]),
        ({"per_passage": 1, "by": "gain"}, ["p1-g0", "p2-g0", "p3-g0"]),
        ({"per_passage": 1, "by": "-gain"}, ["p1-g1", "p2-g1", "p3-g0"]),
        # of equals the highest id; what has no gain comes last
        ({"per_passage": 2, "by": "log_prob"}, ["p1-g1", "p1-g2", "p2-g0", "p2-g1", "p3-g0"]),
        ({"per_passage": 2, "by": "gain", "max_queries": 4}, ["p1-g0", "p1-g1", "p2-g0", "p2-g1"]),
        ({"max_queries": 3, "by": "log_prob"}, ["p2-g0", "p2-g1", "p3-g0"]),
        ({"max_queries": 5, "by": "gain"}, ["p1-g0", "p1-g1", "p2-g0", "p2-g1", "p3-g0"]),
        ({"keep": "roundtrip < 7", "max_queries": 1, "by": "-roundtrip"}, ["p2-g0"]),
    ],
)
def test_the_best(kept: Filter, options: dict[str, Any], expected: list[str]) -> None:
    assert kept(**options) == expected


PAIRS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["x", "y", "z"]), st.sampled_from([1.0, 2.0, None])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.integers(1, 3), st.integers(1, 6), st.booleans())
def test_steps_are_those_of_sorted_lists(
    tmp_path_factory: pytest.TempPathFactory, pairs: Any, per_passage: int, most: int, lowest: bool
) -> None:
    """Against plain Python: first of each pair, then sorted by passage, cut, and cut again."""

    ids = [f"{passage}-g{number}" for number, (passage, _, _) in enumerate(pairs)]
    numbers = [np.array([ord(one[place]) for one in pairs], np.uint64) for place in (0, 1)]
    figure = np.array([np.nan if one is None else one for _, _, one in pairs])
    columns = Columns(
        ids=np.array(ids, np.dtypes.StringDType()),
        passages=numbers[0],
        texts=numbers[1],
        blank=numbers[1] == ord("z"),
        words=figure,
        overlap=figure,
        figures={"f": figure},
        _rows=FirstLines(),
    )
    asked = {text: {passage for passage, other, _ in pairs if other == text} for _, text, _ in pairs}
    assert passages_of_text(numbers[1], numbers[0]).tolist() == [len(asked[text]) for _, text, _ in pairs]
    assert repeats(numbers[1], numbers[0]).tolist() == [
        pair[:2] in [other[:2] for other in pairs[:place]] for place, pair in enumerate(pairs)
    ]
    rows = [
        (value is None, (value or 0) * (1 if lowest else -1), [-ord(letter) for letter in name], name, passage)
        for place, (name, (passage, text, value)) in enumerate(zip(ids, pairs, strict=True))
        if text != "z" and (passage, text) not in [other[:2] for other in pairs[:place]]
    ]
    by_passage = [sorted(row for row in rows if row[-1] == passage)[:per_passage] for passage in "abc"]
    best = sorted(row for some in by_passage for row in some)[:most]
    options = QueriesFilterOptions(
        queries="pool", output="out", per_passage=per_passage, max_queries=most, by="-f" if lowest else "f"
    )
    if not rows:
        with pytest.raises(UserError, match="their texts are blank"):
            select(columns, None, options)
        return
    left = select(columns, None, options).left
    assert {ids[row] for row in np.flatnonzero(left)} == {row[3] for row in best}


def test_the_folder_is_a_collection_and_a_pool_again(
    pool: Path, scores: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["queries", "filter", str(pool), "--scores", scores, "--keep", "gain >= 1", "--per_passage", "1"]
    assert main([*words, "--by=-gain", "--output", str(tmp_path / "out")]) == 0
    out = tmp_path / "out"
    assert capsys.readouterr().out.strip() == str(out)
    collection = open_collection(out)
    examples = read_examples(collection, "train")
    found = [(one.query_id, one.text, one.positives) for one in examples]
    assert found == [("p1-g0", "what causes gout", ("p1",)), ("p2-g1", "what is it", ("p2",))]
    assert [passage.id for passage in collection.passages()] == list(PASSAGES)
    assert os.path.samefile(out / "corpus.jsonl", pool / "corpus.jsonl")
    mined = mine(MineOptions(collection=str(out), split="train", bm25=True, n=1, output=str(tmp_path / "negatives")))
    assert mined.counts.queries == 2
    record = json.loads((out / "queries.jsonl").read_text().splitlines()[0])
    assert record["metadata"]["log_prob"] == -4.0  # what stood there stays
    assert record["metadata"]["scores"]["log_prob"] == -1.5
    assert (record["metadata"]["scores"]["gain"], record["metadata"]["scores"]["words"]) == (2.5, 3.0)
    facts = check_written(out)["facts"]
    assert facts == {"collection": "mine", "queries": 2, "passages": 2, "written": 8}
    # The figures went along: the text was written for two passages, though one of them lost it.
    again = filter_queries(
        QueriesFilterOptions(queries=str(out), keep="gain >= 1 and passages == 2", output=str(tmp_path / "again"))
    )
    assert [one.id for one in read_written(again)] == ["p2-g1"]


def test_missing_figures_are_counted_and_written_as_null(kept: Filter, tmp_path: Path, capsys: Any) -> None:
    assert kept(keep="gain > 100 or roundtrip == 101") == ["p1-g2"]
    assert "missing: gain for 2 queries; no comparison holds there" in capsys.readouterr().err
    record = json.loads((tmp_path / "out" / "queries.jsonl").read_text())
    assert record["metadata"]["scores"]["gain"] is None
    assert "| `gain > 100`       |      0 |              2 |" in (tmp_path / "out" / "report.md").read_text()


def test_later_scores_win(kept: Filter, tmp_path: Path, capsys: pytest.CaptureFixture[str], scores: str) -> None:
    other = write_lines(tmp_path / "other.jsonl", [{"_id": one, "gain": 1, "new": 2} for one in POOL])
    assert len(kept(scores=[scores, other], keep="gain == 1 and new == 2")) == 6
    assert "other.jsonl: its gain in place of those that were there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*SCORES, {"_id": "p9-g0", "gain": 1}], "s.jsonl:9: query 'p9-g0' is not among the 8 written ones"),
        ([*SCORES, SCORES[0]], "s.jsonl:9: query 'p2-g0' stands twice"),
        (SCORES[1:7], "s.jsonl: 2 queries have no line, such as 'p2-g0', 'p3-g0'"),
        ([], "s.jsonl: 8 queries have no line, such as 'p1-g0', 'p1-g1', 'p1-g2', ..."),
        ([{"_id": "p2-g0", "gain": "3"}], "s.jsonl:1: gain is '3', expected a number or null"),
        ([{"_id": "p2-g0", "gain": True}], "s.jsonl:1: gain is True, expected a number or null"),
        ([{"_id": "p2-g0", "gain": [1]}], "s.jsonl:1: gain is [1], expected a number or null"),
        ([{"_id": "p2-g0", "a gain": 1}], "s.jsonl:1: a figure is called 'a gain', expected a letter"),
        ([{"gain": 1}], "s.jsonl:1: id is None, expected a string"),
        (['{"_id": "p2-g0", "gain": NaN}'], "s.jsonl:1: not valid JSON"),
        (["[1]"], "s.jsonl:1: expected a JSON object, found an array"),
    ],
)
def test_scores_at_fault(kept: Filter, tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        kept(scores=[write_lines(tmp_path / "s.jsonl", lines)])
    assert message in str(caught.value)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["s.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "gian > 1"}, "--keep: character 1: no figure is called 'gian' (did you mean gain?)"),
        ({"keep": "gain >"}, "--keep: character 7: found the end, expected a number"),
        ({"per_passage": 1, "by": "-gian"}, "--by: no figure is called 'gian' (did you mean gain?)"),
        ({"by": "gain"}, "--by goes with --per_passage or --max_queries"),
        ({"scores": ["nowhere.jsonl"]}, "nowhere.jsonl: no such file"),
        (
            {"keep": "gain > 2.5 and roundtrip > q0.5 and words > 99"},
            "none of the 8 queries is left; alone, gain > 2.5 leaves 1, roundtrip > q0.5 leaves 3, words > 99 leaves 0",
        ),
    ],
)
def test_options_at_fault(kept: Filter, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        kept(**options)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_queries_at_fault(pool: Path, tmp_path: Path, kept: Filter) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            kept(queries=str(folder), scores=[])

    refused(tmp_path / "nowhere", "no such folder; expected a written queries folder")
    lost = write_pool(tmp_path / "lost", POOL | {"p9-g0": ("p9", "what", -1.0, 1, 0)})
    refused(lost, r"queries.jsonl:9: its passage 'p9' is not in the corpus")
    refused(write_pool(tmp_path / "odd", scores={"a b": 1}), "queries.jsonl:1: a figure is called 'a b'")
    refused(write_pool(tmp_path / "list", scores=[1]), r"queries.jsonl:1: metadata.scores is \[1\], expected an object")
    refused(write_pool(tmp_path / "none", {}), "queries.jsonl: no query in this file")
    refused(write_pool(tmp_path / "blank", {"p1-g4": POOL["p1-g4"]}), "none of the 1 queries is left: their texts are")
    with Workspace(tmp_path / "twice", KIND, config={}, inputs={}) as workspace:
        (workspace.path / "corpus.jsonl").write_text((pool / "corpus.jsonl").read_text())
        (workspace.path / "queries.jsonl").write_text((pool / "queries.jsonl").read_text() * 2)
        workspace.commit({})
    refused(tmp_path / "twice", "queries.jsonl:9: query id 'p1-g0' stands twice")
    (lost / "queries.jsonl").write_text("{}\n")
    refused(lost, "queries.jsonl: has 3 bytes")


def test_again_it_is_up_to_date_and_other_scores_are_named(
    pool: Path, scores: str, kept: Filter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = write_lines(tmp_path / "copy.jsonl", SCORES)
    first = kept(keep="gain > 1", scores=[copy])
    capsys.readouterr()
    assert kept(keep="gain > 1", scores=[scores]) == first  # where the file lies is no difference
    assert "up to date" in capsys.readouterr().err
    write_lines(Path(copy), [one | {"gain": 7} for one in SCORES])
    with pytest.raises(UserError, match=r"was made with other settings: scores 1: '\w+' -> '\w+'"):
        kept(keep="gain > 1", scores=[copy])
    with pytest.raises(UserError, match="keep: 'gain > 1' -> 'gain > 2'"):
        kept(keep="gain > 2")
    with pytest.raises(UserError, match="which is read"):
        kept(output=str(pool / "inside"))


@pytest.mark.parametrize("place", ["commit-begun", "manifest-written"])
def test_a_killed_run_is_made_good(pool: Path, scores: str, kept: Filter, tmp_path: Path, place: str) -> None:
    words = [str(pool), "--scores", scores, "--keep", "gain > 1", "--output", str(tmp_path / "killed")]
    command = [sys.executable, "-m", "retrieval.cli", "queries", "filter", *words]
    done = subprocess.run(command, env=os.environ | {"CONDENSER_FAULT": place}, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    kept(keep="gain > 1", output=str(tmp_path / "killed"))
    kept(keep="gain > 1", output=str(tmp_path / "whole"))
    assert load_manifest(tmp_path / "killed", verify=True)["fingerprint"]
    for folder in ("killed", "whole"):
        (tmp_path / folder / "manifest.json").unlink()
    assert_same_files(tmp_path / "killed", tmp_path / "whole")


def test_neither_texts_nor_passages_stay_in_memory(tmp_path: Path) -> None:
    with Workspace(tmp_path / "pool", KIND, config={}, inputs={}) as workspace:
        passages = ({"_id": f"p{number}", "text": f"passage {number} " + "of words " * 1000} for number in range(50))
        (workspace.path / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in passages))
        texts = (f"passage {number} " + "is long " * 200 for number in range(500))
        queries = (Written(f"q{i}", text, f"p{i // 10}", {}, None, -1.0, 3) for i, text in enumerate(texts))
        (workspace.path / "queries.jsonl").write_text("".join(query.line for query in queries))
        workspace.commit({})
    collection = open_collection(tmp_path / "pool")
    read_columns(tmp_path / "pool", collection)  # what is imported and looked up at the first time
    tracemalloc.start()
    columns = read_columns(tmp_path / "pool", collection)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(columns) == 500
    # the texts are 450,000 and 800,000 bytes, the least table of ids 20,000
    assert size < 100_000
