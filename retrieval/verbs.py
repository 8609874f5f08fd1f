"""The verbs of the command ``condenser``: each a stage, its options a dataclass, named here and imported when used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verb:
    """Where a verb's options and function live, as ``module:name``."""

    help: str
    options: str
    function: str
    positional: tuple[str, ...] = ()


VERBS: dict[str, Verb] = {
    "data": Verb(
        "list the embedded collections", "retrieval.options:DataOptions", "retrieval.collections:list_collections"
    ),
    "check": Verb(
        "look a collection through before training on it",
        "retrieval.options:CheckOptions",
        "retrieval.check:check",
        positional=("collection",),
    ),
    "spans": Verb("documents to token spans", "condenser.options:SpansOptions", "retrieval.spans:build_spans_of"),
    "pretrain": Verb(
        "spans to weights: MLM, Condenser, coCondenser, ELECTRA, Electric",
        "condenser.options:PretrainOptions",
        "condenser.pretrain:pretrain",
    ),
    "score": Verb(
        "how plausible texts are, and queries given their passages",
        "condenser.score_options:ScoreOptions",
        "condenser.score:score",
        positional=("file",),
    ),
    "convert": Verb(
        "weights from and to other toolkits",
        "condenser.options:ConvertOptions",
        "retrieval.convert:convert_or_join",
        positional=("model",),
    ),
    "finetune": Verb("train a bi-encoder", "retrieval.options:FinetuneOptions", "retrieval.finetune:finetune"),
    "bm25": Verb("lexical baseline run", "retrieval.options:Bm25Options", "retrieval.bm25:search_bm25"),
    "bm25 index": Verb(
        "a collection to a lexical index", "retrieval.options:Bm25IndexOptions", "retrieval.bm25:build_bm25"
    ),
    "bm25 search": Verb(
        "queries to a lexical run", "retrieval.options:Bm25SearchOptions", "retrieval.bm25:search_index"
    ),
    "lm train": Verb(
        "text to a recurrent language model", "condenser.lm_options:LmTrainOptions", "condenser.lm:train_lm"
    ),
    "lm train-writer": Verb(
        "judged pairs to a model that writes queries for passages",
        "retrieval.writer_options:TrainWriterOptions",
        "retrieval.query_writer:train_writer",
    ),
    "lm perplexity": Verb(
        "how well a language model foresees texts",
        "condenser.lm_options:LmPerplexityOptions",
        "condenser.lm:perplexity",
        positional=("model",),
    ),
    "lm automaton": Verb(
        "a constraint on texts as an automaton",
        "condenser.decoding.options:LmAutomatonOptions",
        "condenser.decoding.drawing:show_automaton",
        positional=("expression",),
    ),
    "lm sample": Verb(
        "texts drawn from a language model",
        "condenser.lm_options:LmSampleOptions",
        "condenser.lm:sample_texts",
        positional=("model",),
    ),
    "queries generate": Verb(
        "passages to queries that a model writes for them",
        "retrieval.queries.options:QueriesGenerateOptions",
        "retrieval.queries.generate:generate",
    ),
    "queries score": Verb(
        "figures of written queries: how probable, how plausible, whether a search finds the passage",
        "retrieval.queries.options:QueriesScoreOptions",
        "retrieval.queries.score:score_queries",
        positional=("queries",),
    ),
    "queries filter": Verb(
        "written queries to the best of them, a collection to train on",
        "retrieval.queries.options:QueriesFilterOptions",
        "retrieval.queries.filter:filter_queries",
        positional=("queries",),
    ),
    "queries label": Verb(
        "queries with mined negatives to a cross-encoder's scores and margins",
        "retrieval.queries.options:QueriesLabelOptions",
        "retrieval.queries.label:label",
    ),
    "mine": Verb("a search's wrong hits to hard negatives", "retrieval.options:MineOptions", "retrieval.mine:mine"),
    "encode": Verb("texts to vectors", "retrieval.options:EncodeOptions", "retrieval.encode:encode"),
    "index": Verb(
        "vectors to a searchable index", "retrieval.options:IndexOptions", "retrieval.index_build:build_index"
    ),
    "plan": Verb("what an index will cost, and which to build", "retrieval.options:PlanOptions", "retrieval.plan:plan"),
    "update": Verb(
        "passages added to an index and deleted from it", "retrieval.options:UpdateOptions", "retrieval.updates:update"
    ),
    "search": Verb("queries to a run", "retrieval.options:SearchOptions", "retrieval.search:search"),
    "rerank": Verb("a run in a cross-encoder's order", "retrieval.options:RerankOptions", "retrieval.rerank:rerank"),
    "fuse": Verb("runs to one run", "retrieval.options:FuseOptions", "retrieval.fuse:fuse", positional=("runs",)),
    "evaluate": Verb("a run to MRR, nDCG, recall", "eval.options:EvaluateOptions", "retrieval.evaluate:evaluate"),
    "compare": Verb(
        "runs against a base run, with tests",
        "eval.options:CompareOptions",
        "retrieval.evaluate:compare",
        positional=("base", "runs"),
    ),
    "recipe": Verb(
        "two-stage training from a file, to measured runs",
        "retrieval.options:RecipeOptions",
        "retrieval.recipe:recipe",
        positional=("recipe",),
    ),
    "adapt": Verb(
        "a retriever for a corpus without judgements",
        "retrieval.adapt_options:AdaptOptions",
        "retrieval.adapt:adapt",
        positional=("corpus",),
    ),
    "quickstart": Verb(
        "the whole chain on embedded data", "retrieval.options:QuickstartOptions", "retrieval.quickstart:quickstart"
    ),
}


def load(place: str) -> Any:
    """Import ``module:name`` and return the object."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
