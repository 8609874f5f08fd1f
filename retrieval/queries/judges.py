"""Who judges a written query: a language model, Electric, and a search for its passage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from condenser.models.rows import batches_by_length
from condenser.scorer import Scorer
from retrieval.queries.pool import Written
from retrieval.records import Passage

if TYPE_CHECKING:
    from retrieval.index import Index
    from retrieval.queries.writers import Writer

Figures = dict[str, float | int]

_BATCH_TOKENS = {"cpu": 3072, "cuda": 16384}
# A token of a word-piece vocabulary has about so many letters; this decides nothing but who shares a batch.
_LETTERS = 4


class Judge(Protocol):
    """Gives each query some figures."""

    def __call__(self, block: Sequence[Written]) -> list[Figures]:
        """Return the figures of each query, by name."""
        ...


@dataclass(frozen=True)
class LanguageModelJudge:
    """How probable a query is for one that has read its passage, by teacher forcing.

    ``log_prob`` is the sum over the query's ``tokens``, of which the last is its end, ``log_prob_per_token`` their
    mean. The tokens are those into which the tokenizer cuts the text: what `queries generate` drew may have been cut
    otherwise, and then its log-probability is another.

    Attributes:
        writer: the model.
        passages: by id.
        passage_max_length: tokens that it reads of a passage, at most.
        batch_tokens: per batch, roughly; None takes what suits the device.
    """

    writer: Writer
    passages: Mapping[str, Passage]
    passage_max_length: int
    batch_tokens: int | None = None

    def __call__(self, block: Sequence[Written]) -> list[Figures]:
        """Return ``log_prob``, ``log_prob_per_token`` and ``tokens`` of each query."""
        read = [self.passages[query.passage_id] for query in block]
        lengths = [
            min((len(one.title) + len(one.text)) // _LETTERS, self.passage_max_length) + len(query.text) // _LETTERS + 2
            for one, query in zip(read, block, strict=True)
        ]
        most = self.batch_tokens or _BATCH_TOKENS[self.writer.device.type]
        figures: list[Figures] = [{}] * len(block)
        for rows in batches_by_length(lengths, most):
            found = self.writer.log_probs([read[row] for row in rows], [block[row].text for row in rows])
            for row, (log_prob, tokens) in zip(rows, found, strict=True):
                figures[row] = {
                    "log_prob": log_prob,
                    "log_prob_per_token": log_prob / tokens,
                    "tokens": tokens,
                }
        return figures


@dataclass(frozen=True)
class ElectricJudge:
    """How plausible a query is before its passage, and how much of that is the passage's doing.

    ``pll`` is the pseudo-log-likelihood of the query alone, ``pll_given_passage`` that before title and text of its
    passage, ``gain`` the second less the first; ``gain_per_token`` divides by Electric's own tokens of the query, and
    is 0 where there are none.

    Attributes:
        scorer: an Electric model.
        passages: by id.
        passage_max_length: tokens that it reads of a passage, at most.
    """

    scorer: Scorer
    passages: Mapping[str, Passage]
    passage_max_length: int

    def __call__(self, block: Sequence[Written]) -> list[Figures]:
        """Return ``pll``, ``pll_given_passage``, ``gain`` and ``gain_per_token`` of each query."""
        texts = [self.passages[query.passage_id].whole for query in block]
        return [
            {
                "pll": one.alone.pll,
                "pll_given_passage": one.given.pll,
                "gain": one.gain,
                "gain_per_token": one.gain / max(1, len(one.alone.values)),
            }
            for one in self.scorer.gain(
                texts, [query.text for query in block], passage_max_length=self.passage_max_length
            )
        ]


@dataclass(frozen=True)
class RoundTripJudge:
    """At which rank an exact search with the query finds its passage among all, from 1; ``depth`` + 1 if below.

    Attributes:
        index: of all passages, with the encoder.
        depth: hits looked at.
        batch_tokens: tokens of queries per batch; None takes what suits the device.
    """

    index: Index
    depth: int
    batch_tokens: int | None = None

    def __call__(self, block: Sequence[Written]) -> list[Figures]:
        """Return ``roundtrip`` of each query."""
        encoder: Any = self.index.encoder
        tokens = encoder.tokenize([query.text for query in block], "query")
        vectors = encoder.encode_token_ids(tokens, "query", batch_tokens=self.batch_tokens)
        rows, _ = self.index.search_rows(vectors, min(self.depth, len(self.index)))
        figures: list[Figures] = []
        for query, found in zip(block, rows, strict=True):
            ids = (self.index.ids[row] for row in found.tolist() if row >= 0)
            rank = next((place for place, one in enumerate(ids, 1) if one == query.passage_id), self.depth + 1)
            figures.append({"roundtrip": rank})
        return figures
