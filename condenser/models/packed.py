"""The forward pass without padding: all tokens of a batch are the rows of one matrix; inference only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import GELUActivation

from condenser.models.half import cpu_multiplies_bfloat16
from condenser.models.int8 import Int8Linear, scaled_rows

__all__ = ["PackedForward", "Rows", "packed_forward_of"]

Rows = Literal["all", "cls", "last"]
# What a linear layer reads is made ready for it first: for 8-bit products it is scaled, once for all that read it.
Linear = Callable[[Any], Tensor]

# oneDNN keeps its last 1,024 compiled products, one for each number of rows it met: hundreds of megabytes. On a CPU
# the rows are filled up to a multiple of this, so that few numbers come.
_ROW_STEP = 32
# Its products of bfloat16 want instructions for them.
_ONEDNN_TYPES = (torch.float32, *((torch.bfloat16,) if cpu_multiplies_bfloat16() else ()))


@dataclass(frozen=True)
class _Names:
    """Where a family of transformers keeps the parts of its encoder, as dotted names.

    Attributes:
        layers: the list of layers, from the model; the other names start at a layer.
        counts_padding: positions are counted from ``pad_token_id`` + 1 on and pass over that token.
    """

    layers: str = "encoder.layer"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    mixed: str = "attention.output.dense"
    mixed_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    activation: str = "intermediate.intermediate_act_fn"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    counts_padding: bool = False


_DISTILBERT = _Names(
    layers="transformer.layer",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    mixed="attention.out_lin",
    mixed_norm="sa_layer_norm",
    up="ffn.lin1",
    activation="ffn.activation",
    down="ffn.lin2",
    norm="output_layer_norm",
)
_ROBERTA = _Names(counts_padding=True)
# By transformers' name of the family: those with absolute positions and norms behind attention and feed-forward.
_FAMILIES = {
    "bert": _Names(),
    "electra": _Names(),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _DISTILBERT,
}


@dataclass(frozen=True)
class _Layer:
    """The parts of one layer; ``up`` has the activation in it."""

    query: Linear
    key: Linear
    value: Linear
    mixed: Linear
    mixed_norm: nn.LayerNorm
    up: Linear
    down: Linear
    norm: nn.LayerNorm


class _Batch:
    """The texts of one batch: where each begins among the rows, and runs of one length."""

    def __init__(self, token_ids: Sequence[Sequence[int]], device: torch.device) -> None:
        self.tokens = torch.tensor([token for text in token_ids for token in text], device=device)
        self.lengths = torch.tensor([len(text) for text in token_ids], device=device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.runs = [(length, sum(1 for _ in run)) for length, run in groupby(len(text) for text in token_ids)]

    def places(self) -> Tensor:
        """Return each token's place in its text, from 0."""
        return torch.arange(len(self.tokens), device=self.tokens.device) - self._of_texts(self.starts)

    def places_beside(self, padding: int) -> Tensor:
        """Count as RoBERTa does: from ``padding`` + 1, a padding token that stands in a text being passed over."""
        real = self.tokens.ne(padding).long()
        counted = real.cumsum(0)
        return (counted - self._of_texts((counted - real)[self.starts])) * real + padding

    def _of_texts(self, values: Tensor) -> Tensor:
        """Repeat one value per text for each of its tokens."""
        return values.repeat_interleave(self.lengths, output_size=len(self.tokens))


def packed_forward_of(model: Any, *, int8: bool = False) -> PackedForward | None:
    """Return the packed forward pass of a transformers encoder, or None where its states would not be the model's.

    None is the answer for families that are not listed here (relative or rotary positions), for decoders,
    and for models whose linear layers are no longer plain ones: wrapped by adapters, quantised.

    Args:
        model: a transformers encoder.
        int8: multiply in 8-bit integers (see `condenser.models.int8`), on the CPU: the states come near the
            model's, and the weights are copied, so that later changes to the model do not show.
    """
    config = getattr(model, "config", None)
    names = _FAMILIES.get(getattr(config, "model_type", ""))
    if names is None or getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return None
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    try:
        return PackedForward(model, names, int8)
    except (AttributeError, TypeError):
        return None


