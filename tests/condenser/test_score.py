"""The verb ``score``: every kind of file, what is written, and what is told of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import condenser.score as verb
from condenser.errors import UserError
from condenser.score import score
from condenser.score_options import ScoreOptions
from condenser.scorer import Scorer
from retrieval.cli import main

RECORDS = [
    {"_id": "7", "title": "Fever", "text": "fever is a symptom"},
    {"_id": "b", "text": "the cat sing to the bird"},
    {"_id": "c", "text": ""},
    {"_id": "d", "spans": ["a king", "of war"]},
]
PAIRS = [
    {"_id": "p", "passage": "the cat sing to the bird", "query": "what is a cat"},
    {"passage": "", "query": "who is king"},
]


def jsonl(file: Path, records: list[dict]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def options_for(file: Path, model: Path, output: Path, **others: object) -> ScoreOptions:
    settings = {"log_z_positions": 3, "log_z_draws": 4, "device": "cpu"} | others
    return ScoreOptions(file=str(file), model=str(model), output=str(output), **settings)


def test_texts_of_every_kind_of_file(
    electric_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "_AT_ONCE", 3)
    output = score(options_for(jsonl(tmp_path / "a.jsonl", RECORDS), electric_folder, tmp_path / "a.scores"))
    lines = lines_of(output)
    texts = ["Fever fever is a symptom", "the cat sing to the bird", "", "a king of war"]
    expected = Scorer.load(electric_folder).score(texts)
    assert [line["_id"] for line in lines] == ["7", "b", "c", "d"]
    for line, one in zip(lines, expected, strict=True):
        assert line == {
            "_id": line["_id"],
            "pll": pytest.approx(one.pll, rel=1e-5),
            "tokens": len(one.values),
            "pll_per_token": one.per_token and pytest.approx(one.per_token, rel=1e-5),
        }
    told = json.loads((tmp_path / "a.scores.json").read_text())
    assert (told["method"], told["texts"], told["tokens"], told["cut"]) == ("electric", 4, 15, 0)
    assert told["pll_per_token"] == pytest.approx(sum(one.pll for one in expected) / 15, rel=1e-5)
    assert told["log_z"]["positions"] == 3
    err = capsys.readouterr().err
    assert "scored 4 texts of 15 tokens by electric" in err
    assert ("no log-probabilities" in err) == (abs(told["log_z"]["mean"]) > 0.5)

    table = tmp_path / "b.tsv"
    table.write_text("x\tfever is a symptom\ny\tFever\tfever is a symptom\n")
    with gzip.open(tmp_path / "c.txt.gz", "wt") as plain:
        plain.write("the cat sing to the bird\n\na king of war\n")
    by_table = lines_of(score(options_for(table, electric_folder, tmp_path / "b.scores")))
    by_plain = lines_of(score(options_for(tmp_path / "c.txt.gz", electric_folder, tmp_path / "c.scores")))
    close = {name: pytest.approx(value, rel=1e-5) for name, value in lines[0].items() if name != "_id"}
    assert by_table[1] == close | {"_id": "y"}
    assert [line["pll"] for line in by_plain] == [pytest.approx(expected[n].pll, rel=1e-5) for n in (1, 3)]
    assert [line["_id"] for line in by_plain] == ["c.txt.gz:1", "c.txt.gz:3"]


@pytest.mark.parametrize("kind", ["electric", "masked_lm"])
def test_queries_given_their_passages(electric_folder: Path, tiny_bert: Path, tmp_path: Path, kind: str) -> None:
    model = electric_folder if kind == "electric" else tiny_bert
    file = jsonl(tmp_path / "pairs.jsonl", PAIRS)
    lines = lines_of(score(options_for(file, model, tmp_path / "out", per_token=True)))
    scorer = Scorer.load(model)
    gains = scorer.gain([pair["passage"] for pair in PAIRS], [pair["query"] for pair in PAIRS])
    assert [line["_id"] for line in lines] == ["p", f"{file}:2"]
    for line, (given, alone) in zip(lines, gains, strict=True):
        assert line["pll_given_passage"] == pytest.approx(given.pll, rel=1e-5)
        assert line["pll"] == pytest.approx(alone.pll, rel=1e-5)
        assert line["gain"] == pytest.approx(line["pll_given_passage"] - line["pll"], rel=1e-5, abs=1e-6)
        assert line["token_pll_given_passage"] == pytest.approx(given.values.tolist(), rel=1e-5)
        assert line["token_pll"] == pytest.approx(alone.values.tolist(), rel=1e-5)
        assert line["token"] == scorer.tokens(alone.token_ids)
    assert lines[0]["token"] == ["what", "is", "a", "cat"]
    assert ("log_z" in json.loads((tmp_path / "out.json").read_text())) == (kind == "electric")


def test_lines_go_to_stdout_and_are_the_same_each_time(
    electric_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(tmp_path / "a.jsonl", RECORDS)
    options = ScoreOptions(file=str(file), model=str(electric_folder), log_z_positions=0)
    assert score(options) is None
    shown = capsys.readouterr()
    assert "log Z" not in shown.err
    assert score(options) is None
    assert capsys.readouterr().out == shown.out
    score(options_for(file, electric_folder, tmp_path / "out.jsonl.gz"))
    with gzip.open(tmp_path / "out.jsonl.gz", "rt") as written:
        assert written.read() == shown.out


def test_the_sample_for_log_z_is_of_the_whole_file() -> None:
    kept: list[int] = []
    for seed in range(400):
        sample = verb._Sample(5, seed)
        for number in range(50):
            sample.offer(str(number))
        assert len(set(sample.kept)) == 5
        kept += map(int, sample.kept)
    counts = [kept.count(number) for number in range(50)]
    assert min(counts) > 15 and max(counts) < 75  # 40 each, six standard deviations


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a cat"}\n{"text": 5}\n', "bad.jsonl:2: text holds int, expected text"),
        ('{"query": "a cat", "passage": "a dog"}\n{"query": "x"}\n', "bad.jsonl:2: passage is None, expected text"),
        ("", "bad.jsonl: file holds no document"),
        ('{"text": "a cat"}\n{"text": \n', "bad.jsonl:2: not valid JSON"),
    ],
)
def test_a_bad_line_leaves_no_output(electric_folder: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UserError) as error:
        score(options_for(tmp_path / "bad.jsonl", electric_folder, tmp_path / "out"))
    assert message in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_the_command(electric_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(jsonl(tmp_path / "a.jsonl", RECORDS))
    command = ["score", file, "--model", str(electric_folder)]
    assert main([*command, "--max_length", "5", "--log_z_positions", "0"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 4
    assert "3 cut at 5 tokens" in shown.err
    assert main([*command, "--output", file]) == 2
    assert "is read, and would be written over" in capsys.readouterr().err
