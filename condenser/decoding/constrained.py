"""Beam search that writes only what an automaton accepts: one beam for each of its states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from condenser.decoding.automaton import NOWHERE, Automaton
from condenser.decoding.generators import Generator
from condenser.decoding.hypotheses import Outcome, Search, SearchSettings, best_of_each, refuse_nan, top_tokens
from condenser.decoding.sampling import within_top_p
from condenser.decoding.stochastic import Draw, Gumbels, rest, top_down
from condenser.errors import UserError


@torch.inference_mode()
def constrained_search(
    generator: Generator,
    automata: Automaton | Sequence[Automaton],
    settings: SearchSettings,
    proposals: int | None = None,
    draw: Draw | None = None,
) -> list[Outcome]:
    """Return the best texts that an automaton accepts, for each input.

    Each state of the automaton has a beam of its own (Anderson et al. 2017). At each step all hypotheses of all states
    are continued by every token, and of the continuations that reach a state its beam keeps the best: so that a state
    into which hardly any token leads gets its hypotheses as well. States from which acceptance is further away than
    the tokens that are left are passed over. A hypothesis may end where its state accepts, and is banked then; an
    input is done when no live hypothesis can still enter its best ``n_best``.

    So there is a text for every input, unless the model gives probability 0 to all that the automaton accepts within
    the length: then `Outcome.dead_end` says where it ended. Of equal continuations that of the lower state counts
    first, then that of the earlier hypothesis.

    With ``draw`` the texts are not the most probable ones but drawn at random from all that the automaton accepts,
    without replacement: stochastic beam search with a beam for each state. If nothing is cut, that is by the model's
    probabilities. What is cut makes the draws sharper: a beginning must first be drawn into its beam, and what
    ``top_k`` and ``top_p`` leave out counts against the texts that might have gone on with it.

    Args:
        generator: the model, bound to the inputs.
        automata: one for all inputs, or one for each.
        settings: ``beam`` is for each state of each input.
        proposals: let each hypothesis propose only its most probable tokens, as many as this, before they are sorted
            into states; rare states then often stay empty. Default: every token.
        draw: texts are drawn, and how; ``length_exponent`` is not used then.

    Raises:
        UserError: an automaton accepts no text of the lengths that are asked for, or knows another vocabulary; both
            ``proposals`` and ``draw``.
        RunFailed: the model gave NaN.
    """
    if draw is not None and proposals is not None:
        raise UserError("proposals and draw exclude each other")
    search = Search(generator, settings, settings.wanted)
    given = [automata] * search.inputs if isinstance(automata, Automaton) else list(automata)
    if len(given) != search.inputs:
        raise UserError(f"{len(given)} automata for {search.inputs} inputs, expected one for all or one for each")
    if draw is not None and len(draw.seeds) != search.inputs:
        raise UserError(f"{len(draw.seeds)} seeds for {search.inputs} inputs, expected one for each")
    distinct = list({id(one): one for one in given}.values())
    tables = [_table(one, settings, search.log_probs) for one in distinct]
    number = {id(one): index for index, one in enumerate(distinct)}
    automaton_of = torch.tensor([number[id(one)] for one in given], device=search.log_probs.device)
    states = max(one.states for one in distinct)
    if draw is None:
        moves_of = partial(_moves, search, settings, proposals=proposals)
    else:
        moves_of = partial(_drawn_moves, search, settings, draw=draw, noise=Gumbels(draw.seeds))
    while len(search.live.owners):
        moves = [
            moves_of(table, (automaton_of[search.live.owners] == index).nonzero()[:, 0])
            for index, table in enumerate(tables)
        ]
        rows, tokens, targets, log_probs, keys = (torch.cat(parts) for parts in zip(*moves, strict=True))
        best = best_of_each(search.live.owners[rows] * states + targets, keys, settings.beam)
        search.go_on(rows[best], tokens[best], targets[best], log_probs[best], None if draw is None else keys[best])
    return search.outcomes()


class _Table(NamedTuple):
    """An automaton as tensors: moves (states, classes), who accepts, the tokens of each class, and what has hope.

    ``hopeful`` (max_length + 1, states) says whether a state, reached after so many tokens, can still accept in time.
    """

    moves: Tensor
    accepting: Tensor
    members: list[Tensor]
    hopeful: Tensor


def _table(automaton: Automaton, settings: SearchSettings, log_probs: Tensor) -> _Table:
    vocabulary = log_probs.shape[1]
    if automaton.highest_token >= vocabulary:
        raise UserError(
            f"the automaton knows token {automaton.highest_token}, the model only {vocabulary:,} tokens",
            hint="make it with the model's own tokenizer",
        )
    outside = [settings.end, *settings.forbidden]
    members = [np.setdiff1d(np.flatnonzero(automaton.classes == kind), outside) for kind in range(automaton.kinds)]
    moves = np.where([len(tokens) > 0 for tokens in members], automaton.moves, NOWHERE)
    hopeful = _hopeful(moves, automaton.accepting, settings)
    if not hopeful[0, 0]:
        raise UserError(_impossible(automaton, settings))
    device = log_probs.device
    return _Table(
        torch.from_numpy(moves).to(device).long(),
        torch.from_numpy(automaton.accepting).to(device),
        [torch.from_numpy(tokens).to(device) for tokens in members],
        torch.from_numpy(hopeful).to(device),
    )


def _hopeful(moves: np.ndarray, accepting: np.ndarray, settings: SearchSettings) -> np.ndarray:
    """Return for each number of tokens written and each state whether a text can still end in time, and late enough."""
    hope = np.zeros((settings.max_length + 1, len(moves)), bool)
    later = np.zeros(len(moves), bool)
    for length in reversed(range(settings.max_length + 1)):
        later = np.append(later, False)[moves].any(axis=1) | (accepting & (length >= settings.min_length))
        hope[length] = later
    return hope


def _impossible(automaton: Automaton, settings: SearchSettings) -> str:
    if automaton.is_empty:
        return "the constraint accepts no text at all: its parts exclude each other"
    shortest = int(automaton.distances()[0])
    if shortest > settings.max_length:
        return f"the constraint needs {shortest} tokens, but max_length is {settings.max_length}"
    return f"the constraint accepts no text of {settings.min_length} to {settings.max_length} tokens"


class _Moves(NamedTuple):
    """Continuations, each an entry: row, token, state reached, log-probability of the text, and what ranks it."""

    rows: Tensor
    tokens: Tensor
    targets: Tensor
    log_probs: Tensor
    keys: Tensor


def _moves(search: Search, settings: SearchSettings, table: _Table, rows: Tensor, proposals: int | None) -> _Moves:
    """Bank what may end, and return the best moves of these rows.

    The best ``beam`` tokens of each class are enough: those of a class all reach the same state.
    """
    states, sums = search.live.states[rows], search.live.log_probs[rows]
    log_probs = search.log_probs if len(rows) == len(search.log_probs) else search.log_probs[rows]
    refuse_nan(log_probs[:, settings.end])  # which no choice among the other tokens looks at
    if search.length >= settings.min_length:
        ending = table.accepting[states]
        search.bank(rows[ending], (sums + log_probs[:, settings.end])[ending])
    if proposals is not None:
        proposed = log_probs.topk(min(proposals, log_probs.shape[1]), dim=1)
        log_probs = torch.full_like(log_probs, -torch.inf).scatter(1, proposed.indices, proposed.values)
    users, tokens, targets, values = _continuations(search, settings, table, states, log_probs, settings.beam)
    totals = sums[users] + values
    return _Moves(rows[users], tokens, targets, totals, totals)


def _drawn_moves(
    search: Search, settings: SearchSettings, table: _Table, rows: Tensor, draw: Draw, noise: Gumbels
) -> _Moves:
    """Bank what may end, and return the moves of these rows with their perturbed log-probabilities."""
    states, sums, parents = search.live.states[rows], search.live.log_probs[rows], search.live.keys[rows]
    log_probs = search.log_probs if len(rows) == len(search.log_probs) else search.log_probs[rows]
    refuse_nan(log_probs[:, settings.end])  # which no choice among the other tokens looks at
    users, tokens, targets, values = _continuations(
        search, settings, table, states, log_probs, draw.top_k or log_probs.shape[1], draw.top_p
    )
    everyone = torch.arange(len(rows), device=rows.device)
    # whatever else could follow, texts that are not accepted among it, has a Gumbel number too: one for all of it
    entries = torch.cat([users, everyone])
    each = torch.cat([values, log_probs[:, settings.end]]).double()
    others = rest(entries, each, len(rows))
    owners = search.live.owners[rows]
    in_order, order = torch.cat([entries, everyone]).sort(stable=True)  # an input's numbers come in that of its rows
    drawn = torch.empty(len(order), dtype=torch.float64, device=rows.device)
    drawn[order] = noise.of(owners[in_order])
    before = sums.double()
    perturbed = before[entries] + each + drawn[: len(entries)]
    keys = top_down(parents, entries, perturbed, before + others + drawn[len(entries) :])
    if search.length >= settings.min_length:
        ending = table.accepting[states]
        search.bank(rows[ending], (sums + log_probs[:, settings.end])[ending], keys[len(users) :][ending])
    return _Moves(rows[users], tokens, targets, sums[users] + values, keys[: len(users)])


def _continuations(
    search: Search,
    settings: SearchSettings,
    table: _Table,
    states: Tensor,
    log_probs: Tensor,
    count: int,
    top_p: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the most probable tokens of each class for each hypothesis: its number, token, state reached, and value.

    A class may count for some states only, and one that leads nowhere in time from any of them is not looked at.
    """
    nothing = states[:0], states[:0], states[:0], log_probs[:0, 0]
    if search.length == settings.max_length:
        return nothing
    reached = table.moves[states]
    useful = (reached != NOWHERE) & table.hopeful[search.length + 1][reached]
    parts = [nothing]
    for kind in useful.any(dim=0).nonzero()[:, 0].tolist():
        users, members = useful[:, kind].nonzero()[:, 0], table.members[kind]
        everyone = len(users) == len(states)  # and then selecting columns alone takes half the time
        of_class = log_probs.index_select(1, members) if everyone else log_probs[users[:, None], members]
        values, places = top_tokens(of_class, count)
        if top_p is not None:
            values = values.masked_fill(~within_top_p(values.softmax(1), top_p), -torch.inf)
        chosen, columns = (values > -torch.inf).nonzero(as_tuple=True)
        users = users[chosen]
        parts.append((users, members[places[chosen, columns]], reached[users, kind], values[chosen, columns]))
    found, tokens, targets, values = (torch.cat(column) for column in zip(*parts, strict=True))
    # from the order of classes to that of rows, by which equals are told apart
    order = found.argsort(stable=True)
    return found[order], tokens[order], targets[order], values[order]
