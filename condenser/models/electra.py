"""ELECTRA: a generator draws words into masked places, and a discriminator learns which are not the text's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import ElectraForPreTraining

from condenser.corpus.corruption import IGNORED
from condenser.errors import UserError
from condenser.files import disk_faults
from condenser.hub import quiet_transformers
from condenser.models.backbone import Backbone
from condenser.models.half import at_least_float32
from condenser.models.pooling import record_cls
from condenser.models.unpadded import TextRow, prepare, row_of_texts

GENERATOR_FOLDER = "generator"
_TINY = 1e-9  # keeps the logarithms of a number drawn from [0, 1) finite

Sharing = Literal["all", "token", "none"]


class ElectraOutput(NamedTuple):
    """What one forward pass yields: *sums*, so that any split of a batch adds up to the whole.

    Attributes:
        slots: over the chosen tokens: the loss ``generator``, and how often its draw is the text's own
            token (``generator_accuracy``).
        tokens: over the tokens that the discriminator judges: its loss ``discriminator``, how often it is right
            (``discriminator_accuracy``), how many are ``replaced``, and how many of these it finds
            (``replaced_found``).
    """

    slots: dict[str, Tensor]
    tokens: dict[str, Tensor]


class ElectraPair(nn.Module):
    """A generator and a discriminator that learn together (Clark et al. 2020, ELECTRA, section 2).

    The generator is a masked language model. What it draws at the chosen positions takes the place of the text's own
    tokens there; the discriminator says of every token whether it was replaced. A draw that is the text's own token
    counts as not replaced. No gradient goes through the draw: the generator learns as from masked-LM training alone.

    Args:
        discriminator: its logit at a position is above 0 where it takes the token for a replaced one.
        generator: over the same vocabulary.
        sharing: what of the embeddings is the same tensors in both: ``all`` (words, positions, types and their
            LayerNorm), the ``token`` table, or ``none``. The discriminator's are kept.
        special_tokens: CLS and SEP count in the discriminator's loss, as in the released code.

    Raises:
        UserError: embeddings of other sizes in the two, or not the same vocabulary.
    """

    def __init__(
        self,
        discriminator: ElectraForPreTraining,
        generator: Backbone,
        *,
        sharing: Sharing = "all",
        special_tokens: bool = True,
    ) -> None:
        super().__init__()
        self.discriminator: Any = discriminator
        self.generator = generator
        self.special_tokens = special_tokens
        _share(self.discriminator.electra, generator.lm, sharing)
        prepare(self.discriminator.electra)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor, seeds: Sequence[int]
    ) -> ElectraOutput:
        """Run masked tokens to both losses.

        Args:
            input_ids: (batch, length), padded on the right.
            attention_mask: (batch, length), 1 on tokens; None when no row is padded.
            labels: (batch, length), the text's own tokens at the chosen positions, else -100.
            seeds: one for each row, of what the generator draws there.
        """
        row = row_of_texts(self.discriminator.config, input_ids, attention_mask)
        wanted = row.unpadded(labels)
        asked = wanted != IGNORED
        logits = at_least_float32(self.generator_logits(row, asked))
        drawn = draw_tokens(logits.detach(), (labels != IGNORED).sum(dim=1).tolist(), seeds)
        filled = row.ids[0].masked_scatter(asked, drawn)
        replaced = asked & (filled != wanted)

        verdicts = at_least_float32(self.discriminator_logits(replace(row, ids=filled[None])))
        if not self.special_tokens:
            inside = ~_ends(row)
            verdicts, replaced = verdicts[inside], replaced[inside]
        told = verdicts > 0
        truth = replaced.to(verdicts.dtype)
        return ElectraOutput(
            {
                "generator": cross_entropy(logits, wanted[asked], reduction="sum"),
                "generator_accuracy": (drawn == wanted[asked]).sum(),
            },
            {
                "discriminator": binary_cross_entropy_with_logits(verdicts, truth, reduction="sum"),
                "discriminator_accuracy": (told == replaced).sum(),
                "replaced": replaced.sum(),
                "replaced_found": (told & replaced).sum(),
            },
        )

    def generator_logits(self, row: TextRow, asked: Tensor) -> Tensor:
        """Return logits (slots, vocabulary) at the tokens of a row that are asked for, bool (tokens,)."""
        return self.generator.vocabulary_logits(_states(self.generator.lm.electra, row)[asked])

    def discriminator_logits(self, row: TextRow) -> Tensor:
        """Return logits (tokens,) of a row."""
        verdicts: Tensor = self.discriminator.discriminator_predictions(_states(self.discriminator.electra, row))
        return verdicts

    def save(self, folder: Path) -> None:
        """Write two clean folders: the discriminator with its pooling, and in ``generator`` within it the generator."""
        with disk_faults(folder), quiet_transformers():
            self.discriminator.save_pretrained(folder)
            self.generator.lm.save_pretrained(folder / GENERATOR_FOLDER)
        record_cls(folder, self.discriminator.config.hidden_size)


def _share(discriminator: Any, generator: Any, sharing: Sharing) -> None:
    wanted, found = discriminator.config, generator.config
    names = ["vocab_size"]
    if sharing != "none":
        names += ["embedding_size"]
    if sharing == "all":
        names += ["max_position_embeddings", "type_vocab_size"]
    for name in names:
        if getattr(wanted, name) != getattr(found, name):
            raise UserError(
                f"the generator's {name} is {getattr(found, name)}, the discriminator's {getattr(wanted, name)}",
                hint=None if name == "vocab_size" else "--embedding_sharing none goes with embeddings of other sizes",
            )
    if sharing == "all":
        generator.electra.embeddings = discriminator.embeddings
    elif sharing == "token":
        generator.electra.embeddings.word_embeddings = discriminator.embeddings.word_embeddings
    generator.generator_lm_head.weight = generator.electra.embeddings.word_embeddings.weight


def _states(encoder: Any, row: TextRow) -> Tensor:
    """Return the last hidden states (tokens, hidden) of texts in a row."""
    out = encoder(input_ids=row.ids, position_ids=row.positions, text_groups=row.groups)
    states: Tensor = out.last_hidden_state[0]
    return states


def _ends(row: TextRow) -> Tensor:
    """Return True on the first and the last token of each text, (tokens,)."""
    ends = torch.zeros(row.ids.shape[1], dtype=torch.bool, device=row.ids.device)
    ends[row.starts] = ends[row.starts - 1] = True  # before a text stands the last token of another
    return ends


@torch.no_grad()
def draw_tokens(logits: Tensor, slots_of_rows: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Draw a token for each slot; (slots,).

    What is drawn for a row depends on its logits and its seed alone, not on the rows beside it.

    Args:
        logits: (slots, vocabulary), row by row.
        slots_of_rows: how many slots each row has.
        seeds: one for each row.
    """
    drawn = []
    for rows, seed in zip(logits.float().split(list(slots_of_rows)), seeds, strict=True):
        generator = torch.Generator(logits.device).manual_seed(seed)
        drawn.append(draw(rows, torch.rand(rows.shape, generator=generator, device=logits.device)))
    return torch.cat(drawn)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from softmax(logits) by Gumbel noise (n, vocabulary) made of numbers from [0, 1); (n,)."""
    return (logits - (uniforms + _TINY).log_().neg_().add_(_TINY).log_()).argmax(dim=-1)
