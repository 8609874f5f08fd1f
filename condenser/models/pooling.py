"""How token states become one vector, recorded where sentence-transformers looks for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from condenser.files import write_json

ENCODER_FILE = "encoder.json"
MODULES_FILE = "modules.json"
MODULE_TYPES = "sentence_transformers.models."
POOLING_FOLDER = "1_Pooling"
DENSE_FOLDER = "2_Dense"
IDENTITY = "torch.nn.modules.linear.Identity"


def record_cls(folder: Path, dimension: int) -> None:
    """Record in a pretrained folder that its vector is the CLS state, as it is.

    Condenser trains that state; sentence-transformers takes the mean over tokens where nothing is recorded.
    """
    write_json(folder / ENCODER_FILE, {"pooling": "cls", "normalize": False})
    write_modules(folder, "cls", normalize=False, dimension=dimension)


def write_modules(
    folder: Path, pooling: str, *, normalize: bool, dimension: int, projection: int | None = None, bias: bool = True
) -> None:
    """Write ``modules.json`` and what it names; the weights of a projection are the caller's.

    The pooling file has sentence-transformers' older keys, because its releases up to 5.1 know no others
    and all later ones still read them.

    Args:
        folder: where.
        pooling: ``cls``, ``mean`` or ``last``.
        normalize: whether vectors are scaled to length 1 at the end.
        dimension: length of a token's state.
        projection: length of what a linear layer makes of the pooled state; None for no such layer.
        bias: whether that layer has one.
    """
    modules = [("", "Transformer"), (POOLING_FOLDER, "Pooling")]
    if projection:
        modules.append((DENSE_FOLDER, "Dense"))
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": MODULE_TYPES + kind}
        for number, (path, kind) in enumerate(modules)
    ]
    write_json(folder / MODULES_FILE, entries)
    stored = {
        "word_embedding_dimension": dimension,
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_lasttoken": pooling == "last",
    }
    write_json(folder / POOLING_FOLDER / "config.json", stored)
    if projection:
        dense = {"in_features": dimension, "out_features": projection, "bias": bias, "activation_function": IDENTITY}
        write_json(folder / DENSE_FOLDER / "config.json", dense)


def pool_padded(states: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """Return the vectors (n, hidden) of texts from their token states (n, length, hidden), padded at the right.

    Args:
        states: see above.
        attention_mask: (n, length), 1 on tokens and 0 on padding; None when no row is padded.
        pooling: ``cls``, ``mean`` or ``last``.
    """
    if pooling == "cls":
        return states[:, 0]
    if attention_mask is None:
        return states.mean(dim=1) if pooling == "mean" else states[:, -1]
    lengths = attention_mask.sum(dim=1).clamp(min=1)
    if pooling == "last":
        return states[torch.arange(len(states), device=states.device), lengths - 1]
    return (states * attention_mask.unsqueeze(-1).to(states.dtype)).sum(dim=1) / lengths.unsqueeze(-1)


def pool_texts(states: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Return the vectors (n, hidden) of texts whose token states (tokens, hidden) stand one after the other.

    Args:
        states: see above.
        lengths: (n,) int64, tokens of each text.
        pooling: ``cls``, ``mean`` or ``last``.
    """
    ends = lengths.cumsum(0)
    if pooling == "cls":
        return states[ends - lengths]
    if pooling == "last":
        return states[ends - 1]
    if states.dtype in (torch.float16, torch.bfloat16):
        states = states.float()  # a mean in half precision would be rounded to it
    return torch.stack([text.mean(dim=0) for text in states.split(lengths.tolist())])
