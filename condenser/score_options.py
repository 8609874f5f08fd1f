"""Options of the verb that says how plausible texts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from condenser.options import Options, option, seed_of, source

Method = Literal["electric", "masked_lm"]


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(Options):
    """How plausible texts are, or queries given their passages: pseudo-log-likelihoods, as JSON lines."""

    file: str = source(
        "texts: .jsonl ({_id, title, text}, or {_id, passage, query} to score the query), .tsv (id, text or id, title, "
        "text), plain text (one a line), each also .gz and .zst"
    )
    model: str = source("folder or hub name: of `pretrain --objective electric`, or of a masked language model")
    output: str | None = option(
        None, "file to write, with what made it beside it as OUTPUT.json; default: stdout", shapes_result=False
    )
    method: Method | None = option(
        None, "electric: one pass per text; masked_lm: one pass per token; default: as the model's folder allows"
    )
    per_token: bool = option(False, "also write each token and its part of the score")
    max_length: int | None = option(
        None, "longest text or pair in tokens, special tokens included; default: the model's positions", minimum=3
    )
    log_z_positions: int = option(
        200, "electric: positions at which the sum over the vocabulary is estimated; 0: none", minimum=0
    )
    log_z_draws: int = option(64, "electric: words that the noise model draws at each of these positions", minimum=1)
    seed: int = seed_of("these positions and draws")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute", shapes_result=False)
    batch_tokens: int | None = option(
        None,
        "tokens per batch, padding included; default: 3072 on a CPU, 16384 on a GPU",
        shapes_result=False,
        minimum=1,
    )
