"""The study of ELECTRA and Electric: its measure, its pairs of sentences, and the whole at toy length."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from scripts.objectives_data import WORD, make_pairs, put
from scripts.objectives_study import auc
from tests.command import run_script
from tests.retrieval.test_check import write
from tests.test_recipe_study import words_of


def test_the_auc_is_the_share_of_pairs_in_order() -> None:
    scores = np.array([0.1, 0.4, 0.4, 0.8, 0.4, -1.0])
    positive = np.array([False, True, False, True, True, False])
    pairs = list(product(scores[positive], scores[~positive]))
    naive = sum((one > other) + 0.5 * (one == other) for one, other in pairs) / len(pairs)
    assert auc(scores, positive) == pytest.approx(naive)
    assert auc(-scores, positive) == pytest.approx(1 - naive)


def test_words_are_put_where_others_stood() -> None:
    sentence = "The heart, it beats."
    spans = [match.span() for match in WORD.finditer(sentence)]
    assert put(sentence, spans, {1: "lung", 3: "breathes"}) == "The lung, it breathes."
    assert put(sentence, spans, {}) == sentence


def test_pairs_differ_in_the_words_that_they_say() -> None:
    known = "One sentence that stands in the training passages as well."
    sentence = "Every year ten people of a thousand have a fever, cough or rash here."
    pairs = make_pairs([known, "fever fever cough"], [f"{known} Too short. {sentence}"], 5)
    assert [pair.sentence for pair in pairs] == [sentence]
    own, redrawn, swapped = (WORD.findall(text.lower()) for text in pairs[0])
    assert len(own) == len(redrawn) == len(swapped) == 14
    assert sum(one != other for one, other in zip(own, redrawn, strict=True)) == 2
    assert set(redrawn) - set(own) <= set(WORD.findall(known.lower()))
    assert Counter(swapped) == Counter(own)
    assert sum(one != other for one, other in zip(own, swapped, strict=True)) == 2


@pytest.mark.slow
def test_the_study_runs_once(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "data",
        passages={f"p{i}": f"{words_of(i, 9)}. {words_of(i + 9, 12)}." for i in range(81)},
        queries={"q": words_of(1, 3)},
        train=[("q", "p1", 1)],
        dev=[("q", "p1", 1)],
    )
    words = ["--quick", "--collection", folder, "--work", tmp_path / "work", "--output", tmp_path / "results"]
    seen = []
    for _ in range(2):
        done = run_script("objectives_study.py", *words)
        assert done.returncode == 0, done.stderr
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    assert seen[0] == seen[1] and done.stderr.count("up to date") == 2
    assert 0 <= seen[0]["electra"]["discriminator_auc"] <= 1
    assert seen[0]["electra"]["replaced"] > 0
    shares = seen[0]["electric"]["preferred"]
    assert shares["unigram"]["swapped"] == 0.5
    assert set(shares) == {"electric", "unigram", "noise_model", "discriminator", "generator"}
    result = json.loads((tmp_path / "results" / "electric.json").read_text())
    assert result["train_cpu_s"].keys() == {"electra", "electric"} and len(result["log"]) == 1
