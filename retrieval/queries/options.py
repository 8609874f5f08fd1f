"""Options of the verbs that write queries for passages, judge them, keep the best and label them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from condenser.options import Options, option, output, seed_of, source
from retrieval.option_types import Device, Format, Precision


@dataclass(frozen=True, kw_only=True)
class QueriesGenerateOptions(Options):
    """Write queries for the passages of a collection: a collection of its own, with one passage right for each query.

    A share of a passage's queries is drawn freely; the others meet a constraint, by default that a key term of the
    passage comes in them.
    """

    collection: str = source("the passages: a folder or file in a known format, or the name of an embedded collection")
    format: Format = option("auto", "how its files are to be read; auto looks at them")
    writer: str = source(
        "folder made by `lm train-writer`, or folder or hub name of a sequence-to-sequence or causal model, such as "
        "a doc2query T5"
    )
    output: str = output("folder to write, in BEIR's layout")
    passages: int | None = option(None, "write for this many passages, drawn at random; default: for all", minimum=1)
    per_passage: int = option(3, "queries written for each passage; repeats are dropped", minimum=1, maximum=10_000)
    constrained: float = option(0.5, "share of them that is written under the constraint", minimum=0, maximum=1)
    constraint: str = option(
        "terms",
        "terms: each holds a key term of its passage; or an expression for all of them, as in `lm automaton`: "
        "words:..., any:..., regex:..., joined by and, or, not",
    )
    terms: int = option(1, "key terms that one query must hold", minimum=1, maximum=5)
    search: Literal["drawn", "best"] = option(
        "drawn",
        "constrained queries: drawn from those that meet the constraint, or the most probable one",
    )
    temperature: float = option(1.0, "free queries: below 1 the probable becomes more probable", above=0, maximum=100)
    top_k: int | None = option(
        25, "drawn queries, free or constrained: of so many most probable tokens only; null: of all", minimum=1
    )
    top_p: float | None = option(
        0.95, "drawn queries: of the fewest tokens that have this probability", above=0, maximum=1
    )
    beam: int = option(4, "constrained queries: hypotheses kept for each state", minimum=1, maximum=1000)
    length_exponent: float = option(
        0.0,
        "--search best: compared by log-probability / length ^ this; above 0 a weak writer runs on and on",
        minimum=0,
        maximum=10,
    )
    min_length: int = option(3, "fewest tokens of a query", minimum=0, maximum=1000)
    max_length: int = option(
        32, "most tokens of a query; free ones that have no end by then are dropped", minimum=1, maximum=1000
    )
    passage_max_length: int = option(256, "published models: longest passage in tokens", minimum=8, maximum=2**17)
    prompt: str = option(
        "{title} {text}",
        "published models: what they read of a passage, {title} and {text} put in; for a causal model with words "
        "behind it that ask for a query",
    )
    batch_size: int = option(32, "queries written at one time", shapes_result=False, minimum=1)
    shard_size: int = option(256, "passages between two savings; a killed run loses no more", minimum=1)
    seed: int = seed_of("the passages and of what is drawn")
    device: Device = option("auto", "where to compute", shapes_result=False)


@dataclass(frozen=True, kw_only=True)
class QueriesScoreOptions(Options):
    """Judge written queries: how probable, how plausible for their passages, whether a search finds the passages.

    Writes a JSON line for each query, in their order, to a file beside the queries, which stay as they are.
    """

    queries: str = source("folder made by `queries generate`")
    with_: str = option(
        "lm",
        "judges, commas between: lm, log-probability by --writer; electric, by --electric the log-likelihood of the "
        "query before its passage less alone; roundtrip, rank of the passage in a search by --encoder",
    )
    writer: str | None = source("lm: the model that gives log-probabilities, as in `queries generate`", default=None)
    electric: str | None = source("electric: folder made by `pretrain --objective electric`", default=None)
    encoder: str | None = source("roundtrip: encoder of queries and passages, folder or hub name", default=None)
    depth: int = option(100, "roundtrip: hits looked at; a passage below has rank depth + 1", minimum=1)
    dtype: Precision = option("auto", "roundtrip: type to encode passages in, as in `encode`")
    passage_max_length: int = option(
        256, "electric, and lm with published models: longest passage in tokens", minimum=8
    )
    prompt: str = option("{title} {text}", "lm with published models: what they read of a passage")
    output: str = output("file to write (.jsonl)")
    device: Device = option("auto", "where to compute", shapes_result=False)
    batch_tokens: int | None = option(
        None, "tokens per batch; default: as each model has it", shapes_result=False, minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class QueriesFilterOptions(Options):
    """Keep the best of written queries: a collection that `finetune` and `mine` take as it is."""

    queries: str = source("folder made by `queries generate`, or by this verb")
    scores: list[str] = source("files made by `queries score`, one or more", default=[])
    keep: str | None = option(
        None,
        "what a query must be, such as 'gain >= q0.5 and roundtrip <= 3'; q0.5 is the median of that figure; also or, "
        "not, brackets; default: all are kept",
    )
    per_passage: int | None = option(None, "most queries kept for a passage; default: all", minimum=1)
    by: str = option(
        "log_prob_per_token",
        "with --per_passage and --max_queries: the figure whose highest are kept; --by=-NAME: whose lowest",
    )
    max_queries: int | None = option(None, "most queries kept, the best by --by; default: all", minimum=1)
    output: str = output("folder to write, in BEIR's layout, with report.md")
    examples: int = option(20, "random examples in the report", minimum=0, maximum=10_000)
    seed: int = seed_of("the examples")


@dataclass(frozen=True, kw_only=True)
class QueriesLabelOptions(Options):
    """Let a cross-encoder score queries with their passages and with mined negatives, as a teacher (GPL).

    The folder is the collection with the scores, which `finetune --loss margin_mse` takes as it is, and with
    GPL's own files: hard-negatives.jsonl and gpl-training-data.tsv (query, positive, negative, margin).
    """

    collection: str = source("queries with their passages: a folder made by `queries filter`, or any collection")
    format: Format = option("auto", "how its files are to be read; auto looks at them")
    split: str = option("train", "whose queries are labelled")
    negatives_file: list[str] = source("files of `condenser mine`, one or more: their names are the miners'")
    cross_encoder: str = source("folder or hub name: made by `finetune --cross_encoder`, or any classifier of pairs")
    max_negatives: int = option(50, "negatives of each query that are scored, of each file", minimum=1)
    max_length: int | None = option(None, "longest pair in tokens; default: as the model says, 512 at most", minimum=8)
    dtype: Precision = option("auto", "type to compute in; auto: bfloat16 on a GPU that has it, else float32")
    seed: int = seed_of("the order of gpl-training-data.tsv")
    output: str = output("folder to write, in BEIR's layout")
    device: Device = option("auto", "where to compute", shapes_result=False)
    batch_tokens: int | None = option(
        None, "tokens per batch; default: 2048 on a CPU, 65536 on a GPU", shapes_result=False, minimum=1
    )
