"""Texts in the making: how they are chosen, remembered and banked, whatever the search."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from condenser.decoding.generators import Generator
from condenser.errors import RunFailed, UserError


class Hypothesis(NamedTuple):
    """One text that a model wrote.

    Attributes:
        tokens: the text, without the end token.
        log_prob: sum of the model's log-probabilities of its tokens, the end token included if it was written.
        score: log_prob / (tokens written) ^ length_exponent, the end token counted; of a text drawn by a search its
            log_prob and a Gumbel number.
        finished: whether the end token was written; texts from a search always have it.
    """

    tokens: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool = True


class Outcome(NamedTuple):
    """What a search found for one input.

    Attributes:
        hypotheses: different texts, best first; fewer than asked for where fewer were found.
        dead_end: if there is none, where the last ones ended; else None.
    """

    hypotheses: list[Hypothesis]
    dead_end: str | None = None


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What every beam search is told.

    Args:
        end: the token that ends a text.
        beam: hypotheses kept for each input, in a constrained search for each state of each input.
        n_best: most texts returned for each input; default: ``beam``.
        max_length: most tokens of a text, the end token not counted; it is the only token left after them.
        min_length: fewest tokens of a text, the end token not counted.
        length_exponent: texts are compared by log-probability / length ^ exponent, the end token counted.
        forbidden: tokens that are never written, such as padding and the begin token.

    Raises:
        UserError: a number out of its range.
    """

    end: int
    beam: int = 4
    n_best: int | None = None
    max_length: int = 32
    min_length: int = 0
    length_exponent: float = 0.0
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, fewest in (("beam", 1), ("wanted", 1), ("min_length", 0), ("length_exponent", 0)):
            if getattr(self, name) < fewest:
                raise UserError(
                    f"{name.replace('wanted', 'n_best')} is {getattr(self, name)}, expected {fewest} or more"
                )
        if self.max_length < max(1, self.min_length):
            raise UserError(f"max_length is {self.max_length}, expected 1 or more and no less than min_length")

    @property
    def wanted(self) -> int:
        """Most texts returned for each input."""
        return self.beam if self.n_best is None else self.n_best

    def score(self, log_probs: Tensor, length: int) -> Tensor:
        """Return scores of log-probabilities of texts of this length, the end token counted."""
        return log_probs / length**self.length_exponent


class Live(NamedTuple):
    """Hypotheses that go on, one row each, sorted by input, then state, then rank: owner, state and log-probability.

    ``keys`` is what they are ranked by: the log-probability, or its sum with a Gumbel number where texts are drawn.
    """

    owners: Tensor
    states: Tensor
    log_probs: Tensor
    keys: Tensor


