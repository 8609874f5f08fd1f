"""The verb `recipe`: what its file may say, the commands it makes, runs that are stopped between any two of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from condenser.errors import UserError
from condenser.files import dump_json
from eval.evaluation import evaluate
from retrieval import stages
from retrieval.cli import main, parse_options
from retrieval.collections import open_collection
from retrieval.options import RecipeOptions
from retrieval.recipe import Results, load_recipe, plan, recipe
from retrieval.stages import command_line
from retrieval.verbs import VERBS
from tests.conftest import WORDS
from tests.retrieval.test_check import write

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "collection": "data",
    "encoder": "start",
    "splits": ["dev"],
    "bm25": {"n": 5, "depth": 12},
    "finetune": {"batch_size": 4, "negatives": 2, "query_max_length": 16, "passage_max_length": 32, "device": "cpu"},
    "stage1": {"max_steps": 3, "learning_rate": 1e-3},
    "mine": {"n": 4, "depth": 10},
    "stage2": {"max_steps": 2},
    "search": {"k": 20},
    "evaluate": {"metrics": ["MRR@10", "R@20"]},
}
STAGES = 11


def words_of(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(count))


@pytest.fixture()
def place(tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a collection and a start by the names that SMALL has for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "_release_memory", lambda: None)  # which takes half a second where torch is loaded
    Path("start").symlink_to(tiny_bert)
    queries = {f"q{i}": words_of(i, 3) for i in range(16)}
    write(
        tmp_path / "data",
        passages={f"p{i}": f"{words_of(i, 3)} {words_of(i + 9, 8)}" for i in range(40)},
        queries=queries,
        train=[(f"q{i}", f"p{i}", 1) for i in range(12)],
        dev=[(f"q{i}", f"p{i}", 1) for i in range(12, 16)],
    )
    return tmp_path


def write_recipe(file: Path, **changes: Any) -> str:
    file.write_text(yaml.safe_dump(SMALL | changes))
    return str(file)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_commands_are_those_of_two_stages_from_one_start(tmp_path: Path) -> None:
    found = load_recipe(RecipeOptions(recipe=write_recipe(tmp_path / "r.yaml"), output="out dir"))
    commands, measurements = plan(found, Path("out dir"))
    assert [stage.verb for stage in commands] == (
        ["mine", "finetune", "encode", "index", "search", "search", "mine", "finetune", "encode", "index", "search"]
    )
    assert len(commands) == STAGES and [stage.verb for stage in measurements] == ["evaluate", "evaluate"]
    by_bm25, first, *_, find, mined, second = (stage.options for stage in commands[:8])
    assert first.encoder == second.encoder == "start"
    assert first.negatives_file == [by_bm25.output] and by_bm25.bm25
    assert second.negatives_file == [by_bm25.output, mined.output]
    assert (first.learning_rate, second.learning_rate) == (1e-3, 2e-5) and first.batch_size == second.batch_size == 4
    assert find.index == "out dir/stage1-index" and find.k == mined.depth == 10 and mined.run == find.output
    for stage in commands + measurements:
        program, verb, *words = shlex.split(command_line(stage))
        assert (program, verb) == ("condenser", stage.verb)
        assert parse_options(verb, words) == stage.options


def test_without_bm25_the_negatives_are_those_of_the_collection(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump({name: value for name, value in SMALL.items() if name != "bm25"}))
    commands, _ = plan(load_recipe(RecipeOptions(recipe=str(file), output="out")), Path("out"))
    trained = [stage.options.negatives_file for stage in commands if stage.verb == "finetune"]
    assert trained == [[], ["out/mined.train.jsonl"]]


def test_the_recipe_of_the_page_is_one(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    block = page[page.index("    collection: my-collection") :].split("\n\n")[0]
    (tmp_path / "page.yaml").write_text(textwrap.dedent(block))
    commands, measurements = plan(load_recipe(RecipeOptions(recipe=str(tmp_path / "page.yaml"), output="o")), Path("o"))
    assert len(commands) == STAGES + 2 and len(measurements) == 4
    assert [stage.options.epochs for stage in commands if stage.verb == "finetune"] == [3, 3]


def test_a_dry_run_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_recipe(tmp_path / "r.yaml")
    output = tmp_path / "out"
    assert main(["recipe", file, "--collection", "nq-qed", "--encoder", "e", "--output", str(output), "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == STAGES + 2 and all(line.split()[1] in VERBS for line in lines)
    assert lines[1].startswith("condenser finetune --encoder e --collection nq-qed --negatives_file ")
    assert not output.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage3": {}}, "unknown section 'stage3' (did you mean stage"),
        ({"encoder": None}, "encoder is None, expected a name (or give --encoder)"),
        ({"splits": "dev"}, "splits is 'dev', expected a list of names"),
        ({"mine": 5}, "mine: found '5', expected options with values"),
        ({"stage2": {"epoch": 2}}, "stage2: unknown option epoch (did you mean epochs?)"),
        ({"stage2": {"epochs": "many"}}, "finetune and stage2: --epochs is 'many', expected a number"),
        ({"stage1": {"negatives": -1}}, "finetune and stage1: --negatives is -1, expected 0 or more"),
        ({"finetune": {"encoder": "x"}}, "finetune: encoder cannot be set: the recipe sees to it"),
        ({"mine": {"config": "x"}}, "mine: unknown option config"),
    ],
)
def test_what_a_recipe_may_not_say(
    place: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    assert main(["recipe", write_recipe(place / "r.yaml", **changes), "--output", "out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"condenser: error: {place / 'r.yaml'}: ") and words in line
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "words"), [("a: [", "not valid YAML"), ("- 1\n", "expected YAML sections"), ("", "expected YAML sections")]
)
def test_what_is_no_recipe(place: Path, text: str, words: str) -> None:
    (place / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=f"r.yaml: {words}"):
        recipe(RecipeOptions(recipe="r.yaml", output="out"))
    with pytest.raises(UserError, match=r"no such file \(did you mean r.yaml\?\)"):
        recipe(RecipeOptions(recipe="s.yaml", output="out"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collection": "medqad"}, "did you mean medquad"),
        ({"encoder": "./strat"}, r"no such folder, expected a model folder \(did you mean start\?\)"),
    ],
)
def test_what_is_not_there_is_found_before_the_work(place: Path, options: dict[str, str], words: str) -> None:
    file = write_recipe(place / "r.yaml")
    with pytest.raises(UserError, match=words):
        recipe(RecipeOptions(recipe=file, output="out", **options))
    with pytest.raises(UserError, match="no judgements for split 'test'"):
        recipe(RecipeOptions(recipe=write_recipe(place / "r.yaml", splits=["test"]), output="out"))
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_recipe_stopped_between_any_two_commands_ends_in_the_same_files(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_recipe(place / "r.yaml")
    options = RecipeOptions(recipe=file, output="out")
    straight = recipe(options)
    assert isinstance(straight, Results)
    wanted = files_of(Path("out"))
    Path("out").rename("straight")

    for last in range(1, STAGES + 1):
        passed = 0

        def stop(name: str, last: int = last) -> None:
            nonlocal passed
            passed += 1
            if passed == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(stages, "fault_point", stop)
            recipe(options)
    capsys.readouterr()
    assert recipe(options) == straight
    assert capsys.readouterr().err.count("up to date") == STAGES
    assert files_of(Path("out")) == wanted

    # The figures are those of the runs, and stand in a file as well.
    qrels = open_collection("data").qrels("dev")
    for row in straight.rows:
        means = evaluate(qrels, f"out/{row['encoder']}.dev.trec", ["MRR@10", "R@20"]).means
        assert row["metrics"] == pytest.approx(means)
    assert json.loads(Path("out/results.json").read_text())["rows"] == json.loads(dump_json(straight.rows))
    assert str(straight).splitlines()[0].split() == ["MRR@10", "R@20"] and "stage2, dev" in str(straight)

    # Other negatives are other training data: what was made from the old ones is not passed over.
    write_recipe(place / "r.yaml", mine={"n": 3, "depth": 10})
    with pytest.raises(UserError, match=r"out/stage2: was made with other settings: negatives_file 2: "):
        recipe(options)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stage-done:7", "manifest-written:4"])
def test_a_killed_recipe_goes_on_to_the_same_files(place: Path, fault: str) -> None:
    options = RecipeOptions(recipe=write_recipe(place / "r.yaml"), output="out")
    recipe(options)
    Path("out").rename("straight")
    command = [sys.executable, "-m", "retrieval.cli", "recipe", "r.yaml", "--output", "out"]
    variables = os.environ | {"CONDENSER_FAULT": fault, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=variables, capture_output=True, check=False).returncode == -signal.SIGKILL
    recipe(options)
    assert files_of(Path("out")) == files_of(Path("straight"))


def test_a_measured_training_split_has_a_run_of_its_own(tmp_path: Path) -> None:
    """That of mining is shallower."""
    found = load_recipe(RecipeOptions(recipe=write_recipe(tmp_path / "r.yaml"), output="o"))
    commands, _ = plan(dataclasses.replace(found, splits=["train", "dev"]), Path("o"))
    made = [stage.made for stage in commands]
    assert len(made) == len(set(made))
