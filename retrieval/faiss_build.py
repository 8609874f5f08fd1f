"""Building FAISS indexes: what is refused beforehand, with a way out; training; adding, on the CPU or on GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from condenser.errors import UserError, nearest
from condenser.talk import warn
from retrieval.faiss_index import faiss_reason, index_bytes, load_faiss, parts_of, to_gpus, uses_gpu

_EXAMPLES = "FAISS's factory strings look like IVF256,Flat, HNSW32, PQ16, SQ8 or OPQ16,IVF256,PQ16,RFlat"
_WORDS = "Flat IVF HNSW NSG PQ OPQ SQ SQfp SQbf PCA PCAR PCAW PCAWR RR RQ LSQ RFlat Refine L2norm IDMap".split()
_POINTS_PER_CENTROID = 256  # FAISS itself samples down to this many per cluster
_POOR_CLUSTERS = 39  # FAISS's own figure for points per cluster
_ADDED_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Recipe:
    """How a FAISS index is built.

    Attributes:
        factory: FAISS's factory string.
        seed: of the sample that it is trained on.
        training_size: vectors in that sample; None is 256 for each cluster.
        ef_construction: candidates that HNSW weighs for each link; None is FAISS's own.
        device: ``cpu``, ``cuda`` to train and add on all visible GPUs, or ``auto``.
        float16: on GPUs, in half the memory; this rounds the vectors that a Flat part keeps.
    """

    factory: str
    seed: int = 42
    training_size: int | None = None
    ef_construction: int | None = None
    device: str = "cpu"
    float16: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any], device: str = "cpu") -> Recipe:
        """Return what the options of the verb ``index``, or the facts of what it made, say."""
        names = ("factory", "seed", "training_size", "ef_construction", "float16")
        return cls(**{name: options[name] for name in names}, device=device)


def new_index(recipe: Recipe, dimension: int, count: int, folder: Path) -> Any:
    """Return an empty FAISS index of inner products; refuse what would fail or crash while it is built.

    Args:
        recipe: how it is to be built.
        dimension: length of a vector.
        count: vectors there are to train on and to add.
        folder: where they lie.

    Raises:
        UserError: a string that FAISS does not know or cannot build over such vectors, with one that it could;
            more memory needed than there is.
    """
    faiss, factory = load_faiss(), recipe.factory
    refusal = f"--factory {factory!r} cannot be built over vectors of {dimension} numbers"
    if re.search(r"[A-Za-z]0+(?!\d)|HNSW1(?!\d)", factory):  # over these FAISS itself crashes
        raise UserError(f"{refusal}: a count in it is too small", hint=_EXAMPLES)
    _check_quantizers(factory, dimension, count, folder)
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UserError(f"{refusal}: {faiss_reason(error)}", hint=_near_factory(factory)) from None
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        if count < ivf.nlist:
            raise UserError(
                f"--factory {factory!r} has {ivf.nlist:,} clusters, but there are {count:,} vectors to train on",
                folder,
                f"use Flat, or at most IVF{max(1, count // _POOR_CLUSTERS)}",
            )
        if count < _POOR_CLUSTERS * ivf.nlist:
            warn(
                f"{count:,} vectors for {ivf.nlist:,} clusters are fewer than {_POOR_CLUSTERS} per cluster: "
                "they will be poor ones"
            )
        ivf.cp.min_points_per_centroid = 1  # FAISS would say the same in its own words
    for part in parts_of(index):
        for name in ("pq", "rq"):
            if hasattr(part, name):
                getattr(part, name).cp.min_points_per_centroid = 1
    if recipe.ef_construction is not None:
        _set_ef_construction(index, recipe.ef_construction, factory)
    try:
        needed = index_bytes(index, count)
    except RuntimeError as error:  # a kind that does not know the size of its codes: NSG, or one with ids of its own
        raise UserError(f"{refusal}: {faiss_reason(error)}", hint=_EXAMPLES) from None
    check_memory(needed, available_memory(), factory)
    return index


def fill_index(index: Any, recipe: Recipe, count: int, blocks: Callable[[], Iterable[np.ndarray]], folder: Path) -> Any:
    """Train an index from `new_index` on a seeded sample and add all vectors, block by block.

    Args:
        index: empty.
        recipe: how it is to be built.
        count: vectors there are.
        blocks: gives all of them, in blocks, each time it is called.
        folder: where they lie.

    Returns:
        The filled index, on the CPU.

    Raises:
        UserError: what FAISS refuses only now.
    """
    faiss = load_faiss()
    on_gpu = uses_gpu(index, recipe.device)
    working = to_gpus(index, count, float16=recipe.float16) if on_gpu else index
    try:
        if not working.is_trained:
            rotations = _quiet_rotations(index)
            working.train(_sample(blocks(), count, _training_size(index, count, recipe), recipe.seed))
            for rotation in rotations:
                rotation.pq = None  # it is not FAISS that owns it
        for block in blocks():
            for start in range(0, len(block), _ADDED_AT_ONCE):
                working.add(np.ascontiguousarray(block[start : start + _ADDED_AT_ONCE]))
    except RuntimeError as error:
        raise UserError(
            f"--factory {recipe.factory!r} cannot be built: {faiss_reason(error)}", folder, "use Flat"
        ) from None
    return faiss.index_gpu_to_cpu(working) if on_gpu else index


def _quiet_rotations(index: Any) -> dict[Any, Any]:
    """Give OPQ rotations a quantizer that does not warn hundreds of times; return it by rotation, to be kept alive."""
    faiss = load_faiss()
    given = {}
    for part in parts_of(index):
        if not isinstance(part, faiss.IndexPreTransform):
            continue
        for place in range(part.chain.size()):
            rotation = faiss.downcast_VectorTransform(part.chain.at(place))
            if isinstance(rotation, faiss.OPQMatrix):
                given[rotation] = rotation.pq = faiss.ProductQuantizer(rotation.d_out, rotation.M, 8)
                rotation.pq.cp.min_points_per_centroid = 1
    return given


def _training_size(index: Any, count: int, recipe: Recipe) -> int:
    ivf = load_faiss().try_extract_index_ivf(index)
    clusters = 256 if ivf is None else max(256, ivf.nlist)
    return min(count, recipe.training_size or _POINTS_PER_CENTROID * clusters)


def _sample(blocks: Iterable[np.ndarray], count: int, size: int, seed: int) -> np.ndarray:
    """Return ``size`` of the ``count`` rows in ``blocks``, chosen by the seed, in their order."""
    chosen = np.sort(np.random.default_rng(seed).permutation(count)[:size])
    parts, start = [], 0
    for block in blocks:
        first, last = np.searchsorted(chosen, (start, start + len(block)))
        parts.append(block[chosen[first:last] - start])
        start += len(block)
    return np.concatenate(parts)


def _check_quantizers(factory: str, dimension: int, count: int, folder: Path) -> None:
    """Follow the vectors' length through the string, and refuse a quantizer that cannot cut or learn them."""
    for part in factory.split(","):
        if reduced := re.fullmatch(r"(?:PCAW?R?|RR)(\d+)", part):
            dimension = int(reduced[1])
        elif rotated := re.fullmatch(r"OPQ(\d+)(?:_(\d+))?", part):
            dimension = int(rotated[2] or dimension)
            _check_cut(factory, part, int(rotated[1]), dimension)
            _check_codes(factory, part, 8, count, folder, "leave it out")
        elif quantized := re.fullmatch(r"(?:HNSW\d+_)?PQ(\d+)(?:x(\d+))?\w*", part):
            parts, bits = int(quantized[1]), int(quantized[2] or 8)
            _check_cut(factory, part, parts, dimension)
            fitting = max(1, count.bit_length() - 1)
            _check_codes(factory, part, bits, count, folder, f"use PQ{parts}x{fitting}, SQ8 or Flat")
            if count < _POOR_CLUSTERS * 2**bits:
                warn(f"{count:,} vectors for {2**bits:,} codes per piece are fewer than {_POOR_CLUSTERS} per code")


