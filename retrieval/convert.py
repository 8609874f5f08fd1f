"""The verb ``convert`` as the command offers it: two published towers may become one encoder."""

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

_CARD = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [condenser-ir, dense-retrieval]
---
# Bi-encoder with a tower for queries and one for passages

Queries are encoded by `{queries}`, passages by `{passages}`.
"""


def convert_or_join(options: ConvertOptions) -> Path:
    """Run `convert`, or with ``--passages`` join two encoders into one with untied towers.

    Raises:
        UserError: --passages beside --from or --to; and what `convert`, `Encoder.load` and `Encoder.join` raise.
    """
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


def _open(folder: Path, converted: Path, options: ConvertOptions) -> Encoder:
    """Load an encoder; one with weights as ``.bin`` by way of a converted copy."""
    if not any(folder.glob("*.safetensors")):
        one = replace(options, model=str(folder), passages=None, from_="transformers", output=str(converted))
        folder = convert(one)
    return Encoder.load(folder)
