"""What scripts/ablation.py reads in place of a whole collection: a pool to search, and shares of the labels."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import orjson

from condenser.artifacts import Workspace
from condenser.corpus.batches import Frame, SpanBatches
from condenser.corpus.corruption import masking_policy
from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.files import atomic_write, atomic_write_bytes
from retrieval.collections import Collection
from retrieval.records import Passage, Query

_SEED = 42


def write_pool(collection: Collection, output: Path, *, queries: int, passages: int) -> None:
    """Write a collection of some test queries, the passages that answer them, and a sample of others.

    Args:
        collection: with a split ``test``.
        output: the folder to write.
        queries: how many; 0 takes all.
        passages: how many in all; 0 takes the whole corpus. Answers are all there even if they are more.
    """
    config = {"queries": queries, "passages": passages}
    with Workspace(output, "pool", config=config, inputs={"collection": collection.fingerprint()}) as workspace:
        if workspace.done:
            return
        generator = np.random.default_rng(_SEED)
        qrels = {query: grades for query, grades in collection.qrels("test").items() if max(grades.values()) > 0}
        chosen = set(_sample(sorted(qrels), queries, generator))
        answers = {passage for query in chosen for passage, grade in qrels[query].items() if grade > 0}
        others = sorted(set(collection.lookup()) - answers)
        pool = answers.union(_sample(others, max(1, passages - len(answers)) if passages else 0, generator))
        _write_corpus(workspace.path, (one for one in collection.passages() if one.id in pool))
        _write_queries(workspace.path, (one for one in collection.queries("test") if one.id in chosen))
        judged = [(query, passage, grade) for query in sorted(chosen) for passage, grade in qrels[query].items()]
        _write_qrels(workspace.path, "test", [one for one in judged if one[1] in pool])
        workspace.commit({"queries": len(chosen), "passages": len(pool)})


def write_labels(collection: Collection, output: Path, *, percents: list[int], seed: int) -> None:
    """Write the collection with a split for each share of its training pairs, named by its percentage.

    Smaller shares are parts of greater ones; 100 is always there.
    """
    config = {"percents": sorted({*percents, 100} - {0}), "seed": seed}
    with Workspace(output, "labels", config=config, inputs={"collection": collection.fingerprint()}) as workspace:
        if workspace.done:
            return
        qrels = collection.qrels("train")
        pairs = [(query, passage, grade) for query in sorted(qrels) for passage, grade in sorted(qrels[query].items())]
        pairs = [pair for pair in pairs if pair[2] > 0]
        _write_corpus(workspace.path, collection.passages())
        _write_queries(workspace.path, collection.queries("train"))
        order = np.random.default_rng([_SEED, seed]).permutation(len(pairs))
        for percent in config["percents"]:
            count = max(1, round(len(pairs) * percent / 100))
            _write_qrels(workspace.path, str(percent), [pairs[place] for place in sorted(order[:count])])
        workspace.commit({"pairs": len(pairs)})


@cache
def tokens_read(data: str, *, pairs: bool, steps: int, batch_size: int, seed: int) -> int:
    """Count the tokens that steps of pretraining read, special ones included and padding left out.

    Args:
        data: the token store.
        pairs: whether ``batch_size`` counts documents (two spans each) or spans.
        steps: how many.
        batch_size: of one step.
        seed: that of the pretraining.
    """
    store = TokenStore(data)
    tokenizer = load_tokenizer(store.tokenizer_folder)
    ids = [
        tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token")) for name in ("mask", "cls", "sep", "pad")
    ]
    batches = SpanBatches(
        store,
        pairs=pairs,
        batch_size=batch_size,
        micro_batches=1,
        policy=masking_policy(
            len(tokenizer), tokenizer.all_special_ids, mask_id=ids[0], probability=0.15, random_tokens="ordinary"
        ),
        frame=Frame(*ids[1:]),
        room=int(store.manifest["facts"]["max_length"]) - tokenizer.num_special_tokens_to_add(),
        seed=seed,
    )
    parts = [part for step in range(steps) for part in batches(step)]
    return sum(int(one.input_ids.numel() if one.attention_mask is None else one.attention_mask.sum()) for one in parts)


def equal_spans(data: str, *, pairs: bool, steps: int, batch_size: int, seed: int) -> int:
    """Return how many single spans a step come nearest to the tokens of other steps; arguments as `tokens_read`."""
    facts = TokenStore(data).manifest["facts"]
    tokens_of_span = facts["tokens"] / facts["spans"] + 2
    tokens = tokens_read(data, pairs=pairs, steps=steps, batch_size=batch_size, seed=seed)
    return max(1, round(tokens / steps / tokens_of_span))


def _sample(names: list[str], count: int, generator: np.random.Generator) -> list[str]:
    """Return so many of the names; all when 0, or when there are no more."""
    if not count or count >= len(names):
        return names
    return [names[place] for place in generator.choice(len(names), count, replace=False)]


def _write_corpus(folder: Path, passages: Iterable[Passage]) -> None:
    with atomic_write_bytes(folder / "corpus.jsonl") as stream:
        for one in passages:
            stream.write(one.line)


def _write_queries(folder: Path, queries: Iterable[Query]) -> None:
    with atomic_write_bytes(folder / "queries.jsonl") as stream:
        for one in queries:
            stream.write(orjson.dumps({"_id": one.id, "text": one.text}) + b"\n")


def _write_qrels(folder: Path, split: str, judged: list[tuple[str, str, int]]) -> None:
    with atomic_write(folder / "qrels" / f"{split}.tsv") as stream:
        stream.write("query-id\tcorpus-id\tscore\n")
        stream.writelines(f"{query}\t{passage}\t{grade}\n" for query, passage, grade in judged)
