"""Beam search: the most probable texts, as far as a few hypotheses at a time can tell."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from condenser.decoding.generators import Generator
from condenser.decoding.hypotheses import Outcome, Search, SearchSettings, best_of_each, top_tokens, without
from condenser.errors import UserError

Stopping = Literal["frozen", "pool", "pool_hf"]
STOPPING = ("frozen", "pool", "pool_hf")


@torch.inference_mode()
def beam_search(generator: Generator, settings: SearchSettings, stopping: Stopping = "pool") -> list[Outcome]:
    """Return the best texts that a beam search finds for each input.

    At each step the hypotheses of an input, K at most, are continued by every token, and the best continuations by
    summed log-probability are looked at; of equals, those of the earlier hypothesis, then the lower token. What
    becomes of one that ends is told by the stopping rule:

    - ``frozen``: it keeps its place among the K, compared by score with those that go on, until all K have ended;
    - ``pool``: if it is among the best 2K continuations, it is banked, and K others go on;
    - ``pool_hf``: it is banked only if among the best K, as transformers does.

    Under both pools an input is done when no hypothesis can still enter the best ``n_best`` banked ones. No two texts
    of an input are equal.

    Args:
        generator: the model, bound to the inputs.
        settings: how wide, how long, how many.
        stopping: one of the three rules.
    """
    if stopping not in STOPPING:
        raise UserError(f"stopping rule {stopping!r} is unknown, expected one of {', '.join(STOPPING)}")
    search = Search(generator, settings, max(settings.beam, settings.wanted))
    if stopping == "frozen":
        _search_frozen(search, settings)
    else:
        _search_pool(search, settings, ending_ranks=settings.beam * (2 if stopping == "pool" else 1))
    return search.outcomes()


def _search_pool(search: Search, settings: SearchSettings, ending_ranks: int) -> None:
    while len(search.live.owners):
        rows, tokens, log_probs = _continuations(search, settings, 2 * settings.beam)
        owners = search.live.owners[rows]
        best = best_of_each(owners, log_probs, 2 * settings.beam)
        among = best_of_each(owners, log_probs, ending_ranks)
        ending = among[tokens[among] == settings.end]
        search.bank(rows[ending], log_probs[ending])
        going = best[tokens[best] != settings.end]
        going = going[best_of_each(owners[going], log_probs[going], settings.beam)]
        search.go_on(rows[going], tokens[going], torch.zeros_like(going), log_probs[going])


def _search_frozen(search: Search, settings: SearchSettings) -> None:
    while len(search.live.owners):
        rows, tokens, log_probs = _continuations(search, settings, settings.beam)
        owners = search.live.owners[rows]
        best = best_of_each(owners, log_probs, settings.beam)
        ending, going = best[tokens[best] == settings.end], best[tokens[best] != settings.end]
        search.bank(rows[ending], log_probs[ending])
        scores = settings.score(log_probs[going], search.length + 1)
        going = going[search.share_places(owners[going], scores, settings.beam)]
        search.go_on(rows[going], tokens[going], torch.zeros_like(going), log_probs[going])


def _continuations(search: Search, settings: SearchSettings, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best ``count`` continuations of each live row: rows, tokens and summed log-probabilities (n,)."""
    device, vocabulary = search.log_probs.device, search.log_probs.shape[1]
    if search.length == settings.max_length:
        allowed = torch.tensor([settings.end], device=device)
    else:
        early = [settings.end] if search.length < settings.min_length else []
        allowed = without(vocabulary, [*settings.forbidden, *early], device)
    whole = len(allowed) == vocabulary
    values, places = top_tokens(search.log_probs if whole else search.log_probs[:, allowed], count)
    log_probs = search.live.log_probs[:, None] + values
    rows, columns = (log_probs > -torch.inf).nonzero(as_tuple=True)
    return rows, allowed[places[rows, columns]], log_probs[rows, columns]
