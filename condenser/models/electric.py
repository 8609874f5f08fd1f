"""Electric: an energy for each token of a text in one pass, learnt against words that a cloze model draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import ElectraForPreTraining

from condenser.errors import UserError
from condenser.files import disk_faults, read_json, write_json
from condenser.hub import quiet_transformers
from condenser.models.cloze import TwoTowerCloze, tower_of
from condenser.models.half import at_least_float32
from condenser.models.pooling import record_cls
from condenser.options import NoiseLossOver, NoiseRatio
from condenser.weights import check_whole

NOISE_FILE = "noise_model.safetensors"
SETTINGS_FILE = "electric.json"
TOWER_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
RELEASED_LOG_RATIO = math.log(0.15 / 0.85)
_EVEN = math.log(2)  # the loss of a token that is as likely noise as not


class ElectricOutput(NamedTuple):
    """What one forward pass yields: *sums*, so that any split of a batch adds up to the whole.

    Attributes:
        nce: the noise contrastive loss, over the positions that it is taken of.
        noise_mle: the noise model's own loss, over all candidates.
        figures: over the replaced positions: how often the noise is the text's own token (``noise_hits``), and how
            often it is found (``noise_found``).
        noised_ids: (batch, length), what the energies were taken of.
    """

    nce: Tensor
    noise_mle: Tensor
    figures: dict[str, Tensor]
    noised_ids: Tensor


class ElectricModel(nn.Module):
    """An energy model and the noise model that it learns against (Clark et al. 2020, Electric, section 2).

    A text's tokens between CLS and SEP are its candidates. Those that are marked are replaced by the noise model's
    draws, all in one pass (algorithm 2); every replaced position is noise, even where the draw is the token that
    stood there. The noise model learns from the likelihood of the text as it was, and nothing of the other loss
    reaches it but through the embeddings, which the two share.

    Args:
        energy: its logit at a position is the energy E; exp(-E) is the token's probability there, up to a factor
            that the training drives to one.
        noise: over the energy model's own embedding block.
        ratio: what a position's odds of being noise begin with: k / (n - k) by the row's own ``counts`` of n
            candidates and k replaced ones, or .15 / .85 as in the ``released`` code.
        over: positions of the loss: ``candidates``, or all ``attended`` ones, CLS and SEP too, as in the released code.
    """

    def __init__(
        self,
        energy: ElectraForPreTraining,
        noise: TwoTowerCloze,
        *,
        ratio: NoiseRatio = "counts",
        over: NoiseLossOver = "candidates",
    ) -> None:
        super().__init__()
        self.energy: Any = energy
        self.noise = noise
        self.ratio = ratio
        self.over = over

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, replaced: Tensor, seeds: Sequence[int]
    ) -> ElectricOutput:
        """Draw noise at the marked positions and return the losses.

        Args:
            input_ids: (batch, length), the text as it was, padded on the right.
            attention_mask: (batch, length), 1 on tokens; None when no row is padded.
            replaced: (batch, length) bool, True at the candidates to replace.
            seeds: one for each row, of what the noise model draws there.
        """
        context = self.noise(input_ids, attention_mask)
        drawn, log_q_drawn = self.noise.sample(context[replaced], replaced.sum(dim=1).tolist(), seeds)
        noised = input_ids.masked_scatter(replaced, drawn)
        candidates = candidate_positions(input_ids, attention_mask)
        scored = candidates if self.over == "candidates" else attended_positions(input_ids, attention_mask)
        log_q_text = self.noise.log_likelihood(context[scored], input_ids[scored])
        log_q = torch.zeros(input_ids.shape, dtype=log_q_text.dtype, device=input_ids.device)
        log_q[scored] = log_q_text.detach()
        log_q[replaced] = log_q_drawn
        energy = at_least_float32(energies(self.energy, noised, attention_mask))
        if self.ratio == "counts":
            prior = noise_log_ratio(replaced, candidates).to(energy.dtype).expand_as(energy)
        else:
            prior = torch.full_like(energy, RELEASED_LOG_RATIO)
        # a row with all or none of its candidates replaced has no such odds
        usable = scored & prior.isfinite()
        nce = nce_losses(energy[usable], log_q[usable], replaced[usable], prior[usable])
        figures = {
            "noise_hits": (drawn == input_ids[replaced]).sum(),
            "noise_found": (nce[replaced[usable]] < _EVEN).sum(),
        }
        return ElectricOutput(nce.sum(), -log_q_text[candidates[scored]].sum(), figures, noised)

    def save(self, folder: Path) -> None:
        """Write the energy model as a clean folder, its pooling, and the noise model with its sizes beside it."""
        with disk_faults(folder), quiet_transformers():
            self.energy.save_pretrained(folder)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.noise.own_parameters().items()}
            save_file(tensors, folder / NOISE_FILE, metadata={"format": "pt"})
        record_cls(folder, self.energy.config.hidden_size)
        sizes = {name: getattr(self.noise.config, name) for name in TOWER_SIZES}
        write_json(folder / SETTINGS_FILE, {"noise_model": sizes})


def attended_positions(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return where tokens are, (batch, length) bool."""
    if attention_mask is None:
        return torch.ones(input_ids.shape, dtype=torch.bool, device=input_ids.device)
    return attention_mask.bool()


