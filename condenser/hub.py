"""Finding models by folder or hub name, and loading them without the noise and the parts that nobody wants."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from condenser.errors import UserError, first_line, nearest

# The families whose positions start behind the pad token's id instead of at 0.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")


def local_folder(name: str | Path, *, also: str | None = None) -> Path:
    """Return the folder of a model that is named by path or by hub name.

    The hub is asked only for what looks like a hub name (``name`` or ``owner/name``), the local cache first.

    Args:
        name: folder or hub name.
        also: files to download beside configuration, tokenizer and safetensors, as a pattern; wanted
            only where there are no safetensors.

    Raises:
        UserError: no such folder; a name that is neither in the cache nor to be had from the hub.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError("is a file, expected a model folder", path)
    text = str(name)
    inside_a_folder = "/" in text and path.parent.is_dir()
    if text.startswith((".", "~")) or path.is_absolute() or text.count("/") > 1 or inside_a_folder:
        raise UserError("no such folder, expected a model folder", path, _near_folder(path))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    # The last are the small layers of sentence-transformers, for `convert`: it opens them, nobody else does.
    wanted = ["*.json", "*.txt", "*.model", "*.safetensors", "[0-9]_*/*.bin", *([also] if also else [])]
    try:
        cached = Path(snapshot_download(text, allow_patterns=wanted, local_files_only=True))
        if also is None or any(cached.glob("*.safetensors")) or any(cached.glob(also)):
            return cached
    except HFValidationError:
        raise UserError("no such folder, and not a hub name either", path) from None
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(text, allow_patterns=wanted))
    except Exception as error:  # whatever the network does, the user learns one thing: it is not here
        raise UserError("no such folder, and not to be had from the model hub", path, first_line(error)) from None


def _near_folder(path: Path) -> str | None:
    if not path.parent.is_dir():
        return None
    close = nearest(path.name, [entry.name for entry in path.parent.iterdir() if entry.is_dir()])
    return f"did you mean {path.parent / close}?" if close else None


def position_limit(config: Any) -> int:
    """Return how many tokens a model of this configuration has positions for."""
    positions = int(getattr(config, "max_position_embeddings", None) or 1_000_000)
    if config.model_type in _OFFSET_POSITIONS:
        positions -= int(config.pad_token_id or 0) + 1
    return positions


def load_encoder_alone(folder: Path, **settings: Any) -> Any:
    """Return what AutoModel makes of a folder, without the pooler that some families put behind the encoder.

    Args:
        folder: the model folder.
        settings: for ``from_pretrained``, whose errors go through.
    """
    from transformers import AutoModel

    try:
        return AutoModel.from_pretrained(folder, add_pooling_layer=False, **settings)
    except TypeError as error:  # families without such a pooler do not know the switch
        if "add_pooling_layer" not in str(error):
            raise
        return AutoModel.from_pretrained(folder, **settings)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and its table of keys: what matters there is checked and said in our words."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
