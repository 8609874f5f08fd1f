"""The verbs `evaluate` and `compare`: where a collection or an encoder meets what `eval` can do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from condenser.errors import UserError
from condenser.talk import say
from eval.options import CompareOptions, EvaluateOptions, Format
from eval.report import Texts, answers_report, comparison_report, evaluation_report, official_report, sts_report
from eval.runs import Qrels, first_byte, load_run
from retrieval.pyserini_sets import find_qrels

_LEVEL = 0.95


def evaluate(options: EvaluateOptions) -> str:
    """Measure a run, its answers or an encoder, and return the report in the format asked for.

    Raises:
        UserError: options that do not go together, and what reading and measuring raise.
    """
    modes = {"--official": options.official, "--answers": options.answers, "--sts": options.sts}
    chosen = [name for name, value in modes.items() if value]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} do not go together", hint="choose one")
    if options.output is not None and not options.answers:
        raise UserError("--output goes with --answers", hint="the report goes to stdout: condenser evaluate ... > FILE")
    if options.sts is not None:
        return _evaluate_sts(options.sts, options)
    if options.run is None:
        raise UserError("--run is missing: the run to measure")
    if options.answers:
        return _evaluate_answers(options.run, options)
    if options.official is not None:
        return _evaluate_official(options.run, options)
    return _evaluate_run(options.run, options)


def _evaluate_run(run: str, options: EvaluateOptions) -> str:
    from eval.evaluation import evaluate as measure
    from eval.evaluation import mean_intervals

    corpus = None
    if options.collection is not None:
        from retrieval.collections import open_collection

        corpus = {passage.id for passage in open_collection(options.collection).passages()}
    result = measure(
        _qrels(options.qrels, options.collection, options.split),
        run,
        options.metrics,
        relevance_level=options.relevance_level,
        ignore_self=options.ignore_self,
        duplicates=options.duplicates,
        corpus=corpus,
    )
    intervals = mean_intervals(result, confidence=_LEVEL, seed=options.seed) if options.intervals else None
    return evaluation_report(result, intervals=intervals, per_query=options.per_query).render(_form(options))


def _evaluate_official(run: str, options: EvaluateOptions) -> str:
    from eval.msmarco import official_mrr

    if options.qrels is None:
        raise UserError("--qrels is missing: the official rules take a file of judgements")
    score = official_mrr(options.qrels, run)
    return official_report(score).render(_form(options))


def _evaluate_answers(run: str, options: EvaluateOptions) -> str:
    from eval.answers import answer_recall, load_dpr, save_dpr

    if first_byte(run) == b"[":
        questions = load_dpr(run)
    elif options.collection is not None:
        questions = _questions(run, options.collection, options)
    else:
        raise UserError(
            "--collection is missing: texts and answers of the run", hint="or give DPR's result json as --run"
        )
    result = answer_recall(questions, options.depths, options.match)
    if options.output is not None:
        save_dpr(options.output, questions, result.hits)
        say(f"{options.output}: {len(questions):,} questions written")
    return answers_report(result).render(_form(options))


def _questions(run: str, collection_name: str, options: EvaluateOptions) -> list[Any]:
    from eval.answers import questions_from_run
    from retrieval.collections import open_collection

    collection = open_collection(collection_name)
    queries = {query.id: (query.text, query.answers) for query in collection.queries(options.split)}
    hits = load_run(run, duplicates=options.duplicates, only=queries)
    wanted = {passage_id for some in hits.values() for passage_id in some}
    texts = {passage.id: (passage.title, passage.text) for passage in collection.passages() if passage.id in wanted}
    return questions_from_run(hits, queries, texts, max(options.depths))


def _evaluate_sts(pairs_file: str, options: EvaluateOptions) -> str:
    from eval.sts import correlate, load_pairs

    if options.encoder is None:
        raise UserError("--encoder is missing: what turns the sentences of --sts into vectors")
    pairs = load_pairs(pairs_file)
    from retrieval.encoder import Encoder

    encoder = Encoder.load(options.encoder, device=options.device)
    # Sentences play the part of queries, but those of a similarity task may be as long as a passage.
    longest = max(encoder.max_length("query"), encoder.max_length("passage"))
    encoder.config = encoder.config.changed({"query_max_length": longest})
    result = correlate(
        encoder.encode_queries([pair.first for pair in pairs]),
        encoder.encode_queries([pair.second for pair in pairs]),
        [pair.score for pair in pairs],
    )
    return sts_report(result).render(_form(options))


def compare(options: CompareOptions) -> str:
    """Compare runs with a base run and return the report in the format asked for.

    Raises:
        UserError: no judgements named, and what reading, measuring and testing raise.
    """
    from eval.comparison import compare as compare_runs

    names = _names([options.base, *options.runs])
    result = compare_runs(
        _qrels(options.qrels, options.collection, options.split),
        options.base,
        dict(zip(names[1:], options.runs, strict=True)),
        options.metrics,
        base_name=names[0],
        relevance_level=options.relevance_level,
        ignore_self=options.ignore_self,
        duplicates=options.duplicates,
        resamples=options.resamples,
        confidence=options.confidence,
        seed=options.seed,
        changed=options.changed,
    )
    texts = None
    if options.collection is not None:
        tops = {top for change in result.changes for top in (change.base_top, change.top) if top is not None}
        texts = _texts(options.collection, {change.query_id for change in result.changes}, tops)
    return comparison_report(result, texts=texts).render(_form(options))


def _texts(name: str, query_ids: set[str], passage_ids: set[str]) -> Texts:
    from retrieval.collections import open_collection

    collection = open_collection(name)
    return Texts(
        queries={query.id: query.text for query in collection.queries() if query.id in query_ids},
        passages={passage.id: passage.whole.strip() for passage in collection.passages() if passage.id in passage_ids},
    )


def _names(paths: Iterable[str]) -> list[str]:
    """Call runs by their file names, and by their paths where two have the same."""
    paths = list(paths)
    if len(set(paths)) != len(paths):
        raise UserError(f"a run is given twice: {max(paths, key=paths.count)}")
    names = [Path(path).name.removesuffix(".gz").rsplit(".", 1)[0] for path in paths]
    return names if len(set(names)) == len(names) else paths


def _qrels(path: str | None, collection: str | None, split: str) -> Qrels:
    if path is not None:
        return find_qrels(path)
    if collection is None:
        raise UserError("--qrels is missing: a file of judgements", hint="or name a --collection and a --split")
    from retrieval.collections import open_collection

    return open_collection(collection).qrels(split)


def _form(options: EvaluateOptions | CompareOptions) -> Format:
    return "json" if options.json else options.format
