"""The verb ``convert`` as the command offers it: weights, two published towers to one encoder, Pyserini's vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from condenser.artifacts import Workspace, result_config
from condenser.errors import UserError
from condenser.files import read_json
from condenser.hub import local_folder
from condenser.interop import convert
from condenser.manifest import fingerprint
from condenser.models.pooling import ENCODER_FILE
from condenser.options import ConvertOptions
from retrieval.encoder import Encoder
from retrieval.pyserini_index import read_pyserini, write_pyserini

_CARD = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [condenser-ir, dense-retrieval]
---
# Bi-encoder with a tower for queries and one for passages

Queries are encoded by `{queries}`, passages by `{passages}`.
"""


def convert_or_join(options: ConvertOptions) -> Path:
    """Run `convert`, or with ``--passages`` join two encoders into one with untied towers; or convert vectors.

    Raises:
        UserError: --passages beside --from or --to, options of weights for vectors and the reverse; and what
            `convert`, `Encoder.load`, `Encoder.join`, `read_pyserini` and `write_pyserini` raise.
    """
    if "pyserini" in (options.from_, options.to):
        return _convert_vectors(options)
    if options.made_by is not None:
        raise UserError("--made_by is for --from pyserini")
    if options.passages is None:
        return convert(options)
    if options.from_ or options.to:
        raise UserError("--passages joins two encoders; --from and --to are for one")
    folders = {"queries": local_folder(options.model, also="*.bin")}
    folders["passages"] = local_folder(options.passages, also="*.bin")
    inputs = {kind: fingerprint(folder) for kind, folder in folders.items()}
    with Workspace(options.output, "encoder", config=result_config(options), inputs=inputs) as workspace:
        if workspace.done:
            return workspace.output
        towers = {kind: _open(folder, workspace.scratch / kind, options) for kind, folder in folders.items()}
        encoder = Encoder.join(towers["queries"], towers["passages"])
        names = {"queries": Path(options.model).name, "passages": Path(options.passages).name}
        encoder.save(workspace.path, _CARD.format(**names))
        return workspace.commit({**read_json(workspace.path / ENCODER_FILE), "dimension": encoder.dimension})


def _convert_vectors(options: ConvertOptions) -> Path:
    if options.from_ and options.to:
        raise UserError("give exactly one of --from and --to")
    for name in ("passages", "skip_from", "late_mlm"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for weights; Pyserini's indexes hold vectors")
    if options.to:
        if options.made_by is not None:
            raise UserError("--made_by is for --from pyserini; these vectors say what made them", options.model)
        return write_pyserini(options.model, options.output)
    if options.made_by is None:
        raise UserError("--made_by is missing: the encoder of these vectors", options.model)
    return read_pyserini(options.model, options.output, made_by=options.made_by)


def _open(folder: Path, converted: Path, options: ConvertOptions) -> Encoder:
    """Load an encoder; one with weights as ``.bin`` by way of a converted copy."""
    if not any(folder.glob("*.safetensors")):
        one = replace(options, model=str(folder), passages=None, from_="transformers", output=str(converted))
        folder = convert(one)
    return Encoder.load(folder)
