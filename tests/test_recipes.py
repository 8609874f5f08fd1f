"""The published recipes, each begun on a small sample in its own input format, and what their scripts say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from condenser.files import read_lines
from retrieval.collections import open_collection
from retrieval.options import RecipeOptions
from retrieval.recipe import Results, load_recipe, plan, recipe
from tests.conftest import WORDS

RECIPES = Path(__file__).parents[1] / "scripts" / "recipes"
LINES = 200
SHORT = {"max_steps": 2, "save_every": 100}
CPU = {"mixed_precision": "no", "device": "cpu", "log_every": 1}


def words_of(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 13 + place * (number % 7 + 1)) % len(WORDS)] for place in range(count))


def marco(folder: Path) -> Path:
    """Files as RocketQA and MS MARCO have them."""
    folder.mkdir()
    files = {
        "para.txt": [f"{i}\t{words_of(i, 12)}" for i in range(LINES)],
        "para.title.txt": [f"{i}\t{words_of(i + 1, 2)}" for i in range(0, LINES, 2)],
        "train.query.txt": [f"{1000 + i}\t{words_of(i, 4)}" for i in range(LINES)],
        "dev.query.txt": [f"{5000 + i}\t{words_of(i, 3)}" for i in range(20)],
        "qrels.train.tsv": [f"{1000 + i}\t0\t{i}\t1" for i in range(LINES)],
        "qrels.dev.tsv": [f"{5000 + i}\t0\t{i}\t1" for i in range(20)],
        "qidpidtriples.train.full.2.tsv": [
            f"{1000 + i}\t{i}\t{(i + 3 * place) % LINES}" for i in range(LINES) for place in range(1, 9)
        ],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def dpr(folder: Path, short: str) -> Path:
    """Files as DPR's download list has them: quotes around texts, answers as a list of Python."""
    folder.mkdir()

    def context(number: int) -> dict[str, Any]:
        key = "psg_id" if short == "trivia" else "passage_id"
        return {"title": f"T{number}", "text": f'a "{words_of(number, 12)}"', "score": 1.0, key: str(number)}

    entries = [
        {
            "question": f"{words_of(i, 5)} {i}",
            "answers": [WORDS[i % len(WORDS)]],
            "positive_ctxs": [context(i)] if i else [],
            "negative_ctxs": [],
            "hard_negative_ctxs": [context((i + 5) % LINES), context((i + 9) % LINES)],
        }
        for i in range(LINES)
    ]
    (folder / f"biencoder-{short}-train.json").write_text(json.dumps(entries))
    (folder / f"{short}-test.qa.csv").write_text(
        "".join(f"{words_of(i, 4)}\t{[words_of(i, 1), 'it' + chr(39) + 's']!r}\n" for i in range(20))
    )
    lines = [f'{i}\t"a ""{words_of(i, 12)}"""\tT{i}' for i in range(LINES)]
    (folder / "psgs_w100.tsv").write_text("\n".join(["id\ttext\ttitle", *lines]) + "\n")
    return folder


