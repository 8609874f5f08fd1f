"""Vectors become a searchable index: exact by default, or any FAISS factory string."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from condenser.artifacts import Workspace, fingerprint, load_manifest, result_config
from condenser.errors import UserError
from condenser.files import existing_file
from condenser.talk import say, warn
from retrieval.options import IndexOptions
from retrieval.records import Hit
from retrieval.vectors import Vectors, check_ids, check_same_space, map_matrix, vectors_file

if TYPE_CHECKING:
    from retrieval.encoder import Encoder

_MATRIX = "vectors.npy"
_FAISS = "index.faiss"
_IDS = "ids.json"
_FACTS = {"dimension": int, "factory": str, "encoder": str, "encoder_fingerprint": str, "max_norm": float}
_MARGIN = 32
_QUERIES_AT_ONCE = 1024
_HITS_AT_ONCE = 1 << 22
_POINTS_PER_CENTROID = 256  # FAISS itself samples down to this many per cluster


def load_faiss() -> Any:
    """Import FAISS; raise UserError when it is not installed."""
    try:
        import faiss
    except ImportError:
        raise UserError("FAISS is not installed", hint="pip install 'condenser-ir[cpu]', or [gpu]") from None
    return faiss


class Index:
    """Passages' vectors with their ids, searched by inner product in the order of the house.

    Args:
        ids: one per vector.
        vectors: (n, dimension) float32, for exact search; may be memory-mapped.
        faiss_index: or a FAISS index of n vectors, searched as FAISS does.
        facts: what made the vectors; see `retrieval.vectors`.
        encoder: turns queries given as text into vectors.

    Raises:
        UserError: the encoder is not the one that made the vectors.
    """

    def __init__(
        self,
        ids: Sequence[str],
        vectors: np.ndarray | None = None,
        *,
        faiss_index: Any = None,
        facts: dict[str, Any] | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self.ids = ids
        self.facts = facts or {}
        self.encoder = encoder
        self._vectors = vectors
        self._faiss_index = faiss_index
        if encoder is not None and facts is not None:
            check_same_space(facts, encoder.facts())
        self.dimension = int(faiss_index.d if vectors is None else vectors.shape[1])
        self._max_norm = self.facts.get("max_norm") or (0.0 if vectors is None else _max_norm([vectors]))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        encoder: Encoder | None = None,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> Index:
        """Open a folder made by `build_index`.

        Args:
            folder: the index.
            encoder: for queries given as text.
            nprobe: inverted lists visited per query, for IVF.
            ef_search: candidates kept while walking the graph, for HNSW.

        Raises:
            UserError: no such folder, a file missing or damaged, an encoder that did not make it, a
                parameter that this kind of index does not have.
        """
        folder = Path(folder)
        facts = load_manifest(folder, "index", facts=_FACTS)["facts"]
        try:
            ids = check_ids(orjson.loads(existing_file(folder / _IDS).read_bytes()), folder / _IDS)
        except orjson.JSONDecodeError:
            raise UserError("is not a list of ids as `condenser index` writes it", folder / _IDS) from None
        if (folder / _MATRIX).is_file():
            vectors = map_matrix(folder / _MATRIX, facts["dimension"])
            _check_counts(folder / _MATRIX, len(vectors), folder / _IDS, len(ids))
            for name, value in (("nprobe", nprobe), ("ef_search", ef_search)):
                if value is not None:
                    raise UserError(f"--{name} does not apply to a {facts['factory']} index", folder)
            return cls(ids, vectors, facts=facts, encoder=encoder)
        faiss_index = _read_faiss(folder / _FAISS)
        _check_counts(folder / _FAISS, faiss_index.ntotal, folder / _IDS, len(ids))
        _set_parameters(faiss_index, nprobe, ef_search, facts["factory"], folder)
        return cls(ids, faiss_index=faiss_index, facts=facts, encoder=encoder)

    def search(self, queries: np.ndarray | Sequence[str], k: int) -> list[list[Hit]]:
        """Return each query's best passages: score as float32 descending, then id descending.

        Args:
            queries: (q, dimension) vectors, or texts if the index has an encoder.
            k: hits per query; above the number of passages it is lowered, with one line.

        Raises:
            UserError: k below 1, texts without an encoder, vectors of another dimension or not finite.
        """
        rows, scores = self.search_rows(queries, k)
        return [
            [Hit(self.ids[row], score) for row, score in zip(found, values, strict=True) if row >= 0]
            for found, values in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def search_rows(self, queries: np.ndarray | Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Like `search`, as arrays (q, k): rows of ``ids`` and float32 scores; -1 where there is no hit."""
        k = self.lower_k(k)
        vectors = self._as_vectors(queries)
        rows = np.full((len(vectors), k), -1, dtype=np.int64)
        scores = np.full((len(vectors), k), -np.inf, dtype=np.float32)
        for start in range(0, len(vectors), _QUERIES_AT_ONCE):
            self._search_block(vectors, range(start, min(start + _QUERIES_AT_ONCE, len(vectors))), k, rows, scores)
        return rows, scores

    def lower_k(self, k: int) -> int:
        """Return k, lowered to the number of passages with one line; raise UserError when it is below 1."""
        if k < 1:
            raise UserError(f"k is {k}, expected 1 or more")
        if k > len(self.ids):
            say(f"k lowered from {k:,} to the {len(self.ids):,} passages there are")
        return min(k, len(self.ids))

    def _as_vectors(self, queries: np.ndarray | Sequence[str]) -> np.ndarray:
        if not isinstance(queries, np.ndarray):
            if self.encoder is None:
                raise UserError("queries are texts, but this index was loaded without an encoder")
            queries = self.encoder.encode_queries(queries)
        vectors = np.ascontiguousarray(queries, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dimension:
            shape = " x ".join(map(str, vectors.shape))
            raise UserError(f"query vectors have shape {shape}, expected rows of {self.dimension}")
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UserError(f"query vector in row {bad[0]} is not finite ({len(bad):,} of {len(vectors):,})")
        return vectors

    def _search_block(self, vectors: np.ndarray, block: range, k: int, rows: np.ndarray, scores: np.ndarray) -> None:
        """Fill the block's rows of ``rows`` and ``scores``.

        More than k candidates are fetched, because FAISS breaks ties at random and rounds an inner product
        by where it stands in a block; and more again for the queries where that can still matter at the cut.
        """
        open_queries, fetch = list(block), k + _MARGIN
        while open_queries:
            fetch = min(fetch, len(self.ids))
            again = []
            for start in range(0, len(open_queries), step := max(1, _HITS_AT_ONCE // fetch)):
                some = open_queries[start : start + step]
                found_scores, found_rows = self._fetch(vectors[some], fetch)
                for query, row_scores, candidates in zip(some, found_scores, found_rows, strict=True):
                    kept = candidates >= 0
                    best, exact = self._rank(vectors[query], candidates[kept], row_scores[kept], k)
                    rows[query, : len(best)], scores[query, : len(best)] = best, exact
                    all_seen = fetch == len(self.ids) or not kept.all()
                    if not all_seen and float(row_scores[-1]) + self._rounding(vectors[query]) >= float(exact[-1]):
                        again.append(query)
            open_queries, fetch = again, 4 * fetch

    def _fetch(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return FAISS's (scores, rows), best first, each (q, count); row -1 where it found no more."""
        faiss = load_faiss()
        if self._vectors is None:
            found: tuple[np.ndarray, np.ndarray] = self._faiss_index.search(vectors, count)
            return found
        # Release 1.15.1 multiplies without BLAS as long as queries x dimension is below 128,000, which is up to
        # twelve times slower; only for one or two queries is it the faster way.
        faiss.cvar.distance_compute_blas_threshold = 3 * self.dimension
        found = faiss.knn(vectors, self._vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
        return found

    def _rank(
        self, query: np.ndarray, candidates: np.ndarray, scores: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the k best (rows, scores) of one query's candidates in the order of the house."""
        if self._vectors is not None:
            # Products of float32 are exact in float64, and numpy sums each row in the same order wherever it
            # stands: equal passages get equal scores, and batches or threads do not show in a run.
            scores = (self._vectors[candidates] * query.astype(np.float64)).sum(axis=1).astype(np.float32)
        order = np.argsort(-scores, kind="stable")
        ranked = scores[order]
        if (ranked[1:] == ranked[:-1]).any():
            # Text sorts by code points, which is the order of its UTF-8 bytes.
            keys = [(score, self.ids[row]) for score, row in zip(scores.tolist(), candidates.tolist(), strict=True)]
            order = np.array(sorted(range(len(keys)), key=keys.__getitem__, reverse=True))
        return candidates[order[:k]], scores[order[:k]]

    def _rounding(self, query: np.ndarray) -> float:
        """Bound the error of a float32 inner product with any passage; 0 when FAISS's own scores are kept."""
        if self._vectors is None:
            return 0.0
        return float((self.dimension + 1) * 2.0**-24 * np.linalg.norm(query) * self._max_norm)


def build_index(options: IndexOptions) -> Path:
    """Build an index over a folder of vectors.

    Flat is exact and needs no FAISS file: the folder holds the vectors themselves (a hard link, where the
    disk allows) and is memory-mapped when searched. Other factory strings are built by FAISS for inner
    product and trained on a seeded sample.

    Returns:
        The finished folder.

    Raises:
        UserError: vectors of queries or none at all, a factory string that FAISS does not know or that does
            not suit the dimension, too few vectors to train on.
    """
    vectors = Vectors.load(options.vectors)
    if vectors.facts["kind"] != "passage":
        raise UserError(f"holds {vectors.facts['kind']} vectors, expected passages", vectors.folder)
    if not vectors.ids:
        raise UserError("holds no vectors, expected at least one", vectors.folder)
    flat = options.factory == "Flat"
    faiss_index = None if flat else _new_faiss_index(options.factory, vectors)
    made_from = fingerprint(vectors.folder)
    with Workspace(
        options.output, "index", config=result_config(options), inputs={"vectors_files": made_from}
    ) as workspace:
        if workspace.done:
            return workspace.output
        if flat:
            _write_matrix(vectors, workspace.path / _MATRIX)
        else:
            _fill_faiss_index(faiss_index, vectors, options)
            _write_faiss(faiss_index, workspace.path / _FAISS)
        (workspace.path / _IDS).write_bytes(orjson.dumps(vectors.ids))
        facts = vectors.facts | {
            "factory": options.factory,
            "metric": "inner product",
            "vectors": str(vectors.folder),
            "vectors_fingerprint": made_from,
            "max_norm": _max_norm(vectors.blocks()),
        }
        output = workspace.commit(facts)
    say(f"indexed {len(vectors.ids):,} vectors of {facts['dimension']} numbers, {options.factory}, inner product")
    return output


def _write_matrix(vectors: Vectors, file: Path) -> None:
    if len(vectors.shards) == 1 and vectors.shards[0].codes.dtype == np.float32:
        source = vectors_file(vectors.folder, 0)
        try:
            os.link(source, file)
        except OSError:  # another disk, or one without hard links
            shutil.copyfile(source, file)
        return
    shape = (len(vectors.ids), vectors.facts["dimension"])
    matrix = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
    start = 0
    for block in vectors.blocks():
        matrix[start : start + len(block)] = block
        start += len(block)
    matrix.flush()


def _max_norm(blocks: Iterable[np.ndarray]) -> float:
    """Return the length of the longest vector."""
    return max(
        (float(np.sqrt(np.einsum("nd,nd->n", block, block).max())) for block in blocks if len(block)), default=0.0
    )


def _new_faiss_index(factory: str, vectors: Vectors) -> Any:
    """Return an empty FAISS index; refuse what would fail or crash in training."""
    faiss = load_faiss()
    dimension, count = vectors.facts["dimension"], len(vectors.ids)
    refusal = f"--factory {factory!r} cannot be built over vectors of {dimension} numbers"
    if re.search(r"[A-Za-z]0+(?!\d)|HNSW1(?!\d)", factory):  # over these FAISS itself crashes
        raise UserError(
            f"{refusal}: a count in it is too small", hint="FAISS's factory strings look like IVF256,Flat or HNSW32"
        )
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UserError(
            f"{refusal}: {_faiss_reason(error)}", hint="FAISS's factory strings look like IVF256,Flat or HNSW32"
        ) from None
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        if count < ivf.nlist:
            raise UserError(
                f"--factory {factory!r} has {ivf.nlist:,} clusters, but there are {count:,} vectors to train on",
                vectors.folder,
                f"use Flat, or at most IVF{max(1, count // 39)}",
            )
        if count < 39 * ivf.nlist:
            warn(f"{count:,} vectors for {ivf.nlist:,} clusters are fewer than 39 per cluster: they will be poor ones")
        ivf.cp.min_points_per_centroid = 1  # FAISS would say the same in its own words
    return index


def _fill_faiss_index(index: Any, vectors: Vectors, options: IndexOptions) -> None:
    faiss = load_faiss()
    try:
        if not index.is_trained:
            ivf = faiss.try_extract_index_ivf(index)
            clusters = 256 if ivf is None else max(256, ivf.nlist)
            index.train(_training_sample(vectors, _POINTS_PER_CENTROID * clusters, options.seed))
        for block in vectors.blocks():
            index.add(np.ascontiguousarray(block))
    except RuntimeError as error:
        raise UserError(
            f"--factory {options.factory!r} cannot be built: {_faiss_reason(error)}", vectors.folder, "use Flat"
        ) from None


def _training_sample(vectors: Vectors, size: int, seed: int) -> np.ndarray:
    count = len(vectors.ids)
    chosen = np.sort(np.random.default_rng(seed).permutation(count)[:size])
    parts, start = [], 0
    for shard in vectors.shards:
        inside = chosen[(chosen >= start) & (chosen < start + len(shard))] - start
        parts.append(shard[inside])
        start += len(shard)
    return np.concatenate(parts)


def _write_faiss(index: Any, file: Path) -> None:
    load_faiss().write_index(index, str(file))
    read = _read_faiss(file)
    if read.ntotal != index.ntotal:
        raise UserError(f"holds {read.ntotal:,} vectors after writing {index.ntotal:,}", file, "is the disk full?")


def _read_faiss(file: Path) -> Any:
    try:
        return load_faiss().read_index(str(existing_file(file)))
    except RuntimeError as error:
        raise UserError(f"is not a whole FAISS index: {_faiss_reason(error)}", file, "build it anew") from None


def _set_parameters(index: Any, nprobe: int | None, ef_search: int | None, factory: str, folder: Path) -> None:
    faiss = load_faiss()
    for name, value in (("nprobe", nprobe), ("ef_search", ef_search)):
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}, expected 1 or more")
    if nprobe is not None:
        ivf = faiss.try_extract_index_ivf(index)
        if ivf is None:
            raise UserError(f"--nprobe does not apply to a {factory} index", folder)
        ivf.nprobe = nprobe
    if ef_search is not None:
        inner = faiss.downcast_index(index)
        while isinstance(inner, faiss.IndexPreTransform):
            inner = faiss.downcast_index(inner.index)
        if not hasattr(inner, "hnsw"):
            raise UserError(f"--ef_search does not apply to a {factory} index", folder)
        inner.hnsw.efSearch = ef_search


def _check_counts(vectors: Path, rows: int, names: Path, ids: int) -> None:
    if rows != ids:
        raise UserError(f"has {rows:,} vectors, but {names} has {ids:,} ids", vectors)


def _faiss_reason(error: RuntimeError) -> str:
    """Return what FAISS says without its C++ signature, path and expression."""
    reason = re.sub(r"^.*?\.(?:cpp|h):\d+: ", "", str(error), flags=re.DOTALL)
    told = re.sub(r"^Error: '.*?' failed(?:: )?", "", reason, flags=re.DOTALL).strip()
    return told or reason.strip()
