"""What a model folder holds, looked at before anything is loaded: no pickle, no file cut short, no path out of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from condenser.errors import UserError
from condenser.files import existing_file, read_json
from condenser.manifest import MANIFEST, load_manifest
from condenser.talk import warn

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
CONVERSION = "condenser convert --from transformers NAME --allow_pickle --output DIR makes safetensors of it"

_MAX_HEADER_BYTES = 100 * 2**20
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def check_config(folder: Path) -> None:
    """Check that a folder has a readable config.json; warn of code that it names and that is never run.

    Raises:
        UserError: no config.json, or one that is not a JSON object.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise UserError("no config.json here, expected a Hugging Face model folder", folder)
    if "auto_map" in read_json(file):
        warn(f"{file}: names code of its own (auto_map); it is not run")


def has_tokenizer(folder: Path) -> bool:
    """Say whether any kind of tokenizer lies in a folder."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_weights(folder: Path) -> None:
    """Check that a folder holds whole safetensors weights, which can be loaded without opening a pickle.

    Raises:
        UserError: no weights, or only as ``.bin``; a weight index that points outside the folder or to a
            missing file; a damaged file; an artifact of ours with a file that differs from its manifest.
    """
    if (folder / MANIFEST).is_file():
        load_manifest(folder, verify=True)
    for file in weight_files(folder):
        check_whole(file)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder; see `check_weights` for what is refused."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        return indexed_files(folder / WEIGHTS_INDEX)
    if any(folder.glob("*.bin")):
        raise UserError("weights are only there as .bin, which is a pickle and is not opened", folder, CONVERSION)
    raise UserError(
        f"no weights here, expected {WEIGHTS}", folder, f"if there are weights as .bin elsewhere: {CONVERSION}"
    )


def indexed_files(index: Path) -> list[Path]:
    """Return the files that a weight index lists.

    Raises:
        UserError: no index of weights, a name that lies outside the folder, a file that is not there.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError("no weight_map in this file", index)
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name:
            raise UserError(f"lists {name!r}, which lies outside the folder", index)
        if not (index.parent / name).is_file():
            raise UserError("file listed in the weight index is missing", index.parent / name)
    return [index.parent / name for name in names]


def check_whole(file: Path) -> None:
    """Refuse a safetensors file that has no header, or is not as long as its header says."""
    _read_header(file)


def stored_dtypes(folder: Path) -> set[str]:
    """Return the kinds of real numbers among a folder's weights, such as ``float32``."""
    codes = {entry["dtype"] for file in weight_files(folder) for entry in _read_header(file).values()}
    return {_DTYPES[code] for code in codes & _DTYPES.keys()}


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the description (dtype, shape, data_offsets) of each tensor in a whole safetensors file."""
    import orjson

    found = existing_file(file).stat().st_size
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        raw = stream.read(min(size, _MAX_HEADER_BYTES))
    try:
        header = orjson.loads(raw)
        header.pop("__metadata__", None)
        promised = 8 + size + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, IndexError):
        raise UserError(
            f"weights are damaged: no safetensors header in these {found:,} bytes", file, "copy or make them anew"
        ) from None
    if found != promised:
        raise UserError(
            f"weights are damaged: {found:,} bytes, the file's header says {promised:,}", file, "copy or make them anew"
        )
    return dict(header)


def check_shapes(mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]], where: str | Path) -> None:
    """Refuse weights of other shapes than the configuration's; transformers lists them as (name, found, expected)."""
    for name, found, expected in sorted(mismatched):
        raise UserError(
            f"weights have {name!r} of shape {tuple(found)}, config.json says {tuple(expected)}",
            where,
            "configuration and weights are of different models",
        )
