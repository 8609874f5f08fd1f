"""What an encoder's folder says of itself: our ``encoder.json``, and sentence-transformers' files, read and written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from condenser.errors import UserError
from condenser.files import read_json, write_json
from condenser.models.pooling import ENCODER_FILE, MODULE_TYPES, MODULES_FILE, write_modules
from condenser.talk import say
from condenser.weights import CONFIG, check_config, check_weights, has_tokenizer

POOLINGS = ("cls", "mean", "last")
# The towers of an untied encoder, as subfolders of its own.
QUERY_TOWER = "query"
PASSAGE_TOWER = "passage"
SIZES_FILE = "sentence_bert_config.json"

_LEGACY_POOLING = "pooling_mode_"
_THEIR_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# DPR was trained on [CLS] title [SEP] text [SEP], up to 256 tokens (Karpukhin et al. 2020).
_DPR_TEMPLATE = "{title}{sep}{text}"
_DPR_LENGTH = 256


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """How a text becomes a vector, besides weights and tokenizer; lengths in tokens with the special ones.

    Attributes:
        pooling: ``cls`` (state of the first token), ``mean`` or ``last`` (state of the last token).
        normalize: scale vectors to length 1.
        untied: a tower for queries and one for passages.
        projection: length of what a linear layer makes of the pooled state; None for no such layer.
        query_prompt: put before each query.
        passage_prompt: put before each passage.
        passage_template: how ``{title}`` and ``{text}`` are joined; ``{sep}`` is the tokenizer's separator.
        query_max_length: longest query.
        passage_max_length: longest passage.

    Raises:
        UserError: an unknown pooling, or a template without ``{text}``.
    """

    pooling: str = "cls"
    normalize: bool = False
    untied: bool = False
    projection: int | None = None
    query_prompt: str = ""
    passage_prompt: str = ""
    passage_template: str = "{title} {text}"
    query_max_length: int = 32
    passage_max_length: int = 128

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise UserError(f"pooling is {self.pooling!r}, expected {_or(POOLINGS)}")
        if "{text}" not in self.passage_template:
            raise UserError(f"passage template {self.passage_template!r} has no {{text}}")

    @property
    def similarity(self) -> str:
        """``cosine`` for vectors of length 1, else ``dot``; the score is the inner product in both cases."""
        return "cosine" if self.normalize else "dot"

    def passage_text(self, title: str, text: str, separator: str | None = None) -> str:
        """Fill the template, see `fill_template`."""
        return fill_template(self.passage_template, title, text, separator)

    def changed(self, overrides: Mapping[str, Any]) -> EncoderConfig:
        """Return a copy with the values of ``overrides`` that are not None."""
        return replace(self, **{name: value for name, value in overrides.items() if value is not None})


def fill_template(template: str, title: str, text: str, separator: str | None = None) -> str:
    """Join title and text by a template; an empty title leaves no leading blank and no separator."""
    if not title:
        template = re.sub(r"\{title\}\s*(\{sep\})?", "", template).lstrip()
    values = {"{title}": title, "{text}": text, "{sep}": separator or ""}
    return re.sub(r"\{(title|text|sep)\}", lambda name: values[name.group()], template)


def check_folder(folder: Path) -> None:
    """Check that a folder holds a model that can be loaded without opening a pickle.

    Raises:
        UserError: no config or tokenizer, or weights that `check_weights` refuses.
    """
    check_config(folder)
    if not has_tokenizer(folder):
        raise UserError("no tokenizer here", folder, "expected tokenizer.json or vocab.txt beside the weights")
    check_weights(folder)


def is_pair(folder: Path) -> bool:
    """Say whether an encoder has two towers, in two subfolders."""
    return _read_if_there(folder / ENCODER_FILE).get("untied") is True


def asks_for_lower_case(folder: Path) -> bool:
    """Say whether sentence-transformers would put texts into lower case before the tokenizer sees them."""
    return _read_if_there(folder / SIZES_FILE).get("do_lower_case") is True


def dense_folder(folder: Path) -> Path | None:
    """Return the subfolder of the linear layer that sentence-transformers' files name, or None."""
    if not (folder / MODULES_FILE).is_file():
        return None
    return next((folder / module.path for module in _read_modules(folder) if module.kind == "Dense"), None)