class Search:
    """Runs a generator step by step; remembers what was chosen and banks what is finished.

    Args:
        generator: the model, bound to the inputs.
        settings: lengths, scores, and how many texts are wanted.
        bank_size: most finished texts kept for each input, no fewer than are wanted.
    """

    def __init__(self, generator: Generator, settings: SearchSettings, bank_size: int) -> None:
        self._generator, self._settings, self._bank_size = generator, settings, bank_size
        self.log_probs, self._state = generator.start()
        self.inputs = len(self.log_probs)
        rows = torch.arange(self.inputs, device=self.log_probs.device)
        none_written = self.log_probs.new_zeros(self.inputs)
        self.live = Live(rows, torch.zeros_like(rows), none_written, none_written.double())
        self.length = 0
        self._history: list[tuple[list[int], list[int]]] = []
        self._bank: list[list[tuple[float, float, int, int]]] = [[] for _ in range(self.inputs)]
        self._dead_ends: dict[int, str] = {}

    def bank(self, rows: Tensor, log_probs: Tensor, keys: Tensor | None = None) -> None:
        """Keep these rows' texts as finished; ``log_probs`` (n,) include the end token, ``keys`` too.

        Rows that the end token cannot follow are passed over.
        """
        scores = self._settings.score(log_probs, self.length + 1) if keys is None else keys
        owners = self.live.owners[rows]
        touched = set()
        for owner, row, log_prob, score in zip(
            owners.tolist(), rows.tolist(), log_probs.tolist(), scores.tolist(), strict=True
        ):
            if log_prob > -torch.inf:
                self._bank[owner].append((score, log_prob, self.length, row))
                touched.add(owner)
        for owner in touched:  # sorting is stable: of equals the shorter, then the one of the earlier row
            self._bank[owner] = sorted(self._bank[owner], key=lambda one: -one[0])[: self._bank_size]

    def share_places(self, owners: Tensor, scores: Tensor, places: int) -> Tensor:
        """Let finished and live hypotheses share each input's places, the best having them; say which live ones stay.

        Args:
            owners: inputs of the live ones (n,), ascending.
            scores: their scores (n,), of each input the best first.
            places: of each input.
        """
        live: list[list[float]] = [[] for _ in range(self.inputs)]
        stays = []
        for owner, score in zip(owners.tolist(), scores.tolist(), strict=True):
            finished = bisect.bisect_right(self._bank[owner], -score, key=lambda one: -one[0])
            stays.append(finished + len(live[owner]) < places)
            live[owner].append(-score)
        for owner, bank in enumerate(self._bank):
            ahead = (bisect.bisect_left(live[owner], -one[0]) for one in bank)
            self._bank[owner] = [
                one for rank, (one, before) in enumerate(zip(bank, ahead, strict=True)) if rank + before < places
            ]
        return torch.tensor(stays, dtype=torch.bool, device=owners.device)

    def go_on(
        self, rows: Tensor, tokens: Tensor, states: Tensor, log_probs: Tensor, keys: Tensor | None = None
    ) -> None:
        """Append tokens to these rows and make them the live ones, but for inputs whose best texts are all found.

        No live hypothesis can still enter the best if log_prob / (max_length + 1) ^ exponent, the highest score that
        it can reach as log-probabilities only fall, is lower than the last of them; nor if its key is.
        """
        owners = self.live.owners[rows]
        reachable = self._settings.score(log_probs, self._settings.max_length + 1) if keys is None else keys
        keys = log_probs if keys is None else keys
        needed = reachable.new_tensor([self._needed_score(owner) for owner in range(self.inputs)])
        kept = (reachable >= needed[owners]).nonzero()[:, 0]
        self._note_dead_ends(owners)
        self._history.append((rows[kept].tolist(), tokens[kept].tolist()))
        self.live = Live(owners[kept], states[kept], log_probs[kept], keys[kept])
        self.length += 1
        if len(kept):
            self._state = self._generator.reorder(self._state, rows[kept])
            self.log_probs, self._state = self._generator.step(tokens[kept], self._state)

    def _needed_score(self, owner: int) -> float:
        bank, wanted = self._bank[owner], self._settings.wanted
        return bank[wanted - 1][0] if len(bank) >= wanted else -torch.inf

    def _note_dead_ends(self, owners: Tensor) -> None:
        """Remember where an input's last hypotheses were, if none goes on and none was finished."""
        left = set(owners.tolist())
        states_of: dict[int, set[int]] = {}
        for owner, state in zip(self.live.owners.tolist(), self.live.states.tolist(), strict=True):
            if owner not in left and not self._bank[owner]:
                states_of.setdefault(owner, set()).add(state)
        for owner, states in states_of.items():
            where = ", ".join(map(str, sorted(states)))
            self._dead_ends[owner] = (
                f"after {self.length} tokens nothing that is allowed next has a probability above 0 (state {where})"
            )

    def outcomes(self) -> list[Outcome]:
        """Return what was found for each input."""
        found = []
        for owner, bank in enumerate(self._bank):
            best = bank[: self._settings.wanted]
            texts = [Hypothesis(self._text(length, row), total, score) for score, total, length, row in best]
            found.append(Outcome(texts, None if texts else self._dead_ends.get(owner)))
        return found

    def _text(self, length: int, row: int) -> tuple[int, ...]:
        tokens = []
        for parents, written in reversed(self._history[:length]):
            tokens.append(written[row])
            row = parents[row]
        return tuple(reversed(tokens))


def top_tokens(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the highest values of each row (rows, count) and where they stand; of equals the ones further left.

    Raises:
        RunFailed: the model gave NaN.
    """
    count = min(count, log_probs.shape[1])
    values, places = log_probs.topk(min(count + 1, log_probs.shape[1]), dim=1)
    refuse_nan(values)  # which counts as more than any number
    last = values[:, count - 1]
    # which of several equals topk takes is not said: where the cut goes through them, the row is sorted
    cut = (values[:, -1] == last) & (last > -torch.inf) if values.shape[1] > count else torch.zeros_like(last).bool()
    values, places = values[:, :count], places[:, :count]
    places, order = places.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    places = places.gather(1, order)
    if cut.any():
        in_order = log_probs[cut].sort(dim=1, descending=True, stable=True)
        values[cut], places[cut] = in_order.values[:, :count], in_order.indices[:, :count]
    return values, places


def refuse_nan(log_probs: Tensor) -> None:
    """Raise RunFailed if the model gave NaN."""
    if log_probs.isnan().any():
        raise RunFailed("the model gives NaN for the next token", hint="its weights are damaged, or it overflows")


def best_of_each(groups: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return indices of the best ``count`` of each group, groups ascending, best first, of equals the earlier."""
    order = scores.argsort(descending=True, stable=True)
    order = order[groups[order].argsort(stable=True)]
    sorted_groups = groups[order]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(sorted_groups, sorted_groups)
    return order[rank < count]


def without(vocabulary: int, tokens: Sequence[int], device: torch.device) -> Tensor:
    """Return all token ids but these, ascending."""
    allowed = torch.ones(vocabulary, dtype=torch.bool, device=device)
    allowed[tokens] = False
    return allowed.nonzero()[:, 0]
