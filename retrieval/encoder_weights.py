"""A tower in a folder: transformer, tokenizer and linear layer, read from any layout we know and written in ours."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from condenser.errors import UserError, first_line
from condenser.files import disk_faults, read_json
from condenser.hub import load_encoder_alone, quiet_transformers
from condenser.manifest import MANIFEST, load_manifest
from condenser.models.pooling import DENSE_FOLDER, IDENTITY
from condenser.weights import CONFIG, WEIGHTS, check_shapes, check_weights
from retrieval.encoder_files import (
    PASSAGE_TOWER,
    QUERY_TOWER,
    SIZES_FILE,
    EncoderConfig,
    asks_for_lower_case,
    check_folder,
    dense_folder,
    is_pair,
    write_config,
)

# The names that transformers gives the towers of DPR: class, and where the encoder is in it.
_DPR_TOWERS = {"DPRQuestionEncoder": "question_encoder", "DPRContextEncoder": "ctx_encoder"}
# What older transformers stored beside the weights, though it can be counted.
_BUFFERS = ("position_ids", "token_type_ids", "inv_freq")
_BERT_SETTINGS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size initializer_range layer_norm_eps pad_token_id"
).split()


class Tower(NamedTuple):
    """What turns token ids into a vector.

    Attributes:
        model: a transformers encoder without pooler.
        tokenizer: its tokenizer.
        head: the linear layer after pooling, or None.
    """

    model: Any
    tokenizer: Any
    head: nn.Linear | None

    @property
    def length(self) -> int:
        """Length of a vector."""
        return int(self.model.config.hidden_size if self.head is None else self.head.out_features)

    @property
    def projection(self) -> int | None:
        """Length of what the linear layer makes, or None."""
        return self.head.out_features if self.head is not None else None


def load_towers(folder: Path) -> tuple[Tower, Tower | None]:
    """Load the tower of passages, and that of queries where an encoder has two.

    Raises:
        UserError: what `load_tower` refuses; towers with different tokenizers; a root with a file that differs
            from its manifest.
    """
    if not is_pair(folder):
        return load_tower(folder), None
    if (folder / MANIFEST).is_file():
        load_manifest(folder, verify=True)
    passages, queries = (load_tower(folder / name) for name in (PASSAGE_TOWER, QUERY_TOWER))
    check_same("tokenizer", tokenizer_digest(queries.tokenizer), tokenizer_digest(passages.tokenizer), folder)
    return passages, queries


def check_same(what: str, queries: object, passages: object, where: Path | None) -> None:
    """Refuse two towers whose vectors do not lie in one space."""
    if queries != passages:
        raise UserError(f"{what} is {queries!r} for queries, {passages!r} for passages", where, "towers share these")


def load_tower(folder: Path) -> Tower:
    """Load a tower in float32.

    Raises:
        UserError: config, tokenizer or weights missing or damaged; weights that leave parts of the model at
            random; a tokenizer without a fast version; a dense module that is not linear.
    """
    check_folder(folder)
    with quiet_transformers():
        try:
            tokenizer, (model, head, info) = _load_tokenizer(folder), _load_model(folder)
        except UserError:
            raise
        except Exception as error:  # what the libraries raise depends on where a file goes wrong
            raise UserError(f"cannot be loaded: {first_line(error)}", folder) from None
    check_shapes(info["mismatched_keys"], folder)
    check_keys(model, info, folder)
    if not tokenizer.is_fast:
        raise UserError("tokenizer has no fast version (tokenizer.json)", folder)
    if asks_for_lower_case(folder) and tokenizer.tokenize("River") != tokenizer.tokenize("river"):
        raise UserError("asks for lower case (do_lower_case) from a tokenizer that keeps capitals", folder / SIZES_FILE)
    dense = dense_folder(folder)
    return Tower(model, tokenizer, head if dense is None else _load_dense(dense, model.config.hidden_size))


def check_keys(model: Any, info: dict[str, Any], folder: Path) -> None:
    """Refuse weights that leave parts of the model at random, or that hold parts it does not have.

    Heads and poolers may be there: an encoder has no use for them.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"weights lack {len(missing)} of the model's tensors, first {missing[0]!r}",
            folder,
            "they are of another architecture than config.json says",
        )
    parts = {name for name, _ in model.named_children()}
    names = sorted(key.removeprefix(f"{model.base_model_prefix}.") for key in info["unexpected_keys"])
    unknown = [name for name in names if name.split(".")[0] in parts and name.rsplit(".", 1)[-1] not in _BUFFERS]
    if unknown:
        raise UserError(
            f"weights have {len(unknown)} tensors that the model has no place for, first {unknown[0]!r}",
            folder,
            "they are of another architecture than config.json says",
        )