def candidate_positions(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return where the text's own tokens are, between the first token of a row and its last; (batch, length) bool."""
    attended = attended_positions(input_ids, attention_mask)
    has_next = nn.functional.pad(attended[:, 1:], (0, 1))
    candidates = attended & has_next
    candidates[:, 0] = False
    return candidates


def energies(energy: Any, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the energy (batch, length) of each token of texts (batch, length); the higher, the less likely."""
    logits: Tensor = energy(input_ids=input_ids, attention_mask=attention_mask).logits
    return logits


def noise_log_ratio(replaced: Tensor, candidates: Tensor) -> Tensor:
    """Return log(k / (n - k)) of each row's k replaced and n candidate positions, (batch, 1) float64."""
    k = replaced.sum(dim=1, keepdim=True).double()
    n = candidates.sum(dim=1, keepdim=True).double()
    return k.log() - (n - k).log()


def nce_losses(energy: Tensor, log_q: Tensor, replaced: Tensor, prior: Tensor | float) -> Tensor:
    """Return each position's noise contrastive loss, in the shape of ``energy``.

    The odds that a token is noise are k q / ((n - k) exp(-E)) (Electric, equation 4, for algorithm 2), and the loss
    is the cross-entropy of that: over all candidates of a text it adds up to n - k times the mean over the data and
    k times the mean over the noise.

    Args:
        energy: E of the tokens as they stand.
        log_q: the noise model's log-probability of the tokens as they stand, given the text as it was.
        replaced: bool, True where a draw from the noise model stands.
        prior: log(k / (n - k)).
    """
    log_odds = energy + log_q + prior
    return nn.functional.binary_cross_entropy_with_logits(log_odds, replaced.to(log_odds.dtype), reduction="none")


def has_noise(folder: Path) -> bool:
    """Say whether a folder is one of `ElectricModel.save`."""
    return (folder / SETTINGS_FILE).is_file()


def load_noise(folder: Path, energy: ElectraForPreTraining) -> TwoTowerCloze:
    """Load the noise model that lies beside an energy model.

    Args:
        folder: what `ElectricModel.save` wrote.
        energy: the energy model from there, whose embedding block the noise model shares.

    Raises:
        UserError: no electric.json, or one without the sizes; weights missing, damaged, or of other names or shapes
            than these sizes give.
    """
    settings = folder / SETTINGS_FILE
    sizes = read_json(settings).get("noise_model")
    if not isinstance(sizes, dict) or any(type(sizes.get(name)) is not int for name in TOWER_SIZES):
        raise UserError(f"noise_model is {sizes!r}, expected whole numbers for {', '.join(TOWER_SIZES)}", settings)
    config = tower_of(energy.config, **{name: sizes[name] for name in TOWER_SIZES})
    noise = TwoTowerCloze(config, energy.electra.embeddings)
    file = folder / NOISE_FILE
    check_whole(file)
    tensors, wanted = load_file(file), noise.own_parameters()
    for name in sorted(wanted.keys() | tensors.keys()):
        found, expected = (tuple(one[name].shape) if name in one else None for one in (tensors, wanted))
        if found != expected:
            raise UserError(f"noise model has {name!r} of shape {found}, {SETTINGS_FILE} says {expected}", file)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])
    return noise
