"""Training without padding: the texts of a batch stand in one row, and each attends to itself alone.

The model is transformers' own, with its gradients and whatever was put around its layers; only the attention between
the projections is ours, and the way in which a CPU draws its dropout. All else works token by token and does not see
where a text ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from condenser.models.dropout import attend, cheapen, masks_of

_NAME = "texts_in_a_row"
# Families whose positions are given as an argument, and which hand what they do not know down to the attention.
_FIRST_POSITION = {"bert": 0, "electra": 0, "distilbert": 0, "roberta": 1, "xlm-roberta": 1}
# Of these, the families whose classifiers see nothing but the state of the first token, maybe through BERT's pooler.
_CLASSIFIERS = ("bert", "electra", "roberta", "xlm-roberta")
# Texts whose lengths differ by little attend together, padded: as many more scores are cheaper than more calls, above
# all on a GPU.
_MOST_PADDING = {"cpu": 1.2, "cuda": 4.0}
# Under dropout, texts of so many tokens attend one by one on a CPU.
_ALONE_FROM = 32


@dataclass(frozen=True)
class _Group:
    """Neighbouring texts that attend in one call.

    Attributes:
        rows: their tokens in the row of all texts.
        lengths: tokens of each text.
        spread: (texts * longest,) which of the group's tokens stands at a place of the padded block; None when all
            texts are of one length.
        collect: (tokens,) at which place of the padded block a token stands.
        mask: (texts, 1, 1, longest) bool, True on tokens.
    """

    rows: slice
    lengths: list[int]
    spread: Tensor | None = None
    collect: Tensor | None = None
    mask: Tensor | None = None

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(self.lengths)


@dataclass(frozen=True)
class TextRow:
    """The texts of a padded batch in one row.

    Attributes:
        ids: (1, tokens).
        positions: (1, tokens), as the model counts them.
        groups: how the tokens are shared out over texts.
        starts: (texts,) where each text begins.
        real: (texts, length) bool, which places of the padded batch are tokens; None: all.
    """

    ids: Tensor
    positions: Tensor
    groups: list[_Group]
    starts: Tensor
    real: Tensor | None

    def unpadded(self, padded: Tensor) -> Tensor:
        """Return (tokens,) values of (texts, length)."""
        return _unpadded(padded, self.real)


@torch.compiler.disable  # the lengths are numbers of Python, other ones in each batch
def row_of_texts(config: Any, input_ids: Tensor, attention_mask: Tensor | None) -> TextRow:
    """Return the texts of a padded batch in one row.

    Args:
        config: of a model that `prepare` took.
        input_ids: (texts, length).
        attention_mask: (texts, length), 1 on tokens; None when no row is padded.
    """
    texts, length = input_ids.shape
    if _FIRST_POSITION[config.model_type]:  # RoBERTa's way: padding that stands within a text is passed over
        counted = input_ids.ne(config.pad_token_id).long()
        positions = counted.cumsum(1) * counted + config.pad_token_id
    else:
        positions = torch.arange(length, device=input_ids.device).expand(texts, length)
    real = None if attention_mask is None else attention_mask.bool()
    lengths = [length] * texts if real is None else real.sum(1).tolist()
    starts = torch.tensor([0, *accumulate(lengths[:-1])], device=input_ids.device)
    ids, places = (_unpadded(padded, real)[None] for padded in (input_ids, positions))
    return TextRow(ids, places, _groups(lengths, input_ids.device), starts, real)


def _unpadded(padded: Tensor, real: Tensor | None) -> Tensor:
    return padded.flatten() if real is None else padded[real]


def prepare(model: nn.Module) -> bool:
    """Make a model ready for texts in a row; it goes on working with padded batches as before.

    Returns:
        Whether its family can do without padding; if not, nothing was changed.
    """
    config: Any = model.config
    if config.model_type not in _FIRST_POSITION or getattr(config, "is_decoder", False):
        return False
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)  # type: ignore[operator]
    cheapen(model)
    return True


def states_of_texts(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    device: torch.device,
    types: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return the last hidden states (tokens, hidden) of texts, one text after the other, with gradients.

    Args:
        model: an encoder that `prepare` took.
        texts: token ids; the work is least when texts of like length are neighbours.
        device: where the model is.
        types: the type of each token, where the model is to know which of two texts it stands in.
    """
    config: Any = model.config
    first = (config.pad_token_id + 1) * _FIRST_POSITION[config.model_type]
    lengths = [len(text) for text in texts]
    ids = torch.tensor([[token for text in texts for token in text]], device=device)
    positions = torch.cat([torch.arange(first, first + length) for length in lengths])[None].to(device)
    given = (
        {} if types is None else {"token_type_ids": torch.tensor([[one for row in types for one in row]]).to(device)}
    )
    groups = _groups(lengths, device)
    states: Tensor = model(input_ids=ids, position_ids=positions, text_groups=groups, **given).last_hidden_state
    return states[0]