def read_config(folder: Path, longest: int, projection: int | None = None) -> EncoderConfig:
    """Read an encoder's config from our file, or from sentence-transformers' files, or take the defaults.

    A folder without either (plain Hugging Face) gets CLS pooling without normalisation, and one line
    says so. What ours does not say (a pretrained folder names the pooling alone) is as by default.

    Args:
        folder: the encoder's folder.
        longest: tokens the model has positions for; defaults are lowered to it.
        projection: length of what the linear layer found in the folder makes, or None.

    Raises:
        UserError: unreadable files, an unknown key or value, a kind of pooling or module that this
            toolkit does not have.
    """
    default = EncoderConfig(projection=projection)
    is_dpr = _read_if_there(folder / CONFIG).get("model_type") == "dpr"
    if is_dpr:
        default = replace(
            default, passage_template=_DPR_TEMPLATE, query_max_length=_DPR_LENGTH, passage_max_length=_DPR_LENGTH
        )
    default = replace(
        default,
        query_max_length=min(default.query_max_length, longest),
        passage_max_length=min(default.passage_max_length, longest),
    )
    if (folder / ENCODER_FILE).is_file():
        return _read_own(folder / ENCODER_FILE, default)
    if (folder / MODULES_FILE).is_file():
        return _read_sentence_transformers(folder, longest, projection)
    if is_dpr:
        say(f"{folder}: a tower of DPR, taking the CLS vector, not normalised, and passages as {_DPR_TEMPLATE}")
    else:
        say(f"{folder}: no pooling recorded here, taking the CLS vector, not normalised")
    return default


def _read_own(file: Path, default: EncoderConfig) -> EncoderConfig:
    stored = read_json(file)
    similarity = stored.pop("similarity", None)
    known = {field.name: str(field.type) for field in fields(EncoderConfig)}
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "bool": (bool,),
        "int": (int,),
        "int | None": (int, type(None)),
    }
    for name, value in stored.items():
        if name not in known:
            raise UserError(f"unknown key {name!r}", file, f"expected {', '.join(known)}")
        if type(value) not in kinds[known[name]]:
            raise UserError(f"{name} is {value!r}, expected {known[name]}", file)
    try:
        config = replace(default, **stored)
    except UserError as error:
        raise UserError(error.what, file) from None
    if similarity not in (None, config.similarity):
        raise UserError(f"similarity is {similarity!r}, which does not go with normalize {config.normalize}", file)
    if config.projection != default.projection:
        raise UserError(f"projection is {config.projection}, the folder has a layer to {default.projection}", file)
    return config


def _read_sentence_transformers(folder: Path, longest: int, projection: int | None) -> EncoderConfig:
    modules = _read_modules(folder)
    pooling = "mean"
    for module in modules:
        if module.kind == "Pooling":
            pooling = _read_pooling(folder / module.path / CONFIG)
    sizes, own = folder / SIZES_FILE, folder / "config_sentence_transformers.json"
    length = min(_value(_read_if_there(sizes), "max_seq_length", int, sizes) or longest, longest)
    said = _read_if_there(own)
    prompts = _value(said, "prompts", dict, own)
    # Their names for the passages' prompt; files that have several leave all but one empty.
    passage_prompts = [_value(prompts, name, str, own) for name in ("document", "passage", "corpus")]
    return EncoderConfig(
        pooling=pooling,
        normalize=modules[-1].kind == "Normalize" or said.get("similarity_fn_name") == "cosine",
        projection=projection,
        query_prompt=_value(prompts, "query", str, own),
        passage_prompt=next(filter(None, passage_prompts), ""),
        query_max_length=length,
        passage_max_length=length,
    )


