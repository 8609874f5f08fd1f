"""What a search asks of a language model, whatever kind it is: the only place that knows transformers' caches."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from condenser.errors import UserError


class Generator(Protocol):
    """A language model bound to the inputs of one batch, asked for one token after the other.

    A state holds one row per text in the making. `step` and `reorder` may use up the state that they are given: go on
    with the one that they return. Log-probabilities are float32, or float64 of a model in float64.
    """

    def start(self) -> tuple[Tensor, Any]:
        """Return log-probabilities (inputs, vocabulary) of the first token of each input's text, and the state."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Append one token to each row (rows,); return log-probabilities (rows, vocabulary) of the next, and the state.

        What a row says of its next token depends on nothing but that row.
        """
        ...

    def reorder(self, state: Any, rows: Tensor) -> Any:
        """Return the state of these rows in this order; a row may come more than once, or not at all."""
        ...


class RecurrentModel(Protocol):
    """What `Recurrent` asks of a recurrent network; only the network knows how its state is laid out."""

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read tokens (rows,); return log-probabilities (rows, vocabulary) of the next and the new state."""
        ...

    def reorder(self, state: Any, rows: Tensor) -> Any:
        """Return the state of these rows in this order."""
        ...


class Recurrent:
    """A recurrent language model as a `Generator`.

    Args:
        model: the network, in eval mode.
        state: what it knows before the first token, one row per input.
        first: token (inputs,) with which each input's text begins; it is no part of what is written.
    """

    def __init__(self, model: RecurrentModel, state: Any, first: Tensor) -> None:
        self._model, self._state, self._first = model, state, first

    @torch.inference_mode()
    def start(self) -> tuple[Tensor, Any]:
        """Read the first token."""
        return self.step(self._first, self._state)

    @torch.inference_mode()
    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one token more per row."""
        return self._model.step(tokens, state)

    @torch.inference_mode()
    def reorder(self, state: Any, rows: Tensor) -> Any:
        """Leave it to the network."""
        return self._model.reorder(state, rows)


class CausalModel:
    """A transformers ``...ForCausalLM`` with one prompt per input as a `Generator`.

    Prompts may be padded on either side, or in between: they are moved to the right end, so that every side gives
    the same bits, and positions are counted without padding.

    Args:
        model: the model, in eval mode.
        input_ids: prompts (inputs, length).
        attention_mask: 1 for each token of a prompt, 0 for padding; every prompt has a token.

    Raises:
        UserError: a prompt without a token, or a model without a cache.
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor) -> None:
        self._model, self._cache_name = model, _cache_name(model)
        _check_tokens(attention_mask, "prompt")
        self._ids, self._mask = _moved(input_ids, attention_mask, to_the_right=True)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def start(self) -> tuple[Tensor, Any]:
        """Read the prompts."""
        return self._run(self._ids, self._mask, None)

    @torch.inference_mode()
    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one token more per row."""
        cache, mask = state
        return self._run(tokens[:, None], torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1), cache)

    @torch.inference_mode()
    def reorder(self, state: Any, rows: Tensor) -> Any:
        """Select the rows of the cache and of the mask."""
        cache, mask = state
        cache.reorder_cache(rows)
        return cache, mask.index_select(0, rows)

    def _run(self, ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        named = {self._cache_name: cache}
        if self._takes_positions:
            named["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self._model(input_ids=ids, attention_mask=mask, use_cache=True, **named)
        return _last_log_probs(out.logits), (getattr(out, self._cache_name), mask)


class SequenceToSequence:
    """A transformers encoder-decoder (T5, BART, EncoderDecoderModel) as a `Generator`.

    Args:
        model: the model, in eval mode.
        input_ids: what the encoder reads (inputs, length), padded on either side: it is moved to the left end.
        attention_mask: 1 for each token, 0 for padding; every input has a token.
        first: token with which every text begins; default: what the model's configuration says.

    Raises:
        UserError: an input without a token, a model without a cache, or no word of the first token.
    """

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor, first: int | None = None) -> None:
        self._model, self._cache_name = model, _cache_name(model)
        _check_tokens(attention_mask, "input")
        self._ids, self._mask = _moved(input_ids, attention_mask, to_the_right=False)
        self._first = first if first is not None else _first_token(model)

    @torch.inference_mode()
    def start(self) -> tuple[Tensor, Any]:
        """Run the encoder, and give the decoder its first token."""
        encoded = self._model.get_encoder()(input_ids=self._ids, attention_mask=self._mask, return_dict=True)
        first = self._ids.new_full((len(self._ids),), self._first)
        return self.step(first, (None, encoded.last_hidden_state, self._mask))

    @torch.inference_mode()
    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Give the decoder one token more per row."""
        cache, encoded, mask = state
        out = self._model(
            encoder_outputs=(encoded,),
            attention_mask=mask,
            decoder_input_ids=tokens[:, None],
            use_cache=True,
            **{self._cache_name: cache},
        )
        return _last_log_probs(out.logits), (getattr(out, self._cache_name), encoded, mask)

    @torch.inference_mode()
    def reorder(self, state: Any, rows: Tensor) -> Any:
        """Select the rows of the cache and of what the encoder made of the inputs."""
        cache, encoded, mask = state
        cache.reorder_cache(rows)
        return cache, encoded.index_select(0, rows), mask.index_select(0, rows)


class Repeated:
    """A generator whose inputs come several times each, read once.

    Args:
        generator: the model, bound to each input once.
        inputs: for each text to be written the number of its input.
    """

    def __init__(self, generator: Generator, inputs: Sequence[int]) -> None:
        self._generator, self._inputs = generator, torch.tensor(inputs)
        self.step, self.reorder = generator.step, generator.reorder

    def start(self) -> tuple[Tensor, Any]:
        """Read each input, and make a row of it for each text."""
        log_probs, state = self._generator.start()
        rows = self._inputs.to(log_probs.device)
        return log_probs[rows], self._generator.reorder(state, rows)


def _last_log_probs(logits: Tensor) -> Tensor:
    last = logits[:, -1]
    return last.log_softmax(-1, dtype=torch.promote_types(last.dtype, torch.float32))


def _cache_name(model: Any) -> str:
    """Return what the model calls its cache: ``past_key_values``, of late ``cache``."""
    known = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in known:
            return name
    raise UserError(
        f"model family {model.config.model_type!r} keeps no cache of what it has read",
        hint="take a model with attention over all earlier tokens, such as GPT-2, T5 or BART",
    )


def _first_token(model: Any) -> int:
    for config in (model.generation_config, model.config):
        token = getattr(config, "decoder_start_token_id", None)
        if token is not None:
            return int(token)
    raise UserError("the model's configuration has no decoder_start_token_id", hint="give the first token")


def _check_tokens(mask: Tensor, what: str) -> None:
    empty = (mask.sum(1) == 0).nonzero()
    if len(empty):
        raise UserError(f"{what} {int(empty[0])} (from 0) has no token, expected at least one")


def _moved(ids: Tensor, mask: Tensor, to_the_right: bool) -> tuple[Tensor, Tensor]:
    """Move each row's tokens to one end, in their order; padding becomes token 0."""
    order = torch.argsort(mask.long() if to_the_right else -mask.long(), dim=1, stable=True)
    kept = int(mask.sum(1).max())
    mask, ids = mask.gather(1, order), ids.gather(1, order)
    mask, ids = (mask[:, -kept:], ids[:, -kept:]) if to_the_right else (mask[:, :kept], ids[:, :kept])
    return ids * mask, mask
