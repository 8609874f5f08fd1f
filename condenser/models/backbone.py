"""Masked language models of several families behind one face: the only place that knows their insides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, BertConfig, BertForMaskedLM, PretrainedConfig
from transformers.masking_utils import create_bidirectional_mask

from condenser.errors import UserError, first_line, sample
from condenser.hub import local_folder, position_limit, quiet_transformers
from condenser.models.dropout import cheapen
from condenser.models.unpadded import TextRow, prepare, row_of_texts
from condenser.models.vocabulary_loss import cross_entropies
from condenser.talk import say
from condenser.weights import check_config, check_shapes, check_weights, stored_dtypes

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "small": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048},
    "medium": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048},
}


@dataclass(frozen=True)
class Family:
    """Where one transformers family keeps what Condenser needs, as dotted names in its ``...ForMaskedLM`` model.

    Attributes:
        layers: the list of Transformer layers.
        head: the modules that turn hidden states into logits.
        transform: the linear map with which they begin.
        before_decoder: what they do before their last linear map: model and states to states.
    """

    layers: str
    head: tuple[str, ...]
    transform: str
    before_decoder: Callable[[Any, Tensor], Tensor]


FAMILIES = {
    "bert": Family(
        "bert.encoder.layer",
        ("cls",),
        "cls.predictions.transform.dense",
        lambda lm, states: lm.cls.predictions.transform(states),
    ),
    "roberta": Family(
        "roberta.encoder.layer",
        ("lm_head",),
        "lm_head.dense",
        lambda lm, states: lm.lm_head.layer_norm(nn.functional.gelu(lm.lm_head.dense(states))),
    ),
    "electra": Family(
        "electra.encoder.layer",
        ("generator_predictions", "generator_lm_head"),
        "generator_predictions.dense",
        lambda lm, states: lm.generator_predictions(states),
    ),
    "modernbert": Family("model.layers", ("head", "decoder"), "head.dense", lambda lm, states: lm.head(states)),
    "distilbert": Family(
        "distilbert.transformer.layer",
        ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
        "vocab_transform",
        lambda lm, states: lm.vocab_layer_norm(lm.activation(lm.vocab_transform(states))),
    ),
}


class Backbone(nn.Module):
    """A masked language model whose layer states and vocabulary head can be used apart.

    Args:
        lm: a transformers ``...ForMaskedLM`` model of a family in `FAMILIES`.

    Raises:
        UserError: another family.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        family = lm.config.model_type
        if family not in FAMILIES:
            raise UserError(f"model family {family!r} is not supported, expected one of {', '.join(FAMILIES)}")
        self.lm: Any = lm
        _tie_decoder(lm)
        self._family = FAMILIES[family]
        self._without_padding = prepare(lm)

    @property
    def config(self) -> PretrainedConfig:
        """The transformers configuration."""
        return self.lm.config

    @property
    def layers(self) -> int:
        """Number of Transformer layers."""
        return int(self.config.num_hidden_layers)

    @property
    def max_length(self) -> int:
        """Most tokens that a row may hold."""
        return position_limit(self.config)

    def in_one_row(self, input_ids: Tensor, attention_mask: Tensor | None) -> TextRow | None:
        """Return the texts (batch, length) without padding in one row; None where the family cannot do without."""
        return row_of_texts(self.config, input_ids, attention_mask) if self._without_padding else None

    def hidden_states(self, input_ids: Tensor, attention: Tensor | TextRow | None) -> tuple[Tensor, ...]:
        """Return the states of all layers, each (batch, length, dim); index 0 is the embedding output.

        Args:
            input_ids: (batch, length), or the ids of a row of texts.
            attention: (batch, length), 1 on tokens; None when no row is padded; or that row of texts.
        """
        if isinstance(attention, TextRow):
            given: dict[str, Any] = {"position_ids": attention.positions, "text_groups": attention.groups}
        else:
            given = {"attention_mask": attention}
        out = self.lm.base_model(input_ids=input_ids, output_hidden_states=True, **given)
        return tuple(out.hidden_states)

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocabulary) of states (..., dim) through the model's own masked-LM head."""
        logits: Tensor = self.lm.get_output_embeddings()(self._family.before_decoder(self.lm, hidden))
        return logits

    def vocabulary_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropies (n,) of `vocabulary_logits` of states (n, dim) against labels (n,)."""
        decoder = self.lm.get_output_embeddings()
        states = self._family.before_decoder(self.lm, hidden)
        return cross_entropies(states, decoder.weight, decoder.bias, labels)

    def new_layers(self, count: int) -> nn.ModuleList:
        """Return ``count`` freshly initialised layers of the family's own class and configuration.

        ModernBERT's layers normalise what they read, not what they write: behind them comes one module
        more, a norm like the one at the end of the model.
        """
        layer_class = type(self.lm.get_submodule(self._family.layers)[0])
        layers = nn.ModuleList()
        if self.config.model_type != "modernbert":
            layers.extend(layer_class(self.config) for _ in range(count))
        elif count:
            # Every layer sees the whole text; number 0 is left out, for it would have no norm before its attention.
            config = copy.deepcopy(self.config)
            config.layer_types = ["full_attention"] * (count + 1)
            layers.extend(layer_class(config, number) for number in range(1, count + 1))
            final_norm: Any = copy.deepcopy(self.lm.model.final_norm)
            final_norm.reset_parameters()
            layers.append(final_norm)
        layers.apply(self.lm._init_weights)
        if self._without_padding:
            cheapen(layers)
        return layers

    def run_layers(self, layers: nn.ModuleList, hidden: Tensor, attention: Tensor | TextRow | None) -> Tensor:
        """Run states (batch, length, dim) through layers from `new_layers`, every token seeing all of its text.

        Args:
            layers: from `new_layers`.
            hidden: the states.
            attention: see `hidden_states`.
        """
        if isinstance(attention, TextRow):
            for layer in layers:
                hidden = layer(hidden, None, text_groups=attention.groups)
            return hidden
        mask = create_bidirectional_mask(self.config, hidden, attention)
        if self.config.model_type != "modernbert":
            for layer in layers:
                hidden = layer(hidden, mask)
            return hidden
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotation = self.lm.model.rotary_emb(hidden, places, "full_attention")
        *blocks, final_norm = layers
        for layer in blocks:
            hidden = layer(hidden, mask, rotation)
        return final_norm(hidden)

    def in_head(self, name: str) -> bool:
        """Say whether a parameter of this name is one of the masked-LM head."""
        return name.startswith(tuple(f"{module}." for module in self._family.head))

    def head_parameters(self) -> dict[str, nn.Parameter]:
        """Return the masked-LM head's own parameters by name: those that are not the encoder's as well."""
        encoder = {id(parameter) for parameter in self.lm.base_model.parameters()}
        return {name: parameter for name, parameter in self.lm.named_parameters() if id(parameter) not in encoder}

    def start_vocabulary_head(self, unigram_counts: np.ndarray) -> None:
        """Give a fresh masked-LM head its start: transform near identity, bias at log unigram frequency.

        The decoder is tied to the word embeddings already, so that the head begins as "the tokens
        like this state, weighted by how common they are".
        """
        transform = self.lm.get_submodule(self._family.transform)
        decoder = self.lm.get_output_embeddings()
        # a vocabulary may be padded to a round number; one of another tokenizer is refused by who knows both
        counts = np.zeros(decoder.out_features)
        counts[: len(unigram_counts)] = unigram_counts[: len(counts)]
        frequency = torch.from_numpy((counts + 1) / (counts.sum() + len(counts)))
        with torch.no_grad():
            if transform.in_features == transform.out_features:
                transform.weight.copy_(torch.eye(transform.in_features))
            else:  # ELECTRA's word embeddings are narrower than its states: back through the map between them
                transform.weight.copy_(torch.linalg.pinv(self.lm.base_model.embeddings_project.weight))
            if transform.bias is not None:
                transform.bias.zero_()
            if decoder.bias is not None:
                decoder.bias.copy_(frequency.log())

    def save(self, folder: Path) -> None:
        """Write a clean folder that AutoModel and AutoModelForMaskedLM open."""
        with quiet_transformers():
            self.lm.save_pretrained(folder)


def load_backbone(
    name: str | Path, unigram_counts: np.ndarray | None = None, *, tensors: dict[str, Tensor] | None = None
) -> tuple[Backbone, bool]:
    """Load masked-LM weights in float32 from a folder or by hub name.

    Args:
        name: folder or hub name. A plain encoder without a masked-LM head is taken, with a line that
            says so.
        unigram_counts: token counts (vocabulary,) for the start of a fresh head.
        tensors: take these weights and only the configuration from the folder.

    Returns:
        The backbone, and whether its masked-LM head is fresh.

    Raises:
        UserError: no such folder, missing or damaged weights, an unsupported family, weights that lack
            parameters beyond the head or have layers that the configuration lacks.
    """
    lm, missing, unexpected = load_weights(name, MODEL_FOR_MASKED_LM_MAPPING, tuple(FAMILIES), tensors=tensors)
    backbone = Backbone(lm)
    fresh = set(backbone.head_parameters()) <= missing
    check_keys(name, lm, {key for key in missing if not (fresh and backbone.in_head(key))}, unexpected)
    if fresh:
        how = ""
        if unigram_counts is not None:
            backbone.start_vocabulary_head(unigram_counts)
            how = " (decoder: the word embeddings; transform: near identity; bias: log frequency of each token)"
        say(f"{name}: no masked-LM head in these weights; a new one is started{how}")
    return backbone, fresh


def load_weights(
    name: str | Path, classes: Mapping[Any, Any], families: Sequence[str], *, tensors: dict[str, Tensor] | None = None
) -> tuple[Any, set[str], set[str]]:
    """Load a model in float32 from a folder or by hub name.

    Args:
        name: folder or hub name.
        classes: which transformers class a configuration's class belongs to.
        families: the families that may be loaded.
        tensors: take these weights and only the configuration from the folder.

    Returns:
        The model, the names of parameters that the weights lack, and those that they have besides.

    Raises:
        UserError: no such folder, missing or damaged weights, an unsupported family.
    """
    folder = local_folder(name)
    config = _load_config(folder, families)
    if tensors is None:
        check_weights(folder)
        dtypes = stored_dtypes(folder)
    else:
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    others = sorted(dtypes & {"float16", "bfloat16", "float64"})
    if others:
        say(f"{name}: weights are stored as {' and '.join(others)}; trained in float32")
    try:
        with quiet_transformers():
            model, report = classes[type(config)].from_pretrained(
                folder if tensors is None else None,
                config=config,
                state_dict=tensors,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers, safetensors and the hub raise many kinds
        raise UserError(f"weights could not be loaded: {first_line(error)}", name) from None
    check_shapes(report["mismatched_keys"], name)
    return model, set(report["missing_keys"]), set(report["unexpected_keys"])


def check_keys(name: str | Path, model: Any, missing: set[str], unexpected: set[str]) -> None:
    """Refuse weights that leave parts of the encoder at random, or that hold parts it does not have.

    Args:
        name: folder or hub name.
        model: what `load_weights` returned, with what they lack, but for a head that may be fresh, and have besides.
        missing: see ``model``.
        unexpected: see ``model``.
    """
    missing = {key for key in missing if not key.endswith("position_ids")}
    if missing:
        raise UserError(f"weights lack {len(missing)} parameters, such as {sample(sorted(missing), 2)}", name)
    base = model.base_model
    parts = {part for part, _ in base.named_children()}
    unexpected = {key.removeprefix(f"{base.base_model_prefix}.") for key in unexpected}
    unknown = sorted(key for key in unexpected if key.split(".")[0] in parts and not key.endswith("position_ids"))
    if unknown:
        raise UserError(
            f"weights have {len(unknown)} parameters beyond the {base.config.num_hidden_layers} layers of config.json, "
            f"such as {sample(unknown, 2)}",
            name,
            "the number of layers there is not that of these weights",
        )


def _tie_decoder(lm: Any) -> None:
    """Make decoder and word embeddings one tensor where they are stored twice; the oldest releases leave them two."""
    decoder, embeddings = lm.get_output_embeddings(), lm.get_input_embeddings()
    if decoder.weight is not embeddings.weight and torch.equal(decoder.weight, embeddings.weight):
        lm.tie_weights()


def new_backbone(size: str, vocabulary_size: int, max_length: int, pad_token_id: int) -> Backbone:
    """Return a BERT of a size in `SIZES` with random weights from torch's generator."""
    config = BertConfig(
        vocab_size=vocabulary_size,
        max_position_embeddings=max(512, max_length),
        pad_token_id=pad_token_id,
        **SIZES[size],
    )
    return Backbone(BertForMaskedLM(config))


def _load_config(folder: Path, families: Sequence[str]) -> Any:
    check_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"no model configuration could be loaded: {first_line(error)}", folder) from None
    if config.model_type not in families:
        expected = f"one of {', '.join(families)}" if len(families) > 1 else families[0]
        raise UserError(f"model family {config.model_type!r} is not supported, expected {expected}", folder)
    return config
