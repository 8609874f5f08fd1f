"""The verb `queries score`: each judge's figures against a naive loop, resume after kill -9, bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertTokenizer, ElectraForPreTraining

from condenser.artifacts import Workspace
from condenser.errors import RunFailed, UserError
from condenser.models.query_writer import QueryWriter
from retrieval.cli import main
from retrieval.encoder import Encoder
from retrieval.queries import score as verb
from retrieval.queries.judges import ElectricJudge, LanguageModelJudge
from retrieval.queries.options import QueriesScoreOptions
from retrieval.queries.pool import CORPUS, KIND, QUERIES, Written, write_qrels
from retrieval.queries.score import score_queries
from retrieval.query_writer import new_writer, writer_batch
from retrieval.records import Passage
from retrieval.writer_options import TrainWriterOptions
from tests.command import stop_after
from tests.tiny_models import save_electric

PASSAGES = [
    Passage("p0", "river", "the river and the bank of the city"),
    Passage("p1", "", "a cat sing to the old dog"),
    Passage("p2", "heart", "blood runs to the heart"),
    Passage("p3", "king", ""),
    Passage("p4", "fever", "fever is a symptom of disease " * 3),
]
TEXTS = [
    *(("p0", "where is the river bank"), ("p0", "what is a city"), ("p1", "who is the old dog"), ("p2", "heart")),
    *(("p2", "when is the blood red"), ("p3", "who is king"), ("p4", "what is a symptom of fever and of disease")),
]


def written_folder(folder: Path, texts: list[tuple[str, str]] = TEXTS) -> Path:
    with Workspace(folder, KIND, config={}, inputs={}) as workspace:
        corpus = [{"_id": one.id, "title": one.title, "text": one.text} for one in PASSAGES]
        (workspace.path / CORPUS).write_text("".join(json.dumps(one) + "\n" for one in corpus))
        queries = [
            Written(f"{passage}-g{number}", text, passage, {"mode": "sample"}, None, -1.5, 4)
            for number, (passage, text) in enumerate(texts)
        ]
        (workspace.path / QUERIES).write_text("".join(query.line for query in queries))
        write_qrels(workspace.path, [(query.id, query.passage_id) for query in queries])
        return workspace.commit({"queries": len(queries)})


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_folder(tmp_path_factory.mktemp("written") / "queries")


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    folder = tmp_path_factory.mktemp("writer")
    torch.manual_seed(2)
    options = TrainWriterOptions(
        encoder=str(tiny_bert), collection="", output="", hidden_size=16, passage_max_length=12
    )
    new_writer(options).eval().save(folder)
    return folder


@pytest.fixture(scope="module")
def electric(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return save_electric(tmp_path_factory.mktemp("electric"), tiny_bert, positions=32)


@pytest.fixture(scope="module")
def models(writer: Path, electric: Path, tiny_bert: Path) -> dict[str, str]:
    return {"writer": str(writer), "electric": str(electric), "encoder": str(tiny_bert)}


def options_for(queries: Path, output: Path, models: dict[str, str], **others: Any) -> QueriesScoreOptions:
    settings: dict[str, Any] = {"with_": "lm,electric,roundtrip", "device": "cpu", **models, **others}
    return QueriesScoreOptions(queries=str(queries), output=str(output), **settings)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("batch_tokens", [1, 60, None])
def test_figures_are_those_of_one_query_at_a_time(
    queries: Path, models: dict[str, str], tmp_path: Path, batch_tokens: int | None
) -> None:
    before = {file.name: file.read_bytes() for file in queries.iterdir() if file.is_file()}
    options = options_for(queries, tmp_path / "scores.jsonl", models, depth=2, batch_tokens=batch_tokens)
    lines = lines_of(score_queries(options))
    assert before == {file.name: file.read_bytes() for file in queries.iterdir() if file.is_file()}
    assert [line["_id"] for line in lines] == [f"{passage}-g{i}" for i, (passage, _) in enumerate(TEXTS)]
    writer = QueryWriter.load(models["writer"])
    energy = ElectraForPreTraining.from_pretrained(models["electric"]).eval()
    tokenizer = BertTokenizer.from_pretrained(models["electric"])
    encoder = Encoder.load(models["encoder"])
    vectors = encoder.encode_passages(PASSAGES)
    ranks = []
    for line, (passage_id, text) in zip(lines, TEXTS, strict=True):
        passage = next(one for one in PASSAGES if one.id == passage_id)
        batch = writer_batch(writer, [passage], [text])
        told, asked = (
            tokenizer(one, add_special_tokens=False).input_ids for one in (f"{passage.title} {passage.text}", text)
        )
        with torch.no_grad():
            log_prob = -float(writer(batch.passage_ids, batch.passage_mask, batch.query_ids, batch.targets))
            told = told[: 32 - 3 - len(asked)]
            given = -energy(torch.tensor([[2, *asked, 3, *told, 3]])).logits[0, 1 : len(asked) + 1].sum().item()
            alone = -energy(torch.tensor([[2, *asked, 3]])).logits[0, 1:-1].sum().item()
        scores = vectors @ encoder.encode_queries([text])[0]
        found = sorted(zip(scores.tolist(), (one.id for one in PASSAGES), strict=True), reverse=True)
        rank = [one for _, one in found].index(passage_id) + 1
        ranks.append(min(rank, 3))
        expected = {
            "log_prob": log_prob,
            "log_prob_per_token": log_prob / batch.weight,
            "tokens": len(asked) + 1,
            "pll": alone,
            "pll_given_passage": given,
            "gain": given - alone,
            "gain_per_token": (given - alone) / len(asked),
            "roundtrip": min(rank, 3),
        }
        assert line.pop("_id")
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert type(line["tokens"]) is type(line["roundtrip"]) is int
    assert 3 in ranks and min(ranks) < 3  # else the depth would prove nothing
    made_by = json.loads((tmp_path / "scores.jsonl.json").read_text())
    assert (made_by["with"], made_by["count"], made_by["depth"]) == (["lm", "electric", "roundtrip"], 7, 2)
    assert made_by["means"]["gain"] == pytest.approx(sum(line["gain"] for line in lines) / 7)
    assert made_by["means"]["roundtrip_found"] == pytest.approx(sum(rank < 3 for rank in ranks) / 7)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "scores.jsonl", "scores.jsonl.json", "scores.jsonl.work",
    ]  # fmt: skip
    assert [file.name for file in (tmp_path / "scores.jsonl.work").iterdir()] == ["vectors"]


def test_each_judge_alone_has_its_own_figures(queries: Path, models: dict[str, str], tmp_path: Path) -> None:
    together = lines_of(score_queries(options_for(queries, tmp_path / "all.jsonl", models)))
    for number, (name, model) in enumerate({"lm": "writer", "electric": "electric"}.items()):
        options = options_for(queries, tmp_path / f"{number}.jsonl", {model: models[model]}, with_=name)
        alone = lines_of(score_queries(options))
        assert alone == [{key: line[key] for key in alone[0]} for line in together]
        assert not (tmp_path / f"{number}.jsonl.work").exists()


def test_a_query_longer_than_the_writer_was_trained_on_counts_whole(models: dict[str, str], tmp_path: Path) -> None:
    """As in generation, which knows no such limit; Electric has its positions, and drops the passage's end."""
    long = ("p1", "the cat " * 20)
    folder = written_folder(tmp_path / "queries", [long])
    options = options_for(folder, tmp_path / "scores.jsonl", models, with_="lm,electric")
    options = dataclasses.replace(options, encoder=None)
    (line,) = lines_of(score_queries(options))
    assert line["tokens"] == 41
    writer = QueryWriter.load(models["writer"])
    writer.settings = dataclasses.replace(writer.settings, query_max_length=64)
    batch = writer_batch(writer, [PASSAGES[1]], [long[1]])
    with torch.no_grad():
        loss = float(writer(batch.passage_ids, batch.passage_mask, batch.query_ids, batch.targets))
    assert line["log_prob"] == pytest.approx(-loss, rel=1e-5)


