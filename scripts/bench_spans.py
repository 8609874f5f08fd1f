"""Measure `condenser spans` against its tokenizer alone; the last line is JSON.

Generated documents (sentences of the embedded collections, shuffled), a WordPiece vocabulary of 30,000
entries learnt from them, all processors; the two variants take turns, each in a process of
its own:

* raw: ``encode_batch_fast`` over 1,000 texts at a time, and ``.ids``; reading the texts is not counted;
* build: all of `build_spans` but its imports, from the file to the finished folder.

``ratio`` is raw's CPU seconds over build's, ``wall_ratio`` the same of seconds on the clock (medians of the
rounds); ``peak_anonymous_mb`` is the most that build and its workers held together, apart from mapped files.

1 GB of text and one round; ``--quick`` takes 60 MB and three rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

VOCABULARY = 30_000


def write_text(path: Path, megabytes: int) -> None:
    """Write documents of three to nine shuffled sentences, one JSON object a line."""
    from retrieval.collections import open_collection

    texts = [passage.text for name in ("medquad", "nq-qed") for passage in open_collection(name).passages()]
    sentences = [sentence + "." for text in texts for sentence in text.split(". ") if 20 < len(sentence) < 400]
    draw = random.Random(0)
    left = megabytes * 10**6
    with path.open("w") as stream:
        number = 0
        while left > 0:
            text = " ".join(draw.choices(sentences, k=draw.randint(3, 9)))
            left -= stream.write(json.dumps({"_id": str(number), "text": text}, ensure_ascii=False) + "\n")
            number += 1


def write_tokenizer(text: Path, folder: Path) -> None:
    """Learn a vocabulary from the first 10,000 documents."""
    from condenser.corpus.vocabulary import train_wordpiece

    texts = list(itertools.chain.from_iterable(itertools.islice(batches(text), 10)))
    train_wordpiece(lambda: texts, VOCABULARY).save_pretrained(folder)


def batches(path: Path) -> Iterator[list[str]]:
    """Yield 1,000 texts at a time."""
    batch = []
    with path.open() as stream:
        for line in stream:
            batch.append(json.loads(line)["text"])
            if len(batch) == 1000:
                yield batch
                batch = []
    if batch:
        yield batch


def run_raw(text: Path, tokenizer: Path) -> dict[str, float]:
    """Tokenize the texts and do nothing else."""
    import tokenizers

    engine = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    engine.no_truncation()
    engine.no_padding()
    cpu = wall = 0.0
    for batch in batches(text):
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        for encoding in engine.encode_batch_fast(batch, add_special_tokens=False):
            encoding.ids  # noqa: B018 - making the list is what is measured
        cpu += time.process_time() - cpu_start
        wall += time.perf_counter() - wall_start
    return {"cpu": cpu, "wall": wall}


def run_build(text: Path, tokenizer: Path) -> dict[str, float]:
    """Build the token store."""
    from condenser.corpus.spans import build_spans
    from condenser.corpus.tokens import load_tokenizer
    from condenser.options import SpansOptions

    load_tokenizer(tokenizer)  # imports transformers
    output = text.with_name("spans")
    shutil.rmtree(output, ignore_errors=True)
    options = SpansOptions(input=[str(text)], tokenizer=str(tokenizer), output=str(output))
    cpu_start, wall_start = _cpu_seconds(), time.perf_counter()
    build_spans(options)
    return {"cpu": _cpu_seconds() - cpu_start, "wall": time.perf_counter() - wall_start}


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(variant: str, text: Path, tokenizer: Path) -> dict[str, float]:
    """Run a variant in a process of its own; watch what it and its children hold."""
    command = [sys.executable, __file__, "--run", variant, "--text", str(text), "--tokenizer", str(tokenizer)]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, sum(_anonymous_bytes(pid) for pid in _family(process.pid)))
            time.sleep(0.1)
        output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"{variant} failed")
    return json.loads(output.splitlines()[-1]) | {"peak": peak / 1e6}


def _family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    family = [pid]
    for member in family:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            try:
                family += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return family


def _anonymous_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def main() -> None:
    """Print each measurement, and all of them as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 MB, three rounds")
    parser.add_argument("--run", choices=["raw", "build"], help=argparse.SUPPRESS)
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run = run_raw if arguments.run == "raw" else run_build
        print(json.dumps(run(arguments.text, arguments.tokenizer)))
        return
    megabytes, rounds = (60, 3) if arguments.quick else (1000, 1)
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = Path(folder) / "text.jsonl", Path(folder) / "tokenizer"
        write_text(text, megabytes)
        write_tokenizer(text, tokenizer)
        results: dict[str, list[dict[str, float]]] = {"raw": [], "build": []}
        for number in range(rounds):
            for variant, measured in results.items():
                measured.append(measure(variant, text, tokenizer))
                shown = ", ".join(f"{key} {value:.1f}" for key, value in measured[-1].items())
                print(f"round {number + 1} {variant:5} {shown}", flush=True)
    middle = {
        (variant, key): statistics.median(one[key] for one in measured)
        for variant, measured in results.items()
        for key in ("cpu", "wall")
    }
    print(
        json.dumps(
            {
                "megabytes": megabytes,
                "threads": len(os.sched_getaffinity(0)),
                "ratio": round(middle["raw", "cpu"] / middle["build", "cpu"], 3),
                "wall_ratio": round(middle["raw", "wall"] / middle["build", "wall"], 3),
                "build_mb_per_s": round(megabytes / middle["build", "wall"], 2),
                "peak_anonymous_mb": round(max(one["peak"] for one in results["build"])),
            }
        )
    )


if __name__ == "__main__":
    main()
