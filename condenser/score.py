"""The verb ``score``: a file of texts, or of queries with their passages, to how plausible each is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import orjson

from condenser.artifacts import refuse_overwriting
from condenser.corpus.documents import read_documents
from condenser.errors import UserError
from condenser.files import atomic_write, identifier, read_records, write_json
from condenser.manifest import identity
from condenser.score_options import ScoreOptions
from condenser.scorer import Score, Scorer
from condenser.talk import Meter, say, warn

_AT_ONCE = 2048
# Beyond this, exp(-E) is not near to a probability.
_FAR_FROM_ONE = 0.5


class Item(NamedTuple):
    """What is scored: ``text``, or ``text`` given ``passage``."""

    id: str
    text: str
    passage: str | None = None


def score(options: ScoreOptions) -> Path | None:
    """Score the texts of a file and write a JSON line for each, in the file's order.

    ``pll`` is the sum over ``tokens`` of each token's part, ``pll_per_token`` their mean. A query with its passage has
    ``pll_given_passage`` and ``gain`` besides, the one less the other. With Electric, log Z is estimated on a sample
    of the texts (queries), and said.

    Returns:
        The output file, beside which OUTPUT.json holds what made it; None when the lines went to stdout.

    Raises:
        UserError: what reading the file and `Scorer.load` raise.
    """
    if options.output is not None:
        refuse_overwriting(options.output, options.file, options.model)
    items = read_items(options.file)
    items = chain([next(items)], items)  # a file that cannot be read is told before a model is loaded
    scorer = Scorer.load(
        options.model,
        method=options.method,
        device=options.device,
        max_length=options.max_length,
        batch_tokens=options.batch_tokens,
    )
    sample = _Sample(options.log_z_positions if scorer.method == "electric" else 0, options.seed)
    cut = tokens = 0
    total = 0.0
    with _opened(options.output) as stream, Meter("score", unit="texts") as meter:
        while block := list(islice(items, _AT_ONCE)):
            for item, line in zip(block, _lines(scorer, block, options.per_token), strict=True):
                cut += line.pop("cut")
                tokens += line["tokens"]
                total += line["pll"]
                sample.offer(item.text)
                stream.write(orjson.dumps(line).decode() + "\n")
            meter.advance(len(block))
    told: dict[str, Any] = {
        "method": scorer.method,
        "model": identity(options.model),
        "texts": meter.done,
        "tokens": tokens,
        "pll_per_token": total / max(tokens, 1),
        "cut": cut,
    }
    say(
        f"scored {meter.done:,} texts of {tokens:,} tokens by {scorer.method}, "
        f"mean of a token {told['pll_per_token']:.3f}, {cut:,} cut at {scorer.max_length:,} tokens"
    )
    if sample.kept:
        told["log_z"] = _tell_log_z(scorer, sample.kept, options)
    if options.output is None:
        return None
    write_json(f"{options.output}.json", told)
    return Path(options.output)


def read_items(path: str | Path) -> Iterator[Item]:
    """Yield what there is to score in a file.

    Objects with ``query`` and ``passage`` are pairs; anything else is read as documents are, a title before its text.

    Raises:
        UserError: what `read_documents` raises; a pair's passage or query that is missing or no text.
    """
    first = next(read_records(path), (0, {}))[1] if _holds_objects(Path(path)) else {}
    if "query" not in first:
        for document in read_documents([path]):
            yield Item(document.id, " ".join(filter(None, (document.title, *document.texts))))
        return
    for number, record in read_records(path):
        where = f"{path}:{number}"
        for key in ("query", "passage"):
            if not isinstance(record.get(key), str):
                raise UserError(f"{key} is {record.get(key)!r}, expected text", where, "a pair has query and passage")
        name = record.get("_id", record.get("id"))
        yield Item(where if name is None else identifier(name, where), record["query"], record["passage"])


def _holds_objects(path: Path) -> bool:
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    return bool(suffixes) and suffixes[-1] in (".jsonl", ".json")


def _lines(scorer: Scorer, block: list[Item], per_token: bool) -> list[dict[str, Any]]:
    texts = [item.text for item in block]
    if block[0].passage is None:
        return [_line(scorer, item, alone, per_token) for item, alone in zip(block, scorer.score(texts), strict=True)]
    gains = scorer.gain([str(item.passage) for item in block], texts)
    lines = []
    for item, (given, alone) in zip(block, gains, strict=True):
        line = _line(scorer, item, alone, per_token)
        line |= {"pll_given_passage": given.pll, "gain": given.pll - alone.pll, "cut": given.cut or alone.cut}
        if per_token:
            line["token_pll_given_passage"] = given.values.tolist()
        lines.append(line)
    return lines


def _line(scorer: Scorer, item: Item, alone: Score, per_token: bool) -> dict[str, Any]:
    line = {
        "_id": item.id,
        "pll": alone.pll,
        "tokens": len(alone.token_ids),
        "pll_per_token": alone.per_token,
        "cut": alone.cut,
    }
    if per_token:
        line |= {"token": scorer.tokens(alone.token_ids), "token_pll": alone.values.tolist()}
    return line


class _Sample:
    """A sample of all that is offered, each as likely as the others to be kept, of texts with something in them."""

    def __init__(self, size: int, seed: int) -> None:
        self.kept: list[str] = []
        self._size, self._seen, self._rng = size, 0, np.random.default_rng(seed)

    def offer(self, text: str) -> None:
        if not self._size or not text.strip():
            return
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(text)
        elif (place := int(self._rng.integers(self._seen))) < self._size:
            self.kept[place] = text


def _tell_log_z(scorer: Scorer, texts: list[str], options: ScoreOptions) -> dict[str, float]:
    log_z = scorer.log_z(texts, draws=options.log_z_draws, seed=options.seed)
    say(f"log Z at {log_z.positions:,} positions: mean {log_z.mean:.2f}, spread {log_z.spread:.2f}")
    if abs(log_z.mean) > _FAR_FROM_ONE:
        warn(
            "the scores are no log-probabilities (their mean log Z is not near 0): compare texts of one length or "
            "candidates for one place"
        )
    return log_z._asdict()


@contextmanager
def _opened(output: str | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with atomic_write(output) as stream:
        yield stream