def _check_cut(factory: str, part: str, pieces: int, dimension: int) -> None:
    if pieces and dimension % pieces:
        fitting = [str(number) for number in range(1, dimension + 1) if dimension % number == 0]
        below = [number for number in fitting if int(number) < pieces][-1:]
        above = [number for number in fitting if int(number) > pieces][:1]
        raise UserError(
            f"--factory {factory!r}: {part} cuts vectors of {dimension} numbers into {pieces} pieces, "
            f"and {dimension} is no multiple of {pieces}",
            hint=f"use {' or '.join(below + above)} pieces",
        )


def _check_codes(factory: str, part: str, bits: int, count: int, folder: Path, way_out: str) -> None:
    if count < 2**bits:
        raise UserError(
            f"--factory {factory!r}: {part} learns {2**bits:,} codes per piece, but there are {count:,} vectors to "
            "train on",
            folder,
            way_out,
        )


def _near_factory(factory: str) -> str:
    for part in factory.split(","):
        word = re.match(r"[A-Za-z]*(?:2norm)?", part)[0]  # type: ignore[index]
        if word not in _WORDS and (close := nearest(word, _WORDS)):
            return f"did you mean {close}? {_EXAMPLES}"
    return _EXAMPLES


def check_memory(needed: int, free: int | None, factory: str) -> None:
    """Raise UserError when an index needs more bytes than there are free; both are named."""
    if free is not None and needed > free:
        raise UserError(
            f"--factory {factory!r} needs {needed / 2**30:,.1f} GiB of memory, {free / 2**30:,.1f} GiB are free",
            hint="use Flat, which is read from the disk, or a smaller code such as IVF4096,SQ8 or OPQ32,IVF4096,PQ32",
        )


def available_memory() -> int | None:
    """Return how many bytes the system can still give; None where it does not say."""
    try:
        told = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return None if told is None else 1024 * int(told[1])


def _set_ef_construction(index: Any, value: int, factory: str) -> None:
    graphs = [part.hnsw for part in parts_of(index) if hasattr(part, "hnsw")]
    if not graphs:
        raise UserError(f"--ef_construction does not apply to a {factory} index")
    graphs[0].efConstruction = value
