"""Other toolkits' weight files, read and written: the only place where a pickle is opened, and only by explicit wish.

Three ways: what the reference Condenser code wrote becomes a pretrained folder; a pretrained folder becomes what that
code loads; a model whose weights are only there as ``.bin`` becomes one with safetensors.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from condenser.artifacts import Workspace, result_config
from condenser.corpus.tokens import load_tokenizer
from condenser.errors import UserError, first_line, sample
from condenser.files import sha256_file
from condenser.hub import local_folder
from condenser.manifest import MANIFEST
from condenser.models.backbone import load_backbone
from condenser.models.condenser import HEAD_FILE, SETTINGS_FILE, CondenserModel, read_settings
from condenser.options import ConvertOptions
from condenser.talk import say, warn
from condenser.weights import CONFIG, WEIGHTS, check_config, check_whole, has_tokenizer, indexed_files

PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
REFERENCE_HEAD = "model.pt"
REFERENCE_FAMILIES = ("bert", "roberta")

_HEAD_PREFIX = "c_head."
# coCondenser's file also has the targets of its contrastive loss, in the size of one batch on one machine.
_NO_WEIGHTS = {"co_target"}
_COPIED = ("*.json", "*.txt", "*.model", "[0-9]_*/*.json")


def convert(options: ConvertOptions) -> Path:
    """Turn weights of another toolkit into ours, or ours into the reference's.

    Args:
        options: see `ConvertOptions`.

    Returns:
        The new folder.

    Raises:
        UserError: not exactly one of --from and --to; files missing, damaged or holding more than plain
            tensors; a pickle without --allow_pickle; a head that does not fit.
    """
    if (options.from_ is None) == (options.to is None):
        raise UserError("give exactly one of --from and --to")
    if "pyserini" in (options.from_, options.to):
        raise UserError("Pyserini's indexes hold vectors, not weights", hint="see retrieval.pyserini_index")
    if options.from_ != "reference" and (options.skip_from, options.late_mlm) != (None, None):
        raise UserError("--skip_from and --late_mlm are for --from reference; other folders say them themselves")
    folder = local_folder(options.model, also="*.bin")
    check_config(folder)
    files = _files_to_read(folder, options)
    pickles = [file for file in files if file.suffix in (".bin", ".pt")]
    if pickles and not options.allow_pickle:
        raise UserError(
            "is a pickle, which is opened only with --allow_pickle",
            pickles[0],
            "as plain tensors: no code in it is run",
        )
    inputs = {file.relative_to(folder).as_posix(): sha256_file(file)[:16] for file in files}
    workspace = Workspace(options.output, "pretrained", config=result_config(options), inputs=inputs)
    with workspace:
        if workspace.done:
            return workspace.output
        if options.to == "reference":
            facts = _to_reference(folder, workspace.path)
        elif options.from_ == "reference":
            facts = _from_reference(folder, files, options, workspace.path)
        else:
            facts = _from_transformers(folder, files, workspace.path)
        if not has_tokenizer(folder):
            warn(f"{folder}: no tokenizer here; put the one of these weights into {workspace.output} before using them")
        return workspace.commit(facts | {"converted": options.from_ or f"to {options.to}", "source": options.model})


def _files_to_read(folder: Path, options: ConvertOptions) -> list[Path]:
    """Return configuration, weights and head: all that is read. What else is there stays closed, args.pt above all."""
    if options.to:
        own = [folder / name for name in (WEIGHTS, SETTINGS_FILE, HEAD_FILE)]
        return [folder / CONFIG, *(file for file in own if file.is_file())]
    modules = _pickled_modules(folder) if options.from_ == "transformers" else []
    if (folder / WEIGHTS).is_file():
        if options.from_ == "transformers" and not modules:
            raise UserError(f"has {WEIGHTS} already; there is nothing to convert", folder)
        weights = [folder / WEIGHTS]
    elif (folder / PICKLED_INDEX).is_file():
        weights = indexed_files(folder / PICKLED_INDEX)
    elif (folder / PICKLED_WEIGHTS).is_file():
        weights = [folder / PICKLED_WEIGHTS]
    else:
        raise UserError(f"no weights here, expected {PICKLED_WEIGHTS} or {WEIGHTS}", folder)
    if options.from_ == "transformers":
        return [folder / CONFIG, *weights, *modules]
    head = folder / REFERENCE_HEAD
    if not head.is_file():
        raise UserError(
            f"no {REFERENCE_HEAD} here, the Condenser head of the reference code",
            folder,
            "weights without a head: --from transformers",
        )
    return [folder / CONFIG, *weights, head]


def _pickled_modules(folder: Path) -> list[Path]:
    """Return the weights of sentence-transformers' modules, such as ``2_Dense``, that are there only as ``.bin``."""
    files = sorted(folder.glob(f"[0-9]_*/{PICKLED_WEIGHTS}"))
    return [file for file in files if not (file.parent / WEIGHTS).is_file()]


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Return the tensors of safetensors files and of pickles, from which nothing but tensors is taken.

    Raises:
        UserError: a damaged file, or a pickle that holds anything else or asks for code to be run.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            check_whole(file)
            tensors |= load_file(file)
        else:
            tensors |= _read_pickle(file)
    return tensors


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an unusual pickle: what comes of it is said here
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises depends on the byte where the file goes wrong
        reason = first_line(error).split(". ")[0]
        raise UserError(f"is damaged, or holds more than plain tensors ({reason})", file) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError("holds something else than named tensors", file)
    return {str(name): value for name, value in loaded.items()}