def prepare_classifier(model: nn.Module) -> bool:
    """Make a model for sequence classification ready for `classify_texts`; returns as `prepare` does."""
    config: Any = model.config
    return config.model_type in _CLASSIFIERS and prepare(model)


def classify_texts(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    device: torch.device,
    types: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return the logits (n, labels) of texts, with gradients.

    Args:
        model: a ``...ForSequenceClassification`` that `prepare_classifier` took.
        texts: see `states_of_texts`.
        device: see `states_of_texts`.
        types: see `states_of_texts`.
    """
    inside: Any = model
    states = states_of_texts(inside.base_model, texts, device, types)
    starts = torch.tensor([0, *accumulate(len(text) for text in texts[:-1])], device=device)
    first = states[starts][:, None]  # what these families classify by, in a block of texts of one token
    pooler = getattr(inside.base_model, "pooler", None)
    logits: Tensor = inside.classifier(first if pooler is None else inside.dropout(pooler(first)))
    return logits


def _groups(lengths: Sequence[int], device: torch.device) -> list[_Group]:
    groups = []
    first = 0
    starts = [0, *accumulate(lengths)]
    most_padding = _MOST_PADDING.get(device.type, _MOST_PADDING["cuda"])
    while first < len(lengths):
        last, longest, tokens = first, lengths[first], lengths[first]
        while last + 1 < len(lengths):
            longer, more = max(longest, lengths[last + 1]), tokens + lengths[last + 1]
            if longer * (last + 2 - first) > most_padding * more:
                break
            last, longest, tokens = last + 1, longer, more
        groups.append(_group(list(lengths[first : last + 1]), starts[first], device))
        first = last + 1
    return groups


def _group(lengths: list[int], start: int, device: torch.device) -> _Group:
    rows, longest = slice(start, start + sum(lengths)), max(lengths)
    if min(lengths) == longest:
        return _Group(rows, lengths)
    inside = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    collect = inside.flatten().nonzero()[:, 0]
    spread = torch.zeros(len(lengths) * longest, dtype=torch.long).index_put((collect,), torch.arange(len(collect)))
    mask = inside[:, None, None, :]
    return _Group(rows, lengths, spread.to(device), collect.to(device), mask.to(device))


@torch.compiler.disable
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    text_groups: Sequence[_Group] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each text.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, width), as are ``key`` and ``value``.
        key: see ``query``.
        value: see ``query``.
        attention_mask: of a padded batch.
        text_groups: how the tokens are shared out over texts; None for a padded batch.
        dropout: probability on the attention weights.
        scaling: what scores are multiplied by.
        others: what a padded batch may need besides.

    Returns:
        (1, tokens, heads, width), and None in the place of the weights.
    """
    if text_groups is None:
        padded: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return padded
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for alone, groups in groupby(text_groups, key=lambda group: group.longest >= _ALONE_FROM):
        masks = masks_of(dropout, query) if alone else None
        if masks is None:
            outputs += [_attend_together(query, key, value, group, dropout, scale) for group in groups]
            continue
        texts = list(groups)
        rows = slice(texts[0].rows.start, texts[-1].rows.stop)
        lengths = [length for group in texts for length in group.lengths]
        outputs.append(attend(query[0, :, rows], key[0, :, rows], value[0, :, rows], lengths, scale, masks))
    return torch.cat(outputs)[None], None


def _attend_together(query: Tensor, key: Tensor, value: Tensor, group: _Group, dropout: float, scale: float) -> Tensor:
    """Return (tokens, heads, width) of a group."""
    heads, width = query.shape[1], query.shape[3]
    q, k, v = (_block(states, group) for states in (query, key, value))
    mixed = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, dropout_p=dropout, scale=scale)
    mixed = mixed.transpose(1, 2).reshape(group.texts * group.longest, heads, width)
    return mixed if group.collect is None else mixed.index_select(0, group.collect)


def _block(states: Tensor, group: _Group) -> Tensor:
    """Return a group's part of (1, heads, tokens, width) as (texts, heads, longest, width)."""
    rows = states[0, :, group.rows].transpose(0, 1)
    if group.spread is not None:
        rows = rows.index_select(0, group.spread)
    return rows.unflatten(0, (group.texts, group.longest)).transpose(1, 2)
