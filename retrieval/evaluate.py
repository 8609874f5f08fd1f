"""The verb `evaluate`: where a collection or an encoder meets what `eval` can do."""

from __future__ import annotations

from condenser.errors import UserError
from eval.options import EvaluateOptions
from eval.runs import Qrels, load_qrels


def evaluate(options: EvaluateOptions) -> str:
    """Measure a run and return the report in the format asked for.

    Raises:
        UserError: options that do not go together, and what reading and measuring raise.
    """
    from eval.evaluation import evaluate as measure_run
    from eval.report import evaluation_dict, evaluation_text, json_text

    if options.run is None:
        raise UserError("--run is missing: the run to measure")
    corpus = None
    if options.collection is not None:
        from retrieval.collections import open_collection

        corpus = {passage.id for passage in open_collection(options.collection).passages()}
    result = measure_run(
        _qrels(options.qrels, options.collection, options.split),
        options.run,
        options.metrics,
        relevance_level=options.relevance_level,
        ignore_self=options.ignore_self,
        duplicates=options.duplicates,
        corpus=corpus,
    )
    if options.json or options.format == "json":
        return json_text(evaluation_dict(result, per_query=options.per_query))
    return evaluation_text(result, per_query=options.per_query, markdown=options.format == "markdown")


def _qrels(path: str | None, collection: str | None, split: str) -> Qrels:
    if path is not None:
        return load_qrels(path)
    if collection is None:
        raise UserError("--qrels is missing: a file of judgements", hint="or name a --collection and a --split")
    from retrieval.collections import open_collection

    return open_collection(collection).qrels(split)
