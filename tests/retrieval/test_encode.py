"""Encoding to disk: the rows are the texts, whatever the shards and however often the run was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from condenser.errors import UserError
from condenser.manifest import load_manifest
from retrieval import encode as encode_module
from retrieval.cli import main
from retrieval.encode import encode
from retrieval.encoder import Encoder
from retrieval.options import EncodeOptions
from retrieval.records import Passage
from retrieval.vectors import Vectors

WORDS = "river bank money water fish heart blood cell disease treatment".split()


def write_passages(file: Path, count: int, longest: int = 20) -> list[Passage]:
    passages = [
        Passage(f"p{n}", "the heart" if n % 3 == 0 else "", " ".join((WORDS * 10)[n % 7 : n % 7 + 1 + n * 5 % longest]))
        for n in range(count)
    ]
    lines = [json.dumps({"_id": passage.id, "title": passage.title, "text": passage.text}) for passage in passages]
    file.write_text("\n".join(lines) + "\n")
    return passages


@pytest.fixture()
def options(tiny_bert: Path, tmp_path: Path) -> EncodeOptions:
    write_passages(tmp_path / "corpus.jsonl", 11)
    return EncodeOptions(
        encoder=str(tiny_bert), input=str(tmp_path / "corpus.jsonl"), output=str(tmp_path / "vectors"), shard_size=4
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_rows_are_the_texts_in_order(options: EncodeOptions, tiny_bert: Path, tmp_path: Path) -> None:
    """Cases B1 and B35."""
    vectors = Vectors.load(encode(options))
    passages = write_passages(tmp_path / "corpus.jsonl", 11)
    assert vectors.ids == [passage.id for passage in passages]
    assert [len(shard) for shard in vectors.shards] == [4, 4, 3]
    encoder = Encoder.load(tiny_bert)
    alone = np.concatenate([encoder.encode_passages([passage]) for passage in passages])
    np.testing.assert_allclose(vectors.matrix(), alone, atol=1e-5)


def test_the_manifest_says_what_made_the_vectors(options: EncodeOptions, tiny_bert: Path) -> None:
    facts = load_manifest(encode(options), "vectors")["facts"]
    assert facts == Encoder.load(tiny_bert).facts() | {
        "kind": "passage",
        "max_length": 64,
        "compute": "float32",
        "dtype": "float32",
        "count": 11,
        "cut": 0,
        "shards": 3,
    }
    assert (facts["dimension"], facts["pooling"], facts["normalize"], facts["similarity"]) == (32, "cls", False, "dot")
    assert facts["encoder"] == str(tiny_bert)


def test_it_says_how_much_was_cut(tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B19: 4 of 10 are over the limit, one is just within it."""
    lengths = [5, 50, 3, 20, 6, 20, 2, 2, 7, 1]
    lines = [json.dumps({"_id": str(n), "text": "heart " * length}) for n, length in enumerate(lengths)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    command = ["encode", "--encoder", str(tiny_bert), "--input", str(tmp_path / "corpus.jsonl")]
    command += ["--output", str(tmp_path / "vectors"), "--max_length", "8", "--shard_size", "6"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "encoded 10 passages in 2 shards, 4 of 10 passages cut at 8 tokens"
    assert said.out == f"{tmp_path / 'vectors'}\n"
    assert main(command) == 0
    assert capsys.readouterr().err == f"{tmp_path / 'vectors'}: up to date\n"


def test_blank_texts_are_encoded_and_counted(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases B40 and R6: finite, equal to each other, and the summary says how many; a title is enough."""
    texts = [("", ""), ("", "   "), ("", "\u200b"), ("", "a"), ("a title", "")]
    lines = [json.dumps({"_id": str(n), "title": title, "text": text}) for n, (title, text) in enumerate(texts)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    command = ["encode", "--encoder", str(tiny_bert), "--input", str(tmp_path / "corpus.jsonl")]
    assert main([*command, "--output", str(tmp_path / "vectors"), "--shard_size", "2"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == (
        "encoded 5 passages in 3 shards, 0 of 5 passages cut at 64 tokens, 2 have no text"
    )
    matrix = Vectors.load(tmp_path / "vectors").matrix()
    assert np.isfinite(matrix).all()
    np.testing.assert_allclose(matrix[1], matrix[0], atol=1e-6)


def test_queries_have_their_own_prompt_and_limit(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = Encoder.load(tiny_bert, query_prompt="what is ", query_max_length=6)
    encoder.save(tmp_path / "encoder", card="")
    (tmp_path / "queries.tsv").write_text("q1\tfever\nq2\theart blood cell disease water\n")
    folder = encode(
        EncodeOptions(
            encoder=str(tmp_path / "encoder"),
            input=str(tmp_path / "queries.tsv"),
            kind="query",
            output=str(tmp_path / "vectors"),
        )
    )
    vectors = Vectors.load(folder)
    bare = Encoder.load(tiny_bert)
    expected = bare.encode_queries(["what is fever", "what is heart blood"])
    np.testing.assert_allclose(vectors.matrix(), expected, atol=1e-5)
    assert (vectors.facts["kind"], vectors.facts["max_length"], vectors.facts["cut"]) == ("query", 6, 1)


def test_a_collection_stands_in_for_a_file(tiny_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "collection"
    (folder / "qrels").mkdir(parents=True)
    write_passages(folder / "corpus.jsonl", 3)
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "river"}\n{"_id": "q2", "text": "heart"}\n')
    (folder / "qrels" / "test.tsv").write_text("q2\tp0\t1\n")
    common = {"encoder": str(tiny_bert), "collection": str(folder)}
    passages = encode(EncodeOptions(**common, output=str(tmp_path / "passages")))
    assert Vectors.load(passages).ids == ["p0", "p1", "p2"]
    queries = encode(EncodeOptions(**common, kind="query", split="test", output=str(tmp_path / "queries")))
    assert Vectors.load(queries).ids == ["q2"]


def test_one_passage_has_one_row(options: EncodeOptions, tmp_path: Path) -> None:
    """Case B39."""
    for count in (1, 9):
        write_passages(tmp_path / "corpus.jsonl", count)
        folder = encode(replace(options, output=str(tmp_path / f"vectors-{count}"), shard_size=8))
        assert Vectors.load(folder).matrix().shape == (count, 32)


def test_a_stopped_run_goes_on_with_the_next_missing_shard(
    options: EncodeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = encode(replace(options, output=str(tmp_path / "straight")))
    written: list[int] = []

    def stop_at_the_third(folder: Path, number: int, *rest: object) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        real(folder, number, *rest)  # type: ignore[arg-type]

    real = encode_module.write_shard
    monkeypatch.setattr(encode_module, "write_shard", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        encode(options)
    assert written == [0, 1] and not Path(options.output).exists()
    # A matrix without ids, and a damaged one, are what a kill or a bad disk can leave.
    partial = Path(f"{options.output}.partial")
    (partial / "vectors-00002.npy").write_bytes(b"half")
    (partial / "vectors-00001.npy").write_bytes(b"half")

    made: list[int] = []
    monkeypatch.setattr(
        encode_module, "write_shard", lambda folder, number, *rest: (made.append(number), real(folder, number, *rest))
    )
    assert contents(encode(options)) == contents(straight)
    assert made == [1, 2]


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bytes(tiny_bert: Path, tmp_path: Path) -> None:
    """kill -9 at three moments; the last run finishes what the others left."""
    write_passages(tmp_path / "corpus.jsonl", 400, longest=60)
    command = ["--encoder", str(tiny_bert), "--input", str(tmp_path / "corpus.jsonl"), "--shard_size", "10"]
    output, partial = tmp_path / "vectors", tmp_path / "vectors.partial"
    for shard in (2, 10, 20):
        process = subprocess.Popen(
            [sys.executable, "-m", "retrieval.cli", "encode", *command, "--output", str(output)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while not (partial / f"ids-{shard:05d}.json").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not output.exists(), "killed too late to prove anything"
    assert main(["encode", *command, "--output", str(output)]) == 0
    assert main(["encode", *command, "--output", str(tmp_path / "straight")]) == 0
    assert contents(output) == contents(tmp_path / "straight")


def test_a_changed_corpus_is_not_mixed_in(
    options: EncodeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = encode_module.write_shard

    def stop_after_one(*rest: Any) -> None:
        write(*rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(encode_module, "write_shard", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        encode(options)
    write_passages(tmp_path / "corpus.jsonl", 12)
    with pytest.raises(UserError, match=r"vectors.partial: was made with other settings: texts"):
        encode(options)


def test_a_broken_model_stops_the_run_by_the_text_id(options: EncodeOptions, tmp_path: Path) -> None:
    """Case B40: NaN is never written."""
    import torch

    encoder = Encoder.load(options.encoder)
    with torch.no_grad():
        river = encoder.tokenizer.convert_tokens_to_ids("disease")
        encoder.model.get_input_embeddings().weight[river] = float("nan")
    encoder.save(tmp_path / "broken", card="")
    (tmp_path / "corpus.jsonl").write_text('{"_id": "a", "text": "river"}\n{"_id": "b", "text": "a disease"}\n')
    with pytest.raises(UserError, match="the vector of 'b' is not finite"):
        encode(replace(options, encoder=str(tmp_path / "broken")))
    assert not Path(options.output).exists()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"encoder": "nowhere/at/all"}, "nowhere/at/all: no such folder, expected a model folder"),
        ({"input": "missing.jsonl"}, "missing.jsonl: no such file"),
        ({"input": None}, "give one of --input and --collection"),
        ({"collection": "medquad"}, "give one of --input and --collection"),
        ({"split": "test"}, "--split goes with --collection and --kind query"),
        ({"format": "beir"}, "--format goes with --collection"),
        ({"shard_size": 0}, "--shard_size is 0, expected 1 or more"),
        ({"batch_tokens": 0}, "--batch_tokens is 0, expected 1 or more"),
        ({"max_length": 2}, "passage_max_length is 2, expected more than the 2 special tokens"),
        ({"max_length": 65}, "passage_max_length is 65, the model has positions for 64 tokens"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    options: EncodeOptions, tmp_path: Path, changes: dict[str, object], line: str
) -> None:
    with pytest.raises(UserError) as caught:
        encode(replace(options, **changes))
    assert line in str(caught.value)
    assert not Path(options.output).exists()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "no passage in this file"),
        ('{"_id": "a", "text": "x"}\n{"_id": "b", "text": \n', "corpus.jsonl:2: not valid JSON"),
        ('{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n', "corpus.jsonl:2: passage id 'a' stands already"),
    ],
)
def test_a_bad_corpus_is_refused_before_the_model_is_loaded(
    options: EncodeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, line: str
) -> None:
    """Case B42: not after a night's work, however late in the file the bad line is."""
    monkeypatch.setattr(Encoder, "load", lambda *rest, **options: pytest.fail("loaded the model"))
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(UserError) as caught:
        encode(options)
    assert line in str(caught.value) and not Path(options.output).exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    options: EncodeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B42."""
    monkeypatch.setattr(Encoder, "load", lambda *rest, **options: pytest.fail("loaded the model"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make this folder"):
        encode(replace(options, output=str(tmp_path / "file" / "vectors")))


def test_missing_parents_of_the_output_are_made(options: EncodeOptions, tmp_path: Path) -> None:
    """Case B42."""
    assert Vectors.load(encode(replace(options, output=str(tmp_path / "a" / "b" / "vectors")))).ids[0] == "p0"


def test_bad_lines_are_passed_over_when_asked(
    options: EncodeOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "a", "text": "x"}\n{"_id"\n{"_id": "b", "text": "y"}\n')
    assert Vectors.load(encode(replace(options, skip_bad=True))).ids == ["a", "b"]
    assert capsys.readouterr().err.count("1 line skipped") == 1


def test_batches_within_the_budget_do_not_change_vectors(options: EncodeOptions, tmp_path: Path) -> None:
    """Case B38."""
    small = Vectors.load(encode(replace(options, batch_tokens=1, output=str(tmp_path / "small")))).matrix()
    large = Vectors.load(encode(replace(options, batch_tokens=4096, output=str(tmp_path / "large")))).matrix()
    np.testing.assert_allclose(small, large, atol=1e-5)