def _from_reference(folder: Path, files: list[Path], options: ConvertOptions, output: Path) -> dict[str, object]:
    *weights, head_file = files[1:]
    head, head_layers = _reference_head(head_file)
    backbone, _ = load_backbone(folder, tensors=read_tensors(weights))
    skip_from = backbone.layers // 2 if options.skip_from is None else options.skip_from
    late_mlm = True if options.late_mlm is None else options.late_mlm
    model = CondenserModel(backbone, head_layers=head_layers, skip_from=skip_from, late_mlm=late_mlm)
    model.take_head(head, head_file)
    if options.skip_from is None or options.late_mlm is None:
        say(
            f"{folder}: taken as skip_from {skip_from}, late_mlm {str(late_mlm).lower()}; the reference keeps these "
            "only in args.pt, which is not opened: --skip_from and --late_mlm say otherwise"
        )
    model.save(output)
    _copy_texts(folder, output)
    return dict(model.settings())


def _reference_head(file: Path) -> tuple[dict[str, Tensor], int]:
    """Return the head's tensors, named as ours are, and the number of its layers."""
    tensors = {name: value for name, value in read_tensors([file]).items() if name not in _NO_WEIGHTS}
    strange = sorted(name for name in tensors if not name.startswith(_HEAD_PREFIX))
    if strange or not tensors:
        raise UserError(f"expected tensors named {_HEAD_PREFIX}0..., found {sample(strange) or 'none'}", file)
    head = {name.removeprefix(_HEAD_PREFIX): value.float() for name, value in tensors.items()}
    return head, len({name.split(".")[0] for name in head})


def _to_reference(folder: Path, output: Path) -> dict[str, object]:
    backbone, _ = load_backbone(folder)
    if backbone.config.model_type not in REFERENCE_FAMILIES:
        raise UserError(
            f"the reference code has no {backbone.config.model_type}, only {' and '.join(REFERENCE_FAMILIES)}", folder
        )
    backbone.lm.config.save_pretrained(output)
    torch.save(dict(backbone.lm.state_dict()), output / PICKLED_WEIGHTS)
    _copy_texts(folder, output)
    _write_vocabulary(folder, output)
    if not (folder / SETTINGS_FILE).is_file():
        say(f"{folder}: no Condenser head here; the reference code starts a new one from {PICKLED_WEIGHTS}")
        return {}
    model = CondenserModel(backbone, **read_settings(folder))
    model.load_head(folder)
    head = {_HEAD_PREFIX + name: value for name, value in model.head.state_dict().items()}
    torch.save(head, output / REFERENCE_HEAD)
    late = " --late_mlm" if model.late_mlm else ""
    say(f"start the reference code with --n_head_layers {model.head_layers} --skip_from {model.skip_from}{late}")
    return dict(model.settings())


def _from_transformers(folder: Path, files: list[Path], output: Path) -> dict[str, object]:
    own = [file for file in files[1:] if file.parent == folder]
    count = _to_safetensors(read_tensors(own), output / WEIGHTS)
    for file in files[1 + len(own) :]:
        place = output / file.parent.name / WEIGHTS
        place.parent.mkdir(exist_ok=True)
        count += _to_safetensors(read_tensors([file]), place)
    shutil.copyfile(folder / CONFIG, output / CONFIG)
    _copy_texts(folder, output)
    say(f"{folder}: {count:,} tensors written as {WEIGHTS}")
    return {}


def _to_safetensors(tensors: dict[str, Tensor], file: Path) -> int:
    """Write tensors and return their number."""
    # Tied weights are one tensor under two names in a pickle; safetensors keeps one, and transformers ties them again.
    first_names: dict[tuple[object, ...], str] = {}
    for name, value in tensors.items():
        first_names.setdefault((value.data_ptr(), value.shape, value.stride()), name)
    kept = {name: tensors[name].contiguous().clone() for name in first_names.values()}
    save_file(kept, file, metadata={"format": "pt"})
    return len(kept)


def _copy_texts(folder: Path, output: Path) -> None:
    """Copy the tokenizer and what says how to use the model; the configuration is the caller's."""
    for pattern in _COPIED:
        for file in sorted(folder.glob(pattern)):
            place = output / file.relative_to(folder)
            if file.name not in (MANIFEST, PICKLED_INDEX, SETTINGS_FILE) and not place.exists():
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, place)


def _write_vocabulary(folder: Path, output: Path) -> None:
    """Write vocab.txt, or vocab.json and merges.txt: all that the tokenizers of the reference's day read."""
    if has_tokenizer(folder):
        load_tokenizer(folder).backend_tokenizer.model.save(str(output))
