"""Half precision: which processors are fast at it, and where its digits will not do."""

from __future__ import annotations

import torch
from torch import Tensor


def cpu_multiplies_bfloat16() -> bool:
    """Say whether this CPU has instructions for products of bfloat16 (AMX, AVX512_BF16).

    With AMX they take a tenth of the time of float32; without such instructions they take many times as long.
    """
    # torch has no public name for what it asks the processor
    asked = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in asked)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half-precision tensors as float32 and others as they are: a softmax wants the digits."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
