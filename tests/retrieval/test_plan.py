"""`condenser plan`: numbers before anything is built, and a recommendation that can be followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.cli import main
from retrieval.plan import advise
from retrieval.structures import Speed, Task, id_bytes_of_numbers, structures

MakeVectors = Callable[..., Path]
SPEED = Speed(batch=4e-11, scan=2e-10)
GIB = 2**30
GIVE_ONE = "give one of --passages (with --dim), --vectors and --tune, found"
PLAIN = ["--passages", "1", "--dim", "2"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def chosen(count: int, dimension: int, *, free: int | None, searches: int, recall: float = 0.95) -> tuple[str, str]:
    task = Task(count, dimension, 100, recall, id_bytes_of_numbers(count))
    advice = advise(structures(task, SPEED), task, free, searches)
    return advice.structure.name, advice.why


@pytest.mark.parametrize("searches", [1, 10**9])
@pytest.mark.parametrize("count", [1, 200, 40_000])
def test_few_vectors_are_searched_exactly(count: int, searches: int) -> None:
    name, why = chosen(count, 384, free=None, searches=searches)
    assert name == "Flat float32"
    assert why.startswith("up to about 40,000 vectors exact search is fast enough, about ")


def test_an_index_must_earn_back_its_building() -> None:
    assert chosen(1_000_000, 768, free=None, searches=1000)[0] == "Flat float32"
    assert chosen(1_000_000, 768, free=None, searches=10**7)[0].startswith(("IVF", "HNSW"))


def test_nothing_but_all_is_exact() -> None:
    assert chosen(1_000_000, 768, free=None, searches=10**7, recall=1.0)[0] in ("Flat float32", "IVF4096,Flat")


def test_what_does_not_fit_is_told_before_anything_is_allocated() -> None:
    """Case R45: half the bytes, a fourth, and then from the disk."""
    assert chosen(1_000_000, 768, free=4 * GIB, searches=1)[0] == "Flat float32"
    assert chosen(1_000_000, 768, free=2 * GIB, searches=1)[0] == "Flat float16"
    assert chosen(1_000_000, 768, free=1 * GIB, searches=1)[0] == "Flat int8"
    name, why = chosen(1_000_000, 768, free=GIB // 2, searches=1)
    assert name == "Flat int8"
    assert why.startswith(
        "no index that reaches recall 0.95 fits into 512.0 MiB; this one is mapped, and its 744.7 MiB"
    )


def test_a_billion_vectors_are_planned_in_a_moment(capsys: pytest.CaptureFixture[str]) -> None:
    """Case R45."""
    answer = planned(capsys, "--passages", "1000000000", "--dim", "768", "--memory", "16", "--gpu_memory", "80")
    flat = answer["structures"][1]
    assert answer["why"] == "but the ids alone take 61.4 GiB of memory: split the passages into several indexes"
    assert flat["name"] == "Flat float16" and flat["disk"] > 2 * 768 * 10**9 and not flat["fits"]
    assert "it does not fit, and is streamed block by block; 26 such GPUs would hold it" in answer["gpu"]


def test_a_gpu_that_holds_the_vectors(capsys: pytest.CaptureFixture[str]) -> None:
    answer = planned(capsys, "--passages", "8841823", "--dim", "768", "--gpu_memory", "24")
    assert answer["gpu"] == (
        "GPU: exact search over float16 needs 12.6 GiB, 24.0 GiB free on 1 GPU: it fits "
        "(condenser search --device cuda --float16)"
    )


def test_text_names_the_command_to_run_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--passages", "1000000", "--dim", "768", "--memory", "1.5", "--recall", "0.99"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1,000,000 vectors of 768 numbers, k 100, recall 0.99 of the exact best, 1.5 GiB of memory free"
    (flat,) = (line for line in lines if line.startswith("Flat float32"))
    assert flat.split()[2:6] == ["exact", "2.9", "GiB", "2.9"] and flat.endswith("from disk")
    assert lines[-2:] == [
        "  condenser encode --encoder ENCODER --collection COLLECTION --store float16 --output VECTORS",
        "  condenser index --vectors VECTORS --factory Flat --output INDEX",
    ]


def test_vectors_that_exist_say_the_rest(tmp_path: Path, make_vectors: MakeVectors, capsys: Any) -> None:
    vectors = make_vectors(np.ones((300, 8)), [f"passage-{row:04}" for row in range(300)])
    answer = planned(capsys, "--vectors", str(vectors))
    assert (answer["passages"], answer["dimension"], answer["k"]) == (300, 8, 100)
    assert answer["structures"][0]["disk"] == pytest.approx(300 * (8 * 4 + 12 + 3), abs=2600)
    assert answer["commands"] == [f"condenser index --vectors {vectors} --factory Flat --output INDEX"]


def test_an_encoder_says_the_dimension_and_how_long_encoding_takes(tiny_bert: Path, capsys: Any) -> None:
    answer = planned(capsys, "--passages", "1000", "--encoder", str(tiny_bert))
    assert answer["dimension"] == 32
    encoding = answer["encoding"]
    assert encoding["seconds"] * encoding["passages_per_second"] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--passages", "10", "--dim", "0"], "--dim is 0, expected 1 to 65536"),
        (["--passages", "0", "--dim", "8"], "--passages is 0, expected 1 to 1000000000000"),
        (["--passages", "10"], "--dim is missing: numbers in each vector"),
        ([], f"{GIVE_ONE} none of them"),
        (["--dim", "8"], f"{GIVE_ONE} none of them"),
        (["--passages", "1", "--vectors", "v"], f"{GIVE_ONE} --passages and --vectors"),
        ([*PLAIN, "--memory", "0"], "--memory is 0.0, expected more than 0 and at most 1000000000"),
        ([*PLAIN, "--gpu_memory", "1e300"], "--gpu_memory is 1e+300, expected more than 0 and at most 1000000000"),
        (["--tune", "i", "--memory", "3"], "--memory does not go with --tune, which measures an index that is there"),
        ([*PLAIN, "--recall", "1.5"], "--recall is 1.5, expected more than 0 and at most 1"),
        ([*PLAIN, "--queries", "q"], "--queries goes with --tune (without it nothing is searched)"),
        (["--vectors", "nowhere"], "nowhere: no such folder; expected a vectors folder"),
        (["--tune", "nowhere", "--queries", "q"], "nowhere: no such folder; expected an index folder"),
        (["--tune", "nowhere"], "--queries is missing: what to measure recall with (a file, or a folder of vectors)"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    heard = capsys.readouterr()
    assert (heard.out, heard.err) == ("", f"condenser: error: {line}\n")
