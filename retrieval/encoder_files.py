"""What an encoder's folder says of itself: our ``encoder.json``, and sentence-transformers' files, read and written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson

from condenser.errors import UserError
from condenser.files import read_json, write_json
from condenser.models.pooling import ENCODER_FILE, MODULES_FILE, write_modules
from condenser.talk import say
from condenser.weights import check_config, check_weights, has_tokenizer

_LEGACY_POOLING = "pooling_mode_"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """How a text becomes a vector, besides weights and tokenizer; lengths in tokens with the special ones.

    Raises:
        UserError: an unknown pooling, or a template without ``{text}``.
    """

    pooling: str = "cls"
    normalize: bool = False
    query_prompt: str = ""
    passage_prompt: str = ""
    passage_template: str = "{title} {text}"
    query_max_length: int = 32
    passage_max_length: int = 128

    def __post_init__(self) -> None:
        if self.pooling not in ("cls", "mean"):
            raise UserError(f"pooling is {self.pooling!r}, expected cls or mean")
        if "{text}" not in self.passage_template:
            raise UserError(f"passage template {self.passage_template!r} has no {{text}}")

    @property
    def similarity(self) -> str:
        """``cosine`` for vectors of length 1, else ``dot``; the score is the inner product in both cases."""
        return "cosine" if self.normalize else "dot"

    def passage_text(self, title: str, text: str) -> str:
        """Fill the template; an empty title leaves no leading blank."""
        template = self.passage_template
        if not title:
            template = template.replace("{title}", "").lstrip()
        values = {"{title}": title, "{text}": text}
        return re.sub(r"\{title\}|\{text\}", lambda name: values[name.group()], template)

    def changed(self, overrides: Mapping[str, Any]) -> EncoderConfig:
        """Return a copy with the values of ``overrides`` that are not None."""
        return replace(self, **{name: value for name, value in overrides.items() if value is not None})


def check_folder(folder: Path) -> None:
    """Check that a folder holds a model that can be loaded without opening a pickle.

    Raises:
        UserError: no config or tokenizer, or weights that `check_weights` refuses.
    """
    check_config(folder)
    if not has_tokenizer(folder):
        raise UserError("no tokenizer here", folder, "expected tokenizer.json or vocab.txt beside the weights")
    check_weights(folder)


def read_config(folder: Path, longest: int) -> EncoderConfig:
    """Read an encoder's config from our file, or from sentence-transformers' files, or take the defaults.

    A folder without either (plain Hugging Face) gets CLS pooling without normalisation, and one line
    says so. What ours does not say (a pretrained folder names the pooling alone) is as by default.

    Args:
        folder: the encoder's folder.
        longest: tokens the model has positions for; defaults are lowered to it.

    Raises:
        UserError: unreadable files, an unknown key or value, a kind of pooling or module that this
            toolkit does not have.
    """
    default = EncoderConfig()
    default = replace(
        default,
        query_max_length=min(default.query_max_length, longest),
        passage_max_length=min(default.passage_max_length, longest),
    )
    if (folder / ENCODER_FILE).is_file():
        return _read_own(folder / ENCODER_FILE, default)
    if (folder / MODULES_FILE).is_file():
        return _read_sentence_transformers(folder, longest)
    say(f"{folder}: no pooling recorded here, taking the CLS vector, not normalised")
    return default


def _read_own(file: Path, default: EncoderConfig) -> EncoderConfig:
    stored = read_json(file)
    similarity = stored.pop("similarity", None)
    known = {field.name: field.type for field in fields(EncoderConfig)}
    kinds = {"str": str, "bool": bool, "int": int}
    for name, value in stored.items():
        if name not in known:
            raise UserError(f"unknown key {name!r}", file, f"expected {', '.join(known)}")
        if type(value) is not kinds[str(known[name])]:
            raise UserError(f"{name} is {value!r}, expected {known[name]}", file)
    try:
        config = replace(default, **stored)
    except UserError as error:
        raise UserError(error.what, file) from None
    if similarity not in (None, config.similarity):
        raise UserError(f"similarity is {similarity!r}, which does not go with normalize {config.normalize}", file)
    return config


def _read_sentence_transformers(folder: Path, longest: int) -> EncoderConfig:
    modules = _read_modules(folder / MODULES_FILE)
    pooling, normalize = "mean", False
    for kind, path in modules:
        if kind == "Pooling":
            pooling = _read_pooling(folder / path / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise UserError(f"has a {kind} module, expected Transformer, Pooling or Normalize", folder / MODULES_FILE)
    lengths = _read_if_there(folder / "sentence_bert_config.json").get("max_seq_length") or longest
    own = _read_if_there(folder / "config_sentence_transformers.json")
    prompts = own.get("prompts") or {}
    return EncoderConfig(
        pooling=pooling,
        normalize=normalize or own.get("similarity_fn_name") == "cosine",
        query_prompt=prompts.get("query") or "",
        passage_prompt=prompts.get("document") or prompts.get("passage") or "",
        query_max_length=min(lengths, longest),
        passage_max_length=min(lengths, longest),
    )


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """Return each module's class name and subfolder; the file is a JSON array, not an object."""
    try:
        modules = [(str(module["type"]), str(module["path"])) for module in orjson.loads(file.read_bytes())]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        raise UserError("expected a JSON array of modules with type and path", file) from None
    return [(kind.rsplit(".", 1)[-1], path) for kind, path in modules]


def _read_pooling(file: Path) -> str:
    stored = read_json(file)
    if "pooling_mode" in stored:
        modes = stored["pooling_mode"]
        modes = [modes] if isinstance(modes, str) else list(modes)
    else:
        legacy = [
            name.removeprefix(_LEGACY_POOLING) for name, on in stored.items() if on and name.startswith(_LEGACY_POOLING)
        ]
        modes = [{"cls_token": "cls", "mean_tokens": "mean"}.get(name, name) for name in legacy] or ["mean"]
    if modes not in (["cls"], ["mean"]):
        raise UserError(f"pooling is {' + '.join(map(str, modes))}, expected cls or mean", file)
    return str(modes[0])


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def write_config(folder: Path, config: EncoderConfig, dimension: int) -> None:
    """Write ``encoder.json``, and the files by which sentence-transformers loads the same encoder."""
    write_json(folder / ENCODER_FILE, {**asdict(config), "similarity": config.similarity})
    write_modules(folder, config.pooling, normalize=config.normalize, dimension=dimension)
    # One limit for both kinds is all that library has; queries are far below it anyway.
    length = {"max_seq_length": config.passage_max_length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", length)
    prompts = {
        "prompts": {"query": config.query_prompt, "document": config.passage_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": config.similarity,
    }
    write_json(folder / "config_sentence_transformers.json", prompts)
