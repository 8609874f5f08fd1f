"""`condenser plan --tune`: the lowest setting that reaches a recall is found, and what cannot reach it is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.cli import main
from retrieval.index import Index
from retrieval.index_build import build_index
from retrieval.options import IndexOptions
from retrieval.recall import measure_recall

MakeVectors = Callable[..., Path]
COUNT, QUERIES = 2000, 40


@pytest.fixture()
def vectors(make_vectors: MakeVectors) -> tuple[Path, Path]:
    """Passages and queries near a surface of 5 dimensions in a space of 16, as texts are."""
    random = np.random.default_rng(3)
    plane = random.normal(size=(5, 16))
    points = random.normal(size=(COUNT + QUERIES, 5)) @ plane + random.normal(size=(COUNT + QUERIES, 16)) / 10
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    ids = [f"p{row}" for row in range(COUNT)]
    queries = make_vectors(points[COUNT:], [f"q{row}" for row in range(QUERIES)], name="queries", kind="query")
    return make_vectors(points[:COUNT], ids, shard_size=700), queries


def built(vectors: Path, factory: str) -> Path:
    output = str(vectors.parent / "index")
    return build_index(IndexOptions(vectors=str(vectors), factory=factory, output=output))


def tuned(capsys: pytest.CaptureFixture[str], index: Path, queries: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", "--tune", str(index), "--queries", str(queries), "--k", "10", *words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(("factory", "name", "most"), [("IVF64,Flat", "nprobe", 64), ("HNSW8", "ef_search", 60)])
def test_the_lowest_value_is_that_of_trying_all(
    vectors: tuple[Path, Path], capsys: pytest.CaptureFixture[str], factory: str, name: str, most: int
) -> None:
    passages, queries = vectors
    folder = built(passages, factory)
    answer = tuned(capsys, folder, queries, "--recall", "0.9")
    sample = np.load(queries / "vectors-00000.npy")
    recalls = [
        measure_recall(Index.load(folder, **{name: value}), sample, 10).value for value in range(1, most + 1)
    ]  # fmt: skip
    for one in answer["measured"]:
        if one["setting"][name] <= most:
            assert one["recall"] == pytest.approx(recalls[one["setting"][name] - 1])
    lowest = next(value for value, recall in enumerate(recalls, 1) if recall >= 0.9)
    assert lowest <= answer["best"]["setting"][name] <= lowest + lowest // 16
    assert answer["flags"] == f"--{name} {answer['best']['setting'][name]}"


def test_all_but_the_times_is_the_same_each_time(
    vectors: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    passages, queries = vectors
    folder = built(passages, "IVF32,Flat")
    answers = [tuned(capsys, folder, queries, "--sample", "20", "--seed", seed) for seed in ("1", "1", "2")]
    settings = [[(one["setting"], one["recall"]) for one in answer["measured"]] for answer in answers]
    assert settings[0] == settings[1] != settings[2]
    assert answers[0]["flags"] == answers[1]["flags"] and answers[0]["queries"] == 20


def test_a_second_parameter_is_tuned_beside_k_factor(
    vectors: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    passages, queries = vectors
    answer = tuned(capsys, built(passages, "IVF32,PQ4x4fs,RFlat"), queries, "--recall", "0.95")
    assert answer["best"]["recall"] >= 0.95
    assert set(answer["best"]["setting"]) == {"nprobe", "k_factor"}
    assert answer["best"]["setting"]["nprobe"] < 32, "all lists are not the cheapest"


def test_a_recall_out_of_reach_is_said(vectors: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    passages, queries = vectors
    folder = built(passages, "IVF16,PQ2x4")
    words = ["plan", "--tune", str(folder), "--queries", str(queries), "--k", "10"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("recall 0.95 is not reached"))
    assert "is the highest (nprobe" in line
    assert line.endswith("Its codes lose too much: append ,RFlat or ,Refine(SQfp16) to the factory, or use SQ8")
    assert lines[-2:] == [
        "exact search needs no tuning:",
        f"  condenser search --index {passages} --queries {queries} --k 10 --output RUN",
    ]
    answer = tuned(capsys, folder, queries)
    assert answer["best"] is None and answer["flags"] is None and answer["exact_is_faster"]


def test_an_index_without_parameters_is_measured_once(
    vectors: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    passages, queries = vectors
    answer = tuned(capsys, built(passages, "SQ8"), queries, "--recall", "0.9")
    (only,) = answer["measured"]
    assert only["setting"] == {} and 0.95 < only["recall"] <= 1


def test_texts_are_encoded_by_the_encoder_of_the_index(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, queries = tmp_path / "corpus.jsonl", tmp_path / "queries.jsonl"
    corpus.write_text("".join(f'{{"_id": "{row}", "text": "the cat {row} of river {row % 7}"}}\n' for row in range(90)))
    queries.write_text("".join(f'{{"_id": "q{row}", "text": "cat {row}"}}\n' for row in range(9)))
    encoder = ["--encoder", str(tiny_bert)]
    assert main(["encode", *encoder, "--input", str(corpus), "--output", str(tmp_path / "vectors")]) == 0
    index = built(tmp_path / "vectors", "IVF2,Flat")
    answer = tuned(capsys, index, queries, "--sample", "5")
    assert answer["queries"] == 5 and answer["best"]["recall"] >= 0.95


def test_what_cannot_be_tuned_is_refused_in_one_line(
    vectors: tuple[Path, Path], make_vectors: MakeVectors, capsys: pytest.CaptureFixture[str]
) -> None:
    passages, queries = vectors
    folder = built(passages, "IVF4,Flat")
    none = make_vectors(np.ones((0, 16)), [], name="none", kind="query")
    other = make_vectors(np.ones((2, 16)), ["a", "b"], name="other", kind="query", encoder_fingerprint="bbbb")
    for index, given, line in [
        (passages, queries, f"{passages}: is searched exactly: there is nothing to tune"),
        (folder, passages, f"{passages}: holds passage vectors, expected queries"),
        (folder, none, f"{none}: holds no queries"),
        (folder, other, "encoder fingerprint is 'aaaa' in the index (encoder /models/a) but 'bbbb' in the queries"),
        (folder, passages.parent / "nowhere", "nowhere: no such file"),
    ]:
        capsys.readouterr()
        assert main(["plan", "--tune", str(index), "--queries", str(given)]) == 2
        heard = capsys.readouterr()
        assert line in heard.err and heard.err.count("\n") == 1 and heard.out == ""


def test_vectors_that_are_gone_are_named(vectors: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    passages, queries = vectors
    folder = built(passages, "IVF4,Flat")
    passages.rename(passages.parent / "elsewhere")
    capsys.readouterr()
    assert main(["plan", "--tune", str(folder), "--queries", str(queries)]) == 2
    assert capsys.readouterr().err == (
        f"condenser: error: {passages}: the vectors that this index was made from are gone\n"
    )