def interrupted(options: QueriesScoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(verb, "fault_point", stop_after(2, "block-scored"))
        with pytest.raises(KeyboardInterrupt):
            score_queries(options)


def killed(options: QueriesScoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"with": options.with_, "output": options.output, "device": options.device}
    given |= {name: getattr(options, name) for name in ("writer", "electric", "encoder")}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    code = (
        "import sys; from retrieval.queries import score; from retrieval.cli import main; score._AT_ONCE = 3; "
        "sys.exit(main(['queries', 'score', *sys.argv[1:]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, options.queries, *words],
        env=os.environ | {"CONDENSER_FAULT": "block-scored:2"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.parametrize("stop", [interrupted, pytest.param(killed, marks=pytest.mark.slow)])
def test_a_run_stopped_in_the_middle_goes_on_to_the_same_bytes(
    queries: Path,
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[[QueriesScoreOptions, pytest.MonkeyPatch], None],
) -> None:
    monkeypatch.setattr(verb, "_AT_ONCE", 3)  # three blocks
    straight = score_queries(options_for(queries, tmp_path / "straight.jsonl", models))
    options = options_for(queries, tmp_path / "killed.jsonl", models)
    stop(options, monkeypatch)
    assert sorted(file.name for file in tmp_path.iterdir() if file.name.startswith("killed")) == ["killed.jsonl.work"]
    place = tmp_path / "killed.jsonl.work" / "scores.partial"
    assert sorted(file.name for file in place.glob("*.jsonl")) == ["000000.jsonl", "000001.jsonl"]
    with pytest.raises(UserError, match=r"scores\.partial: was made with other settings: depth: 100 -> 3"):
        score_queries(dataclasses.replace(options, depth=3))
    asked = []
    judge = LanguageModelJudge.__call__
    with monkeypatch.context() as patch:
        patch.setattr(
            LanguageModelJudge, "__call__", lambda self, block: asked.append(len(block)) or judge(self, block)
        )
        score_queries(options)
    assert asked == [1]
    assert (tmp_path / "killed.jsonl").read_bytes() == straight.read_bytes()
    assert (tmp_path / "killed.jsonl.json").read_bytes() == (tmp_path / "straight.jsonl.json").read_bytes()
    assert not place.exists()


def test_a_run_killed_before_the_file_is_there_judges_nothing_again(
    queries: Path, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(queries, tmp_path / "scores.jsonl", {"writer": models["writer"]}, with_="lm")
    with monkeypatch.context() as patch:
        patch.setattr(verb, "_join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            score_queries(options)
    with monkeypatch.context() as patch:
        patch.setattr(verb, "_judge", None)
        score_queries(options)
    assert len(lines_of(tmp_path / "scores.jsonl")) == 7
    assert not (tmp_path / "scores.jsonl.work").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"with_": "lm,electrik"}, r"--with has an unknown judge 'electrik' \(did you mean electric\?\)"),
        ({"with_": ""}, r"--with has an unknown judge '' \(judges: lm, electric, roundtrip\)"),
        ({"writer": None}, "--writer is missing, which --with lm asks"),
        ({"encoder": None}, "--encoder is missing, which --with roundtrip asks"),
        ({"with_": "lm,roundtrip"}, r"--electric goes with --with electric \(--with lm,roundtrip,electric\)"),
        ({"with_": "lm,electric", "encoder": None, "depth": 5}, "--depth goes with --with roundtrip"),
        (
            {"with_": "roundtrip", "writer": None, "electric": None, "passage_max_length": 9},
            "--passage_max_length goes with --with lm",
        ),
        ({"writer": "/no/such/model"}, "/no/such/model: no such folder"),
        ({"electric": "ENCODER"}, "weights have no head that gives energies"),
        ({"queries": "/no/such/folder"}, "/no/such/folder: no such folder; expected a written queries folder"),
        ({"queries": "ENCODER"}, "no manifest.json here; expected a written queries folder"),
        ({"output": "."}, "is a folder, expected a file to write"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    queries: Path, models: dict[str, str], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    change = {name: models["encoder"] if value == "ENCODER" else value for name, value in change.items()}
    if "output" in change:
        change["output"] = str(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        score_queries(dataclasses.replace(options_for(queries, tmp_path / "scores.jsonl", models), **change))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_damaged_and_empty_folders_are_refused(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, texts, message in (
        ("strange", [("p9", "who")], "query 'p9-g0' was written for passage 'p9', which is not here"),
        ("empty", [], "holds no query"),
    ):
        folder = written_folder(tmp_path / name, texts)
        words = ["queries", "score", str(folder), "--writer", models["writer"]]
        assert main([*words, "--output", str(tmp_path / "scores.jsonl")]) == 2
        assert message in capsys.readouterr().err
    folder = written_folder(tmp_path / "changed")
    (folder / QUERIES).write_text((folder / QUERIES).read_text().replace("heart", "horse"))
    options = options_for(folder, tmp_path / "scores.jsonl", {"writer": models["writer"]}, with_="lm")
    with pytest.raises(UserError, match="contents differ from the manifest's sha256"):
        score_queries(options)
    shutil.rmtree(folder)
    folder = written_folder(tmp_path / "changed")
    with pytest.raises(UserError, match=r"lies in .*changed, which is read"):
        score_queries(dataclasses.replace(options, output=str(folder / "scores.jsonl")))


def test_figures_that_are_no_numbers_end_the_run(
    queries: Path, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ElectricJudge, "__call__", lambda self, block: [{"pll": float("nan")} for _ in block])
    options = options_for(queries, tmp_path / "out.jsonl", {"electric": models["electric"]}, with_="electric")
    with pytest.raises(RunFailed, match="gives pll nan to query 'p0-g0', expected a finite number"):
        score_queries(options)
    assert not list(tmp_path.iterdir())
