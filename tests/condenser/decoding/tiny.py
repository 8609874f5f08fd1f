"""Small models to search in, and every text that they can write, scored one by one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

END = 2
WORDS = range(3, 7)
Text = tuple[int, ...]


class TextModel:
    """A generator that asks a function of the input and the text so far; it knows no cache that could be wrong."""

    def __init__(self, inputs: int, next_log_probs: Callable[[int, Text], Tensor]) -> None:
        self._inputs, self._next = inputs, next_log_probs

    def start(self) -> tuple[Tensor, list[tuple[int, Text]]]:
        return self._answer([(number, ()) for number in range(self._inputs)])

    def step(self, tokens: Tensor, state: list[tuple[int, Text]]) -> tuple[Tensor, list[tuple[int, Text]]]:
        return self._answer([(one, (*text, token)) for (one, text), token in zip(state, tokens.tolist(), strict=True)])

    def reorder(self, state: list[tuple[int, Text]], rows: Tensor) -> list[tuple[int, Text]]:
        return [state[row] for row in rows.tolist()]

    def _answer(self, state: list[tuple[int, Text]]) -> tuple[Tensor, list[tuple[int, Text]]]:
        return torch.stack([self._next(*row) for row in state]), state


@functools.cache
def random_next(vocabulary: int, seed: int = 0, holes: float = 0.0) -> Callable[[int, Text], Tensor]:
    """Return log-probabilities drawn by input and text; a share of the tokens has probability 0."""

    @functools.cache
    def next_log_probs(number: int, text: Text) -> Tensor:
        drawn = torch.Generator().manual_seed(hash((seed, number, text)) % 2**31)
        scores = 2 * torch.randn(vocabulary, generator=drawn, dtype=torch.float64)
        scores[torch.rand(vocabulary, generator=drawn) < holes] = -torch.inf
        return scores.log_softmax(0) if scores.isfinite().any() else scores

    return next_log_probs


@functools.cache
def every_text(
    next_log_probs: Callable[[int, Text], Tensor], number: int, longest: int, words: Sequence[int] = WORDS
) -> list[tuple[float, Text]]:
    """Return each text of at most ``longest`` words with its log-probability, end token included, best first."""
    scored = []
    for length in range(longest + 1):
        for text in itertools.product(words, repeat=length):
            steps = enumerate((*text, END))
            total = sum(float(next_log_probs(number, text[:place])[token]) for place, token in steps)
            if total > -torch.inf:
                scored.append((total, text))
    return sorted(scored, key=lambda one: -one[0])


def tiny_transformer(family: str, vocabulary: int = 7) -> Any:
    """A random model in float64, with weights large enough that its guesses differ."""
    torch.manual_seed(1)
    size = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END}
    bart = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    bert = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if family == "gpt2":
        model: Any = GPT2LMHeadModel(GPT2Config(**size, n_embd=8, n_layer=2, n_head=2, n_positions=32))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**size, **bert))
    elif family == "t5":
        heads = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(**size, **heads, decoder_start_token_id=0))
    elif family == "bart":
        feed = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32}
        model = BartForConditionalGeneration(BartConfig(**size, **bart, **feed, d_model=8, decoder_start_token_id=1))
    else:
        parts = BertConfig(**size, **bert), BertConfig(**size, **bert, is_decoder=True, add_cross_attention=True)
        model = EncoderDecoderModel(config=EncoderDecoderConfig.from_encoder_decoder_configs(*parts))
        model.config.decoder_start_token_id = 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower() and "ln_" not in name:
                parameter.normal_(std=0.7)
    return model.double().eval()


def next_of_transformer(model: Any, inputs: Sequence[Sequence[int]]) -> Callable[[int, Text], Tensor]:
    """Return the same model asked without padding, batch or cache."""

    @functools.cache
    def next_log_probs(number: int, text: Text) -> Tensor:
        given = torch.tensor([list(inputs[number])])
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                written = torch.tensor([[model.config.decoder_start_token_id, *text]])
                logits = model(input_ids=given, decoder_input_ids=written, use_cache=False).logits
            else:
                logits = model(input_ids=torch.cat([given, torch.tensor([text]).long()], 1), use_cache=False).logits
        return logits[0, -1].log_softmax(-1)

    return next_log_probs


def padded(rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
    """Return rows of ids and their mask, padded on the right, on the left, or at both ends."""
    length = max(map(len, rows)) + 2
    before = {"right": lambda row: 0, "left": lambda row: length - len(row), "both": lambda row: 1}[side]
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(before(row), before(row) + len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return ids, mask
