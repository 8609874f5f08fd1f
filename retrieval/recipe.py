"""Two stages of training as one file: on BM25's negatives, then also on those that the first stage finds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from condenser.errors import UserError, nearest, sample
from condenser.files import existing_file, write_json
from condenser.hub import local_folder
from condenser.talk import say
from condenser.weights import check_config
from eval.metrics import parse_metric
from eval.options import EvaluateOptions
from retrieval.cli import parse_options
from retrieval.collections import open_collection
from retrieval.evaluate import evaluate
from retrieval.options import RecipeOptions
from retrieval.stages import Stage, command_line, run_stages
from retrieval.verbs import VERBS, load

Section = dict[str, Any]

# The sections of a file, each with the verb whose options it holds.
_VERBS = {
    "bm25": "mine",
    "mine": "mine",
    "finetune": "finetune",
    "stage1": "finetune",
    "stage2": "finetune",
    "encode": "encode",
    "index": "index",
    "search": "search",
    "evaluate": "evaluate",
}
_TRAIN = "train"


@dataclass(frozen=True)
class Recipe:
    """What a recipe file says.

    Attributes:
        path: the file.
        collection: what is trained on, searched and measured.
        encoder: the pretrained start of both stages.
        splits: the splits that are searched and measured.
        sections: options of verbs, by the name of the section.
    """

    path: Path
    collection: str
    encoder: str
    splits: list[str]
    sections: dict[str, Section]

    def options(self, *sections: str, **settled: Any) -> Any:
        """Return a verb's options: those of the sections, the later before the earlier, and what is settled.

        Raises:
            UserError: an option that the verb does not have, that is settled here, or of a wrong type; with the
                section.
        """
        verb = VERBS[_VERBS[sections[0]]]
        known = {field.name for field in dataclasses.fields(load(verb.options))}
        given: Section = {}
        for section in sections:
            options = self.sections.get(section, {})
            for name in options:
                if name in settled:
                    raise UserError(f"{name} cannot be set: the recipe sees to it", f"{self.path}: {section}")
                if name not in known:
                    close = nearest(name, known)
                    hint = f"did you mean {close}?" if close else None
                    raise UserError(f"unknown option {name}", f"{self.path}: {section}", hint)
            given |= options
        words = [word for name, value in {**given, **settled}.items() for word in _words(name, value)]
        try:
            return parse_options(_VERBS[sections[0]], words)
        except UserError as error:
            raise UserError(error.what, f"{self.path}: {' and '.join(sections)}", error.hint) from None


def _words(name: str, value: Any) -> list[str]:
    """Return an option as words of a command line; none for null, which is the default."""
    if value is None or value == []:
        return []
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}"]


@dataclass
class Results:
    """The figures of each encoder on each split, and where everything is."""

    rows: list[dict[str, Any]]
    output: str

    def __str__(self) -> str:
        names = [f"{row['encoder']}, {row['split']}" for row in self.rows]
        metrics = list(self.rows[0]["metrics"])
        width = max(map(len, names))
        lines = [f"{'':<{width}}" + "".join(f"{metric:>10}" for metric in metrics)]
        for name, row in zip(names, self.rows, strict=True):
            lines.append(f"{name:<{width}}" + "".join(f"{row['metrics'][metric]:>10.4f}" for metric in metrics))
        return "\n".join([*lines, "", f"Everything is in {self.output}/"])


def recipe(options: RecipeOptions) -> Results | str:
    """Train in two stages, mining negatives in between; encode, index, search and measure.

    Both stages start from the same pretrained encoder (Gao and Callan 2022): the first one serves to find
    negatives. Run again, it goes on where it stopped: what is done is passed over, also when it was made by
    the command itself, on other machines say.

    Returns:
        The figures of both stages on each split; with ``dry_run`` the commands.

    Raises:
        UserError: a recipe with unknown or ill-typed options, a split that is not there, and what the verbs raise.
    """
    found = load_recipe(options)
    stages, measurements = plan(found, Path(options.output))
    if options.dry_run:
        return "\n".join(command_line(stage) for stage in [*stages, *measurements])
    collection = open_collection(found.collection)
    collection.qrels(_TRAIN)
    for split in found.splits:
        next(iter(collection.queries(split)))
    check_config(local_folder(found.encoder))
    run_stages(stages)
    rows = [_measure(stage) for stage in measurements]
    results = Results(rows, options.output)
    write_json(Path(options.output) / "results.json", {"recipe": dataclasses.asdict(found), "rows": rows})
    return results


def load_recipe(options: RecipeOptions) -> Recipe:
    """Read a recipe file.

    Raises:
        UserError: no such file, no YAML mapping, an unknown section, or no collection or encoder.
    """
    import yaml

    path = existing_file(options.recipe)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"not valid YAML ({' '.join(str(error).split())})", path) from None
    if not isinstance(values, dict):
        raise UserError("expected YAML sections of options", path, "see docs/recipes.md")
    known = {"collection", "encoder", "splits", *_VERBS}
    for name in map(str, values):
        if name not in known:
            close = nearest(name, known)
            hint = f"did you mean {close}?" if close else f"sections: {', '.join(sorted(known))}"
            raise UserError(f"unknown section {name!r}", path, hint)
    values |= {name: given for name in ("collection", "encoder") if (given := getattr(options, name))}
    for name in ("collection", "encoder"):
        if not isinstance(values.get(name), str):
            raise UserError(f"{name} is {values.get(name)!r}, expected a name", path, f"or give --{name}")
    splits = values.get("splits", ["dev"])
    if not isinstance(splits, list) or not splits or not all(isinstance(split, str) for split in splits):
        raise UserError(f"splits is {splits!r}, expected a list of names", path)
    sections = {name: values[name] or {} for name in _VERBS if name in values}
    for name, section in sections.items():
        if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
            raise UserError(f"found {sample([str(section)])}, expected options with values", f"{path}: {name}")
    return Recipe(path, values["collection"], values["encoder"], splits, sections)


def plan(recipe: Recipe, root: Path) -> tuple[list[Stage], list[Stage]]:
    """Return the commands in order, and those that measure at the end.

    Raises:
        UserError: as `Recipe.options`.
    """
    stages: list[Stage] = []
    files: list[str] = []
    ours = {"collection": recipe.collection, "split": _TRAIN}
    if "bm25" in recipe.sections:
        by_bm25 = recipe.options("bm25", **ours, bm25=True, output=str(root / f"bm25.{_TRAIN}.jsonl"))
        stages.append(Stage("mine", by_bm25))
        files.append(by_bm25.output)
    first, measured = retriever(recipe, root, "stage1", files)
    run = str(root / f"stage1.{_TRAIN}.mining.trec")  # of another depth than a run that is measured
    mined = recipe.options("mine", **ours, run=run, output=str(root / f"mined.{_TRAIN}.jsonl"))
    found = recipe.options("search", **ours, index=str(root / "stage1-index"), output=run)
    stages += [*first, Stage("search", dataclasses.replace(found, k=mined.depth)), Stage("mine", mined)]
    second, measured_then = retriever(recipe, root, "stage2", [*files, mined.output])
    return stages + second, measured + measured_then


def retriever(recipe: Recipe, root: Path, name: str, negatives: list[str]) -> tuple[list[Stage], list[Stage]]:
    """Return the commands from the pretrained encoder to runs, and those that measure the runs.

    Args:
        recipe: its section ``name`` stands before ``finetune``.
        root: folder of all artifacts.
        name: what they are called.
        negatives: files of hard negatives, beside those of the collection.
    """
    collection = recipe.collection
    finetune = recipe.options(
        "finetune",
        name,
        encoder=recipe.encoder,
        collection=collection,
        negatives_file=negatives,
        output=str(root / name),
    )
    vectors = recipe.options(
        "encode", encoder=finetune.output, collection=collection, output=str(root / f"{name}-vectors")
    )
    index = recipe.options("index", vectors=vectors.output, output=str(root / f"{name}-index"))
    stages = [Stage("finetune", finetune), Stage("encode", vectors), Stage("index", index)]
    measurements = []
    for split in recipe.splits:
        run = str(root / f"{name}.{split.replace('/', '-')}.trec")
        ours = {"collection": collection, "split": split}
        stages.append(Stage("search", recipe.options("search", **ours, index=index.output, output=run)))
        measurements.append(Stage("evaluate", recipe.options("evaluate", **ours, run=run)))
    return stages, measurements


def _measure(stage: Stage) -> dict[str, Any]:
    options: EvaluateOptions = stage.options
    say(command_line(stage))
    report = json.loads(evaluate(dataclasses.replace(options, format="json")))
    if options.answers:
        asked = [f"top-{depth}" for depth in options.depths]
    else:
        asked = [parse_metric(name).name for name in options.metrics]
    metrics = {name: report["metrics"][name] for name in asked}  # in the order in which they are asked for
    encoder = Path(str(options.run)).name.split(".")[0]
    return {"encoder": encoder, "split": options.split, "metrics": metrics, "counts": report["counts"]}
