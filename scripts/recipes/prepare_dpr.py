"""Join DPR's files into one collection, for the recipes of Natural Questions and TriviaQA.

What must be there, from DPR's download list (nothing is downloaded here); each may be packed as .gz:

    data.retriever.nq-train             biencoder-nq-train.json      (or biencoder-trivia-train.json)
    data.retriever.qas.nq-test          nq-test.qa.csv               (or trivia-test.qa.csv)
    data.wikipedia_split.psgs_w100      psgs_w100.tsv

    python scripts/recipes/prepare_dpr.py --train biencoder-nq-train.json --test nq-test.qa.csv \
        --passages psgs_w100.tsv --output nq

The collection holds the passages of Wikipedia (the quotes that DPR's file puts around its texts taken away), the
training questions with the passages and BM25 negatives that they name by id, and the test questions with their answers,
which nobody judged: `condenser evaluate --answers` measures them.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import TextIO

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from condenser.artifacts import Workspace
from condenser.errors import UserError
from condenser.files import atomic_write, existing_file, read_lines
from condenser.manifest import fingerprint
from condenser.talk import say, track
from retrieval.collections import open_collection


def write_passages(source: Path, stream: TextIO) -> int:
    """Write ``id, title, text`` for each passage of DPR's ``id, text, title``; return how many."""
    count = 0
    for number, line in track(read_lines(source), "passages", unit="lines"):
        cells = line.split("\t")
        if len(cells) != 3:
            raise UserError(f"found {len(cells)} columns, expected id, text, title", f"{source}:{number}")
        name, text, title = cells
        if name != "id":
            stream.write(f"{name}\t{unquoted(title)}\t{unquoted(text)}\n")
            count += 1
    return count


def unquoted(text: str) -> str:
    """Return a field without the quotes that a writer of CSV puts around it."""
    return text[1:-1].replace('""', '"') if len(text) > 1 and text[0] == text[-1] == '"' else text


def write_questions(source: Path, stream: TextIO) -> int:
    """Write the questions of DPR's ``question, ['answer', ...]`` as JSON lines; return how many."""
    count = 0
    for number, line in read_lines(source):
        question, _, answers = line.partition("\t")
        try:
            names = ast.literal_eval(answers)
        except (ValueError, SyntaxError):
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError("expected a question and a list of answers, parted by a tab", f"{source}:{number}")
        write_line(stream, {"_id": f"test-{number}", "text": question, "answers": names})
        count += 1
    return count


def write_line(stream: TextIO, value: dict[str, object]) -> None:
    """Write one line of JSON."""
    stream.write(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE).decode())


def prepare(train: Path, test: Path, passages: Path, output: Path) -> Path:
    """Write the collection, whole or not at all."""
    files = {"train": train, "test": test, "passages": passages}
    inputs = {name: fingerprint(existing_file(file)) for name, file in files.items()}
    with Workspace(output, "collection", config={}, inputs=inputs) as workspace:
        if workspace.done:
            return workspace.output
        folder = workspace.path
        given = open_collection(train, "dpr")
        qrels, negatives = given.qrels("train"), given.negatives("train")
        (folder / "qrels").mkdir()
        (folder / "negatives").mkdir()
        with atomic_write(folder / "queries.train.jsonl") as stream:
            for query in given.queries("train"):
                write_line(stream, {"_id": query.id, "text": query.text, "answers": query.answers})
        with atomic_write(folder / "qrels" / "train.tsv") as stream:
            stream.writelines(f"{query}\t{passage}\t1\n" for query, grades in qrels.items() for passage in grades)
        with atomic_write(folder / "negatives" / "train.jsonl") as stream:
            for query_id, names in negatives.items():
                write_line(stream, {"query_id": query_id, "negatives": names})
        with atomic_write(folder / "queries.test.jsonl") as stream:
            questions = write_questions(test, stream)
        with atomic_write(folder / "corpus.tsv") as stream:
            count = write_passages(passages, stream)
        answered = sum(any(grades.values()) for grades in qrels.values())
        say(f"{output}: {count:,} passages, {answered:,} training questions, {questions:,} test questions")
        return workspace.commit({"passages": count, "train": answered, "test": questions})


def main() -> int:
    """Parse the arguments and prepare; bad input ends in one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, what in (
        ("train", "biencoder-nq-train.json"),
        ("test", "nq-test.qa.csv"),
        ("passages", "psgs_w100.tsv"),
        ("output", "folder to write"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=what)
    given = parser.parse_args()
    try:
        prepare(given.train, given.test, given.passages, given.output)
    except UserError as error:
        print(f"prepare_dpr: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
