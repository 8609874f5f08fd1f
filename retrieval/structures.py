"""What kinds of index there are for so many vectors, and what each costs in bytes and in processor time.

Bytes follow from what is written: they are exact but for a few kilobytes. Times are multiplications counted and
priced by `Speed`, which is measured in a second on this machine: good for choosing, not for promising.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FEW = 40_000
"""Vectors up to which exact search answers in a millisecond or so, and an index saves less than it loses."""

FLAT_STORES = {"float32": 4, "float16": 2, "int8": 1}
"""Bytes per number of what `condenser encode --store` keeps and a Flat index searches."""

_POOR_CLUSTERS = 39  # FAISS's own figure for points per cluster
_TRAINING_POINTS = 256  # `condenser index` trains on this many per cluster
_LINKS = 32
_FILE_BYTES = 2500  # headers and manifest

# What one number of a vector costs while lists or codes are scanned, over what it costs in a scan of float32
# (measured: AMD EPYC with AVX-512, 24,000 sentence embeddings of 384 numbers).
_SCAN_CODE = 4.0  # a byte of PQ, which stands for several numbers
_SCAN_FAST = 0.4  # four bits of PQ in registers
_SCAN_SQ8 = 0.8
_SCAN_ROUNDED_FLAT = 6.0  # float16 and int8 are turned into float32 first, for one query as for a thousand
_RANDOM_ACCESS = 3.0  # vectors that do not lie side by side
_HIT = 1400.0  # what each hit costs to keep and to put in order
# k-means of small pieces, over the same count of multiplications in batches; and its rounds.
_PIECES = 2.0
_KMEANS_ROUNDS, _PQ_ROUNDS, _OPQ_ROUNDS = 10, 25, 240


@dataclass(frozen=True)
class Speed:
    """What this machine takes, in seconds of processor time.

    Attributes:
        batch: per multiplication, when a thousand queries meet each vector together.
        scan: per multiplication, when one query passes over the vectors.
    """

    batch: float
    scan: float

    @classmethod
    def measure(cls, dimension: int) -> Speed:
        """Time exact search over a few thousand random vectors, with many queries and with one."""
        from retrieval.exact import ExactVectors
        from retrieval.vectors import Matrix

        rows = max(128, (1 << 22) // dimension)  # 16 MB
        random = np.random.default_rng(0)
        vectors = random.standard_normal((rows, dimension), dtype=np.float32)
        queries = random.standard_normal((256, dimension), dtype=np.float32)
        store = ExactVectors([Matrix(vectors)], dimension)
        batch = _fastest(lambda: store.fetch(queries, 100)) / (len(queries) * vectors.size)
        return cls(batch, _fastest(lambda: store.fetch(queries[:1], 100)) / vectors.size)


@dataclass(frozen=True)
class Structure:
    """A kind of index over given vectors.

    Attributes:
        name: how the table names it.
        factory: ``--factory`` of `condenser index`.
        store: ``--store`` of `condenser encode`.
        recall: the class of its recall, in words.
        reach: recall of the exact best 100 that tuning can be expected to reach.
        setting: the search-time parameter that trades recall for time, with a first value to try; "" without one.
        disk: bytes of the folder.
        memory: bytes while it is searched at full speed.
        build_memory: bytes at the peak of building it.
        build_seconds: processor time to build it.
        query_seconds: processor time of one query among a thousand.
        alone_seconds: processor time of a query that comes alone.
    """

    name: str
    factory: str
    store: str
    recall: str
    reach: float
    setting: str
    disk: int
    memory: int
    build_memory: int
    build_seconds: float
    query_seconds: float
    alone_seconds: float

    @property
    def exact(self) -> bool:
        """Whether every stored vector is looked at."""
        return self.factory == "Flat"


@dataclass(frozen=True)
class Task:
    """What is to be searched.

    Attributes:
        count: vectors.
        dimension: numbers in each.
        k: hits per query.
        recall: share of the exact best k that is wanted.
        id_bytes: UTF-8 bytes of all ids together.
    """

    count: int
    dimension: int
    k: int
    recall: float
    id_bytes: int

    @property
    def ids_on_disk(self) -> int:
        """Bytes of the ids as JSON: quotes and a comma around each."""
        return self.id_bytes + 3 * self.count

    @property
    def ids_in_memory(self) -> int:
        """Bytes of the ids as a list of Python's strings."""
        return self.id_bytes + (49 + 8) * self.count


