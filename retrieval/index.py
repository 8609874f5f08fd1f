"""The index: vectors of passages with their ids, searched in the order of the house."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from condenser.errors import UserError
from condenser.talk import say
from retrieval.exact import Backend, ExactVectors, Store
from retrieval.faiss_index import FaissVectors, check_parameters, read_index, set_parameters
from retrieval.index_folder import FLAT, METRIC, IndexFolder, passage_vectors, read_either
from retrieval.records import Hit, Passage, PassageHit
from retrieval.vectors import Matrix, Vectors, check_same_space

if TYPE_CHECKING:
    from retrieval.encoder import Encoder
    from retrieval.formats.base import Collection

Queries = np.ndarray | Sequence[str] | Sequence[Sequence[float]]

_MARGIN = 16
_QUERIES_AT_ONCE = 1024
_HITS_AT_ONCE = 1 << 22


class Index:
    """Passages' vectors with their ids, searched by inner product in the order of the house.

    Args:
        ids: one per vector.
        vectors: (n, dimension), for exact search; or any other `retrieval.exact.Store` of n vectors.
        facts: what made the vectors; see `retrieval.vectors`.
        deleted: numbers of rows that are not to be found.
        encoder: turns queries given as text into vectors; default: the one that made the vectors, when needed.
        parameters: search-time parameters in use, by name.
        folder: where the index is, for `add` and `delete`.

    Raises:
        UserError: the encoder is not the one that made the vectors.
    """

    def __init__(
        self,
        ids: Sequence[str],
        vectors: np.ndarray | Store,
        *,
        facts: dict[str, Any] | None = None,
        deleted: np.ndarray | None = None,
        encoder: Encoder | None = None,
        parameters: Mapping[str, int | float] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.ids = ids
        self.facts = facts or {}
        self.encoder = encoder
        self.parameters = dict(parameters or {})
        self.folder = folder
        if encoder is not None and facts is not None:
            check_same_space(facts, encoder.facts())
        if isinstance(vectors, np.ndarray):
            vectors = ExactVectors([Matrix(np.ascontiguousarray(vectors, np.float32))], vectors.shape[1])
        self.store = vectors
        self._dead = np.zeros(len(ids), dtype=bool)
        if deleted is not None:
            self._dead[deleted] = True
        self._corpus: Mapping[str, Passage] | None = None
        self._opened_with: dict[str, Any] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        encoder: Encoder | None = None,
        corpus: str | Path | Collection | Mapping[str, Passage] | None = None,
        backend: Backend = "auto",
        device: str = "cpu",
        float16: bool = False,
        verify: bool = True,
        **parameters: int | None,
    ) -> Index:
        """Open a folder made by `condenser index`, or one of vectors, which is searched exactly.

        Args:
            folder: the index, or a folder made by `condenser encode --kind passage`.
            encoder: for queries given as text; default: the one that made the vectors, loaded when needed.
            corpus: the passages' texts, see `attach`.
            backend: how vectors are multiplied in exact search; see `retrieval.exact.ExactVectors`.
            device: ``cpu``, ``cuda`` for all visible GPUs, or ``auto``.
            float16: on GPUs, keep vectors in half the memory.
            verify: compare a FAISS file with its SHA-256 before it is opened.
            parameters: ``nprobe``, inverted lists visited per query (IVF); ``ef_search``, candidates kept while
                walking the graph (HNSW); ``k_factor``, candidates per hit that are scored again (RFlat, Refine).

        Raises:
            UserError: no such folder, a file missing or damaged, an encoder that did not make it, a
                parameter that is unknown or that this kind of index does not have (those it has are named).
        """
        folder = Path(folder)
        exact: dict[str, Any] = {"backend": backend, "device": device, "float16": float16}
        if read_either(folder)["kind"] == "vectors":
            vectors = passage_vectors(folder)
            _no_parameters(parameters, folder)
            store: Store = ExactVectors(vectors.shards, vectors.facts["dimension"], **exact)
            facts = vectors.facts | {"factory": FLAT, "metric": METRIC, "vectors": str(folder)}
            index = cls(vectors.ids, store, facts=facts, encoder=encoder, folder=folder)
        else:
            opened = IndexFolder.open(folder, verify=verify)
            facts, used = opened.facts, dict[str, int | float]()
            if opened.flat:
                _no_parameters(parameters, folder)
                store = ExactVectors(opened.shards, facts["dimension"], max_norm=facts["max_norm"], **exact)
            else:
                store, used = _open_faiss(opened, parameters, **exact)
            if len(store) != len(opened.ids):
                raise UserError(f"has {len(store):,} vectors, but {len(opened.ids):,} ids", folder)
            index = cls(
                opened.ids,
                store,
                facts=facts,
                deleted=opened.deleted,
                encoder=encoder,
                parameters=used,
                folder=folder,
            )
        index._opened_with = {"verify": verify, **exact, **parameters}
        if corpus is not None:
            index.attach(corpus)
        return index

    def __len__(self) -> int:
        return len(self.ids) - int(self._dead.sum())

    @property
    def exact(self) -> bool:
        """Whether every vector is compared with every query."""
        return isinstance(self.store, ExactVectors)

    @property
    def deleted(self) -> np.ndarray:
        """Numbers of the rows that are not found."""
        return np.flatnonzero(self._dead)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self.store.dimension

    def describe(self) -> str:
        """Return factory, metric and the parameters in use, in one line."""
        values = [f"{name} {value:,}" for name, value in self.parameters.items()]
        return ", ".join([str(self.facts.get("factory", FLAT)), METRIC, *values])

    def attach(self, corpus: str | Path | Collection | Mapping[str, Passage]) -> Index:
        """Give hits their texts from now on; return the index.

        Args:
            corpus: a collection, its name or path, or passages by id.
        """
        if not isinstance(corpus, Mapping):
            if isinstance(corpus, str | Path):
                from retrieval.collections import open_collection

                corpus = open_collection(corpus)
            corpus = corpus.lookup()
        self._corpus = corpus
        return self

    def search(self, queries: Queries, k: int) -> list[list[Hit | PassageHit]]:
        """Return each query's best passages: score as float32 descending, then id descending.

        Args:
            queries: (q, dimension) vectors, an array or lists of numbers; or a list of texts for the encoder.
            k: hits per query; above the number of passages it is lowered, with one line.

        Returns:
            A list per query of `Hit`, or of `PassageHit` with title and text if a corpus is attached.

        Raises:
            UserError: k below 1; texts without an encoder, or whose encoder is gone; vectors of another dimension
                or not finite; a passage that is not in the attached corpus.
        """
        hits = self.hits(*self.search_rows(queries, k))
        return [[self._with_text(hit) for hit in found] for found in hits]

    def search_rows(self, queries: Queries, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Like `search`, as arrays (q, k): rows of ``ids`` and float32 scores; -1 where there is no hit."""
        k = self.lower_k(k)
        vectors = self._as_vectors(queries)
        rows = np.full((len(vectors), k), -1, dtype=np.int64)
        scores = np.full((len(vectors), k), -np.inf, dtype=np.float32)
        for start in range(0, len(vectors), _QUERIES_AT_ONCE):
            self._search_block(vectors, np.arange(start, min(start + _QUERIES_AT_ONCE, len(vectors))), k, rows, scores)
        return rows, scores

    def hits(self, rows: np.ndarray, scores: np.ndarray) -> list[list[Hit]]:
        """Return what `search_rows` gave as ids with scores."""
        return [
            [Hit(self.ids[row], score) for row, score in zip(found, values, strict=True) if row >= 0]
            for found, values in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def lower_k(self, k: int) -> int:
        """Return k, lowered to the number of passages with one line; raise UserError when it is below 1."""
        if k < 1:
            raise UserError(f"k is {k}, expected 1 or more")
        if not len(self):
            raise UserError("all passages of this index are deleted: there is nothing to search", self.folder)
        if k > len(self):
            say(f"k lowered from {k:,} to the {len(self):,} passages there are")
        return min(k, len(self))

    def add(self, vectors: str | Path | Vectors, *, replace: bool = False) -> Index:
        """Add the passages of a folder of vectors to the index on disk, and find them from now on.

        Args:
            vectors: folder made by `condenser encode --kind passage`, with the same encoder.
            replace: take the place of passages whose ids are there already, instead of being refused.

        Returns:
            The index.
        """
        return self._update(add=vectors, replace=replace)

    def delete(self, ids: Iterable[str]) -> Index:
        """Delete passages from the index on disk; return the index, which finds them no more."""
        return self._update(delete=list(ids))

    def _update(self, **changes: Any) -> Index:
        from retrieval.updates import change_index

        if self.folder is None or read_either(self.folder)["kind"] == "vectors":
            raise UserError("only an index made by `condenser index` can be changed", self.folder)
        change_index(self.folder, **changes)
        corpus, encoder = self._corpus, self.encoder
        self.__dict__ = Index.load(self.folder, **self._opened_with).__dict__
        self._corpus, self.encoder = corpus, encoder
        return self

    def _as_vectors(self, queries: Queries) -> np.ndarray:
        if not isinstance(queries, np.ndarray) and all(isinstance(query, str) for query in queries):
            queries = self._find_encoder().encode_queries(cast("Sequence[str]", queries))
        vectors = np.ascontiguousarray(queries, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dimension:
            shape = " x ".join(map(str, vectors.shape))
            raise UserError(f"query vectors have shape {shape}, expected rows of {self.dimension}")
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UserError(f"query vector in row {bad[0]} is not finite ({len(bad):,} of {len(vectors):,})")
        return vectors

    def _find_encoder(self) -> Encoder:
        if self.encoder is None:
            if "encoder" not in self.facts:
                raise UserError("queries are texts, but this index was loaded without an encoder")
            place = Path(self.facts["encoder"])
            if not place.is_dir():
                raise UserError(
                    "the encoder that made this index is gone", place, "give one: Index.load(folder, encoder=...)"
                )
            from retrieval.encoder import Encoder

            encoder = Encoder.load(place, dimension=self.facts.get("truncated"))
            check_same_space(self.facts, encoder.facts())
            self.encoder = encoder
        return self.encoder

    def _with_text(self, hit: Hit) -> Hit | PassageHit:
        if self._corpus is None:
            return hit
        if hit.passage_id not in self._corpus:
            raise UserError(f"passage {hit.passage_id!r} is not in the attached corpus", self.folder)
        passage = self._corpus[hit.passage_id]
        return PassageHit(hit.passage_id, hit.score, passage.title, passage.text)

    def _search_block(
        self, vectors: np.ndarray, open_queries: np.ndarray, k: int, rows: np.ndarray, scores: np.ndarray
    ) -> None:
        """Fill the rows of ``rows`` and ``scores`` that ``open_queries`` name.

        More than k candidates are fetched, because stores break ties at random, round inner products by where they
        stand in a block and know nothing of deleted rows; and more again for the queries where that can still matter.
        """
        fetch = k + _MARGIN
        while len(open_queries):
            fetch = min(fetch, len(self.ids))
            again = []
            for start in range(0, len(open_queries), step := max(1, _HITS_AT_ONCE // fetch)):
                some = open_queries[start : start + step]
                rows[some], scores[some], unsure = self._best(vectors[some], k, fetch)
                again.append(some[unsure])
            open_queries, fetch = np.concatenate(again), 4 * fetch

    def _best(self, queries: np.ndarray, k: int, fetch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the k best ``(rows, scores)`` among ``fetch`` candidates, and for which queries that is not enough."""
        fetched, rows = self.store.fetch(queries, fetch)
        slack = self.store.rounding(queries)
        found = rows >= 0
        live = found & ~self._dead[rows]
        ranked = np.where(live, fetched, -np.inf)
        # What lies further below the k-th best than rounding can move two scores is not among the k best.
        cut = np.partition(ranked, fetch - k, axis=1)[:, fetch - k] - 2 * slack
        query, place = np.nonzero(live & (ranked >= cut[:, None]))
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        scores[query, place] = self.store.rescore(queries, query, rows[query, place], fetched[query, place])
        order = np.argsort(-scores, axis=1, kind="stable")
        scores, rows = np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)
        for tied in np.flatnonzero(((scores[:, 1:] == scores[:, :-1]) & np.isfinite(scores[:, 1:])).any(axis=1)):
            self._order_ties(rows[tied], scores[tied])
        worst = scores[:, k - 1]
        rows = np.where(np.isfinite(scores[:, :k]), rows[:, :k], -1)
        seen_all = ~found.all(axis=1) | (fetch == len(self.ids))
        # The worst score fetched bounds all that were not.
        unsure = ~seen_all & (fetched.min(axis=1) + slack >= worst)
        return rows, scores[:, :k], unsure

    def _order_ties(self, rows: np.ndarray, scores: np.ndarray) -> None:
        """Put equal scores of one query, best first, in the descending order of their ids, in place."""
        held = int(np.isfinite(scores).sum())
        # Text sorts by code points, which is the order of its UTF-8 bytes.
        keys = [(score, self.ids[row]) for score, row in zip(scores[:held].tolist(), rows[:held].tolist(), strict=True)]
        order = sorted(range(held), key=keys.__getitem__, reverse=True)
        rows[:held], scores[:held] = rows[order], scores[order]


def _no_parameters(parameters: Mapping[str, int | None], folder: Path) -> None:
    check_parameters(parameters, (), FLAT, folder)


def _open_faiss(
    opened: IndexFolder, parameters: Mapping[str, int | None], *, backend: Backend, device: str, float16: bool
) -> tuple[FaissVectors, dict[str, int | float]]:
    factory = opened.facts["factory"]
    if backend not in ("auto", "faiss"):
        raise UserError(f"--backend {backend} is for exact search, this is a {factory} index", opened.folder)
    faiss_index = read_index(opened.faiss_file)
    used = set_parameters(faiss_index, parameters, factory, opened.folder)
    return FaissVectors(faiss_index, device=device, float16=float16), used
