"""In which type an encoder computes: float32, half precision where the hardware has it, or 8-bit integers on a CPU."""

from __future__ import annotations

import torch

from condenser.errors import UserError
from condenser.models.half import cpu_multiplies_bfloat16
from condenser.models.int8 import is_available
from condenser.models.packed import packed_forward_of
from retrieval.encoder import Encoder, Kind

__all__ = ["resolve_dtype", "set_precision"]


def set_precision(encoder: Encoder, kind: Kind, dtype: str = "auto", quantize: str = "none") -> str:
    """Make an encoder compute the vectors of one kind of text in another type; a projection stays in float32.

    Args:
        encoder: on its device; afterwards good for encoding, not for training.
        kind: the texts that are to be encoded.
        dtype: ``float32``, ``float16``, ``bfloat16``, or ``auto``: bfloat16 on a GPU that has it, else float32.
        quantize: ``none``, or ``int8``: linear layers in 8-bit integers, each token with a scale of its own.

    Returns:
        The type's name, for the facts of what is made.

    Raises:
        UserError: half precision on a CPU that is slow at it; int8 on a GPU, together with another type, for a
            family that is not supported, or in a build of PyTorch without it.
    """
    on_cpu = encoder.device.type == "cpu"
    if quantize == "int8":
        if dtype != "auto":
            raise UserError(f"--quantize int8 and --dtype {dtype} are two types", hint="leave --dtype out")
        if not on_cpu:
            raise UserError("--quantize int8 is for CPUs", hint="use --device cpu, or leave --quantize out")
        if not is_available():
            raise UserError("--quantize int8: this build of PyTorch has no 8-bit products")
        packed = packed_forward_of(encoder.tower(kind).model, int8=True)
        if packed is None:
            family = encoder.model.config.model_type
            raise UserError(f"--quantize int8 does not know the model family {family!r}", encoder.source)
        encoder.quantized[kind] = packed
        return "int8"
    dtype = resolve_dtype(dtype, encoder.device)
    encoder.tower(kind).model.to(getattr(torch, dtype))
    return dtype


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """Return the type that ``auto`` means on a device, else the type itself.

    Raises:
        UserError: float16 on a CPU, or bfloat16 on one without instructions for it.
    """
    on_cpu = device.type == "cpu"
    if dtype == "auto":
        return "float32" if on_cpu or not torch.cuda.is_bf16_supported(including_emulation=False) else "bfloat16"
    if on_cpu and (dtype == "float16" or (dtype == "bfloat16" and not cpu_multiplies_bfloat16())):
        raise UserError(f"--dtype {dtype} is for GPUs; this CPU computes in float32", hint="leave --dtype out")
    return dtype