def structures(task: Task, speed: Speed) -> list[Structure]:
    """Return every kind of index that can be built over the vectors, exact ones first."""
    found = [_flat(task, speed, store) for store in FLAT_STORES]
    found.append(_hnsw(task, speed))
    if task.count >= _TRAINING_POINTS:  # what 8-bit codes are learnt from
        found += _inverted(task, speed)
    return found


def id_bytes_of_numbers(count: int) -> int:
    """Return the bytes of the ids 0 to ``count`` - 1 in decimal, for vectors that do not exist yet."""
    digits = len(str(max(count - 1, 0)))
    return sum(
        length * (min(count, 10**length) - (10 ** (length - 1) if length > 1 else 0)) for length in range(1, digits + 1)
    )


def clusters(count: int) -> int:
    """Return the number of inverted lists: the power of two nearest to 4 sqrt(n), with 39 vectors or more in each.

    FAISS's guidelines advise 4 sqrt(n) to 16 sqrt(n) lists.
    """
    wanted = 2 ** round(math.log2(4 * math.sqrt(count)))
    return max(1, min(wanted, 2 ** int(math.log2(max(1, count // _POOR_CLUSTERS)))))


def pieces(dimension: int, size: int) -> int:
    """Return into how many equal pieces of about ``size`` numbers a vector can be cut."""
    return max(number for number in range(1, max(1, dimension // size) + 1) if dimension % number == 0)


def visited(task: Task) -> float:
    """Return about how many vectors IVF must look at for the wanted recall.

    A rule of thumb, fitted to 3,000 to 24,000 sentence embeddings; `condenser plan --tune` measures it.
    """
    return min(task.count, 4400 * _size(task) ** 0.57 * (task.k / 100) ** 0.2 * _care(task) ** 0.9)


def search_depth(task: Task) -> int:
    """Return about what ``ef_search`` HNSW needs for the wanted recall; see `visited`."""
    return max(1, math.ceil(min(task.count, 95 * _size(task) ** 0.27 * (task.k / 100) ** 0.5 * _care(task))))


def _size(task: Task) -> float:
    return task.count / 24_000


def _care(task: Task) -> float:
    """Return how much rarer a miss must be than at recall .95."""
    return 0.05 / max(1 - task.recall, 0.001)


def _flat(task: Task, speed: Speed, store: str) -> Structure:
    numbers = task.count * task.dimension
    codes = numbers * FLAT_STORES[store] + (4 * task.count if store == "int8" else 0)
    rounded, hits = store != "float32", task.k * _HIT * speed.scan
    return Structure(
        name=f"Flat {store}",
        factory="Flat",
        store=store,
        recall={"float32": "exact", "float16": "exact, vectors rounded", "int8": "exact, vectors rounded to 1/127"}[
            store
        ],
        reach={"float32": 1.0, "float16": 0.999, "int8": 0.98}[store],
        setting="",
        disk=codes + task.ids_on_disk + _FILE_BYTES,
        memory=codes + task.ids_in_memory,
        build_memory=2 * task.ids_in_memory,
        build_seconds=numbers * speed.scan,
        query_seconds=numbers * (speed.batch + rounded * _SCAN_ROUNDED_FLAT * speed.scan / 1024) + hits,
        alone_seconds=numbers * speed.scan * (_SCAN_ROUNDED_FLAT if rounded else 1) + hits,
    )


def _faiss(
    task: Task,
    *,
    factory: str,
    recall: str,
    reach: float,
    setting: str,
    file: float,
    sample: int,
    build_seconds: float,
    query_seconds: float,
    alone_seconds: float,
) -> Structure:
    """Fill in what all FAISS files have in common: built in memory, beside the sample and what is left of it."""
    return Structure(
        name=factory,
        factory=factory,
        store="float32",
        recall=recall,
        reach=reach,
        setting=setting,
        disk=int(file) + task.ids_on_disk + _FILE_BYTES,
        memory=int(file) + task.ids_in_memory,
        build_memory=int(file) + 2 * 4 * sample * task.dimension + 2 * task.ids_in_memory,
        build_seconds=build_seconds,
        query_seconds=query_seconds,
        alone_seconds=alone_seconds,
    )


def _hnsw(task: Task, speed: Speed) -> Structure:
    """A graph: 2 M links per vector on the ground floor, M on each of the 1 / (M - 1) floors above it, of 4 bytes."""
    count, width = task.count, task.dimension
    depth = search_depth(task)
    distance = width * speed.scan * _RANDOM_ACCESS
    looked_at = min(count, 60 * depth**0.74)
    query = looked_at * distance + task.k * _HIT * speed.scan
    return _faiss(
        task,
        factory=f"HNSW{_LINKS}",
        recall="any, by ef_search",
        reach=0.99,
        setting=f"--ef_search {depth}",
        file=count * (4 * width + 4 * (2 * _LINKS + _LINKS / (_LINKS - 1)) + 12),
        sample=0,
        build_seconds=count * distance * min(count, 55 * math.log2(count + 2)),
        query_seconds=query,
        alone_seconds=query,
    )


def _inverted(task: Task, speed: Speed) -> list[Structure]:
    """IVF with whole vectors, 8 bits a number, and product quantization with and without refinement."""
    count, width, lists = task.count, task.dimension, clusters(task.count)
    probes = max(1, math.ceil(lists * visited(task) / count))
    scanned = count * probes / lists
    sample = min(count, _TRAINING_POINTS * max(256, lists))
    centroids = lists * (4 * width + 8)
    cut, halves = pieces(width, 8), pieces(width, 2)
    learnt = min(count, 1 << 16) * width * speed.batch * _PIECES  # a round of k-means, per centroid
    training = _KMEANS_ROUNDS * min(sample, _TRAINING_POINTS * lists) * lists * width * speed.batch
    adding = count * lists * width * speed.batch

    def ivf(
        code: str,
        recall: str,
        reach: float,
        *,
        size: float,
        scan: float,
        before: float = 0,
        more: float = 0,
        refined: int = 0,
    ) -> Structure:
        rest = (scanned * scan + task.k * (_HIT + refined * width * _RANDOM_ACCESS)) * speed.scan
        return _faiss(
            task,
            factory=code,
            recall=recall,
            reach=reach,
            setting=f"--nprobe {probes}",
            file=count * (size + 8) + centroids + more,
            sample=sample,
            build_seconds=training + adding + before,
            query_seconds=lists * width * speed.batch + rest,
            alone_seconds=lists * width * speed.scan + rest,
        )

    tables, rotation = 4 * 256 * width, 4 * width * width
    coding = count * 256 * width * speed.batch * _PIECES
    return [
        ivf(f"IVF{lists},Flat", "any, by nprobe", 1.0, size=4 * width, scan=width),
        ivf(f"IVF{lists},SQ8", "any, vectors rounded", 0.98, size=width, scan=width * _SCAN_SQ8, more=8 * width),
        ivf(
            f"IVF{lists},PQ{halves}x4fs,Refine(SQfp16)",
            "any, by nprobe and k_factor",
            0.99,
            size=halves / 2 + 2 * width,
            scan=halves * _SCAN_FAST,
            before=(_PQ_ROUNDS * 16 * learnt) + coding / 16,
            more=64 * width + 8 * halves * lists,
            refined=2,
        ),
        ivf(
            f"IVF{lists},PQ{cut}np",
            "lossy codes: about .7",
            0.7,
            size=cut,
            scan=cut * _SCAN_CODE,
            before=_PQ_ROUNDS * 256 * learnt + coding,
            more=tables,
        ),
        ivf(
            f"OPQ{cut},IVF{lists},PQ{cut}np",
            "lossy codes: about .8",
            0.78,
            size=cut,
            scan=cut * _SCAN_CODE,
            before=(_PQ_ROUNDS + _OPQ_ROUNDS) * 256 * learnt + coding + count * width * width * speed.batch,
            more=tables + rotation,
        ),
    ]


def _fastest(work: Callable[[], object]) -> float:
    """Return the least processor time of a few runs."""
    times = []
    for _ in range(3):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return max(min(times), 1e-6)
