"""A query writer trained on a collection's pairs: batches, dev perplexity, resume, the finished folder."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from condenser.errors import UserError
from condenser.models.query_writer import QueryWriter
from condenser.training import loop
from retrieval.collections import open_collection
from retrieval.examples import read_examples
from retrieval.query_writer import WriterBatches, dev_scores, passage_text, train_writer
from retrieval.records import Passage
from retrieval.writer_options import TrainWriterOptions
from tests.command import stop_after
from tests.folders import assert_same_files

WORDS = ["river", "bank", "heart", "blood", "cat", "dog", "king", "queen"]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Passage i is about word i; its query asks what that is. Query 0 has two positives."""
    folder = tmp_path_factory.mktemp("pairs")
    corpus = [{"_id": f"p{i}", "title": word, "text": f"the {word} is a new {word}"} for i, word in enumerate(WORDS)]
    queries = [{"_id": f"q{i}", "text": f"what is a {word}"} for i, word in enumerate(WORDS)]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "qrels").mkdir()
    pairs = [(i, i) for i in range(len(WORDS))]
    for split, judged in (("train", [*pairs, (0, 5)]), ("dev", pairs[2:5])):
        lines = "".join(f"q{query}\tp{passage}\t1\n" for query, passage in judged)
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)
    return str(folder)


def options_for(collection: str, tiny_bert: Path, output: Path, **others: object) -> TrainWriterOptions:
    settings: dict[str, object] = {
        "max_steps": 8, "batch_size": 4, "hidden_size": 16, "log_every": 1, "passage_max_length": 12, "device": "cpu",
        "learning_rate": 1e-2,
    }  # fmt: skip
    return TrainWriterOptions(
        encoder=str(tiny_bert),
        collection=collection,
        output=str(output),
        **(settings | others),  # type: ignore[arg-type]
    )


def test_it_learns_and_goes_on_after_a_stop(
    collection: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(collection, tiny_bert, tmp_path / "out", max_steps=30, save_every=10, eval_every=15)
    straight = train_writer(dataclasses.replace(options, output=str(tmp_path / "straight")))
    log = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "fault_point", stop_after(24))
        with pytest.raises(KeyboardInterrupt):
            train_writer(options)
    again = train_writer(options)
    assert (again / "encoder" / "model.safetensors").is_file()
    assert_same_files(again, straight)

    opened = open_collection(collection)
    writer = QueryWriter.load(again)
    scores = dev_scores(writer, read_examples(opened, "dev"), opened.lookup())
    best = max(line["dev_log_prob"] for line in log if "dev_log_prob" in line)
    assert scores["dev_log_prob"] == pytest.approx(best)
    assert scores["dev_perplexity"] == pytest.approx(math.exp(-best))
    assert passage_text(writer, Passage("x", "cat", "runs")) == "cat runs"


def test_the_encoder_moves_only_where_asked(collection: str, tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    before = AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False).state_dict()
    for trained in (False, True):
        options = options_for(collection, tiny_bert, tmp_path / str(trained), max_steps=1, train_encoder=trained)
        after = QueryWriter.load(train_writer(options)).encoder.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in after) != trained


def test_each_query_comes_once_an_epoch_with_one_of_its_positives(
    collection: str, tiny_bert: Path, tmp_path: Path
) -> None:
    writer = QueryWriter.load(train_writer(options_for(collection, tiny_bert, tmp_path / "out", max_steps=1)))
    opened = open_collection(collection)
    batches = WriterBatches(read_examples(opened, "train"), opened.lookup(), writer, batch_size=4, seed=3)
    assert batches.steps_per_epoch == 2
    met = set()
    for step in range(12):
        (batch,) = batches(step)
        for query, passage in zip(batch.query_ids, batch.passage_ids, strict=True):
            asked = writer.tokenizer.decode(query, skip_special_tokens=True).split()[-1]
            met.add((asked, writer.tokenizer.decode(passage, skip_special_tokens=True).split()[0]))
        assert batch.weight == 4 * 5  # four words and the end
    assert met == {*((word, word) for word in WORDS), ("river", "dog")}
    assert sorted(batches.names(0) + batches.names(1)) == [f"q{i}" for i in range(8)]


def test_bad_options_are_one_line(collection: str, tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="8 training queries, one step needs 9"):
        train_writer(options_for(collection, tiny_bert, tmp_path / "out", batch_size=9))
    with pytest.raises(UserError, match=r"passage_max_length is 65, the model has positions for 64 tokens"):
        train_writer(options_for(collection, tiny_bert, tmp_path / "out", passage_max_length=65))
    assert not list(tmp_path.iterdir())
