"""What a step of constrained search costs: 8 states, 8 inputs, a beam of 5, a vocabulary of 30,522, one thread.

    python scripts/bench_decoding.py [--rounds 3]

The constraint is that each of three words must come: 2^3 states. Beside our search runs the one that would be written
first: a table of states x states x tokens, and for each state reached one selection among all tokens of all
hypotheses. Both must find the same texts. Searches of both kinds alternate; what is measured is CPU time between two
calls of the model, once every beam is full; figures are medians. The last line is JSON:

- ``constrained_step_ms``: a step of our search;
- ``naive_step_ms``, ``naive_ratio``: a step of the other, and how many times as long it takes;
- ``plain_step_ms``: a step of beam search without a constraint, with as many hypotheses (a beam of 40).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import Tensor

from condenser.decoding.automaton import Automaton, from_table
from condenser.decoding.beam import beam_search
from condenser.decoding.constrained import constrained_search
from condenser.decoding.hypotheses import SearchSettings

INPUTS, BEAM, VOCABULARY, END = 8, 5, 30_522, 102
WORDS = (1000, 2000, 3000)
STATES = 2 ** len(WORDS)
STEPS_TO_FILL, MEASURED_STEPS = 4, 3
MEASURED = slice(STEPS_TO_FILL, STEPS_TO_FILL + MEASURED_STEPS)
MAX_LENGTH = STEPS_TO_FILL + MEASURED_STEPS + len(WORDS)  # in the last steps, states far from acceptance are empty


class RandomModel:
    """A model: its log-probabilities are rows of a table, drawn by what was written; it times the calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._rows = torch.randn(INPUTS * STATES * BEAM, VOCABULARY).mul_(3).log_softmax(-1)
        self._rows[:, END] = -20.0  # never among the best, so that no search is done before its last step
        self.times: list[float] = []

    def start(self) -> tuple[Tensor, Tensor]:
        """Begin with another row for each input."""
        self.times = []
        return self._answer(torch.arange(INPUTS))

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next row."""
        self.times.append(time.process_time() - self._returned)
        if len(self.times) in range(STEPS_TO_FILL, STEPS_TO_FILL + MEASURED_STEPS) and len(tokens) != len(self._rows):
            raise SystemExit(f"{len(tokens)} hypotheses where {len(self._rows)} are measured")
        return self._answer((state * 31 + tokens) % len(self._rows))

    def reorder(self, state: Tensor, rows: Tensor) -> Tensor:
        """Select rows."""
        return state[rows]

    def _answer(self, state: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = self._rows[state]
        self._returned = time.process_time()
        return log_probs, state


def naive_search(model: RandomModel, automaton: Automaton, settings: SearchSettings) -> list[list[tuple[int, ...]]]:
    """Search as it would be written first, with a dense table and one selection for each state; best texts by input."""
    classes = torch.from_numpy(automaton.classes).long()
    moves = torch.from_numpy(automaton.moves).long()[:, classes]
    allowed = (classes != -1) & (torch.arange(VOCABULARY) != END)
    table = torch.stack([(moves == target) & allowed for target in range(STATES)], dim=1)  # from, to, token
    log_probs, state = model.start()
    sums = torch.full((INPUTS, STATES, BEAM), -torch.inf)
    sums[:, 0, 0] = 0
    texts = [[[()] * BEAM for _ in range(STATES)] for _ in range(INPUTS)]
    rows = torch.arange(INPUTS)[:, None, None].expand_as(sums)
    finished: list[list[tuple[float, tuple[int, ...]]]] = [[] for _ in range(INPUTS)]
    for length in range(settings.max_length + 1):
        ending = sums + log_probs[rows][..., END]
        for one, place in (ending[:, automaton.accepting] > -torch.inf).nonzero()[:, [0, 2]].tolist():
            (final,) = automaton.accepting.nonzero()[0].tolist()
            finished[one].append((float(ending[one, final, place]), texts[one][final][place]))
        if length == settings.max_length:
            break
        scores = sums[..., None] + log_probs[rows]
        chosen = []
        for target in range(STATES):
            reached = scores.masked_fill(~table[None, :, target, None, :], -torch.inf).reshape(INPUTS, -1)
            chosen.append(reached.topk(BEAM, dim=1))
        sums = torch.stack([one.values for one in chosen], dim=1)
        places = torch.stack([one.indices for one in chosen], dim=1)
        parents, tokens = places // VOCABULARY, places % VOCABULARY
        texts = [
            [
                [(*texts[one][parent // BEAM][parent % BEAM], token) for parent, token in zip(*pair, strict=True)]
                for pair in zip(parents[one].tolist(), tokens[one].tolist(), strict=True)
            ]
            for one in range(INPUTS)
        ]
        before = rows.reshape(INPUTS, -1).gather(1, parents.reshape(INPUTS, -1)).reshape(-1)
        log_probs, state = model.step(tokens.reshape(-1), model.reorder(state, before))
        rows = torch.arange(len(before)).reshape(sums.shape)
    return [[text for _, text in sorted(texts, reverse=True)[: settings.wanted]] for texts in finished]


def main() -> None:
    """Measure, print the figures and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    automaton = three_words()
    settings = SearchSettings(end=END, beam=BEAM, max_length=MAX_LENGTH)
    plain_settings = SearchSettings(end=END, beam=STATES * BEAM, max_length=MAX_LENGTH)
    model = RandomModel()
    ours: list[float] = []
    naive: list[float] = []
    plain: list[float] = []
    with torch.inference_mode():
        for _ in range(given.rounds):
            outcomes = constrained_search(model, automaton, settings)
            ours += model.times[MEASURED]
            expected = naive_search(model, automaton, settings)
            naive += model.times[MEASURED]
            beam_search(model, plain_settings)
            plain += model.times[MEASURED]
            if [[one.tokens for one in outcome.hypotheses] for outcome in outcomes] != expected:
                raise SystemExit("the two searches do not find the same texts")
    step, naive_step = statistics.median(ours), statistics.median(naive)
    print(f"{INPUTS} inputs, {STATES} states, beam {BEAM}, {VOCABULARY:,} tokens, CPU time of one step")
    print(f"constrained {1e3 * step:,.0f} ms, as first written {1e3 * naive_step:,.0f} ms")
    print(f"without a constraint, beam {STATES * BEAM}: {1e3 * statistics.median(plain):,.0f} ms")
    result = {
        "constrained_step_ms": round(1e3 * step, 1),
        "naive_step_ms": round(1e3 * naive_step, 1),
        "naive_ratio": round(naive_step / step, 1),
        "plain_step_ms": round(1e3 * statistics.median(plain), 1),
    }
    print(json.dumps(result))


def three_words() -> Automaton:
    """Accept texts in which each of the three words comes; any other token may come as well."""
    moves = {
        state: {
            token: state | (1 << WORDS.index(token) if token in WORDS else 0)
            for token in range(VOCABULARY)
            if token != END
        }
        for state in range(STATES)
    }
    return from_table(moves, [STATES - 1], 0, VOCABULARY)


if __name__ == "__main__":
    main()
