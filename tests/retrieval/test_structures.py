"""What an index costs: bytes as they are written, and factories that can be built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from retrieval.index_build import build_index
from retrieval.options import IndexOptions
from retrieval.structures import Speed, Structure, Task, clusters, id_bytes_of_numbers, pieces, structures, visited

MakeVectors = Callable[..., Path]
COUNT, DIMENSION = 1000, 16
SPEED = Speed(batch=4e-11, scan=2e-10)
SMALL = Task(COUNT, DIMENSION, 100, 0.95, id_bytes_of_numbers(COUNT))


@pytest.mark.parametrize("structure", structures(SMALL, SPEED), ids=lambda one: one.name)
def test_bytes_are_those_that_index_writes(tmp_path: Path, make_vectors: MakeVectors, structure: Structure) -> None:
    """Case R45."""
    matrix = np.random.default_rng(0).normal(size=(COUNT, DIMENSION)).astype("f4")
    vectors = make_vectors(matrix, [str(row) for row in range(COUNT)], shard_size=600, dtype=structure.store)
    index = build_index(IndexOptions(vectors=str(vectors), factory=structure.factory, output=str(tmp_path / "index")))
    written = sum(file.stat().st_size for file in index.iterdir())
    assert structure.disk == pytest.approx(written, rel=0.05)


@pytest.mark.parametrize("dimension", [1, 7, 100, 384, 768, 1024])
@pytest.mark.parametrize("count", [1, 255, 256, 5000, 1_000_000])
def test_every_factory_suits_count_and_dimension(count: int, dimension: int) -> None:
    """Case R44: FAISS takes the string, and no cluster has fewer than 39 vectors to learn from."""
    import faiss

    for structure in structures(Task(count, dimension, 10, 0.9, count), SPEED):
        index = faiss.index_factory(dimension, structure.factory, faiss.METRIC_INNER_PRODUCT)
        inverted = faiss.try_extract_index_ivf(index)
        assert inverted is None or 39 * inverted.nlist <= count


def test_the_number_of_lists_is_within_the_advice_of_faiss() -> None:
    for count in (20_000, 1_000_000, 8_841_823, 10**9):
        assert 2 * count**0.5 < clusters(count) < 16 * count**0.5
    assert [clusters(count) for count in (1, 38, 39, 78, 1000)] == [1, 1, 1, 2, 16]


def test_pieces_divide_a_vector() -> None:
    assert [pieces(768, 8), pieces(384, 2), pieces(100, 8), pieces(7, 8), pieces(1, 8)] == [96, 192, 10, 1, 1]


@pytest.mark.parametrize("count", [1, 9, 10, 11, 1000, 12_345])
def test_ids_that_do_not_exist_yet_are_numbers(count: int) -> None:
    assert id_bytes_of_numbers(count) == sum(len(str(number)) for number in range(count))


def test_more_is_visited_for_more_recall_and_never_more_than_there_is() -> None:
    wanted = [visited(Task(10**6, 64, 100, recall, 1)) for recall in (0.8, 0.9, 0.95, 0.99)]
    assert wanted == sorted(wanted) and wanted[-1] <= 10**6
    assert visited(Task(10, 64, 10, 0.95, 1)) == 10


def test_speed_is_measured_and_one_query_costs_more_than_its_share_of_many() -> None:
    speed = Speed.measure(64)
    assert 0 < speed.batch < speed.scan < 1e-6
