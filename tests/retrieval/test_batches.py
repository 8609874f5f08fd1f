"""Batches: pure functions of seed and step, groups of any size, collections mixed by weight, scored pairs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from condenser.errors import UserError
from retrieval.batches import Batches, MixedBatches, PairBatch, PairBatches, ScoredPairBatches
from retrieval.collections import open_collection
from retrieval.encoder import Encoder
from retrieval.examples import Example, Examples, read_examples
from retrieval.finetune import finetune
from retrieval.options import FinetuneOptions
from retrieval.records import Passage, ScoredPair

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert)


def passages_of(examples: Sequence[Example]) -> dict[str, Passage]:
    """Give each passage its id as text."""
    return {one: Passage(one, "", one) for example in examples for one in (*example.positives, *example.negatives)}


def batches_of(examples: Sequence[Example], encoder: Encoder, **others: Any) -> PairBatches:
    settings = {"batch_size": 4, "negatives": 0, "seed": 1} | others
    return PairBatches(Examples(examples), passages_of(examples), encoder, **settings)


def texts_of(rows: list[list[int]], encoder: Encoder) -> list[str]:
    return encoder.tokenizer.batch_decode(rows, skip_special_tokens=True)


# Twelve queries: "who a" has positives "a" and "a a", and negatives "b a", "b b", ..., as many as its place.
TWELVE = [
    Example(f"q{i}", f"who {letter}", (letter, f"{letter} {letter}"), tuple(f"b {one}" for one in LETTERS[:i]))
    for i, letter in enumerate(LETTERS[2:14])
]


def test_each_query_comes_once_an_epoch_with_a_positive(encoder: Encoder) -> None:
    batches = batches_of(TWELVE, encoder)
    assert (batches.count, batches.steps_per_epoch) == (12, 3)
    epochs = [[batches(step)[0] for step in range(first, first + 3)] for first in (0, 3)]
    for epoch in epochs:
        queries = [query for batch in epoch for query in texts_of(batch.queries, encoder)]
        assert sorted(queries) == [example.text for example in TWELVE]
        for batch in epoch:
            passages = texts_of(batch.passages, encoder)
            for query, passage in zip(texts_of(batch.queries, encoder), passages, strict=True):
                letter = query.removeprefix("who ")
                assert passage in (letter, f"{letter} {letter}")
            assert (batch.passage_rows[batch.targets][:, None] == batch.positives).any(dim=1).all()
    assert epochs[0][0].queries != epochs[1][0].queries
    names = [name for step in range(3) for name in batches.names(step)]
    assert sorted(names) == sorted(example.query_id for example in TWELVE)


def test_queries_left_over_come_in_another_epoch(encoder: Encoder) -> None:
    batches = batches_of(TWELVE, encoder, batch_size=5)
    assert batches.steps_per_epoch == 2
    assert {name for step in range(8) for name in batches.names(step)} == {example.query_id for example in TWELVE}


def test_a_step_is_a_function_of_seed_and_step(encoder: Encoder) -> None:
    first, again = (batches_of(TWELVE, encoder, negatives=3) for _ in range(2))
    for step in (7, 2):  # in no order
        a, b = first(step)[0], again(step)[0]
        assert (a.queries, a.passages) == (b.queries, b.passages) and torch.equal(a.positives, b.positives)
    assert batches_of(TWELVE, encoder, seed=2)(0)[0].queries != first(0)[0].queries


def test_positives_and_negatives_are_drawn_anew_each_epoch(encoder: Encoder) -> None:
    example = Example("q", "a ?", ("a", "b"), tuple(LETTERS[5:15]))
    batches = batches_of([example], encoder, batch_size=1, negatives=2)
    drawn = Counter(text for epoch in range(300) for text in texts_of(batches(epoch)[0].passages, encoder))
    assert set(drawn) == set("ab") | set(LETTERS[5:15])
    assert 115 < drawn["a"] < 185 and all(35 < drawn[one] < 85 for one in LETTERS[5:15])


def test_processes_share_a_step_out(encoder: Encoder) -> None:
    whole = batches_of(TWELVE, encoder, negatives=2)(1)[0]
    halves = [batches_of(TWELVE, encoder, negatives=2, rank=rank, world=2)(1)[0] for rank in (0, 1)]
    assert halves[0].queries + halves[1].queries == whole.queries
    assert halves[0].passages + halves[1].passages == whole.passages
    assert torch.equal(torch.cat([half.passage_rows for half in halves]), whole.passage_rows)


def test_rows_with_different_numbers_of_negatives(
    encoder: Encoder, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases B24, R16: 0, 1, 3 and 10 negatives and a group of 1 + 4; nobody is drawn twice, nothing is made up."""
    collection = open_collection(cases / "24" / "train.jsonl")
    examples = read_examples(collection, "train", with_negatives=True)
    batches = PairBatches(examples, collection.lookup(), encoder, batch_size=4, negatives=4, seed=1)
    assert capsys.readouterr().err == (
        "train.jsonl, train: each query brings a positive and 4 hard negatives, drawn anew each epoch from 0 to 10 "
        "in the data (3.5 on average); 3 of 4 queries have fewer and bring all they have\n"
    )
    for step in range(2):
        batch = batches(step)[0]
        assert len(batch.passages) == 4 + 0 + 1 + 3 + 4
        own = [batch.owners.tolist().count(query) for query in range(4)]
        by_name = dict(zip(batches.names(step), own, strict=True))
        assert by_name == {"q0": 1, "q1": 2, "q2": 4, "q3": 5}
        assert len(set(batch.passage_rows.tolist())) == 12
    PairBatches(examples, collection.lookup(), encoder, batch_size=4, negatives=1, seed=1)
    assert "each query brings a positive and 1 hard negatives" in capsys.readouterr().err


