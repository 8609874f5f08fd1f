"""The model card: its figures are the log's, its code runs, its command is one that the command takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.cli import parse_options
from retrieval.encoder import Encoder
from retrieval.model_card import best_scores, write_model_card
from retrieval.options import FinetuneOptions

LOG = """{"step":10,"loss":2.0,"contrastive":2.0,"grad_norm":1.0,"lr":0.1}
{"step":10,"dev_pool_mrr@10":0.25,"dev_pool_recall@100":0.5}
{"step":20,"dev_pool_mrr@10":0.75,"dev_pool_recall@100":0.625}
{"step":30,"dev_pool_mrr@10":0.75,"dev_pool_recall@100":0.875}
"""


def options_for(encoder: Path, **others: Any) -> FinetuneOptions:
    return FinetuneOptions(encoder=str(encoder), collection=["/data/topics"], output="/models/out", **others)


def write(folder: Path, tiny_bert: Path, log: str = LOG, others: dict[str, Any] | None = None, **config: Any) -> str:
    encoder = Encoder.load(tiny_bert, passage_max_length=8, **config)
    encoder.save(folder, "")
    (folder / "log.jsonl").write_text(log)
    options = options_for(tiny_bert, **(others or {}))
    write_model_card(folder, options, ["topics"], encoder.config, encoder.dimension)
    return (folder / "README.md").read_text()


def blocks(card: str) -> list[str]:
    """Return the indented blocks, without the indent."""
    found = re.findall(r"(?:^    .*\n)+", card, re.MULTILINE)
    return [re.sub("^    ", "", block, flags=re.MULTILINE) for block in found]


def test_figures_are_those_of_the_weights_that_were_kept(tiny_bert: Path, tmp_path: Path) -> None:
    """Of two equal scores the first is kept, as the loop does."""
    card = write(tmp_path / "out", tiny_bert, others={"eval_pool": 500})
    best = best_scores(tmp_path / "out" / "log.jsonl")
    assert best is not None and best.step == 20
    assert "Figures on split `dev` after step 20, whose weights these are." in card
    assert "| dev_pool_mrr@10 | 0.7500 |\n| dev_pool_recall@100 | 0.6250 |\n" in card
    assert "a pool of 500 passages, so they are higher than test figures" in card
    assert f"started from `{tiny_bert.name}`: cls pooling, vectors of 32 numbers, dot similarity" in card


def test_a_run_without_dev_says_so(tiny_bert: Path, tmp_path: Path) -> None:
    card = write(tmp_path / "out", tiny_bert, log=LOG.splitlines()[0] + "\n")
    assert "No dev figures were taken: the weights are those of the last step." in card


def test_the_command_is_the_run_but_for_places(tiny_bert: Path, tmp_path: Path) -> None:
    others = {
        "batch_size": 8, "negatives": 2, "normalize": True, "matryoshka": [16, 8], "query_prompt": "ask: it's ",
        "log_every": 3, "learning_rate": 3e-4,
    }  # fmt: skip
    card = write(tmp_path / "out", tiny_bert, others=others)
    assert "/data" not in card and "/models" not in card and str(tiny_bert.parent) not in card
    verb, *words = shlex.split(blocks(card)[0])[1:]
    found = parse_options(verb, [*words, "--output", "x"])
    expected = options_for(
        Path(tiny_bert.name), **{name: value for name, value in others.items() if name != "log_every"}
    )
    assert found == FinetuneOptions(**vars(expected) | {"collection": ["topics"], "output": "x"})


@pytest.mark.parametrize(
    "config",
    [
        {"pooling": "cls"},
        {"pooling": "mean", "normalize": True, "passage_prompt": "passage: "},
        {"pooling": "last"},
        {"pooling": "mean", "untied": True},
        {"pooling": "cls", "projection": 8},
    ],
    ids=str,
)
def test_the_code_in_the_card_gives_the_encoders_vectors(
    tiny_bert: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = tmp_path / "out"
    _, *codes = blocks(write(folder, tiny_bert, **config))
    assert len(codes) == (1 if "projection" in config else 2)
    encoder = Encoder.load(folder)
    queries = encoder.encode_queries(["where is the cat"])
    texts = ["the old cat is in the city and runs to the river", "a dog"]
    passages = encoder.encode_passages(texts)
    prompt = config.get("passage_prompt", "")
    for code in codes:
        for shown, real in (
            ("FOLDER", str(folder)),
            ('["a question"]', '["where is the cat"]'),
            ('["a passage"]', repr(texts)),
            (f"[{prompt + 'a passage'!r}]", repr([prompt + text for text in texts])),
        ):
            code = code.replace(shown, real)
        names: dict[str, Any] = {}
        exec(code, names)
        found = names["scores"] if "scores" in names else queries @ names["vectors"].numpy().T
        np.testing.assert_allclose(found, queries @ passages.T, rtol=1e-4, atol=1e-4)
