"""How long texts are: in tokens of an encoder, or in words."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from retrieval.options import CheckOptions
from retrieval.records import Passage

if TYPE_CHECKING:
    from retrieval.encoder import Encoder

# Those of an encoder that says nothing of lengths; its own module would load torch.
QUERY_LIMIT, PASSAGE_LIMIT = 32, 128
# Above each edge a bin of its own: most texts are short, and what is cut is far out.
_EDGES = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class Bin:
    """Texts of at most ``up_to`` units that are in no earlier bin; None takes all that are longer."""

    up_to: int | None
    count: int


class Lengths:
    """Lengths of many texts, 4 bytes each.

    Args:
        limit: longer texts are cut.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values = array("I")

    def extend(self, lengths: Sequence[int]) -> None:
        """Take in more."""
        self._values.extend(lengths)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def over(self) -> int:
        """How many are longer than the limit."""
        return int((np.asarray(self._values) > self.limit).sum())

    @property
    def share_over(self) -> float:
        """Which share is longer than the limit; 0 when there is no text."""
        return self.over / max(1, len(self))

    @property
    def longest(self) -> int:
        """The greatest length; 0 when there is no text."""
        return max(self._values, default=0)

    def at_most(self, share: float) -> int:
        """Return the length that this share of the texts does not exceed; 0 when there is no text."""
        if not self._values:
            return 0
        return int(np.quantile(np.asarray(self._values), share, method="inverted_cdf"))

    def histogram(self) -> list[Bin]:
        """Return the counts between fixed edges."""
        places = np.searchsorted(_EDGES, np.asarray(self._values), side="left")
        counts = np.bincount(places.astype(np.int64), minlength=len(_EDGES) + 1).tolist()
        return [Bin(up_to, count) for up_to, count in zip((*_EDGES, None), counts, strict=True)]


class Ruler(Protocol):
    """Measures texts in one unit; ``exact`` says whether what is over a limit is just what is cut."""

    unit: str
    exact: bool
    query_limit: int
    passage_limit: int

    def queries(self, texts: Sequence[str]) -> list[int]:
        """Return the length of each query."""
        ...

    def passages(self, passages: Sequence[Passage]) -> list[int]:
        """Return the length of each passage, the title included."""
        ...


def ruler_for(options: CheckOptions) -> Ruler:
    """Return what measures in tokens of ``--encoder``, or in words where none is given."""
    if options.encoder is None:
        return _Words(options.query_max_length or QUERY_LIMIT, options.passage_max_length or PASSAGE_LIMIT)
    from retrieval.encoder import Encoder

    return _Tokens(
        Encoder.load(
            options.encoder,
            query_max_length=options.query_max_length,
            passage_max_length=options.passage_max_length,
        )
    )


class _Words:
    unit, exact = "words", False  # a word is one token or more

    def __init__(self, query_limit: int, passage_limit: int) -> None:
        self.query_limit, self.passage_limit = query_limit, passage_limit

    def queries(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def passages(self, passages: Sequence[Passage]) -> list[int]:
        return [len(passage.title.split()) + len(passage.text.split()) for passage in passages]


class _Tokens:
    unit, exact = "tokens", True

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.query_limit = encoder.max_length("query")
        self.passage_limit = encoder.max_length("passage")

    def queries(self, texts: Sequence[str]) -> list[int]:
        return self._measure([self._encoder.config.query_prompt + text for text in texts])

    def passages(self, passages: Sequence[Passage]) -> list[int]:
        prompt = self._encoder.config.passage_prompt
        return self._measure([prompt + self._encoder.passage_text(passage) for passage in passages])

    def _measure(self, texts: list[str]) -> list[int]:
        backend = self._encoder.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return [len(encoding) for encoding in backend.encode_batch_fast(texts)]
