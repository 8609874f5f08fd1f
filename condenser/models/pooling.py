"""How token states become one vector, recorded where sentence-transformers looks for it."""

from __future__ import annotations

from pathlib import Path

from condenser.files import write_json

ENCODER_FILE = "encoder.json"
MODULES_FILE = "modules.json"
_TYPES = "sentence_transformers.models."


def record_cls(folder: Path, dimension: int) -> None:
    """Record in a pretrained folder that its vector is the CLS state, as it is.

    Condenser trains that state; sentence-transformers takes the mean over tokens where nothing is recorded.
    """
    write_json(folder / ENCODER_FILE, {"pooling": "cls", "normalize": False})
    write_modules(folder, "cls", normalize=False, dimension=dimension)


def write_modules(folder: Path, pooling: str, *, normalize: bool, dimension: int) -> None:
    """Write ``modules.json`` and what it names.

    The pooling file has sentence-transformers' older keys, because its releases up to 5.1 know no others
    and all later ones still read them.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if normalize:
        modules.append(("2_Normalize", "Normalize"))
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": _TYPES + kind}
        for number, (path, kind) in enumerate(modules)
    ]
    write_json(folder / MODULES_FILE, entries)
    stored = {
        "word_embedding_dimension": dimension,
        "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    write_json(folder / "1_Pooling" / "config.json", stored)
