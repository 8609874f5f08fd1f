"""Measure reading and looking up passages of MS MARCO's size; the last line is JSON.

2,000,000 passages of 56 words in ``collection.tsv``, and 3,000 questions with 100 passages each in one JSON array as
DPR has them:

* ``stream_us``: CPU microseconds a passage of reading them all in order;
* ``build_s``: CPU seconds until the first look-up;
* ``access_us``: CPU microseconds of a look-up by a random id; by the clock, the median and the longest of each hundred;
* ``array_mb_s``: megabytes of the JSON array read in a CPU second; ``array_access_us``: of a look-up in it;
* ``anonymous_mb``: peak of anonymous memory over all of this, start-up included, without the pages of mapped files.

``--quick`` takes a tenth of the passages and questions. Files go where temporary ones go (TMPDIR): 0.9 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from retrieval.collections import open_collection

WORDS = 56
LOOKUPS = 100_000


class AnonymousMemory:
    """Watches this process's anonymous memory from a thread; ``peak`` is in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            lines = Path("/proc/self/status").read_text().splitlines()
            line = next(line for line in lines if line.startswith("RssAnon:"))
            self.peak = max(self.peak, int(line.split()[1]) * 1024)


def texts(seed: int = 0) -> list[str]:
    """Return a thousand texts of 56 words, to be put together anew."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(5000)]
    return [" ".join(draw.choices(words, k=WORDS)) for _ in range(1000)]


def write_collection(folder: Path, passages: int) -> None:
    """Write ``collection.tsv``; the ids are no row numbers and in no order."""
    draw, known = random.Random(1), texts()
    with (folder / "collection.tsv").open("w") as stream:
        for number in range(passages):
            stream.write(f"{number * 7919 % 10_000_019}\t{number} {known[draw.randrange(1000)]}\n")


def write_array(path: Path, questions: int) -> None:
    """Write DPR's training file: one array of questions with 100 passages each."""
    draw, known = random.Random(2), texts()
    with path.open("w") as stream:
        for number in range(questions):
            contexts = [
                {"title": f"title {draw.randrange(10_000)}", "text": known[draw.randrange(1000)], "score": 1.5}
                for _ in range(100)
            ]
            record = {
                "question": f"question {number}",
                "answers": ["a"],
                "positive_ctxs": contexts[:1],
                "negative_ctxs": contexts[1:50],
                "hard_negative_ctxs": contexts[50:],
            }
            stream.write(("[" if number == 0 else ",\n") + json.dumps(record, indent=4))
        stream.write("]\n")


def measure_collection(folder: Path, passages: int) -> dict[str, float]:
    """Read the passages in order, then look some up."""
    collection = open_collection(folder)
    start = time.process_time()
    count = sum(1 for _ in collection.passages())
    stream_us = (time.process_time() - start) / count * 1e6
    start = time.process_time()
    store = collection.lookup()
    build_s = time.process_time() - start
    draw = random.Random(3)
    numbers = [draw.randrange(passages) for _ in range(LOOKUPS)]
    times, start = [], time.process_time()
    for number in numbers:
        began = time.perf_counter()
        found = store[str(number * 7919 % 10_000_019)]
        times.append(time.perf_counter() - began)
        if not found.text.startswith(f"{number} "):
            raise SystemExit(f"passage {number} was not found but {found}")
    access_us = (time.process_time() - start) / LOOKUPS * 1e6
    times.sort()
    return {
        "stream_us": stream_us,
        "build_s": build_s,
        "access_us": access_us,
        "access_median_us": times[LOOKUPS // 2] * 1e6,
        "access_p99_us": times[-LOOKUPS // 100] * 1e6,
    }


def measure_array(path: Path) -> dict[str, float]:
    """Gather the questions of DPR's file and open its passages."""
    collection = open_collection(path)
    start = time.process_time()
    collection.qrels("train")
    seconds = time.process_time() - start
    store = collection.lookup()
    ids = random.Random(4).sample(list(store), 2000)
    start = time.process_time()
    for passage_id in ids:
        store[passage_id]
    access_us = (time.process_time() - start) / len(ids) * 1e6
    return {"array_mb_s": path.stat().st_size / 1e6 / seconds, "array_access_us": access_us}


def main() -> None:
    """Print each measurement, and all of them as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the passages and questions")
    scale = 10 if parser.parse_args().quick else 1
    passages = 2_000_000 // scale
    with tempfile.TemporaryDirectory() as name, AnonymousMemory() as memory:
        folder = Path(name)
        write_collection(folder, passages)
        write_array(folder / "nq-train.json", 3000 // scale)
        results = {"passages": float(passages)} | measure_collection(folder, passages)
        print(f"collection.tsv: peak of anonymous memory {memory.peak / 1e6:.0f} MB", flush=True)
        results |= measure_array(folder / "nq-train.json")
    results["anonymous_mb"] = memory.peak / 1e6
    for title, value in results.items():
        print(f"{title:16} {value:,.1f}")
    print(json.dumps({title: round(value, 2) for title, value in results.items()}))


if __name__ == "__main__":
    main()
