"""The device that gpu_check.py measures: its name and limits, its clock and its memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator

# Dense bfloat16 operations per second, by a part of the device's name; the first that fits counts.
_PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
)
_PRODUCTS = 10  # calls within one timing, so that launching them does not count

Size = TypeVar("Size")


class Wrong(Exception):
    """A number that is not what it must be."""


class Limits(NamedTuple):
    """What the device does at best, measured: operations per second of large products, bytes per second of a copy."""

    bfloat16: float
    float32: float
    bandwidth: float


class Machine:
    """One device.

    Args:
        device: ``cuda`` takes the first GPU that is visible.
        toy: everything at a size that a CPU computes in a moment.
    """

    def __init__(self, device: torch.device, *, toy: bool) -> None:
        torch.set_float32_matmul_precision("highest")  # no TF32: float32 is to mean float32
        # models that it prepares compute in bfloat16, others in float32
        self.accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16")
        self.device: torch.device = self.accelerator.device
        self.toy = toy

    @property
    def name(self) -> str:
        """What the device is called."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def size(self, full: Size, toy: Size) -> Size:
        """Return one of two sizes."""
        return toy if self.toy else full

    @cached_property
    def limits(self) -> Limits:
        """Measured once."""
        width = self.size(8192, 256)
        rates = []
        for dtype in (torch.bfloat16, torch.float32):
            left, right = (torch.randn(width, width, device=self.device, dtype=dtype) for _ in range(2))
            took = self.seconds(lambda left=left, right=right: _repeat(lambda: left @ right))  # type: ignore[misc]
            rates.append(_PRODUCTS * 2 * width**3 / took)
        source = torch.ones(self.size(2**30, 2**16), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        took = self.seconds(lambda: _repeat(lambda: target.copy_(source)))
        return Limits(*rates, bandwidth=_PRODUCTS * 2 * source.numel() / took)

    @cached_property
    def peak(self) -> tuple[float, str]:
        """Dense bfloat16 operations per second of this device, and where the number is from."""
        for part, operations in _PEAKS:
            if part in self.name:
                return operations, part
        return self.limits.bfloat16, "products measured here: the device is unknown"

    def utilisation(self, operations: float, seconds: float) -> float:
        """Return the share of the device's peak that so many useful operations are."""
        return operations / seconds / self.peak[0]

    def free(self) -> None:
        """Let go of the memory of models and optimisers that nobody holds any more."""
        self.accelerator.free_memory()  # it keeps every model that it has prepared
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, run: Callable[[], Any], *, rounds: int = 5, warm_up: int = 2) -> float:
        """Return the median time of a call, all work on the device done, after some that do not count."""
        times = []
        for number in range(warm_up + rounds):
            self.synchronize()
            began = time.perf_counter()
            run()
            self.synchronize()
            if number >= warm_up:
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Count the peak of memory from here."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float | None:
        """Return the most memory that tensors took on the device since `reset_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None


def limits(machine: Machine) -> dict[str, Any]:
    """What the device does at best: products of square matrices, and a copy (bytes read and bytes written)."""
    found = machine.limits
    operations, source = machine.peak
    return {
        "bf16_tflops": found.bfloat16 / 1e12,
        "float32_tflops": found.float32 / 1e12,
        "copy_gb_per_s": found.bandwidth / 1e9,
        "peak_tflops": operations / 1e12,
        "peak_of": source,
    }


def _repeat(run: Callable[[], Any]) -> None:
    for _ in range(_PRODUCTS):
        run()