def test_training_on_them_runs(tiny_bert: Path, cases: Path, tmp_path: Path) -> None:
    """Case B24: two steps with a group of 1 + 4."""
    options = FinetuneOptions(
        encoder=str(tiny_bert),
        collection=[str(cases / "24" / "train.jsonl")],
        output=str(tmp_path / "encoder"),
        max_steps=2,
        batch_size=4,
        negatives=4,
        log_every=1,
        device="cpu",
    )
    log = [json.loads(line) for line in (finetune(options) / "log.jsonl").read_text().splitlines()]
    assert len(log) == 2 and all(0 < line["loss"] < 100 for line in log)


def test_no_negatives_in_the_data_is_said(encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    batches_of(TWELVE[:1] * 4, encoder, negatives=2)
    told = "training data: no hard negatives for --negatives 2, so there are in-batch negatives only"
    assert told in capsys.readouterr().err


def test_owners_and_scores_follow_the_passages(encoder: Encoder) -> None:
    examples = [
        Example(f"q{i}", f"{i}", (f"{i} a",), (f"{i} b", f"{i} c")[: i % 3], (i + 0.5,), (i + 0.25, i + 0.125)[: i % 3])
        for i in range(6)
    ]
    batch = batches_of(examples, encoder, batch_size=6, negatives=2)(0)[0]
    queries, passages = texts_of(batch.queries, encoder), texts_of(batch.passages, encoder)
    score = {"a": 0.5, "b": 0.25, "c": 0.125}
    assert batch.scores is not None and batch.scores.dtype == torch.float32
    for passage, owner, given in zip(passages, batch.owners, batch.scores, strict=True):
        number, letter = passage.split()
        assert queries[owner] == number and given == float(number) + score[letter]
    assert [passages[row] for row in batch.targets] == [f"{query} a" for query in queries]


def test_a_teacher_needs_something_to_compare(encoder: Encoder) -> None:
    with pytest.raises(UserError, match=r"--negatives 0 leaves a teacher nothing to compare \(--negatives 1 or more\)"):
        batches_of([Example("q", "a", ("b",), ("c",), (1.0,), (0.5,))], encoder, batch_size=1)


def test_batches_that_cannot_be_made_are_refused(encoder: Encoder) -> None:
    with pytest.raises(UserError, match=r"12 training queries, one step needs 13 \(lower --batch_size\)"):
        batches_of(TWELVE, encoder, batch_size=13)
    with pytest.raises(UserError, match="--batch_size 5 cannot be shared out over 2 processes"):
        batches_of(TWELVE, encoder, batch_size=5, world=2)


def test_pairs_are_queries_on_both_sides(encoder: Encoder) -> None:
    pairs = [ScoredPair(one, f"{one} {one}", i / 10) for i, one in enumerate(LETTERS[:9])]
    batches = ScoredPairBatches(pairs, encoder, batch_size=4, seed=3)
    assert (batches.count, batches.steps_per_epoch) == (9, 2)
    batch = batches(1)[0]
    for first, second, score in zip(
        texts_of(batch.queries, encoder), texts_of(batch.passages, encoder), batch.scores, strict=True
    ):
        assert second == f"{first} {first}" and score.item() == pytest.approx(LETTERS.index(first) / 10)
    assert batches.names(1) == [f"pair {1 + LETTERS.index(one)}" for one in texts_of(batch.queries, encoder)]
    halves = [ScoredPairBatches(pairs, encoder, batch_size=4, seed=3, rank=r, world=2)(1)[0] for r in (0, 1)]
    assert halves[0].passages + halves[1].passages == batch.passages


class Numbered:
    """Batches that say their step and nothing else."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.count, self.steps_per_epoch = count, count // batch_size

    def __call__(self, step: int) -> list[PairBatch]:
        return [PairBatch([[step]], [[step]], *(torch.zeros(1, dtype=torch.int64) for _ in range(3)))]

    def names(self, step: int) -> list[str]:
        return [f"q{step}"]


def mixture(weights: Sequence[float] = (), seed: int = 5) -> MixedBatches:
    parts: list[Batches] = [Numbered(70, 10), Numbered(30, 10), Numbered(900, 10)]
    return MixedBatches(parts, ["a", "b", "c"], weights, seed=seed)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((), [0.07, 0.03, 0.9]), ((2, 1, 1), [0.5, 0.25, 0.25]), ((0.001, 1, 1), [0.0005, 0.5, 0.5])],
)
def test_collections_have_their_shares_of_the_steps(
    weights: tuple[float, ...], shares: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = mixture(weights)
    assert (mixed.count, mixed.steps_per_epoch) == (1000, 100)
    for block in range(20):
        drawn = Counter(mixed.place(step)[0] for step in range(100 * block, 100 * block + 100))
        assert all(abs(drawn[part] - 100 * share) < 1 for part, share in enumerate(shares))
    total = Counter(mixed.place(step)[0] for step in range(20_000))
    assert all(total[part] == pytest.approx(20_000 * share, abs=30) for part, share in enumerate(shares))
    told = ", ".join(f"{name} {share / sum(shares):.1%}" for name, share in zip("abc", shares, strict=True))
    assert f"steps by collection: {told}\n" in capsys.readouterr().err


def test_a_mixture_goes_through_each_collection_in_order_and_resumes_anywhere() -> None:
    mixed, seen = mixture(), {0: 0, 1: 0, 2: 0}
    places = [mixed.place(step) for step in range(350)]
    for part, its_step in places:
        assert its_step == seen[part]
        seen[part] += 1
    assert mixture().place(349) == places[349] and mixture().place(120) == places[120]
    assert [mixture(seed=6).place(step)[0] for step in range(100)] != [part for part, _ in places[:100]]
    part, its_step = places[349]
    assert mixed.names(349) == [f"{'abc'[part]}: q{its_step}"] and mixed(349)[0].queries == [[its_step]]


def test_weights_for_another_number_of_collections_are_refused() -> None:
    with pytest.raises(UserError, match="--weights gives 2 numbers for 3 collections"):
        mixture((1, 1))
