"""BM25 in Lucene's variant: the baseline that every dense run is read against, and a source of hard negatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import bm25s
import numpy as np
import Stemmer

from condenser.errors import UserError
from condenser.talk import say, track
from eval.runs import write_run
from retrieval.collections import open_collection
from retrieval.options import Bm25Options
from retrieval.records import Hit, Passage, Query


class Bm25:
    """An inverted index over title and text, with English stop words and the Snowball English stemmer.

    The score of a passage is the sum over the query's words of

        idf * tf / (tf + k1 * (1 - b + b * length / mean length)),   idf = ln(1 + (N - df + 0.5) / (df + 0.5))

    (Lucene's BM25; Kamphuis et al., Which BM25 Do You Mean?, ECIR 2020), in float32. A word that the query
    repeats counts as often as it stands there.

    Args:
        passages: what is searched; ids must be unique.
        k1: how soon repetitions of a word stop adding to the score.
        b: how much long passages are held back, from 0 to 1.

    Raises:
        UserError: k1 or b out of range, no passages, or nothing but stop words in them.
    """

    def __init__(self, passages: Iterable[Passage], *, k1: float = 0.9, b: float = 0.4) -> None:
        if not k1 >= 0 or not 0 <= b <= 1:
            raise UserError(f"k1 is {k1} and b is {b}, expected k1 >= 0 and b between 0 and 1")
        # In descending order of ids, so that equal scores come out in house order by their position alone.
        ordered = sorted(passages, key=lambda passage: passage.id.encode(), reverse=True)
        if not ordered:
            raise UserError("no passages to search")
        words = _words([f"{passage.title} {passage.text}" for passage in ordered])
        if not any(words):
            raise UserError(f"none of the {len(ordered):,} passages has a word to search for")
        self.passage_ids = [passage.id for passage in ordered]
        self._index = bm25s.BM25(method="lucene", k1=k1, b=b, backend="numpy", csc_backend="numpy")
        self._index.index(words, show_progress=False)

    def search(self, queries: Iterable[Query], k: int) -> dict[str, list[Hit]]:
        """Return each query's k best passages, in house order (score descending, then passage id descending).

        A passage that shares no word with the query is no hit, so a list may be shorter than k, or empty.
        """
        queries = list(queries)
        words = _words([query.text for query in queries])
        pairs = track(zip(queries, words, strict=True), "bm25", len(queries), "queries")
        return {query.id: self._best(query_words, k) for query, query_words in pairs}

    def _best(self, words: list[str], k: int) -> list[Hit]:
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        found = np.flatnonzero(scores)
        if k < len(found):
            # All that tie with the k-th stay in until they are sorted.
            found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
        best = found[np.argsort(-scores[found], kind="stable")[:k]]
        return [
            Hit(self.passage_ids[row], score) for row, score in zip(best.tolist(), scores[best].tolist(), strict=True)
        ]


def search_bm25(options: Bm25Options) -> Path:
    """Search the queries judged in a split and write the run.

    Returns:
        The run file.

    Raises:
        UserError: what the collection lacks.
    """
    # The rows are made while the file is open: an output that cannot be written is found before the work.
    write_run(options.output, _ranked(options), tag="bm25")
    return Path(options.output)


def _ranked(options: Bm25Options) -> Iterator[tuple[str, list[Hit]]]:
    collection = open_collection(options.collection)
    queries = list(collection.queries(options.split))
    index = Bm25(collection.passages(), k1=options.k1, b=options.b)
    count = len(index.passage_ids)
    if options.k > count:
        say(f"k lowered from {options.k:,} to the {count:,} passages there are")
    hits = index.search(queries, options.k)
    empty = sum(not found for found in hits.values())
    say(f"bm25: {len(queries):,} queries over {count:,} passages, {empty:,} without a hit")
    yield from hits.items()


def _words(texts: list[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(
        texts, stopwords="en", stemmer=Stemmer.Stemmer("english"), return_ids=False, show_progress=False
    )
    return words
