"""Pairs of texts scored by a cross-encoder, block by block, each block kept in a file: a killed run loses one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from condenser.errors import RunFailed
from condenser.faults import fault_point
from condenser.files import atomic_write_bytes
from condenser.talk import Meter
from retrieval.records import Passage

if TYPE_CHECKING:
    from retrieval.cross_encoder import CrossEncoder

# Pairs that are scored together and kept at once: a killed run loses no more than these, and among so many there are
# others of like length.
_PAIRS_AT_ONCE = 2048


class Asked(Protocol):
    """A query and the passages to score with it."""

    @property
    def query_id(self) -> str:
        """The query."""
        ...

    @property
    def asked(self) -> Sequence[str]:
        """The passages, at least one."""
        ...


Task = TypeVar("Task", bound=Asked)


class PairScorer(NamedTuple):
    """What scores pairs, and where their scores are kept.

    Attributes:
        judge: the cross-encoder.
        queries: their texts, by id.
        passages: by id.
        folder: for the files of the blocks; it belongs to one judge and one list of tasks.
        batch_tokens: tokens per batch; None takes what suits the device.
    """

    judge: CrossEncoder
    queries: Mapping[str, str]
    passages: Mapping[str, Passage]
    folder: Path
    batch_tokens: int | None = None

    def score(self, tasks: Iterable[Task], meter: Meter) -> Iterator[tuple[Task, np.ndarray, int]]:
        """Yield each task with its scores (asked,) float32, and how many of its pairs were too long.

        Raises:
            RunFailed: a score that is not a number.
        """
        for number, block in enumerate(_blocks(tasks)):
            scores, cut = self._block(self.folder / f"{number:05d}.npy", block, meter)
            first = 0
            for task in block:
                own = slice(first, first + len(task.asked))
                first = own.stop
                yield task, scores[own], int(cut[own].sum())

    def _block(self, file: Path, block: Sequence[Asked], meter: Meter) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and cuts (pairs,) of a block, from its file if that is there."""
        if file.is_file():
            scores, cut = np.load(file, allow_pickle=False)
            meter.advance(len(scores))
            return scores, cut
        judge = self.judge
        texts = [
            (self.queries[task.query_id], judge.passage_text(self.passages[one]))
            for task in block
            for one in task.asked
        ]
        tokens = judge.tokenize(texts)
        scores = judge.score_tokens(tokens, batch_tokens=self.batch_tokens, on_batch=meter.advance)
        cut = np.array(tokens.cut, np.float32)
        if not np.isfinite(scores).all():
            raise RunFailed("gives scores that are not numbers", judge.source, "try --dtype float32")
        with atomic_write_bytes(file) as stream:
            np.save(stream, np.stack([scores, cut]))
        fault_point("block-scored")
        return scores, cut


def _blocks(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    block: list[Task] = []
    pairs = 0
    for task in tasks:
        block.append(task)
        pairs += len(task.asked)
        if pairs >= _PAIRS_AT_ONCE:
            yield block
            block, pairs = [], 0
    if block:
        yield block
