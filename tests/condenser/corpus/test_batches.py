"""Which spans make a step: pairs, documents with one span, processes and micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from condenser.corpus.batches import Frame, PretrainBatch, SpanBatches
from condenser.corpus.corruption import IGNORED, masking_policy
from condenser.corpus.spans import build_spans
from condenser.corpus.tokens import TokenStore
from condenser.errors import UserError
from condenser.options import SpansOptions

CLS, SEP, PAD, MASK = 2, 3, 0, 4
SPANS = [1, 2, 5, 1, 2, 3]  # of each document


def store_of(folder: Path, tiny_bert: Path, spans: list[int]) -> TokenStore:
    """Documents whose spans read "d s": their own number, and the span's."""
    lines = ['{"spans": [' + ", ".join(f'"{d} {s} ' + 'cat" ' for s in range(n)) + "]}\n" for d, n in enumerate(spans)]
    (folder / "docs.jsonl").write_text("".join(lines))
    return TokenStore(
        build_spans(
            SpansOptions(input=[str(folder / "docs.jsonl")], tokenizer=str(tiny_bert), output=str(folder / "store"))
        )
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> TokenStore:
    """Case B20: documents with 0, 1, 2, 3 and 5 spans."""
    return store_of(tmp_path_factory.mktemp("batches"), tiny_bert, [*SPANS, 0])


def batches_of(store: TokenStore, **others: object) -> SpanBatches:
    settings = {"pairs": True, "batch_size": 6, "micro_batches": 1, "room": 9, "seed": 3} | others
    policy = masking_policy(90, [0, 1, 2, 3, 4], mask_id=MASK, probability=0.15, random_tokens="ordinary")
    return SpanBatches(store, policy=policy, frame=Frame(CLS, SEP, PAD), **settings)


def originals(batch: PretrainBatch) -> list[tuple[int, ...]]:
    """Return the rows as they were before masking, without special tokens."""
    ids = np.where(batch.labels != IGNORED, batch.labels, batch.input_ids).tolist()
    return [tuple(token for token in row if token not in (CLS, SEP, PAD)) for row in ids]


def test_a_pair_is_two_different_spans_of_one_document(store: TokenStore) -> None:
    """Case B20."""
    batches = batches_of(store)
    assert batches.examples == 6, "a document without spans is not stored"
    seen = set()
    for step in range(150):
        (batch,) = batches(step)
        rows = originals(batch)
        assert batch.paired_rows == 8 and len(rows) == 8 + 2
        for first, second in zip(rows[0:8:2], rows[1:8:2], strict=True):
            assert first[0] == second[0], "one document"
            assert first[1] != second[1], "never the same span twice"
            seen.add((first[0], first[1], second[1]))
        alone = {row[0] for row in rows[8:]}
        assert len({row[0] for row in rows[0:8:2]} | alone) == 6, "each document once in an epoch"
        assert {row[1] for row in rows[8:]} == {rows[8][1]}, "their only span"
        assert all((batch.labels[8:] != IGNORED).any(1)), "which still is repaired"
    assert len(seen) == 2 + 20 + 2 + 6, "all ordered pairs come"


def test_pairs_are_a_function_of_seed_epoch_and_document(store: TokenStore) -> None:
    def spans_by_document(batches: SpanBatches, epoch: int, steps: int) -> dict[int, list[tuple[int, ...]]]:
        found: dict[int, list[tuple[int, ...]]] = {}
        for step in range(epoch * steps, (epoch + 1) * steps):
            for row in originals(batches(step)[0]):
                found.setdefault(row[0], []).append(row)
        return found

    whole = spans_by_document(batches_of(store), 1, 1)
    assert spans_by_document(batches_of(store, batch_size=2), 1, 3) == whole, "whatever the batch"
    assert spans_by_document(batches_of(store), 2, 1) != whole
    assert spans_by_document(batches_of(store, seed=4), 1, 1) != whole


def test_processes_and_micro_batches_share_a_step_and_its_pairs_weigh_the_same(store: TokenStore) -> None:
    for step in range(10):
        (whole,) = batches_of(store)(step)
        parts = [batches_of(store, micro_batches=3, rank=rank, world=2)(step) for rank in range(2)]
        rows = [row for micro_batches in parts for batch in micro_batches for row in originals(batch)]
        assert sorted(rows) == sorted(originals(whole))
        for place in range(3):
            pairs = sum((micro_batches[place].paired_rows or 0) // 2 for micro_batches in parts)
            assert {micro_batches[place].pair_share for micro_batches in parts} == {pairs / 4}
        assert whole.pair_share == 1


def test_a_step_without_pairs_has_no_share(tmp_path: Path, tiny_bert: Path) -> None:
    store = store_of(tmp_path, tiny_bert, [1, 1, 1, 2])
    batches = batches_of(store, batch_size=1)
    found = [(batch.paired_rows, batch.pair_share) for step in range(4) for batch in batches(step)]
    assert sorted(found) == [(0, 0.0)] * 3 + [(2, 1.0)]


def test_the_loss_of_no_pairs_is_zero_and_has_a_gradient() -> None:
    import torch

    from condenser.training.contrastive import span_contrastive_loss

    cls = torch.ones(3, 4, requires_grad=True)
    loss = span_contrastive_loss(cls[:0])
    loss.backward()
    assert loss.item() == 0 and cls.grad is not None and not cls.grad.any()


def test_what_is_used_in_part_is_said(store: TokenStore) -> None:
    """Cases R18 and R19; B25: accumulation does not widen what a span is told from; B28: nothing is lost unsaid."""
    text = "6 documents; 2 of them with one span, for the MLM losses only; up to {} negatives per span"
    assert batches_of(store).describe() == text.format(10)
    assert batches_of(store, micro_batches=3).describe() == text.format(2)
    left_over = "; 2 documents left over in each epoch, others each time"
    assert batches_of(store, batch_size=4).describe() == text.format(6) + left_over
    text = batches_of(store, pairs=False, room=2).describe()
    left_over = "14 spans; 2 spans left over in each epoch, others each time"
    assert text == f"{left_over}; 14 spans (100.0 %) longer than 2 tokens, read through a window"
    assert batches_of(store, pairs=False, batch_size=7).describe() == "14 spans"


def test_a_store_without_any_pair_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    """Case R19."""
    store = store_of(tmp_path, tiny_bert, [1] * 8)
    with pytest.raises(UserError, match="store: holds no document with two spans, which contrastive objectives need"):
        batches_of(store)
    assert batches_of(store, pairs=False).examples == 8


@pytest.mark.parametrize(("pairs", "kind", "count"), [(True, "documents", 6), (False, "spans", 14)])
def test_a_batch_larger_than_the_store_is_refused(store: TokenStore, pairs: bool, kind: str, count: int) -> None:
    with pytest.raises(UserError, match=f"holds {count} {kind}, one step needs 20"):
        batches_of(store, pairs=pairs, batch_size=20)
