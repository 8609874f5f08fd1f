"""The published pretraining, each recipe begun on 200 lines of its own input, and what its script says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from condenser.artifacts import load_manifest
from retrieval.cli import parse_options
from tests.conftest import WORDS

RECIPES = Path(__file__).parents[1] / "scripts" / "recipes"
LINES = 200
CPU = ["--batch_size", "8", "--epochs", "0.1", "--mixed_precision", "no", "--device", "cpu", "--workers", "0"]


def words_of(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 13 + place * (number % 7 + 1)) % len(WORDS)] for place in range(count))


def wikipedia(folder: Path) -> None:
    """Objects as WikiExtractor --json writes them, some of them with no text."""
    records = [
        {
            "id": str(i),
            "revid": str(1000 + i),
            "url": f"https://en.wikipedia.org/wiki?curid={i}",
            "title": f"City {i}",
            "text": "\n".join(f"{words_of(i + part, 40)}." for part in range(i % 9)),
        }
        for i in range(LINES)
    ]
    (folder / "wiki.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def books(folder: Path) -> None:
    """A sentence a line, in lower case, words and signs apart; the last line of a file may lack its end."""
    for number in (1, 2):
        lines = [f"{words_of(i * number, 9)} ." for i in range(LINES)]
        (folder / f"books_large_p{number}.txt").write_text("\n".join(lines) + "\n")


def marco(folder: Path) -> None:
    """Four columns with tabs between, quotes that are text, and documents without a title or a body."""
    lines = [f'D{i}\thttps://a.b/{i}\t{words_of(i, i % 4)}\ta "{words_of(i, i % 300)}' for i in range(LINES)]
    (folder / "msmarco-docs.tsv").write_text("\n".join(lines) + "\n")


def run_script(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(RECIPES / "pretrain.sh"), *map(str, words)]
    environment = os.environ | {"PATH": path} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def long_bert(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny BERT with positions for 128 tokens and 6 layers, as skip_from asks for."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("long-bert")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig.from_pretrained(tiny_bert, max_position_embeddings=128, num_hidden_layers=6)
    BertForMaskedLM(config).save_pretrained(folder)
    return str(folder)


def test_hyperparameters_are_the_published_ones() -> None:
    for name in ("condenser-wiki", "cocondenser-wiki", "cocondenser-marco"):
        words = ["--config", str(RECIPES / f"{name}.yaml"), "--data", "spans", "--output", "model"]
        options = parse_options("pretrain", words)
        assert (options.learning_rate, options.warmup_ratio, options.weight_decay) == (1e-4, 0.1, 0.01)
        assert (options.epochs, options.max_steps, options.mixed_precision) == (8, None, "fp16")
        assert (options.random_tokens, options.mlm_probability) == ("all", 0.15)
        if name == "condenser-wiki":
            assert (options.init, options.batch_size, options.objective) == ("bert-base-uncased", 1024, "condenser")
            assert (options.head_layers, options.skip_from, options.late_mlm) == (2, 6, True)
        else:
            assert (options.init, options.batch_size, options.objective) == (None, 2048, "cocondenser")
            assert options.gradient_accumulation == 1 and options.cache_chunk == 64


@pytest.mark.slow
def test_every_recipe_begins(tmp_path: Path, long_bert: str) -> None:
    """Condenser, then coCondenser from its folder, as they are meant to follow."""
    for write in (wikipedia, books, marco):
        write(tmp_path)
    model = tmp_path / "condenser-wiki" / "model"
    for name, start, documents, longest in (
        ("condenser-wiki", long_bert, LINES + -(-2 * LINES // 64), 128),
        ("cocondenser-wiki", model, LINES, 128),
        ("cocondenser-marco", model, LINES, 80),
    ):
        done = run_script(name, tmp_path, tmp_path / name, "--init", start, *CPU, TOKENIZER=long_bert, LAUNCH="env")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [str(tmp_path / name / "spans"), str(tmp_path / name / "model")]
        spans = load_manifest(tmp_path / name / "spans", "spans")["facts"]
        assert (spans["documents"], spans["max_length"]) == (documents, longest)
        assert json.loads((tmp_path / name / "model" / "condenser.json").read_text())["skip_from"] == 6
        assert not list((tmp_path / name).glob("*.partial"))


def test_scripts_name_what_is_missing(tmp_path: Path) -> None:
    for words, said in (
        (("condenser-wiki", tmp_path, "out"), f"pretrain.sh: error: {tmp_path}/wiki.jsonl (or .gz) is missing: Wiki"),
        (("cocondenser-marco", tmp_path, "out"), f"pretrain.sh: error: {tmp_path}/msmarco-docs.tsv (or .gz) is"),
        (("condenser", tmp_path, "out"), "pretrain.sh: error: unknown recipe condenser, expected condenser-wiki, "),
        (("condenser-wiki",), "usage: pretrain.sh condenser-wiki|"),
    ):  # fmt: skip
        done = run_script(*words)
        assert done.returncode == 2 and done.stderr.startswith(said), done.stderr
    (tmp_path / "msmarco-docs.tsv.gz").write_bytes(b"\x1f\x8b\x08 cut off")
    cut_off = run_script("cocondenser-marco", tmp_path, tmp_path / "out")
    assert cut_off.returncode != 0 and not (tmp_path / "out" / "documents.tsv.gz").exists()
    assert not Path("out").exists()
