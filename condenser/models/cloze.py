"""A two-tower cloze model: what stands at a position, told from the words before it and the words after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import ElectraConfig, ElectraModel

from condenser.models.electra import draw_tokens
from condenser.models.half import at_least_float32
from condenser.models.vocabulary_loss import cross_entropies

# Logits that exist at one time: 64 MB in float32.
CHUNK_LOGITS = 2**24


def tower_config(config: ElectraConfig, ratio: float) -> ElectraConfig:
    """Return the configuration of one tower: as deep as the energy model, its width times ``ratio``."""
    heads = max(1, round(config.num_attention_heads * ratio))
    hidden = heads * max(1, round(config.hidden_size * ratio / heads))
    return tower_of(config, hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden)


def tower_of(config: ElectraConfig, **sizes: int) -> ElectraConfig:
    """Return ``config`` with other sizes."""
    values: dict[str, Any] = config.to_dict() | sizes
    values.pop("architectures", None)
    return ElectraConfig(**values)


class TwoTowerCloze(nn.Module):
    """A distribution over the vocabulary at each position, in one pass, that never saw the word there.

    One Transformer reads from left to right and one from right to left; position t is told from the state of t-1 in
    the first and of t+1 in the second (Clark et al. 2020, Electric, section 2.3).

    Args:
        config: one tower's configuration, see `tower_config`.
        embeddings: the energy model's embedding block (words, positions, types, LayerNorm), which the towers share;
            its word table is the output table, too.
    """

    def __init__(self, config: ElectraConfig, embeddings: Any) -> None:
        super().__init__()
        self.config = config
        self.ltr: Any = ElectraModel(config)
        self.rtl: Any = ElectraModel(config)
        for tower in (self.ltr, self.rtl):
            tower.embeddings = embeddings
            tower.set_attn_implementation("sdpa")  # which takes the masks of `tower_masks`
        self.cloze = _ClozeHead(config)

    @property
    def table(self) -> Tensor:
        """The word table (vocabulary, embedding)."""
        table: Tensor = self.ltr.embeddings.word_embeddings.weight
        return table

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return what each position is told from, (batch, length, embedding).

        At the first and the last position of a row, where CLS and SEP stand, a state comes round from the other end
        that has seen them, as in the released code.

        Args:
            input_ids: (batch, length), padded on the right.
            attention_mask: (batch, length), 1 on tokens; None when no row is padded.
        """
        before, after = tower_masks(input_ids, attention_mask)
        left = self.ltr(input_ids=input_ids, attention_mask=before).last_hidden_state
        right = self.rtl(input_ids=input_ids, attention_mask=after).last_hidden_state
        context: Tensor = self.cloze(torch.cat([left.roll(1, dims=1), right.roll(-1, dims=1)], dim=-1))
        return context

    def logits(self, context: Tensor) -> Tensor:
        """Return logits (..., vocabulary), in float32 at least, of what `forward` gave for some positions."""
        return at_least_float32(nn.functional.linear(context, self.table, self.cloze.output_bias))

    def log_likelihood(self, context: Tensor, tokens: Tensor, chunk_logits: int = CHUNK_LOGITS) -> Tensor:
        """Return log q (n,) of a token at each position.

        The logits of a chunk of positions go before those of the next come, and come again in the backward pass:
        those of all positions of a large batch would not fit into memory. Those of a single chunk stay.

        Args:
            context: (n, embedding), from `forward`.
            tokens: (n,), which token.
            chunk_logits: numbers that exist at one time.
        """

        def of_chunk(rows: Tensor, wanted: Tensor) -> Tensor:
            logits = self.logits(rows)
            return logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1)

        rows = max(1, chunk_logits // len(self.table))
        if len(tokens) <= rows:
            return -cross_entropies(context, self.table, self.cloze.output_bias, tokens)
        parts = [
            checkpoint(of_chunk, part, wanted, use_reentrant=False, preserve_rng_state=False)
            for part, wanted in zip(context.split(rows), tokens.split(rows), strict=True)
        ]
        return torch.cat(parts)

    @torch.no_grad()
    def sample(
        self,
        context: Tensor,
        places_of_rows: Sequence[int],
        seeds: Sequence[int],
        chunk_logits: int = CHUNK_LOGITS,
    ) -> tuple[Tensor, Tensor]:
        """Draw a token at each position; return tokens (n,) and their log q (n,).

        Args:
            context: (n, embedding), from `forward`, row by row.
            places_of_rows: how many positions each row has.
            seeds: one for each row, which with its context alone decides what is drawn there.
            chunk_logits: numbers that exist at one time, if no row asks for more.
        """
        drawn, log_q = [], []
        at_once = max(1, chunk_logits // len(self.table) // max(1, *places_of_rows))
        for first in range(0, len(seeds), at_once):
            rows = slice(first, first + at_once)
            start, count = sum(places_of_rows[:first]), sum(places_of_rows[rows])
            log_p = self.logits(context[start : start + count]).log_softmax(-1)
            tokens = draw_tokens(log_p, places_of_rows[rows], seeds[rows])
            drawn.append(tokens)
            log_q.append(log_p.gather(-1, tokens[:, None])[:, 0])
        return torch.cat(drawn), torch.cat(log_q)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return parameters by name, but for the embedding block."""
        shared = {id(one) for one in self.ltr.embeddings.parameters()}
        return {name: one for name, one in self.named_parameters() if id(one) not in shared}


class _ClozeHead(nn.Module):
    """From both towers' states (..., 2 * hidden) to the width of the word table, and the table's bias."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(2 * config.hidden_size, config.embedding_size)
        self.LayerNorm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        nn.init.normal_(self.dense.weight, std=config.initializer_range)
        nn.init.zeros_(self.dense.bias)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(nn.functional.gelu(self.dense(states)))
        return out


def tower_masks(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what each position may see in the two towers, bool (batch or 1, 1, length, length), True where it may.

    Padding behind a text sees nothing in the second tower, of which PyTorch's attention makes zeros.
    """
    length = input_ids.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None]
    after = before.mT
    if attention_mask is not None:
        seen = attention_mask.bool()[:, None, :]
        before, after = before & seen, after & seen
    return before[:, None], after[:, None]
