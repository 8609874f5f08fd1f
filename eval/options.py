"""Options of the verbs that turn a run into numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from condenser.options import Options, option, required, seed_of

Format = Literal["text", "markdown", "json"]


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options):
    """Measure a run against judgements; or answer strings (--answers), or sentence pairs (--sts)."""

    qrels: str | None = option(None, "judgements: TREC, MS MARCO or BEIR columns, .gz too; or pyserini:NAME")
    run: str | None = option(None, "run: TREC, MS MARCO (query passage [rank]) or JSON, .gz too")
    collection: str | None = option(
        None, "take judgements, texts and answers from this collection (folder or embedded name)"
    )
    split: str = option("test", "with --collection: whose judgements")
    metrics: list[str] = option(
        ["MRR@10", "nDCG@10", "R@100"],
        "MRR R R_cap Success nDCG nDCG_exp MAP P Judged, each with @k",
    )
    relevance_level: int = option(
        1, "lowest grade that counts as relevant (nDCG takes the grades themselves)", minimum=1
    )
    ignore_self: bool = option(False, "leave out the hit whose id is the query's own id")
    duplicates: Literal["refuse", "best"] = option(
        "refuse", "a passage twice in one ranking: refuse, or keep its best score"
    )
    per_query: bool = option(False, "add each query's values")
    intervals: bool = option(False, "add 95 % bootstrap intervals of the means")
    seed: int = seed_of("the bootstrap")
    official: Literal["msmarco"] | None = option(None, "rules of the official MS MARCO passage script, to the letter")
    answers: bool = option(False, "top-k accuracy: does a retrieved passage contain an answer string (DPR)?")
    match: Literal["string", "regex", "kilt"] = option("string", "with --answers: how an answer is looked for")
    depths: list[int] = option([1, 5, 20, 100], "with --answers: the k of top-k", minimum=1)
    output: str | None = option(None, "with --answers: write DPR's result json with has_answer here")
    sts: str | None = option(None, "scored sentence pairs (tsv or jsonl): Spearman and Pearson of the similarities")
    encoder: str | None = option(None, "with --sts: encoder folder or hub name")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "with --sts: where to encode")
    format: Format = option("text", "text, markdown or json")
    json: bool = option(False, "the same as --format json")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """Compare runs with a base run: differences, intervals, paired tests, and the queries that changed most."""

    base: str = required("the run that the others are compared with")
    runs: list[str] = required("the other runs")
    qrels: str | None = option(None, "judgements: TREC, MS MARCO or BEIR columns, .gz too; or pyserini:NAME")
    collection: str | None = option(None, "take judgements and texts from this collection (folder or embedded name)")
    split: str = option("test", "with --collection: whose judgements")
    metrics: list[str] = option(
        ["MRR@10", "nDCG@10", "R@100"], "as in `condenser evaluate`; the first one ranks the changes"
    )
    relevance_level: int = option(1, "lowest grade that counts as relevant", minimum=1)
    ignore_self: bool = option(False, "leave out the hit whose id is the query's own id")
    duplicates: Literal["refuse", "best"] = option(
        "refuse", "a passage twice in one ranking: refuse, or keep its best score"
    )
    resamples: int = option(
        10_000, "bootstrap samples, and sign flips of the randomisation test", minimum=100, maximum=1_000_000
    )
    confidence: float = option(0.95, "of the intervals", above=0, below=1)
    seed: int = seed_of("the bootstrap and of the randomisation test")
    changed: int = option(10, "how many of the most changed queries to show", minimum=0)
    format: Format = option("text", "text, markdown or json")
    json: bool = option(False, "the same as --format json")
