"""Texts written one token at a time: the most probable next one, or one drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from condenser.decoding.generators import Generator
from condenser.decoding.hypotheses import Hypothesis, refuse_nan, top_tokens
from condenser.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How texts are drawn.

    Args:
        end: the token that ends a text.
        max_length: most tokens drawn, the end token among them; a text without it by then stays unfinished.
        min_length: fewest tokens of a text, the end token not counted.
        temperature: the model's log-probabilities are divided by it: below 1 the probable becomes more probable.
        top_k: draw from the so many most probable tokens only.
        top_p: draw from the fewest most probable tokens that together have at least this probability.
        forbidden: tokens that are never drawn, such as padding and the begin token.

    Raises:
        UserError: a number out of its range.
    """

    end: int
    max_length: int = 32
    min_length: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_length < 1 or not 0 <= self.min_length <= self.max_length:
            raise UserError(
                f"lengths are {self.min_length} to {self.max_length}, expected at least 1 at most, no less at least"
            )
        if not self.temperature > 0:
            raise UserError(
                f"temperature is {self.temperature}, expected more than 0", hint="greedy search is its limit"
            )
        check_cuts(self.top_k, self.top_p)


def check_cuts(top_k: int | None, top_p: float | None) -> None:
    """Raise UserError for a cut that is out of its range."""
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k is {top_k}, expected 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}, expected more than 0 and at most 1")


def within_top_p(shares: Tensor, top_p: float) -> Tensor:
    """Say which of each row's shares, the highest first, are needed to reach top_p: the first always is."""
    return shares.cumsum(1) - shares < top_p


def greedy(generator: Generator, settings: SampleSettings) -> list[Hypothesis]:
    """Take the most probable token at each step, of equals the lowest; one text for each input."""

    def choose(log_probs: Tensor, inputs: list[int], step: int) -> Tensor:
        return top_tokens(log_probs, 1)[1][:, 0]

    return _write(generator, settings, choose)


def sample(generator: Generator, settings: SampleSettings, seeds: Sequence[int]) -> list[Hypothesis]:
    """Draw one text for each input, by its own seed: what else is in the batch does not matter.

    Args:
        generator: the model, bound to the inputs.
        settings: what is drawn from.
        seeds: one for each input.
    """
    drawn = [np.random.Generator(np.random.Philox(seed)).random(settings.max_length) for seed in seeds]
    return sample_at(generator, settings, torch.from_numpy(np.array(drawn).reshape(len(seeds), settings.max_length)))


def sample_at(generator: Generator, settings: SampleSettings, uniforms: Tensor) -> list[Hypothesis]:
    """Draw each token at a given place of its distribution: the first whose cumulative probability is greater.

    Args:
        generator: the model, bound to the inputs.
        settings: what is drawn from.
        uniforms: numbers from 0 to below 1 (inputs, max_length), float64.
    """

    def choose(log_probs: Tensor, inputs: list[int], step: int) -> Tensor:
        probabilities = drawn_from(log_probs, settings)
        cumulative = probabilities.cumsum(1)
        total = cumulative[:, -1:]
        places = uniforms[inputs, step].to(total.device)[:, None] * total
        below_total = torch.nextafter(total, torch.zeros_like(total))  # to which rounding may lift a place
        return torch.searchsorted(cumulative, places.minimum(below_total), right=True)[:, 0]

    return _write(generator, settings, choose)


def drawn_from(log_probs: Tensor, settings: SampleSettings) -> Tensor:
    """Return the probabilities (rows, vocabulary), float64, that are drawn from: tempered, then cut by top_k and top_p.

    Of equals at a cut, the lower tokens stay.
    """
    tempered = (log_probs.double() / settings.temperature).log_softmax(1)
    if settings.top_k is None and settings.top_p is None:
        return tempered.exp()
    values, tokens = top_tokens(tempered, settings.top_k or tempered.shape[1])
    kept = values.softmax(1)
    if settings.top_p is not None:
        kept = torch.where(within_top_p(kept, settings.top_p), kept, 0.0)
    return torch.zeros_like(tempered).scatter(1, tokens, kept / kept.sum(1, keepdim=True))


@torch.inference_mode()
def _write(
    generator: Generator, settings: SampleSettings, choose: Callable[[Tensor, list[int], int], Tensor]
) -> list[Hypothesis]:
    """Write a text for each input; finished ones leave the batch.

    ``choose`` gets log-probabilities (rows, vocabulary), the input of each row and the step; it returns tokens (rows,).
    """
    log_probs, state = generator.start()
    texts: list[list[int]] = [[] for _ in range(len(log_probs))]
    sums = [0.0] * len(texts)
    inputs = list(range(len(texts)))
    for step in range(settings.max_length):
        barred = [*settings.forbidden, *([settings.end] if step < settings.min_length else [])]
        allowed = log_probs.clone()
        allowed[:, barred] = -torch.inf
        _check_choice(allowed, inputs, step)
        tokens = choose(allowed, inputs, step)
        for input, token, log_prob in zip(
            inputs, tokens.tolist(), log_probs.gather(1, tokens[:, None])[:, 0].tolist(), strict=True
        ):
            texts[input].append(token)
            sums[input] += log_prob
        rows = (tokens != settings.end).nonzero()[:, 0]
        inputs = [inputs[row] for row in rows.tolist()]
        if not inputs or step + 1 == settings.max_length:
            break
        log_probs, state = generator.step(tokens[rows], generator.reorder(state, rows))
    return [_hypothesis(text, total, settings.end) for text, total in zip(texts, sums, strict=True)]


def _check_choice(allowed: Tensor, inputs: list[int], step: int) -> None:
    """Refuse to draw where nothing has a probability: whatever came out would be a token that is not allowed."""
    refuse_nan(allowed)
    stuck = (~(allowed > -torch.inf).any(1)).nonzero()[:, 0].tolist()
    if stuck:
        raise UserError(
            f"input {inputs[stuck[0]]} (from 0): after {step} tokens no allowed token has a probability above 0"
        )


def _hypothesis(text: list[int], log_prob: float, end: int) -> Hypothesis:
    finished = text[-1] == end
    return Hypothesis(tuple(text[:-1] if finished else text), log_prob, log_prob, finished)
