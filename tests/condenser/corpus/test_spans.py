"""Documents to spans: where cuts fall, what is kept by document, what is counted."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from condenser.corpus.spans import build_spans
from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.errors import UserError
from condenser.options import SpansOptions

LONG = "The cat sing. The dog runs to the bank. The bird runs in the old river water. A king of the city went."


def write_jsonl(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def build(tmp_path: Path, tiny_bert: Path, records: list[dict], **options: object) -> TokenStore:
    file = write_jsonl(tmp_path / "docs.jsonl", records)
    settings = {"max_length": 16, "min_tokens": 3} | options
    return TokenStore(
        build_spans(SpansOptions(input=[file], tokenizer=str(tiny_bert), output=str(tmp_path / "store"), **settings))
    )


def test_spans_are_kept_by_document_and_decode_to_the_text(tmp_path: Path, tiny_bert: Path) -> None:
    store = build(tmp_path, tiny_bert, [{"_id": "a", "title": "Cats", "text": LONG}, {"_id": 7, "text": "One two."}])
    assert store.spans_per_document.tolist() == [3, 1]
    tokenizer = load_tokenizer(store.tokenizer_folder)
    texts = [tokenizer.decode(store.span(0, i).ids) for i in range(3)]
    assert texts[0].startswith("cats the cat sing.")
    assert " ".join(texts) == tokenizer.decode(tokenizer("Cats " + LONG, add_special_tokens=False)["input_ids"])
    assert all(len(store.span(0, i).ids) <= 14 for i in range(3))
    assert store.manifest["facts"]["documents_with_two_spans"] == 1


def test_word_starts_follow_the_tokenizers_words(tmp_path: Path, tiny_bert: Path) -> None:
    store = build(tmp_path, tiny_bert, [{"_id": "a", "text": "cats bird-sing treatment"}])
    span = store.span_at(0)
    tokens = load_tokenizer(tiny_bert).convert_ids_to_tokens(span.ids)
    assert tokens == ["cat", "##s", "bird", "-", "sing", "treat", "##ment"]
    assert span.word_starts.tolist() == [True, False, True, True, True, True, False]


def test_given_spans_are_kept_and_cut_at_the_limit(tmp_path: Path, tiny_bert: Path) -> None:
    store = build(tmp_path, tiny_bert, [{"spans": ["the cat", "", LONG]}, {"spans": []}])
    assert store.spans_per_document.tolist() == [2]
    assert [len(store.span(0, i).ids) for i in range(2)] == [2, 14]
    assert store.manifest["facts"]["spans_cut"] == 1
    assert store.manifest["facts"]["empty_documents"] == 1


def test_random_access_equals_reading_in_order(tmp_path: Path, tiny_bert: Path) -> None:
    records = [{"_id": str(i), "text": " ".join(["cat"] * (5 * i + 1))} for i in range(9)]
    store = build(tmp_path, tiny_bert, records, batch_size=2)
    in_order = [store.span(d, i).ids for d in range(len(store)) for i in range(store.spans_per_document[d])]
    assert store.span_count == len(in_order)
    for position, ids in enumerate(in_order):
        assert np.array_equal(store.span_at(position).ids, ids)
    counts = store.unigram_counts(200)
    assert counts.sum() == sum(len(ids) for ids in in_order)
    assert np.array_equal(counts, np.bincount(np.concatenate(in_order), minlength=200))


def test_batch_size_does_not_change_the_store(tmp_path: Path, tiny_bert: Path) -> None:
    records = [{"_id": str(i), "text": LONG[: 20 * i + 5]} for i in range(5)]
    (tmp_path / "x").mkdir()
    stores = [build(tmp_path, tiny_bert, records), build(tmp_path / "x", tiny_bert, records, batch_size=2)]
    for position in range(stores[0].span_count):
        assert np.array_equal(stores[0].span_at(position).ids, stores[1].span_at(position).ids)


def test_plain_text_and_gzip_hold_one_document_a_line(tmp_path: Path, tiny_bert: Path) -> None:
    file = tmp_path / "docs.txt.gz"
    with gzip.open(file, "wt") as stream:
        stream.write("the cat\n\nthe dog runs\n")
    options = SpansOptions(input=[str(file)], tokenizer=str(tiny_bert), output=str(tmp_path / "store"))
    assert TokenStore(build_spans(options)).spans_per_document.tolist() == [1, 1]


def test_a_vocabulary_can_be_trained_on_the_input(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "docs.jsonl", [{"_id": str(i), "text": LONG} for i in range(20)])
    store = TokenStore(build_spans(SpansOptions(input=[file], train_tokenizer=60, output=str(tmp_path / "store"))))
    tokenizer = load_tokenizer(store.tokenizer_folder)
    assert len(tokenizer) == 60
    assert tokenizer.decode(tokenizer("The CAT")["input_ids"]) == "[CLS] the cat [SEP]"
    assert tokenizer.decode(store.span(0, 0).ids).startswith("the cat sing.")


def test_running_again_is_up_to_date_and_other_options_are_refused(
    tmp_path: Path, tiny_bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "docs.jsonl", [{"_id": "a", "text": LONG}])
    options = SpansOptions(input=[file], tokenizer=str(tiny_bert), output=str(tmp_path / "store"))
    before = (build_spans(options) / "manifest.json").read_bytes()
    build_spans(options)
    assert "up to date" in capsys.readouterr().err
    with pytest.raises(UserError, match="max_length: 128 -> 64"):
        build_spans(dataclasses.replace(options, max_length=64))
    assert (tmp_path / "store" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"_id": "a", "text": "x"}\n{"_id": "b", "text": \n', r"docs\.jsonl:2: not valid JSON"),
        ('{"_id": "a", "body": "x"}\n', r"docs\.jsonl:1: record has neither text nor spans \(found: _id, body\)"),
        ('{"_id": 1.5, "text": "x"}\n', r"docs\.jsonl:1: id is 1\.5"),
        ('{"spans": "x"}\n', r"docs\.jsonl:1: spans is str, expected a list of texts"),
        ('["x"]\n', r"docs\.jsonl:1: expected a JSON object, found an array"),
        ("", r"docs\.jsonl: file holds no document"),
        ('{"_id": "a", "text": " "}\n', "no text in the input"),
    ],
)
def test_bad_input_leaves_nothing_behind(tmp_path: Path, tiny_bert: Path, lines: str, message: str) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text(lines)
    with pytest.raises(UserError, match=message):
        build_spans(SpansOptions(input=[str(file)], tokenizer=str(tiny_bert), output=str(tmp_path / "store")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl"]


def test_options_that_contradict_are_refused(tmp_path: Path, tiny_bert: Path) -> None:
    file = write_jsonl(tmp_path / "docs.jsonl", [{"_id": "a", "text": LONG}])
    base = {"input": [file], "output": str(tmp_path / "store")}
    for tokenizers in ({}, {"tokenizer": str(tiny_bert), "train_tokenizer": 80}):
        with pytest.raises(UserError, match="exactly one of --tokenizer, --train_tokenizer and --train_words"):
            build_spans(SpansOptions(**base, **tokenizers))
    with pytest.raises(UserError, match="--max_length 2 leaves no room for text beside 2 special tokens"):
        build_spans(SpansOptions(**base, tokenizer=str(tiny_bert), max_length=2))


def test_lists_of_chunks_cover_a_store_of_many_batches(tmp_path: Path, tiny_bert: Path) -> None:
    records = [{"_id": str(i), "text": "the cat"} for i in range(7)]
    store = build(tmp_path, tiny_bert, records, batch_size=3)
    ids = list(itertools.chain.from_iterable(store.span_at(i).ids.tolist() for i in range(7)))
    assert len(ids) == 14


@pytest.mark.parametrize("short_spans", [0.0, 0.3])
def test_the_store_is_the_same_bytes_whatever_the_workers(tmp_path: Path, tiny_bert: Path, short_spans: float) -> None:
    records = [{"_id": str(i), "title": "Cats", "text": LONG * (i % 5)} for i in range(40)]
    file = write_jsonl(tmp_path / "docs.jsonl", records)
    base = SpansOptions(
        input=[file], tokenizer=str(tiny_bert), output="", max_length=20, batch_size=3, short_spans=short_spans
    )
    stores = [build_spans(dataclasses.replace(base, output=str(tmp_path / str(n)), workers=n)) for n in (1, 2, 3)]
    for name in ("tokens.arrow", "manifest.json"):
        assert len({(store / name).read_bytes() for store in stores}) == 1


def test_a_fault_in_a_worker_is_the_users_line_and_leaves_nothing(tmp_path: Path, tiny_bert: Path) -> None:
    file = tmp_path / "docs.jsonl"
    file.write_text('{"_id": "a", "text": "the cat"}\n' * 50 + "{\n")
    options = SpansOptions(
        input=[str(file)], tokenizer=str(tiny_bert), output=str(tmp_path / "store"), batch_size=4, workers=2
    )
    with pytest.raises(UserError, match=r"docs\.jsonl:51: not valid JSON"):
        build_spans(options)
    assert [path.name for path in tmp_path.iterdir()] == ["docs.jsonl"]


def test_a_killed_build_leaves_nothing_half_written(tmp_path: Path, tiny_bert: Path) -> None:
    """Killed with one batch in the file; the same command then makes what an undisturbed one makes."""
    file = write_jsonl(tmp_path / "docs.jsonl", [{"_id": str(i), "text": LONG} for i in range(20)])
    script = (
        "import os, signal, sys\n"
        "from condenser.corpus import spans\n"
        "from condenser.options import SpansOptions\n"
        "write = spans.TokenStoreWriter.write\n"
        "def die(self, rows):\n"
        "    write(self, rows)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "spans.TokenStoreWriter.write = die\n"
        "spans.build_spans(SpansOptions(input=[sys.argv[1]], tokenizer=sys.argv[2], output=sys.argv[3], batch_size=5))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", script, file, str(tiny_bert), str(tmp_path / "store")]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "store").exists()
    options = SpansOptions(input=[file], tokenizer=str(tiny_bert), output=str(tmp_path / "store"), batch_size=5)
    straight = build_spans(dataclasses.replace(options, output=str(tmp_path / "straight")))
    assert (build_spans(options) / "manifest.json").read_bytes() == (straight / "manifest.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "store", "straight"]


def test_a_data_set_gives_the_store_of_its_file(tmp_path: Path, tiny_bert: Path) -> None:
    file = write_jsonl(tmp_path / "train.jsonl", [{"_id": str(i), "text": LONG} for i in range(5)])
    base = SpansOptions(tokenizer=str(tiny_bert), output="", max_length=16)
    stores = [
        build_spans(dataclasses.replace(base, output=str(tmp_path / "a"), input=[file])),
        build_spans(dataclasses.replace(base, output=str(tmp_path / "b"), dataset=file)),
    ]
    assert len({(store / "tokens.arrow").read_bytes() for store in stores}) == 1
    with pytest.raises(UserError, match="dataset_column: 'text' -> 'body'"):
        build_spans(dataclasses.replace(base, output=str(tmp_path / "b"), dataset=file, dataset_column="body"))


def test_files_of_one_name_are_told_apart(tmp_path: Path, tiny_bert: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(write_jsonl(tmp_path / name / "docs.jsonl", [{"_id": name, "text": f"the cat {name}"}]))
    options = SpansOptions(input=files, tokenizer=str(tiny_bert), output=str(tmp_path / "store"))
    assert len(TokenStore(build_spans(options))) == 2
    write_jsonl(tmp_path / "a" / "docs.jsonl", [{"_id": "a", "text": "another"}])
    with pytest.raises(UserError, match=r"docs\.jsonl \(1\): "):
        build_spans(options)


def test_progress_tells_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("condenser.talk._PLAIN_INTERVAL_S", 0.0)
    file = write_jsonl(tmp_path / "docs.jsonl", [{"_id": str(i), "text": LONG * 40} for i in range(600)])
    build_spans(SpansOptions(input=[file], train_tokenizer=200, output=str(tmp_path / "store"), batch_size=50))
    said = capsys.readouterr().err
    assert re.search(r"spans: 1 of 2 MB, [\d.]+ MB/s, \d+s left, \d+ documents", said)
    assert re.search(r"tokenizer: 3 of 4 MB, [\d.]+ MB/s, \d+s left", said), "in two passes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "x"}, "give one of --input .files of documents., --collection and --dataset"),
        ({"input": []}, "give one of --input .files of documents., --collection and --dataset"),
        ({"short_spans": 1.5}, "--short_spans is 1.5, expected 0 to 1"),
        ({"workers": 0}, "--workers is 0, expected 1 to 256"),
        ({"batch_size": 0}, "--batch_size is 0, expected 1 or more"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, tiny_bert: Path, change: dict[str, object], message: str) -> None:
    base = SpansOptions(input=["docs.txt"], tokenizer=str(tiny_bert), output=str(tmp_path / "store"))
    with pytest.raises(UserError, match=message):
        build_spans(dataclasses.replace(base, **change))