def run_script(*words: str | Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", str(RECIPES / "run.sh"), *map(str, words)]
    return subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def long_bert(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT with positions for 256 tokens."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("long-bert")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig.from_pretrained(tiny_bert, max_position_embeddings=256)).save_pretrained(folder)
    return folder


def shortened(name: str, file: Path) -> str:
    """Write a recipe with two steps a stage, for a CPU, and else as it is."""
    values = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    values["finetune"] |= CPU
    for stage in ("stage1", "stage2"):
        values[stage] |= SHORT
    file.write_text(yaml.safe_dump(values))
    return str(file)


@pytest.mark.parametrize("name", ["marco", "nq", "triviaqa"])
def test_hyperparameters_are_the_published_ones(name: str) -> None:
    found = load_recipe(RecipeOptions(recipe=str(RECIPES / f"{name}.yaml"), output="out"))
    stages, _ = plan(found, Path("out"))
    first, second = (stage.options for stage in stages if stage.verb == "finetune")
    (mined,) = (stage.options for stage in stages if stage.verb == "mine")
    assert (mined.depth, mined.n, mined.choice) == (200, 30, "sample")
    for options in (first, second):
        assert (options.learning_rate, options.warmup_ratio, options.weight_decay) == (5e-6, 0.1, 0)
        assert (options.temperature, options.passage_template, options.pooling) == (1, "{title}{sep}{text}", "cls")
        sizes = (options.batch_size, options.negatives, options.query_max_length, options.passage_max_length)
        assert sizes == ((8, 7, 32, 128) if name == "marco" else (128, 1, 32, 256))
        assert options.untied is (None if name == "marco" else True)
        assert options.encoder == found.encoder and options.negatives_pool == 30
    assert first.epochs == (3 if name == "marco" else 40)
    # Steps of the published second stage: 2 epochs of 900,000 lines in eights; 20 of two lines for each question.
    if name == "marco":
        assert second.epochs * 502_939 / 8 == pytest.approx(225_000, rel=0.01)
    else:
        assert second.epochs == 20 * 2


@pytest.mark.slow
def test_marco_begins(tmp_path: Path, long_bert: Path) -> None:
    folder = marco(tmp_path / "marco")
    file = shortened("marco", tmp_path / "marco.yaml")
    output = tmp_path / "out"
    results = recipe(RecipeOptions(recipe=file, collection=str(folder), encoder=str(long_bert), output=str(output)))
    assert isinstance(results, Results)
    assert [(row["encoder"], row["split"]) for row in results.rows] == [("stage1", "dev"), ("stage2", "dev")]
    assert all(set(row["metrics"]) == {"MRR@10", "R@1000"} and row["counts"]["both"] == 20 for row in results.rows)
    mined = [json.loads(line) for _, line in read_lines(output / "mined.train.jsonl")]
    assert len(mined) == LINES and all(len(line["negatives"]) == 30 for line in mined)
    assert all(str(int(line["query_id"]) - 1000) not in line["negatives"] for line in mined)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "short"), [("nq", "nq"), ("triviaqa", "trivia")])
def test_dpr_recipes_begin(tmp_path: Path, long_bert: Path, name: str, short: str) -> None:
    downloads, output = dpr(tmp_path / "downloads", short), tmp_path / "out"
    planned = run_script(name, downloads, output, "--dry_run")
    assert planned.returncode == 0, planned.stderr
    assert f"{LINES} passages, {LINES - 1} training questions, 20 test questions" in planned.stderr
    assert planned.stdout.count("condenser finetune") == 2 and "--untied true" in planned.stdout
    collection = open_collection(output / "collection")
    assert next(iter(collection.passages())).text == f'a "{words_of(0, 12)}"'
    assert next(iter(collection.queries("test"))).answers == (words_of(0, 1), "it's")

    file = shortened(name, tmp_path / "recipe.yaml")
    results = recipe(
        RecipeOptions(recipe=file, collection=str(output / "collection"), encoder=str(long_bert), output=str(output))
    )
    assert isinstance(results, Results)
    assert all([*row["metrics"]] == ["top-5", "top-20", "top-100"] for row in results.rows)
    assert results.rows[1]["counts"]["questions"] == 20 and results.rows[1]["metrics"]["top-100"] > 0.5


def test_scripts_name_what_is_missing(tmp_path: Path) -> None:
    folder = marco(tmp_path / "marco")
    (folder / "dev.query.txt").unlink()
    for words, said in (
        (("marco", folder, "out"), f"run.sh: error: {folder}/dev.query.txt (or .gz) is missing: RocketQA"),
        (("nq", folder, "out"), f"run.sh: error: {folder}/biencoder-nq-train.json (or .gz) is missing: DPR"),
        (("nqq", folder, "out"), "run.sh: error: unknown recipe nqq, expected marco, nq or triviaqa\n"),
        (("nq",), "usage: run.sh marco|nq|triviaqa DOWNLOADS OUTPUT [option ...]\n"),
    ):  # fmt: skip
        done = run_script(*words)
        assert done.returncode == 2 and done.stderr.startswith(said), done.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("nq-test.qa.csv", "who\t['a']\nwho\tnobody\n", "nq-test.qa.csv:2: expected a question and a list of answers"),
        ("psgs_w100.tsv", "1\tone\n", "psgs_w100.tsv:1: found 2 columns, expected id, text, title"),
        ("biencoder-nq-train.json", "[{", "biencoder-nq-train.json"),
    ],
)
def test_preparing_what_is_broken_is_one_line(tmp_path: Path, file: str, text: str, words: str) -> None:
    downloads = dpr(tmp_path / "downloads", "nq")
    (downloads / file).write_text(text)
    done = run_script("nq", downloads, tmp_path / "out", "--dry_run")
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2 and line.startswith("prepare_dpr: error: ") and words in line
    assert not (tmp_path / "out" / "collection").exists()
