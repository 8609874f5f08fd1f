"""The verb `adapt`: a toy chain from a corpus without judgements to an index, its arms, and the same after a kill."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from condenser.errors import UserError
from retrieval.adapt import Adapted, adapt
from retrieval.adapt_chain import Chain
from retrieval.adapt_options import AdaptOptions, Amounts
from retrieval.cli import main, parse_options
from retrieval.index import Index
from retrieval.queries.pool import read_written
from tests.command import start
from tests.folders import assert_same_files

NOUNS = ["river", "bank", "heart", "blood", "cat", "dog", "king", "queen"]
WORDS = [f"{colour} {noun}" for colour in ("red", "green", "blue", "old", "new") for noun in NOUNS]

TEXT = "The {0} is in the city of water and fish. The {0} runs and sings to a doctor and a bird."


def write_collection(folder: Path, text: str, splits: tuple[str, ...] = ()) -> str:
    folder.mkdir()
    corpus = [{"_id": f"p{i}", "title": word, "text": text.format(word)} for i, word in enumerate(WORDS)]
    queries = [{"_id": f"q{i}", "text": f"what is a {word}"} for i, word in enumerate(WORDS)]
    for name, records in (("corpus", corpus), *([("queries", queries)] if splits else [])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for split in splits:
        (folder / "qrels").mkdir(exist_ok=True)
        lines = "".join(f"q{i}\tp{i}\t1\n" for i in range(len(WORDS)))
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)
    return str(folder)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("labelled") / "labelled"
    return write_collection(folder, "a {0} runs and another {0} sings in the city", ("train", "dev"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_collection(tmp_path_factory.mktemp("corpus") / "corpus", TEXT)


def options_for(corpus: str, labelled: str, tiny_bert: Path, output: Path, **others: Any) -> AdaptOptions:
    settings: dict[str, Any] = {"budget": 0.2, "max_length": 24, "batch_size": 4, "device": "cpu"}
    settings |= {"gain": True, "roundtrip": 40, "labels": True}  # every link
    return AdaptOptions(
        corpus=corpus, labelled=labelled, init=str(tiny_bert), output=str(output), **(settings | others)
    )


@pytest.mark.slow
def test_the_chain_goes_on_after_a_kill_to_the_same_files(
    corpus: str, labelled: str, tiny_bert: Path, tmp_path: Path
) -> None:
    options = options_for(corpus, labelled, tiny_bert, tmp_path / "out")
    killed = start("adapt", options, CONDENSER_FAULT="shard-written")
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "out" / "writer").is_dir() and not (tmp_path / "out" / "queries").exists()
    adapted = adapt(options)
    assert isinstance(adapted, Adapted) and adapted.rows == []
    straight = adapt(dataclasses.replace(options, output=str(tmp_path / "straight")))
    assert isinstance(straight, Adapted)
    for name in ("queries", "kept", "encoder"):
        assert_same_files(tmp_path / "out" / name, tmp_path / "straight" / name)
    assert len(Index.load(tmp_path / "out" / "index")) == len(WORDS)
    kept = list(read_written(tmp_path / "out" / "kept"))
    assert 0 < len(kept) < len(list(read_written(tmp_path / "out" / "queries")))
    assert "/encoder" in str(adapted) and "condenser queries filter" in str(adapted)


def test_a_given_retriever_and_judges_leave_their_stages_out(
    corpus: str, labelled: str, tiny_bert: Path, tmp_path: Path
) -> None:
    given = {"retriever": "R", "writer": "W", "electric": "E", "cross_encoder": "C"}
    options = options_for(corpus, labelled, tiny_bert, tmp_path / "out", **given)
    verbs = [stage.verb for stage in Chain.of(options).stages()[0]]
    judged = ["queries generate", "queries score", "queries filter", "mine", "mine", "queries label"]
    assert verbs == [*judged, "finetune", "encode", "index"]
    assert not Chain.of(options).learns_from_source
    plain = dataclasses.replace(options, gain=False, roundtrip=0, labels=False, constrained=0.0)
    stages = Chain.of(plain).stages()[0]
    assert [stage.verb for stage in stages] == [
        "queries generate",
        "queries filter",
        "finetune",
        "encode",
        "index",
    ]
    assert stages[1].options.keep is None
    # nobody says which of BM25's hits are wrong: only other queries' passages are
    assert (stages[2].options.loss, stages[2].options.negatives) == ("softmax", 0)


def test_printed_commands_are_those_that_run(corpus: str, labelled: str, tiny_bert: Path, tmp_path: Path) -> None:
    options = options_for(corpus, labelled, tiny_bert, tmp_path / "out", dry_run=True, measure="test")
    printed = str(adapt(options)).splitlines()
    stages, measured = Chain.of(options).stages()
    assert len(printed) == len(stages) and list(measured) == ["before", "after"]
    for line, stage in zip(printed, stages, strict=True):
        words = shlex.split(line)
        assert words[0] == "condenser"
        assert parse_options(stage.verb, words[1 + len(stage.verb.split()) :]) == stage.options
    assert not (tmp_path / "out").exists()


def test_amounts_scale_with_the_budget() -> None:
    assert Amounts.within(60.0) == Amounts()
    assert Amounts.within(120.0).passages == 2 * Amounts().passages
    assert min(dataclasses.astuple(Amounts.within(0.001))) == 2


def test_what_is_missing_is_told_before_anything_runs(
    corpus: str, labelled: str, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_for(corpus, labelled, tiny_bert, tmp_path / "out")
    with pytest.raises(UserError, match="no judgements for split 'test'"):
        adapt(dataclasses.replace(options, measure="test"))
    with pytest.raises(UserError, match="no judgements for split 'train'"):
        adapt(dataclasses.replace(options, labelled=corpus))
    with pytest.raises(UserError, match="no such folder"):
        adapt(dataclasses.replace(options, init=str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="--electric goes with --gain true"):
        adapt(dataclasses.replace(options, gain=False, electric="E"))
    with pytest.raises(UserError, match="--cross_encoder goes with --labels true"):
        adapt(dataclasses.replace(options, labels=False, cross_encoder="C"))
    assert main(["adapt", corpus, "--output", str(tmp_path / "out"), "--budgt", "3"]) == 2
    assert "did you mean --budget?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("retriever", "no config.json here"),
        ("writer", "holds a BertForMaskedLM, which writes no text"),
        ("electric", "holds no noise model"),
        ("cross_encoder", "classifier"),
    ],
)
def test_given_models_of_the_wrong_kind_are_told_before_anything_runs(
    corpus: str, labelled: str, tiny_bert: Path, tmp_path: Path, name: str, said: str
) -> None:
    wrong = corpus if name == "retriever" else str(tiny_bert)
    options = options_for(corpus, labelled, tiny_bert, tmp_path / "out", **{name: wrong})
    with pytest.raises(UserError, match=said):
        adapt(options)
    with pytest.raises(UserError, match="no such folder"):
        adapt(dataclasses.replace(options, **{name: str(tmp_path / "nothing")}))
    assert not (tmp_path / "out").exists()


def test_no_weights_are_asked_for_where_nothing_starts_from_them(
    corpus: str, labelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise UserError("not installed")

    monkeypatch.setattr("retrieval.adapt_chain.default_weights", missing)
    given = {"retriever": "R", "writer": "W", "electric": "E", "cross_encoder": "C"}
    options = AdaptOptions(corpus=corpus, labelled=labelled, output=str(tmp_path / "out"), **given)
    assert Chain.of(options).init == ""
    with pytest.raises(UserError, match="not installed"):
        Chain.of(dataclasses.replace(options, labels=True, cross_encoder=None))


def test_a_corpus_too_small_to_pretrain_on_is_told_with_what_does_without(
    labelled: str, tiny_bert: Path, tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "corpus.jsonl").write_text('{"_id": "p", "text": "the river and the bank"}\n')
    options = options_for(str(tmp_path / "corpus"), labelled, tiny_bert, tmp_path / "out")
    with pytest.raises(UserError, match=r"holds 1 span.*do without by --pretraining false"):
        adapt(options)
    without = dataclasses.replace(options, pretraining=False, gain=False)
    assert not {"spans", "pretrain"} & {stage.verb for stage in Chain.of(without).stages()[0]}


def test_every_stage_reads_the_corpus_in_the_format_that_is_given(
    corpus: str, labelled: str, tiny_bert: Path, tmp_path: Path
) -> None:
    options = options_for(corpus, labelled, tiny_bert, tmp_path / "out", format="beir", measure="test")
    stages = Chain.of(options).stages()[0]
    verbs = [stage.verb for stage in stages if getattr(stage.options, "collection", None) == f"beir:{corpus}"]
    assert verbs == ["spans", "queries generate", "encode", "encode", "search", "search"]


def test_an_output_that_is_read_is_refused(corpus: str, labelled: str, tiny_bert: Path, tmp_path: Path) -> None:
    before = sorted(Path(corpus).iterdir())
    for read in (corpus, labelled, str(tiny_bert)):
        with pytest.raises(UserError, match="is read, and would be written into"):
            adapt(options_for(corpus, labelled, tiny_bert, Path(read)))
    assert sorted(Path(corpus).iterdir()) == before
