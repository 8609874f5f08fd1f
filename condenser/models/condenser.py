"""Condenser: a head that sees early token states and the late CLS, so that the CLS must carry the passage."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from condenser.corpus.corruption import IGNORED
from condenser.errors import UserError
from condenser.files import disk_faults, read_json, write_json
from condenser.models.backbone import Backbone
from condenser.models.pooling import record_cls
from condenser.models.unpadded import TextRow
from condenser.weights import check_whole

HEAD_FILE = "condenser_head.safetensors"
SETTINGS_FILE = "condenser.json"


def read_settings(folder: Path) -> dict[str, Any]:
    """Return how the head in a Condenser folder was trained: ``head_layers``, ``skip_from`` and ``late_mlm``.

    Raises:
        UserError: no condenser.json, or one of the three is missing or of another type.
    """
    file = folder / SETTINGS_FILE
    stored = read_json(file)
    kinds = {
        "head_layers": (int, "a whole number"),
        "skip_from": (int, "a whole number"),
        "late_mlm": (bool, "true or false"),
    }
    for key, (kind, words) in kinds.items():
        if type(stored.get(key)) is not kind:
            raise UserError(f"{key} is {stored.get(key)!r}, expected {words}", file)
    return {key: stored[key] for key in kinds}


class PretrainingOutput(NamedTuple):
    """What one forward pass yields.

    Attributes:
        losses: masked-LM losses by name, each the *sum* over masked tokens, so that any split of a
            batch adds up to the whole; divide by the number of masked tokens.
        cls: last-layer CLS states (batch, dim).
    """

    losses: dict[str, Tensor]
    cls: Tensor


class CondenserModel(nn.Module):
    """A masked language model with or without a Condenser head (Gao and Callan 2021, section 3).

    Args:
        backbone: the masked language model; its vocabulary head serves both losses.
        head_layers: Transformer layers in the Condenser head; 0 gives plain masked-LM training.
        skip_from: index of the hidden states the head sees for all tokens but CLS (0 is the
            embedding output); negative counts from the last layer.
        late_mlm: add the masked-LM loss of the last layer. Always on without a head.

    Raises:
        UserError: ``skip_from`` beyond the backbone's layers.
    """

    def __init__(self, backbone: Backbone, *, head_layers: int = 2, skip_from: int = 0, late_mlm: bool = True) -> None:
        super().__init__()
        if not -backbone.layers - 1 <= skip_from <= backbone.layers:
            raise UserError(f"--skip_from {skip_from} is beyond the encoder's {backbone.layers} layers")
        self.backbone = backbone
        self.head = backbone.new_layers(head_layers)
        self.head_layers = head_layers
        self.skip_from = skip_from
        self.late_mlm = late_mlm or not head_layers

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None) -> PretrainingOutput:
        """Run corrupted tokens (batch, length) to losses.

        Args:
            input_ids: (batch, length).
            attention_mask: (batch, length), 1 on tokens; None when no row is padded.
            labels: (batch, length), -100 where nothing is asked; None for the CLS states alone,
                which then cost neither head nor vocabulary.
        """
        row = self.backbone.in_one_row(input_ids, attention_mask)
        if row is None:
            states = self.backbone.hidden_states(input_ids, attention_mask)
            starts = torch.arange(len(input_ids), device=input_ids.device) * input_ids.shape[1]
        else:
            states, starts = self.backbone.hidden_states(row.ids, row), row.starts
        late = states[-1].flatten(0, 1)
        losses: dict[str, Tensor] = {}
        if labels is not None:
            labels = labels.flatten() if row is None else row.unpadded(labels)
            asked = (labels != IGNORED).nonzero()[:, 0]
            parts = {}
            if len(self.head):
                repaired = self.head_states(states, attention_mask if row is None else row, starts)
                parts["head_mlm"] = repaired.flatten(0, 1)[asked]
            if self.late_mlm:
                parts["late_mlm"] = late[asked]
            # the vocabulary's weights, the largest matrix there is, are gone through once for both
            each = self.backbone.vocabulary_losses(torch.cat([*parts.values()]), labels[asked].repeat(len(parts)))
            losses = {name: part.sum() for name, part in zip(parts, each.split(len(asked)), strict=True)}
        return PretrainingOutput(losses, late[starts])

    def head_states(self, states: tuple[Tensor, ...], attention: Tensor | TextRow | None, starts: Tensor) -> Tensor:
        """Run the head over [late CLS ; early tokens] (Condenser, equations 5 and 6); (batch, length, dim).

        Args:
            states: of all layers, each (batch, length, dim).
            attention: see `Backbone.hidden_states`.
            starts: (texts,) where each text begins among the batch * length places.
        """
        late, early = states[-1], states[self.skip_from]
        with_late_cls = early.flatten(0, 1).index_copy(0, starts, late.flatten(0, 1)[starts].to(early.dtype))
        return self.backbone.run_layers(self.head, with_late_cls.view_as(early), attention)

    def save(self, folder: Path) -> None:
        """Write a clean masked-LM folder, its pooling, and the head with its settings beside it."""
        with disk_faults(folder):
            self.backbone.save(folder)
            if len(self.head):
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.head.state_dict().items()}
                save_file(tensors, folder / HEAD_FILE, metadata={"format": "pt"})
        record_cls(folder, self.backbone.config.hidden_size)
        if len(self.head):
            write_json(folder / SETTINGS_FILE, self.settings())

    def settings(self) -> dict[str, int | bool]:
        """Return what a head's weights do not tell of themselves."""
        return {"head_layers": self.head_layers, "skip_from": self.skip_from, "late_mlm": self.late_mlm}

    def load_head(self, folder: Path) -> None:
        """Take the head of a Condenser folder.

        Raises:
            UserError: it was trained with other ``head_layers``, ``skip_from`` or ``late_mlm``, or its
                weights are missing, damaged or of another size.
        """
        stored = read_settings(folder)
        for key, value in self.settings().items():
            if stored[key] != value:
                raise UserError(f"Condenser head has {key} {stored[key]}, asked for {value}", folder / SETTINGS_FILE)
        check_whole(folder / HEAD_FILE)
        self.take_head(load_file(folder / HEAD_FILE), folder / HEAD_FILE)

    def take_head(self, tensors: dict[str, Tensor], where: Path) -> None:
        """Take the head's weights by name.

        Raises:
            UserError: tensors missing, unexpected or of another shape than this encoder's layers have.
        """
        wanted = {name: tuple(tensor.shape) for name, tensor in self.head.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise UserError(
                    f"Condenser head has {name!r} of shape {found.get(name)}, this encoder's layers {wanted.get(name)}",
                    where,
                )
        self.head.load_state_dict(tensors)