class PackedForward:
    """A BERT-like encoder over packed rows; it reads the model's own weights at each call (8-bit ones are copies).

    The linear layers see no padding. Attention goes run by run, a run being neighbouring texts of one length,
    without a mask; on a GPU, where each call costs, it goes in one call per layer, padded and masked.

    Args:
        model: a transformers encoder.
        names: where its parts are.
        int8: multiply in 8-bit integers.

    Raises:
        AttributeError, TypeError: a part is not there, or is not of the plain kind.
    """

    def __init__(self, model: Any, names: _Names, int8: bool = False) -> None:
        self._embeddings = model.embeddings
        self._norm = _part(model, "embeddings.LayerNorm", nn.LayerNorm)
        self._project = _linear(model, "embeddings_project") if hasattr(model, "embeddings_project") else None
        self._heads = int(model.config.num_attention_heads)
        self._padding: int | None = model.config.pad_token_id if names.counts_padding else None
        self._layers = [_layer(layer, names, int8) for layer in model.get_submodule(names.layers)]
        self._ready: Callable[[Tensor], Any] = scaled_rows if int8 else lambda rows: rows

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[Sequence[int]], rows: Rows = "all") -> tuple[Tensor, Tensor]:
        """Return the last layer's states of a batch, equal to the model's up to rounding.

        Args:
            token_ids: one list per text, none empty. Texts sorted by length take the fewest calls.
            rows: which states are wanted: of all tokens, or of each text's first (``cls``) or last one, which
                leaves out most of the last layer.

        Returns:
            States (total tokens, hidden), or (texts, hidden) for ``cls`` and ``last``; and the lengths (texts,).
        """
        device = self._norm.weight.device
        texts, tokens = len(token_ids), sum(map(len, token_ids))
        if device.type == "cpu":
            token_ids = [*token_ids, *_fillers(-tokens % _ROW_STEP, max(map(len, token_ids)))]
        batch = _Batch(token_ids, device)
        attend = _attend_by_runs if device.type == "cpu" else _attend_padded
        states = self._embed(batch)
        for layer in self._layers:
            ready = self._ready(states)
            key, value = layer.key(ready), layer.value(ready)
            if rows != "all" and layer is self._layers[-1]:
                states = states[batch.starts if rows == "cls" else batch.starts + batch.lengths - 1]
                ready = self._ready(states)
            mixed = attend(layer.query(ready), key, value, batch, self._heads)
            states = layer.mixed_norm(layer.mixed(self._ready(mixed)).add_(states))
            states = layer.norm(layer.down(self._ready(layer.up(self._ready(states)))).add_(states))
        return states[: tokens if rows == "all" else texts], batch.lengths[:texts]

    def _embed(self, batch: _Batch) -> Tensor:
        parts = self._embeddings
        places = batch.places() if self._padding is None else batch.places_beside(self._padding)
        states = functional.embedding(batch.tokens, parts.word_embeddings.weight)
        if hasattr(parts, "token_type_embeddings"):
            states = states.add_(parts.token_type_embeddings.weight[0])
        states = states.add_(functional.embedding(places, parts.position_embeddings.weight))
        states = self._norm(states)
        return states if self._project is None else self._project(states)


def _fillers(tokens: int, longest: int) -> list[list[int]]:
    """Return texts of so many tokens in all, none longer than one that the model has positions for."""
    whole, rest = divmod(tokens, longest)
    return [[0] * longest] * whole + ([[0] * rest] if rest else [])


def _attend_by_runs(query: Tensor, key: Tensor, value: Tensor, batch: _Batch, heads: int) -> Tensor:
    """Return the attention's output in the place of the queries: one per token, or one per text."""
    per_text = len(query) == len(batch.lengths)
    texts = tokens = 0
    for length, count in batch.runs:
        asked = slice(texts, texts + count) if per_text else slice(tokens, tokens + count * length)
        known = slice(tokens, tokens + count * length)
        q, k, v = (
            part.view(count, -1, heads, part.shape[-1] // heads).transpose(1, 2)
            for part in (query[asked], key[known], value[known])
        )
        query[asked] = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, query.shape[-1])
        texts, tokens = texts + count, tokens + count * length
    return query


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, batch: _Batch, heads: int) -> Tensor:
    """Like `_attend_by_runs`, in one call over rows padded to the longest."""
    per_text = len(query) == len(batch.lengths)
    columns = torch.arange(max(length for length, _ in batch.runs), device=query.device)
    known = columns < batch.lengths[:, None]
    # What stands beyond a text's end is read from its last token, and masked.
    places = batch.starts[:, None] + columns.minimum(batch.lengths[:, None] - 1)
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in (query[:, None] if per_text else query[places], key[places], value[places])
    )
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=known[:, None, None])
    mixed = mixed.transpose(1, 2).flatten(-2)
    return mixed[:, 0] if per_text else mixed[known]


def _layer(layer: nn.Module, names: _Names, int8: bool) -> _Layer:
    linear = _int8_linear if int8 else _linear
    return _Layer(
        query=linear(layer, names.query),
        key=linear(layer, names.key),
        value=linear(layer, names.value),
        mixed=linear(layer, names.mixed),
        mixed_norm=_part(layer, names.mixed_norm, nn.LayerNorm),
        up=linear(layer, names.up, layer.get_submodule(names.activation)),
        down=linear(layer, names.down),
        norm=_part(layer, names.norm, nn.LayerNorm),
    )


def _part(module: nn.Module, name: str, kind: type[nn.Module]) -> Any:
    """Return a part by name; raise TypeError where something else has taken its place."""
    part = module.get_submodule(name)
    if type(part) is not kind:
        raise TypeError(f"{name} is a {type(part).__name__}, expected a {kind.__name__}")
    return part


def _is_gelu(activation: nn.Module | None) -> bool:
    return type(activation) is GELUActivation and activation.act is functional.gelu


def _linear(module: nn.Module, name: str, activation: nn.Module | None = None) -> Linear:
    """Return a linear layer, with its activation behind it.

    On a CPU the product is oneDNN's: in float32 15 to 30 % faster than the BLAS behind `nn.Linear` from 32 rows
    on, GELU nearly free, and as fast for three products of one input as for one with their weights joined.
    """
    linear: nn.Linear = _part(module, name, nn.Linear)
    is_gelu = _is_gelu(activation)
    # oneDNN's name of what it does to the result, and which formula: "none" is GELU by the error function.
    then, formula = ("gelu", "none") if is_gelu else ("none", "")

    def apply(rows: Tensor) -> Tensor:
        if rows.dtype in _ONEDNN_TYPES and rows.device.type == "cpu" and torch.backends.mkldnn.is_available():
            result = torch.ops.mkldnn._linear_pointwise(rows, linear.weight, linear.bias, then, [], formula)
            return result if is_gelu or activation is None else activation(result)
        result = linear(rows)
        return result if activation is None else activation(result)

    return apply


def _int8_linear(module: nn.Module, name: str, activation: nn.Module | None = None) -> Linear:
    """Return a linear layer in 8-bit integers, with its activation behind it."""
    return Int8Linear(_part(module, name, nn.Linear), torch.ops.aten.gelu_ if _is_gelu(activation) else activation)
