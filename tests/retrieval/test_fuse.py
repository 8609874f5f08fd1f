"""Fused runs against naive dictionaries, weights against trying every mixture by hand, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from condenser.errors import UserError
from eval.evaluation import evaluate
from eval.runs import Run, load_run, write_run
from retrieval.cli import main
from retrieval.fuse import Fusion, Method, mixtures, read_ranked

FIRST = "q1 Q0 a 1 9.0 x\nq1 Q0 b 2 5.0 x\nq1 Q0 c 3 1.0 x\nq2 Q0 a 1 2.0 x\n"
SECOND = "q1 Q0 c 1 0.9 y\nq1 Q0 d 2 0.3 y\nq3 Q0 b 1 0.5 y\n"


def ordered(hits: dict[str, float]) -> list[str]:
    return sorted(hits, key=lambda name: (np.float32(hits[name]), name.encode()), reverse=True)


def naive(runs: Sequence[Run], weights: Sequence[float], method: Method, rrf_k: float = 60, depth: int = 1000) -> Run:
    """Fusion by its definition: one passage, one run, one query at a time."""
    fused: Run = {}
    for query_id in dict.fromkeys(query_id for run in runs for query_id in run):
        cut = [
            {name: run[query_id][name] for name in ordered(run[query_id])[:depth]} for run in runs if query_id in run
        ]
        shares = [weight for run, weight in zip(runs, weights, strict=True) if query_id in run]
        fused[query_id] = {}
        for name in {name for hits in cut for name in hits}:
            total = 0.0
            for hits, weight in zip(cut, shares, strict=True):
                values = list(hits.values())
                low, high, mean = min(values), max(values), sum(values) / len(values)
                deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
                if method == "rrf":
                    total += weight / (rrf_k + 1 + ordered(hits).index(name)) if name in hits else 0
                elif method == "minmax":
                    own = 1.0 if low == high else (hits.get(name, low) - low) / (high - low)
                    total += weight * own if name in hits else 0
                else:
                    total += weight * (hits.get(name, low) - mean) / deviation if deviation else 0
            fused[query_id][name] = total
    return fused


def random_runs(seed: int, runs: int, queries: int = 6, passages: int = 30) -> list[Run]:
    """Runs with ties, with queries that only some have, and with hits that only some have."""
    random = np.random.default_rng(seed)
    made: list[Run] = []
    for _ in range(runs):
        run: Run = {}
        for query in range(queries):
            if random.random() < 0.8:
                names = random.choice(passages, size=random.integers(1, passages), replace=False)
                run[f"q{query}"] = {f"p{name}": float(random.integers(0, 8)) / 4 - 1 for name in names}
        made.append(run)
    return made


@pytest.mark.parametrize("method", ["rrf", "minmax", "zscore"])
@pytest.mark.parametrize("seed", range(8))
def test_every_method_is_its_definition(seed: int, method: Method) -> None:
    runs, weights = random_runs(seed, 3), [1.0, 0.25, 2.0]
    fusion = Fusion([read_ranked(run) for run in runs], method, 10)
    expected = naive(runs, weights, method, 10)
    assert list(expected) == fusion.query_ids
    for query_id, hits in expected.items():
        found = fusion.rank(query_id, weights, 1000)
        assert {hit.passage_id for hit in found} == set(hits)
        assert [hit.score for hit in found] == pytest.approx([hits[hit.passage_id] for hit in found], abs=1e-6)
        assert [hit.passage_id for hit in found] == ordered({hit.passage_id: hit.score for hit in found})
        assert fusion.rank(query_id, weights, 4) == found[:4]


def test_only_the_first_hits_of_a_run_count() -> None:
    runs = random_runs(3, 2)
    fusion = Fusion([read_ranked(run, 5) for run in runs], "zscore")
    for query_id, hits in naive(runs, [1, 1], "zscore", depth=5).items():
        assert dict(fusion.rank(query_id, [1, 1], 100)) == pytest.approx(hits, abs=1e-6)


def test_reciprocal_ranks_of_the_paper() -> None:
    """Cormack et al. 2009: k = 60, ranks from 1."""
    runs = [{"q": {"a": 2.0, "b": 1.0}}, {"q": {"b": 0.2, "c": 0.1}}]
    hits = Fusion([read_ranked(run) for run in runs]).rank("q", [1, 1], 10)
    assert [hit.passage_id for hit in hits] == ["b", "a", "c"]
    assert [hit.score for hit in hits] == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62])


def test_what_a_run_lacks_counts_as_its_lowest_hit() -> None:
    """Else a passage found with a score below the mean would be worse off than one not found at all."""
    runs = [{"q": {"a": 3.0, "b": 2.0, "c": 1.0}}, {"q": {"a": 1.0, "d": 0.0}}]
    hits = dict(Fusion([read_ranked(run) for run in runs], "zscore").rank("q", [1, 0], 10))
    assert hits["c"] == hits["d"] < hits["b"] < hits["a"]


def test_mixtures_are_all_weights_of_one_step() -> None:
    assert list(mixtures(1)) == [[1.0]]
    two = list(mixtures(2))
    assert len(two) == 21 and two[0] == [0.0, 1.0] and [0.35, 0.65] in two
    for runs in (3, 4, 7, 30):
        found = list(mixtures(runs))
        assert 1 < len(found) <= 500 and len({tuple(weights) for weights in found}) == len(found)
        assert all(sum(weights) == pytest.approx(1) and len(weights) == runs for weights in found)


@pytest.mark.parametrize("method", ["rrf", "minmax", "zscore"])
@pytest.mark.parametrize("metric", ["MRR@10", "nDCG@5", "MAP"])
def test_chosen_weights_are_the_best_of_all(method: Method, metric: str) -> None:
    runs = random_runs(11, 2, queries=20)
    random = np.random.default_rng(1)
    qrels = {f"q{n}": {f"p{p}": int(random.integers(0, 3)) for p in random.choice(30, 4, False)} for n in range(20)}
    fitted = Fusion([read_ranked(run) for run in runs], method).fit(qrels, metric)

    def value(weights: Sequence[float]) -> float:
        fused = Fusion([read_ranked(run) for run in runs], method)
        hits = {query_id: dict(fused.rank(query_id, weights, 1000)) for query_id in fused.query_ids}
        return evaluate({name: qrels[name] for name in hits}, hits, [metric])[metric]

    values = {tuple(weights): value(weights) for weights in mixtures(2)}
    assert fitted.value == pytest.approx(max(values.values()), abs=1e-12)
    assert values[tuple(fitted.weights)] == pytest.approx(fitted.value, abs=1e-12)
    assert fitted.equal == pytest.approx(values[0.5, 0.5], abs=1e-12)
    good = [weights for weights, reached in values.items() if reached >= fitted.value - 1e-12]
    assert abs(fitted.weights[0] - 0.5) == pytest.approx(min(abs(weights[0] - 0.5) for weights in good))


@pytest.fixture()
def runs(tmp_path: Path) -> list[str]:
    (tmp_path / "one.trec").write_text(FIRST)
    (tmp_path / "two.trec").write_text(SECOND)
    return [str(tmp_path / "one.trec"), str(tmp_path / "two.trec")]


def test_run_file(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs may lack queries; what made the run stands beside it; the same again gives the same bytes."""
    output = tmp_path / "deep/fused.trec"
    assert main(["fuse", *runs, "--method", "minmax", "--weights", "1", "0.5", "--output", str(output)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{output}\n"
    assert said.err.splitlines() == [
        f"fuse: {runs[0]} lacks 1 of the 3 queries",
        f"fuse: {runs[1]} lacks 1 of the 3 queries",
        "fuse: 2 runs of 3 queries, minmax",
    ]
    assert [line.split()[:5] for line in output.read_text().splitlines()] == [
        ["q1", "Q0", "a", "1", "1.0"],
        ["q1", "Q0", "c", "2", "0.5"],
        ["q1", "Q0", "b", "3", "0.5"],
        ["q1", "Q0", "d", "4", "0.0"],
        ["q2", "Q0", "a", "1", "1.0"],
        ["q3", "Q0", "b", "1", "0.5"],
    ]
    made_by = json.loads(Path(f"{output}.json").read_text())
    assert (made_by["runs"], made_by["weights"], made_by["method"]) == (runs, [1.0, 0.5], "minmax")
    before = output.read_bytes()
    assert main(["fuse", *runs, "--method", "minmax", "--weights", "1", "0.5", "--output", str(output)]) == 0
    assert output.read_bytes() == before


def test_weights_are_chosen_on_judgements(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Judgements of q1 want what only the second run has; the line says what to give for other queries."""
    (tmp_path / "qrels.tsv").write_text("q1\t0\td\t1\n")
    output = tmp_path / "fused.json"
    words = [*runs, "--method", "minmax", "--fit", str(tmp_path / "qrels.tsv"), "--metric", "mrr@3"]
    assert main(["fuse", *words, "--output", str(output)]) == 0
    said = capsys.readouterr().err.splitlines()[0]
    made_by = json.loads(Path(f"{output}.json").read_text())
    weights = made_by["weights"]
    assert made_by["fitted"]["value"] == pytest.approx(0.5) and made_by["fitted"]["queries"] == 1
    shown = f"{weights[0]:g} {weights[1]:g}"
    assert said == f"fuse: --weights {shown} reach MRR@3 0.5000 on 1 judged queries (0.0000 with equal ones)"
    again = tmp_path / "again.json"
    assert main(["fuse", *words[:4], "--weights", *shown.split(), "--output", str(again)]) == 0
    assert again.read_bytes() == output.read_bytes()


def test_any_format_in_and_out(runs: list[str], tmp_path: Path) -> None:
    """MS MARCO files give ranks alone, and lines of one query may stand apart."""
    (tmp_path / "ranks.tsv").write_text("q1\ta\t1\nq2\ta\t1\nq1\tb\t2\n")
    write_run(tmp_path / "two.json.gz", [(name, list(hits.items())) for name, hits in load_run(runs[1]).items()])
    outputs = [tmp_path / "a.trec.gz", tmp_path / "b.json"]
    for second, output in zip((runs[1], str(tmp_path / "two.json.gz")), outputs, strict=True):
        assert main(["fuse", str(tmp_path / "ranks.tsv"), second, "--output", str(output)]) == 0
    assert load_run(outputs[0]) == load_run(outputs[1])
    assert list(load_run(outputs[0])["q1"]) == ["c", "a", "d", "b"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["{one}"], "found 1 run, expected two or more to fuse"),
        (["{one}", "{two}", "--weights", "1"], "found 1 --weights for 2 runs, expected one for each"),
        (["{one}", "{two}", "--weights", "0", "0"], "--weights are all 0, expected one above 0"),
        (["{one}", "{two}", "--weights", "1", "-1"], "--weights is -1.0, expected 0 to 1000000"),
        (
            ["{one}", "{two}", "--method", "minmax", "--rrf_k", "3"],
            "--rrf_k goes with --method rrf, --method is minmax",
        ),
        (["{one}", "{two}", "--split", "test"], "--split goes with --collection"),
        (
            ["{one}", "{two}", "--metric", "MAP"],
            "--metric goes with --fit or --collection, on which weights are chosen",
        ),
        (
            ["{one}", "{two}", "--weights", "1", "1", "--fit", "{qrels}"],
            "--weights are given, and judgements to choose them on too (leave one of them out)",
        ),
        (["{one}", "{two}", "--fit", "{qrels}", "--collection", "medquad"], "give one of --fit and --collection"),
        (
            ["{one}", "{two}", "--fit", "{qrels}"],
            "judgements and runs have no query in common: judged are 'q9'; in the runs 'q1', 'q2', 'q3' "
            "(are these the judgements of another split?)",
        ),
        (["{one}", "{two}", "--fit", "{nothing}"], "none of the 1 judged queries has a relevant passage"),
        (
            ["{one}", "{twice}"],
            "{twice}:2: passage 'a' stands more than once in the ranking of query 'q1', first on line 1 "
            "(--duplicates best keeps the better score)",
        ),
        (["{one}", "{three}"], "{three}: no such file (did you mean {twice}?)"),
    ],
)
def test_what_is_refused(
    runs: list[str], words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"one": runs[0], "two": runs[1]}
    contents = {"qrels": "q9\t0\ta\t1\n", "nothing": "q1\t0\ta\t0\n", "twice": "q1 Q0 a 1 2 x\nq1 Q0 a 2 1 x\n"}
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_text(content)
        files[name] = str(tmp_path / f"{name}.txt")
    files["three"] = str(tmp_path / "twce.txt")
    output = tmp_path / "fused.trec"
    assert main(["fuse", *(word.format(**files) for word in words), "--output", str(output)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"condenser: error: {line.format(**files)}"
    assert not output.exists() and not Path(f"{output}.json").exists()


def test_a_passage_twice_keeps_its_best_score_by_wish(runs: list[str], tmp_path: Path) -> None:
    (tmp_path / "twice.trec").write_text("q1 Q0 a 1 2 x\nq1 Q0 a 2 1 x\nq1 Q0 b 3 1.5 x\n")
    words = [runs[0], str(tmp_path / "twice.trec"), "--duplicates", "best", "--output", str(tmp_path / "f.trec")]
    assert main(["fuse", *words]) == 0
    assert list(load_run(tmp_path / "f.trec")["q1"]) == ["a", "b", "c"]


def test_a_score_that_is_not_finite_has_no_place_in_a_sum(runs: list[str], tmp_path: Path) -> None:
    (tmp_path / "huge.trec").write_text("q1 Q0 a 1 1e300 x\n")
    with pytest.raises(UserError, match=r"huge.trec: query 'q1': a score is not finite"):
        read_ranked(tmp_path / "huge.trec")


def test_a_run_that_is_read_is_not_written_over(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(runs[0]).read_bytes()
    assert main(["fuse", *runs, "--output", runs[0]]) == 2
    line = f"condenser: error: {runs[0]}: is read, and would be written over (choose another --output)"
    assert capsys.readouterr().err.splitlines() == [line]
    assert Path(runs[0]).read_bytes() == before
