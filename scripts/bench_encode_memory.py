"""Measure how much memory `condenser encode` takes above its loaded model; the last line is JSON.

Generated passages (5 to 120 words) and a random BERT of two layers, so that the texts, their tokens and their
vectors are what counts; every number is of anonymous memory, apart from mapped files, in a process of its own.
``loaded_mb`` is what the process holds once the model has encoded a batch, ``peak_above_mb`` the most that
encoding takes above that.

200,000 passages; ``--passages`` takes another number, ``--dimension`` another length of the vectors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WORDS = "river bank money water fish heart blood cell disease treatment symptom fever pain doctor cat dog".split()


def write_passages(file: Path, count: int) -> None:
    """Write passages of 5 to 120 words, one JSON object a line."""
    draw = random.Random(0)
    with file.open("w") as stream:
        for number in range(count):
            text = " ".join(draw.choices(WORDS, k=draw.randint(5, 120)))
            stream.write(json.dumps({"_id": f"passage-{number}", "title": "", "text": text}) + "\n")


def write_model(folder: Path, dimension: int) -> None:
    """Write a random BERT of two layers with a small vocabulary."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS) + 5,
        hidden_size=dimension,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=dimension,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)


def anonymous_mb() -> float:
    """Return what this process holds apart from mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this kernel does not tell RssAnon")


def encode_and_watch(folder: Path) -> None:
    """Load the model, then encode, and print both measurements."""
    from retrieval.encode import encode
    from retrieval.encoder import Encoder
    from retrieval.options import EncodeOptions

    Encoder.load(folder / "model").encode_queries(["river bank"] * 64)
    loaded = peak = anonymous_mb()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    encode(
        EncodeOptions(
            encoder=str(folder / "model"),
            input=str(folder / "corpus.jsonl"),
            output=str(folder / "vectors"),
            device="cpu",
        )
    )
    done.set()
    watcher.join()
    print(json.dumps({"loaded_mb": round(loaded, 1), "peak_above_mb": round(peak - loaded, 1)}))


def main() -> None:
    """Print the measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--dimension", type=int, default=32)
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        encode_and_watch(options.watch)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_passages(folder / "corpus.jsonl", options.passages)
        write_model(folder / "model", options.dimension)
        child = subprocess.run(
            [sys.executable, __file__, "--watch", str(folder)], stdout=subprocess.PIPE, check=True, env=os.environ
        )
        measured = json.loads(child.stdout.splitlines()[-1])
        print(json.dumps({"passages": options.passages, "dimension": options.dimension, **measured}))


if __name__ == "__main__":
    main()
