"""Linear layers in 8-bit integers, for faster encoding on x86 processors; the weights are copied and rounded once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Int8Linear", "ScaledRows", "is_available", "scaled_rows"]


# Steps that an input has to either side of zero. Without VNNI a processor adds two products in 16 bits, where those of
# full 8-bit numbers do not fit.
_VNNI_STEPS, _STEPS = 127, 63


class ScaledRows(NamedTuple):
    """Rows (n, in) over their largest absolute values (n, 1): int8 with VNNI, else float32, which FBGEMM rounds."""

    rows: Tensor
    largest: Tensor


def is_available() -> bool:
    """Say whether this build of PyTorch has the 8-bit products used here, which is so on x86."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def scaled_rows(rows: Tensor) -> ScaledRows:
    """Scale each row to -1 to 1: a token's integers depend on it alone, not on the batch that it stands in."""
    largest = torch.maximum(rows.amax(dim=1, keepdim=True), rows.amin(dim=1, keepdim=True).neg_())
    largest.clamp_(min=torch.finfo(rows.dtype).tiny)
    if _has_vnni():
        return ScaledRows((rows * (_VNNI_STEPS / largest)).round_().to(torch.int8), largest)
    return ScaledRows(rows / largest, largest)


class Int8Linear:
    """A linear layer whose weights are 8-bit integers with a scale per output, and whose inputs become so by row.

    The product is oneDNN's on processors with VNNI, two to three times as fast there as FBGEMM's, which serves others.

    Args:
        linear: the layer, in float32 on the CPU; it stays as it is.
        activation: an elementwise function of the outputs, which may work in place.
    """

    def __init__(self, linear: nn.Linear, activation: Callable[[Tensor], Tensor] | None = None) -> None:
        weight = linear.weight.detach().float()
        self._bias = None if linear.bias is None else linear.bias.detach().float().clone()
        self._activation = activation
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(weight.dtype).tiny)
        self._product = _onednn_product(weight, scale) if _has_vnni() else _fbgemm_product(weight, scale)

    def __call__(self, scaled: ScaledRows) -> Tensor:
        """Return the outputs (n, out) in float32."""
        rows, largest = scaled
        result = self._product(rows)
        if self._bias is None:
            result.mul_(largest)
        else:
            torch.addcmul(self._bias, result, largest, out=result)
        return result if self._activation is None else self._activation(result)


def _has_vnni() -> bool:
    return bool(torch.cpu._is_vnni_supported())


def _onednn_product(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    rounded = (weight / scale[:, None]).round_().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(rounded, None)
    zeros = torch.zeros(len(weight), dtype=torch.int32)

    def product(rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1 / _VNNI_STEPS, 0, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return result

    return product


def _fbgemm_product(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        # PyTorch wants to move quantised tensors to another library; the products themselves stay.
        warnings.simplefilter("ignore")
        rounded = torch.quantize_per_channel(weight, scale.double(), zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(rounded, None)

    def product(rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, 1 / _STEPS, _STEPS + 1, packed
        )
        return result

    return product
