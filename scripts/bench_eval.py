"""Measure evaluation: CPU seconds of one core, variants interleaved, medians; the last line is JSON.

6,980 queries with 1,000 hits each (MS MARCO's small dev set), MRR@10 + nDCG@10 + R@1000:

* ``arrays_s``: seconds from the arrays that a vector search returns;
* ``file_ratio``: time from a TREC file over that of a bare ``line.split()`` loop over the same file;
* ``dict_vs_pytrec``: pytrec_eval's time over ours, from the same nested dicts;
* ``answers_s``: seconds of answer matching for 3,610 questions with 100 passages each (NQ test);
* ``startup_s``: seconds of ``condenser evaluate`` on a handful of lines, start-up included.

``--quick`` takes a tenth of the queries and questions, and one round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from eval import RunArrays, evaluate, write_run

METRICS = ["MRR@10", "nDCG@10", "R@1000"]
PASSAGES = 1_000_000
HITS = 1000


def make_run(queries: int, seed: int = 0) -> tuple[dict[str, dict[str, int]], RunArrays]:
    """Draw a run of distinct hits per query in falling order of score, and one or two relevant passages each."""
    generator = np.random.default_rng(seed)
    rows = np.stack([generator.choice(PASSAGES, HITS, replace=False) for _ in range(queries)])
    scores = -np.sort(-generator.normal(80, 5, (queries, HITS)).astype(np.float32), axis=1)
    query_ids = [str(1_000_000 + 7 * query) for query in range(queries)]
    passage_ids = [str(8 * row) for row in range(PASSAGES)]
    qrels = {
        query_id: {passage_ids[row]: 1 for row in generator.choice(hits, 1 + (place % 15 == 0), replace=False)}
        for place, (query_id, hits) in enumerate(zip(query_ids, rows, strict=True))
    }
    return qrels, RunArrays(query_ids, rows, scores, passage_ids)


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Run ``work`` and return the CPU seconds it took."""
    start = time.process_time()
    work()
    return time.process_time() - start


def split_lines(path: Path) -> None:
    """Do the least that reading a run takes: cut each line at its blanks."""
    with path.open() as stream:
        for line in stream:
            line.split()


def time_metrics(queries: int, rounds: int) -> dict[str, float]:
    """Time the three sources of a run against their yardsticks."""
    import pytrec_eval

    qrels, arrays = make_run(queries)
    run = arrays.as_run()
    measures = {"recip_rank", "ndcg_cut.10", "recall.1000"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.trec"
        write_run(path, ((query_id, list(hits.items())) for query_id, hits in run.items()))
        variants: dict[str, Callable[[], Any]] = {
            "arrays": lambda: evaluate(qrels, arrays, METRICS),
            "split": lambda: split_lines(path),
            "file": lambda: evaluate(qrels, path, METRICS),
            "pytrec": lambda: pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(run),
            "dicts": lambda: evaluate(qrels, run, METRICS),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(rounds):
            for name, work in variants.items():
                times[name].append(cpu_seconds(work))
                print(f"round {number + 1} {name:7} {times[name][-1]:.3f} s", flush=True)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "arrays_s": middle["arrays"],
        "file_s": middle["file"],
        "split_s": middle["split"],
        "file_ratio": middle["file"] / middle["split"],
        "dicts_s": middle["dicts"],
        "pytrec_s": middle["pytrec"],
        "dict_vs_pytrec": middle["pytrec"] / middle["dicts"],
    }


def time_answers(count: int, passages_each: int = 100) -> float:
    """Time answer matching over embedded passages, the corpus shuffled anew for each question."""
    from eval.answers import Context, Question, answer_recall
    from retrieval.collections import open_collection

    collection = open_collection("nq-qed")
    contexts = [Context(passage.id, passage.title, passage.text, "0") for passage in collection.passages()]
    queries = [query for query in collection.queries() if query.answers]
    generator = np.random.default_rng(0)
    questions = []
    for place in range(count):
        query = queries[place % len(queries)]
        chosen = generator.choice(len(contexts), passages_each, replace=False).tolist()
        questions.append(Question(query.text, query.answers, [contexts[row] for row in chosen]))
    return cpu_seconds(lambda: answer_recall(questions))


def time_startup() -> float:
    """Return the least CPU time of three runs of the command on two lines."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "qrels").write_text("q1 0 d1 1\n")
        (Path(folder) / "run").write_text("q1 Q0 d2 1 2.0 t\nq1 Q0 d1 2 1.0 t\n")
        command = [sys.executable, "-m", "retrieval.cli", "evaluate", "--qrels", "qrels", "--run", "run"]
        environment = os.environ | {"PYTHONPATH": sys.path[0]}
        times = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def main() -> None:
    """Print each measurement, and all of them as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the queries, one round")
    quick = parser.parse_args().quick
    results = time_metrics(698 if quick else 6980, 1 if quick else 3)
    results["answers_s"] = time_answers(361 if quick else 3610)
    results["startup_s"] = time_startup()
    print(json.dumps({name: round(value, 3) for name, value in results.items()}))


if __name__ == "__main__":
    main()