def save_tower(folder: Path, tower: Tower, config: EncoderConfig, *, max_length: int) -> None:
    """Write a folder that AutoModel and SentenceTransformer open; the latter cuts all texts at ``max_length``."""
    with quiet_transformers(), disk_faults(folder):
        tower.model.save_pretrained(folder)
        plain_core(tower.tokenizer)
        tower.tokenizer.save_pretrained(folder)
        if tower.head is not None:
            (folder / DENSE_FOLDER).mkdir(exist_ok=True)
            tensors = {f"linear.{name}": value.contiguous() for name, value in tower.head.state_dict().items()}
            save_file(tensors, folder / DENSE_FOLDER / WEIGHTS, metadata={"format": "pt"})
    has_bias = tower.head is not None and tower.head.bias is not None
    write_config(folder, config, tower.model.config.hidden_size, bias=has_bias, max_length=max_length)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of vocabulary and tokenization rules."""
    return hashlib.sha256(plain_core(tokenizer).to_str().encode()).hexdigest()[:16]


def plain_core(tokenizer: Any) -> Any:
    """Return a tokenizer's core without the truncation that a call leaves in it, which would be saved with it."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _load_model(folder: Path) -> tuple[Any, nn.Linear | None, dict[str, Any]]:
    """Return the encoder, DPR's projection if there is one, and transformers' report on the weights."""
    from safetensors import SafetensorError

    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "use_safetensors": True,
        "local_files_only": True,
        "trust_remote_code": False,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    try:
        if read_json(folder / CONFIG).get("model_type") == "dpr":
            return _load_dpr(folder, settings)
        model, info = load_encoder_alone(folder, **settings)
        return model, None, info
    except SafetensorError as error:
        raise UserError(f"weights are damaged ({error})", folder / WEIGHTS, "copy or make them anew") from None


def _load_dpr(folder: Path, settings: dict[str, Any]) -> tuple[Any, nn.Linear | None, dict[str, Any]]:
    """Load a tower of DPR (Karpukhin et al. 2020) as the BERT that it is."""
    import transformers

    found = read_json(folder / CONFIG).get("architectures") or []
    named = [name for name in found if name in _DPR_TOWERS]
    if not named:
        raise UserError(
            f"architecture is {', '.join(map(str, found)) or 'not said'}, expected {' or '.join(_DPR_TOWERS)}",
            folder / CONFIG,
        )
    whole, info = getattr(transformers, named[0]).from_pretrained(folder, **settings)
    place = _DPR_TOWERS[named[0]]
    tower = getattr(whole, place)
    info["unexpected_keys"] = {key.removeprefix(f"{place}.bert_model.") for key in info["unexpected_keys"]}
    settings_of_bert = {name: getattr(whole.config, name) for name in _BERT_SETTINGS}
    model = transformers.BertModel(transformers.BertConfig(**settings_of_bert), add_pooling_layer=False)
    model.load_state_dict(tower.bert_model.state_dict())
    return model, getattr(tower, "encode_proj", None), info


def _load_dense(folder: Path, hidden: int) -> nn.Linear:
    """Load a sentence-transformers Dense module.

    Raises:
        UserError: another activation than the identity, a residual, other sizes than the model's.
    """
    said = read_json(folder / CONFIG)
    activation = said.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation != IDENTITY or said.get("use_residual"):
        also = " with a residual" if said.get("use_residual") else ""
        raise UserError(f"activation is {activation}{also}, expected a linear layer ({IDENTITY})", folder / CONFIG)
    check_weights(folder)
    tensors = {name.removeprefix("linear."): value.float() for name, value in load_file(folder / WEIGHTS).items()}
    length = said.get("out_features")
    wanted = {"weight": (length, hidden), "bias": (length,)}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if found not in (wanted, {"weight": wanted["weight"]}):
        raise UserError(f"has tensors of shapes {found}, expected {wanted}", folder / WEIGHTS)
    head = nn.Linear(hidden, len(tensors["weight"]), bias="bias" in tensors)
    head.load_state_dict(tensors)
    return head