def _value(stored: Mapping[str, Any], name: str, kind: type, file: Path) -> Any:
    """Return a value of a file, or the empty one of its kind where the file has none or null."""
    value = stored.get(name)
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{name} is {value!r}, expected {kind.__name__}", file)
    return kind() if value is None else value


class _Module(NamedTuple):
    kind: str
    path: str


def _read_modules(folder: Path) -> list[_Module]:
    """Return each module's class name and subfolder; the file is a JSON array, not an object."""
    import orjson

    file = folder / MODULES_FILE
    try:
        entries = orjson.loads(file.read_bytes())
        modules = [_Module(str(one["type"]).rsplit(".", 1)[-1], str(one["path"])) for one in entries]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        raise UserError("expected a JSON array of modules with type and path", file) from None
    kinds = [module.kind for module in modules]
    if kinds != [kind for kind in _MODULES if kind in kinds] or kinds[:1] != ["Transformer"]:
        raise UserError(f"modules are {', '.join(kinds) or 'none'}, expected {', '.join(_MODULES)} in this order", file)
    for module in modules:
        if module.path and (Path(module.path).name != module.path or module.path == ".."):
            raise UserError(f"lists {module.path!r}, which lies outside the folder", file)
    return modules


def _read_pooling(file: Path) -> str:
    stored = read_json(file)
    if "pooling_mode" in stored:
        said = stored["pooling_mode"]
        modes = list(map(str, said if isinstance(said, list) else [said]))
    else:
        modes = [
            name.removeprefix(_LEGACY_POOLING) for name, on in stored.items() if on and name.startswith(_LEGACY_POOLING)
        ]
    modes = [_THEIR_POOLINGS.get(mode, mode) for mode in modes] or ["mean"]
    if len(modes) > 1 or modes[0] not in POOLINGS:
        raise UserError(f"pooling is {' + '.join(modes)}, expected {_or(POOLINGS)}", file)
    if stored.get("include_prompt") is False:
        raise UserError("pooling leaves the prompt out (include_prompt false), which is not supported", file)
    return modes[0]


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def write_config(folder: Path, config: EncoderConfig, hidden: int, *, bias: bool, max_length: int) -> None:
    """Write a tower's ``encoder.json``, and the files by which sentence-transformers loads the same encoder.

    Args:
        folder: where.
        config: of an encoder with this tower for queries and passages.
        hidden: length of a token's state.
        bias: whether the projection has one.
        max_length: where sentence-transformers cuts texts, queries and passages alike.
    """
    _write_own(folder, config)
    write_modules(
        folder,
        config.pooling,
        normalize=config.normalize,
        dimension=hidden,
        projection=config.projection,
        bias=bias,
    )
    length = {"max_seq_length": max_length, "do_lower_case": False}
    write_json(folder / SIZES_FILE, length)


def write_pair(folder: Path, config: EncoderConfig) -> None:
    """Write what joins the towers ``query`` and ``passage``: ``encoder.json``, and a sentence-transformers Router."""
    _write_own(folder, config)
    write_json(folder / MODULES_FILE, [{"idx": 0, "name": "0", "path": "", "type": MODULE_TYPES + "Router"}])
    towers = {"query": QUERY_TOWER, "document": PASSAGE_TOWER}
    structure = {
        route: [f"{tower}/{path}".rstrip("/") for _, path in _read_modules(folder / tower)]
        for route, tower in towers.items()
    }
    types = {
        f"{tower}/{path}".rstrip("/"): MODULE_TYPES + kind
        for tower in towers.values()
        for kind, path in _read_modules(folder / tower)
    }
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(folder / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})


def _write_own(folder: Path, config: EncoderConfig) -> None:
    write_json(folder / ENCODER_FILE, {**asdict(config), "similarity": config.similarity})
    prompts = {
        "prompts": {"query": config.query_prompt, "document": config.passage_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": config.similarity,
    }
    write_json(folder / "config_sentence_transformers.json", prompts)


def _or(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
