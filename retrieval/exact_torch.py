"""Exact search with torch, on a CPU or on GPUs: vectors stay on the GPUs where they fit, and are streamed where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from condenser.errors import RunFailed, UserError
from condenser.talk import say
from retrieval.vectors import Matrix

_RESIDENT_SHARE = 0.7  # of the free memory; the rest is for products and their best
_PRODUCTS = 1 << 26
_CPU_PRODUCTS = 1 << 22


class _Block(NamedTuple):
    """Some rows of the store on a device: ``codes`` (n, dimension), ``scales`` (n, 1) with int8."""

    start: int
    codes: Tensor
    scales: Tensor | None

    def vectors(self) -> Tensor:
        """Return the vectors as float32: products and sums are of that type, whatever is kept."""
        vectors = self.codes.float()
        return vectors if self.scales is None else vectors * self.scales


class TorchBlocks:
    """Finds each query's best stored vectors by float32 inner product.

    Args:
        shards: the stored vectors.
        dimension: their length.
        device: ``cpu``, ``cuda`` for all visible GPUs, which share the rows, or one of them.
        float16: keep float32 vectors as float16 on the device.

    Raises:
        UserError: no GPU to use.
    """

    def __init__(self, shards: Sequence[Matrix], dimension: int, device: str, *, float16: bool = False) -> None:
        self._shards = shards
        self._dimension = dimension
        self._devices = _devices(device)
        self.halved = float16 and any(shard.codes.dtype == np.float32 for shard in shards)
        self._resident: list[_Block] | None = None
        if self._devices[0].type == "cuda":
            self._keep_if_it_fits()

    def fetch(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best ``(scores, rows)``, each (q, count), in no order; -inf and -1 where there are no more."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # the bound on rounding is that of float32, not of TF32
        try:
            with torch.inference_mode():
                found = self._search(torch.from_numpy(np.ascontiguousarray(queries)), count)
        except torch.OutOfMemoryError:
            free = [torch.cuda.mem_get_info(place)[0] / 2**30 for place in self._devices]
            raise RunFailed(
                f"GPU memory ran out over {len(queries):,} queries and {count:,} candidates each, "
                f"with {min(free):,.1f} GiB free",
                hint="search fewer queries at once, or use --float16 or --device cpu",
            ) from None
        finally:
            torch.set_float32_matmul_precision(precision)
        return found

    def _search(self, queries: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
        placed = {place: queries.to(place) for place in self._devices}
        best: dict[torch.device, tuple[Tensor, Tensor]] = {}
        limit = _PRODUCTS if self._devices[0].type == "cuda" else _CPU_PRODUCTS
        rows_at_once = max(1024, limit // max(1, len(queries)))
        for block in self._blocks(rows_at_once):
            place = block.codes.device
            scores, found = _best_of(placed[place] @ block.vectors().T, None, count)
            found = found + block.start
            if place in best:
                scores, found = _best_of(
                    torch.cat([best[place][0], scores], 1), torch.cat([best[place][1], found], 1), count
                )
            best[place] = scores, found
        scores = torch.cat([one[0].cpu() for one in best.values()], 1)
        scores, rows = _best_of(scores, torch.cat([one[1].cpu() for one in best.values()], 1), count)
        missing = (0, count - scores.shape[1])
        return (
            torch.nn.functional.pad(scores, missing, value=-torch.inf).numpy(),
            torch.nn.functional.pad(rows, missing, value=-1).numpy(),
        )

    def _blocks(self, rows: int) -> Iterator[_Block]:
        if self._resident is None:
            yield from self._stream(rows)
            return
        for block in self._resident:
            for start in range(0, len(block.codes), rows):
                scales = None if block.scales is None else block.scales[start : start + rows]
                yield _Block(block.start + start, block.codes[start : start + rows], scales)

    def _stream(self, rows: int) -> Iterator[_Block]:
        """Yield all rows, block by block, on one device after the other."""
        first = number = 0
        for shard in self._shards:
            for start in range(0, len(shard), rows):
                codes = torch.from_numpy(_writable(shard.codes[start : start + rows]))
                scales = None if shard.scales is None else _writable(shard.scales[start : start + rows])
                place = self._devices[number % len(self._devices)]
                codes = codes.half() if self.halved and codes.dtype == torch.float32 else codes
                yield _Block(
                    first + start,
                    codes.to(place, non_blocking=True),
                    None if scales is None else torch.from_numpy(scales).unsqueeze(1).to(place),
                )
                number += 1
            first += len(shard)

    def _keep_if_it_fits(self) -> None:
        needed = stored_bytes(self._shards, self._dimension, halved=self.halved)
        free = [torch.cuda.mem_get_info(place)[0] for place in self._devices]
        told = f"{needed / 2**30:,.1f} GiB of vectors, {sum(free) / 2**30:,.1f} GiB free on {len(free)} GPU"
        if fits(needed, free):
            rows = sum(map(len, self._shards))
            self._resident = list(self._stream(min(1 << 18, max(1, -(-rows // len(free))))))
            say(f"search on GPU: {told}")
        else:
            say(f"search on GPU: {told}: they are streamed block by block")


def stored_bytes(shards: Sequence[Matrix], dimension: int, *, halved: bool = False) -> int:
    """Return how many bytes vectors take on a device: as they are kept, or float32 ones in half."""
    total = 0
    for shard in shards:
        width = shard.codes.dtype.itemsize
        total += len(shard) * (dimension * (2 if halved and width == 4 else width) + (0 if shard.scales is None else 4))
    return total


def fits(needed: int, free: Sequence[int]) -> bool:
    """Tell whether ``needed`` bytes, shared evenly, leave each device room to work in its ``free`` bytes."""
    return needed / len(free) <= _RESIDENT_SHARE * min(free)


def _best_of(scores: Tensor, rows: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    values, places = scores.topk(min(count, scores.shape[1]), dim=1, sorted=False)
    return values, places if rows is None else rows.gather(1, places)


def _writable(array: np.ndarray) -> np.ndarray:
    # torch warns of memory that it might write to; a mapped file cannot be written, so it is copied
    return np.array(array) if not array.flags.writeable else array


def _devices(name: str) -> list[torch.device]:
    if name == "cpu":
        return [torch.device("cpu")]
    if not torch.cuda.is_available():
        raise UserError(f"--device {name}: PyTorch finds no GPU here", hint="use --device cpu")
    if name == "cuda":
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return [torch.device(name)]
