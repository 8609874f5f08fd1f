"""The ablation at toy length: every arm makes its cells, of equal tokens, and cells that are there are passed over."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.collections import open_collection
from scripts.ablation_data import write_labels, write_pool
from scripts.ablation_settings import settings_of
from scripts.ablation_table import differences, means
from tests.command import run_script
from tests.conftest import WORDS
from tests.retrieval.test_check import write

PRETRAINED = ["mlm", "condenser", "condenser+generator", "mlm+contrastive", "condenser+cocondenser"]


def words_of(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(count))


def study(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("ablation.py", *words)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(
        tmp_path_factory.mktemp("ablation") / "data",
        passages={f"p{i}": f"{words_of(i, 14)}. {words_of(i + 9, 14)}." for i in range(60)},
        queries={f"q{i}": words_of(i, 3) for i in range(52)},
        train=[(f"q{i}", f"p{i}", 1) for i in range(40)],
    )
    (folder / "qrels" / "test.tsv").write_text("".join(f"q{i}\tp{i}\t{i % 6 > 0:d}\n" for i in range(40, 52)))
    return folder


@pytest.mark.slow
def test_every_arm_makes_its_cells_once(tmp_path: Path, data: Path, tiny_bert: Path) -> None:
    words = ["--quick", "--collections", data, "--start", f"tiny={tiny_bert}", "--seeds", "1", "--percents", "0", "10"]
    words += ["--output", tmp_path / "results", "--work", tmp_path / "work"]
    planned = study(*words, "--dry_run")
    names = {line.split()[1] for line in planned.stdout.splitlines()[:-1]}
    assert len(names) == 2 * 6 + 1 and not (tmp_path / "work").exists()
    first = study(*words)
    assert first.returncode == 0, first.stderr
    assert {file.name for file in (tmp_path / "results").iterdir()} == names
    cells = {name: json.loads((tmp_path / "results" / name).read_text()) for name in names}
    tokens = {arm: cells[f"data-tiny-{arm}-10-1.json"]["tokens"] for arm in PRETRAINED}
    assert len({first for first, _ in tokens.values()}) == 1
    assert tokens["mlm"] == tokens["condenser"] == tokens["condenser+generator"]
    assert tokens["mlm+contrastive"] == tokens["condenser+cocondenser"]
    assert sum(tokens["mlm"]) == pytest.approx(sum(tokens["mlm+contrastive"]), rel=0.1)
    generated = [" ".join(cells[f"data-tiny-condenser{arm}-10-1.json"]["commands"]) for arm in ("", "+generator")]
    assert ["--corruption generator:data-tiny/mlm-mlm-1 " in one for one in generated] == [False, True]
    for cell in cells.values():
        values = np.array(cell["per_query"]["MRR@10"].split(), float)
        assert (len(values), cell["pool"]["passages"]) == (8, 24)
        assert values.mean() == pytest.approx(cell["means"]["MRR@10"], abs=1e-3)
    assert not any((tmp_path / "work" / "data-tiny" / "cells").iterdir())

    gone = tmp_path / "results" / "data-tiny-condenser-10-1.json"
    gone.unlink()
    again = study(*words)
    assert again.stdout == first.stdout and "condenser: 2 steps done" not in again.stderr
    assert json.loads(gone.read_text())["per_query"] == cells[gone.name]["per_query"]
    other = study(*words, "--table", "--set", "pretrain_rate=0.5")
    assert other.returncode == 2 and "was made with another pretrain_rate" in other.stderr


@pytest.mark.slow
def test_random_weights_are_one_start_for_all_arms(tmp_path: Path, data: Path) -> None:
    words = ["--quick", "--gpu", "--collections", data, "--seeds", "1", "--percents", "0", "--arms", "none", "mlm"]
    done = study(*words, "--output", tmp_path / "results", "--work", tmp_path / "work")
    assert done.returncode == 0, done.stderr
    cells = [json.loads((tmp_path / "results" / f"data-random-{arm}-0-1.json").read_text()) for arm in ("none", "mlm")]
    assert [len(cell["tokens"]) for cell in cells] == [0, 2]
    for cell, option in zip(cells, ("--encoder", "--init"), strict=True):
        assert f"{option} data-random/random-1 " in cell["commands"][0]


def test_pool_holds_the_answers_and_labels_nest(tmp_path: Path, data: Path) -> None:
    collection = open_collection(data)
    write_pool(collection, tmp_path / "pool", queries=5, passages=9)
    pool = open_collection(tmp_path / "pool")
    qrels = pool.qrels("test")
    assert len(list(pool.passages())) == 9 and len(qrels) == len(list(pool.queries("test"))) == 5
    assert all(f"p{query[1:]}" in pool.lookup() and grades == {f"p{query[1:]}": 1} for query, grades in qrels.items())
    write_pool(collection, tmp_path / "whole", queries=0, passages=0)
    assert len(open_collection(tmp_path / "whole").qrels("test")) == sum(i % 6 > 0 for i in range(40, 52))

    for seed in (1, 2):
        write_labels(collection, tmp_path / f"labels-{seed}", percents=[0, 10, 50], seed=seed)
    labels, others = (open_collection(tmp_path / f"labels-{seed}") for seed in (1, 2))
    shares = [set(labels.qrels(percent)) for percent in ("10", "50", "100")]
    assert list(map(len, shares)) == [4, 20, 40] and shares[0] < shares[1] < shares[2]
    assert set(others.qrels("10")) != shares[0]


def cell(arm: str, seed: int, values: list[float]) -> dict[str, Any]:
    mean = {"MRR@10": float(np.mean(values))}
    return {"arm": arm, "percent": 1, "seed": seed, "means": mean, "per_query": {"MRR@10": " ".join(map(str, values))}}


def test_tables_average_seeds_and_compare_queries() -> None:
    """Half the queries gain .5 with one seed of two: .125 in the mean, and no query is worse."""
    base, better = [0.0] * 40, [0.5] * 20 + [0.0] * 20
    cells = [cell("none", 1, base), cell("none", 2, base), cell("mlm", 1, better), cell("mlm", 2, base)]
    assert means(cells, "MRR@10").rows == [["none", ".000 ± .000"], ["mlm", ".125 ± .177"]]
    table = differences(cells, "MRR@10")
    assert table is not None
    ((name, text),) = table.rows
    assert name == "mlm - none" and text.startswith("+.125 [+.0") and text.endswith("]*")
    assert differences(cells[:2], "MRR@10") is None


def test_settings_are_changed_by_name() -> None:
    from condenser.errors import UserError

    changed = settings_of(
        gpu=True,
        quick=False,
        changes=["model_size=small", "second_steps=7", "late_mlm=false", 'finetune_steps={"100": 40}'],
    )
    assert (changed.model_size, changed.second_steps, changed.late_mlm) == ("small", 7, False)
    assert changed.finetune_steps == {0: 0, 1: 50, 10: 150, 100: 40}
    for change, said in (
        ('finetune_steps={"5": 3}', "no share 5"),
        ('finetune_steps={"10": 0.5}', "expected whole numbers"),
        ("stepps=1", "--set stepps: unknown setting"),
        ("late_mlm=1", "late_mlm is '1', expected true"),
    ):
        with pytest.raises(UserError, match=said):
            settings_of(gpu=False, quick=False, changes=[change])
