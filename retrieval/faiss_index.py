"""FAISS indexes: how they are searched, read and written, their parameters, GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from condenser.errors import RunFailed, UserError
from condenser.files import existing_file
from condenser.talk import say

GPU_MOST_HITS = 2048  # what FAISS's selection on a GPU can keep
PARAMETERS = ("nprobe", "ef_search", "k_factor")

_GPU_WORK_SHARE = 0.7  # of the free memory: FAISS takes some for the time of a search


class Parameter(NamedTuple):
    """Where FAISS keeps one search-time parameter."""

    owner: Any
    attribute: str

    @property
    def value(self) -> int | float:
        """What it is now."""
        value: int | float = getattr(self.owner, self.attribute)
        return int(value) if float(value).is_integer() else value


def load_faiss() -> Any:
    """Import FAISS; raise UserError when it is not installed."""
    try:
        import faiss
    except ImportError:
        raise UserError("FAISS is not installed", hint="pip install 'condenser-ir[cpu]', or [gpu]") from None
    return faiss


class FaissVectors:
    """A FAISS index of inner products as a store that an `Index` fetches candidates from; scores are FAISS's own.

    Args:
        index: built and filled.
        device: ``cpu``, ``cuda`` for all visible GPUs, which share the vectors, or ``auto``.
        float16: on GPUs, keep vectors and tables in half the memory.

    Raises:
        UserError: a GPU that is not there or a FAISS without GPUs; a kind of index that no GPU searches.
        RunFailed: the GPUs have not enough free memory; needed and free are named.
    """

    def __init__(self, index: Any, *, device: str = "cpu", float16: bool = False) -> None:
        self.index = index
        self._gpu = to_gpus(index, float16=float16) if uses_gpu(index, device) else None

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self.index.d)

    def fetch(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best ``(scores, rows)``, each (q, count); row -1 where FAISS found no more."""
        index = self.index
        if self._gpu is not None:
            if count <= GPU_MOST_HITS:
                index = self._gpu
            else:
                say(f"{count:,} candidates are more than the {GPU_MOST_HITS:,} FAISS finds on a GPU: now on the CPU")
                self._gpu = None
        scores, rows = index.search(queries, count)
        return np.where(rows >= 0, scores, -np.inf).astype(np.float32, copy=False), rows

    def rescore(self, queries: np.ndarray, query: np.ndarray, rows: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return ``scores``."""
        return scores

    def rounding(self, queries: np.ndarray) -> np.ndarray:
        """Return zeros: fetched scores are final."""
        return np.zeros(len(queries))


def index_bytes(index: Any, count: int) -> int:
    """Return about how many bytes of memory a FAISS index takes with ``count`` vectors in it."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return index_bytes(index.index, count)
    if isinstance(index, faiss.IndexRefine):
        return index_bytes(index.base_index, count) + index_bytes(index.refine_index, count)
    if hasattr(index, "hnsw"):
        return index_bytes(index.storage, count) + count * (4 * index.hnsw.nb_neighbors(0) + 20)
    if hasattr(index, "nlist"):
        return int(count * (index.code_size + 8) + index.nlist * index.d * 4)
    return int(count * index.sa_code_size())


def uses_gpu(index: Any, device: str) -> bool:
    """Tell whether an index goes to GPUs: on ``cuda``, and on ``auto`` where FAISS and the kind of index can.

    Raises:
        UserError: ``cuda``, and FAISS has no GPUs, or has this kind of index for CPUs only.
    """
    if device == "cpu":
        return False
    graph = any(hasattr(part, "hnsw") or hasattr(part, "nsg") for part in parts_of(index))
    if device == "auto":
        return bool(_count_gpus()) and not graph
    if not _count_gpus():
        raise UserError("this FAISS uses no GPU", hint="pip install 'condenser-ir[gpu]', or --device auto")
    if graph:
        raise UserError("graphs such as HNSW are searched on the CPU", hint="use --device auto")
    return True


def _count_gpus() -> int:
    faiss = load_faiss()
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


def to_gpus(index: Any, count: int | None = None, *, float16: bool = False) -> Any:
    """Copy an index to all visible GPUs, which share its vectors.

    Args:
        index: on the CPU.
        count: vectors that it is going to hold; None: those in it.
        float16: keep vectors and tables in half the memory.

    Raises:
        RunFailed: not enough free memory; needed and free are named.
    """
    faiss = load_faiss()
    gpus = _count_gpus()
    import torch

    check_gpu_memory(
        index_bytes(index, count or index.ntotal) // (2 if float16 else 1),
        [torch.cuda.mem_get_info(number)[0] for number in range(gpus)],
    )
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = float16
    return faiss.index_cpu_to_gpus_list(index, options, list(range(gpus)))


def check_gpu_memory(needed: int, free: list[int]) -> None:
    """Raise RunFailed when ``needed`` bytes, shared evenly, do not fit beside FAISS's own into ``free`` bytes each."""
    if needed / len(free) > _GPU_WORK_SHARE * min(free):
        raise RunFailed(
            f"the index needs {needed / 2**30:,.1f} GiB on {len(free)} GPU with {min(free) / 2**30:,.1f} GiB free each",
            hint="use --float16, a smaller code such as PQ, or --device cpu",
        )


def write_index(index: Any, file: Path) -> None:
    """Write a FAISS index and look whether the disk took it, which FAISS does not."""
    load_faiss().write_index(index, str(file))
    read = read_index(file)
    if read.ntotal != index.ntotal:
        raise UserError(f"holds {read.ntotal:,} vectors after writing {index.ntotal:,}", file, "is the disk full?")


def read_index(file: Path, *, mapped: bool = True) -> Any:
    """Read a FAISS index, memory-mapped where its kind allows.

    No array in the file may claim more bytes than the file has: a damaged one is refused instead of crashing.

    Raises:
        UserError: no such file, or one that is damaged.
    """
    faiss = load_faiss()
    limit = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(existing_file(file).stat().st_size)
    # The tables that an IVFPQ index would compute while it is read serve distances, not inner products, and the limit
    # would count them.
    flags = faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE | (faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    try:
        return faiss.read_index(str(file), flags)
    except RuntimeError as error:
        raise UserError(f"is not a whole FAISS index: {faiss_reason(error)}", file, "build it anew") from None
    finally:
        faiss.set_deserialization_vector_byte_limit(limit)


def parameters_of(index: Any) -> dict[str, Parameter]:
    """Return the search-time parameters that an index has, by our names for them."""
    found: dict[str, Parameter] = {}
    for part in parts_of(index):
        if hasattr(part, "k_factor"):
            found["k_factor"] = Parameter(part, "k_factor")
        if hasattr(part, "nprobe"):
            found["nprobe"] = Parameter(part, "nprobe")
        if hasattr(part, "hnsw"):
            found["ef_search"] = Parameter(part.hnsw, "efSearch")
    return found


def set_parameters(index: Any, wanted: Mapping[str, int | None], factory: str, folder: Path) -> dict[str, int | float]:
    """Set search-time parameters, all but those that are None; return the values in use.

    Raises:
        UserError: a name that is no parameter or that this index does not have, with those it has; a value below 1.
    """
    known = parameters_of(index)
    check_parameters(wanted, known, factory, folder)
    for name, value in wanted.items():
        if value is not None:
            owner, attribute = known[name]
            setattr(owner, attribute, min(value, owner.nlist) if name == "nprobe" else value)
    return {name: parameter.value for name, parameter in sorted(known.items())}


def check_parameters(wanted: Mapping[str, int | None], known: Iterable[str], factory: str, folder: Path) -> None:
    """Refuse parameters that an index does not have; see `set_parameters`."""
    known = sorted(known)
    for name, value in wanted.items():
        if name not in PARAMETERS:
            raise UserError(f"unknown parameter {name!r}, expected one of {', '.join(PARAMETERS)}", folder)
        if value is None:
            continue
        if value < 1:
            raise UserError(f"--{name} is {value}, expected 1 or more")
        if name not in known:
            its = f"which has {', '.join(known)}" if known else "which has none to set"
            raise UserError(f"--{name} does not apply to a {factory} index, {its}", folder)


def faiss_reason(error: RuntimeError) -> str:
    """Return what FAISS says without its C++ signature, path and expression."""
    reason = re.sub(r"^.*?\.(?:cpp|h):\d+: ", "", str(error), flags=re.DOTALL)
    told = re.sub(r"^Error: '.*?' failed(?:: )?", "", reason, flags=re.DOTALL).strip()
    return told or reason.strip()


def parts_of(index: Any) -> Iterator[Any]:
    """Yield an index and what it is made of, from the outside in; not an IVF's own index of centroids."""
    faiss = load_faiss()
    part = faiss.downcast_index(index)
    yield part
    for name in ("index", "base_index"):
        if isinstance(part, faiss.IndexPreTransform | faiss.IndexRefine) and hasattr(part, name):
            yield from parts_of(getattr(part, name))
