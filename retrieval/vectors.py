"""Vectors on disk: a folder of shards, each a ``.npy`` matrix and the ids of its rows, memory-mapped when read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from condenser.errors import UserError, sample
from condenser.faults import fault_point
from condenser.files import atomic_write_bytes, existing_file
from condenser.manifest import MANIFEST, damaged_files, read_manifest

Store = Literal["float32", "float16", "int8"]
STORES: tuple[Store, ...] = get_args(Store)

# What two sets of vectors must share for their inner products to mean anything. Length limits, batch sizes and
# the type they are kept in are not among them: they change how good a vector is, not what it is a vector of.
SPACE = (
    *("dimension", "pooling", "normalize", "untied", "projection", "query_prompt", "passage_prompt"),
    *("tokenizer", "encoder_fingerprint"),
)

_AGAIN = "run the command that made the folder again: it makes only this shard anew"
_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class Matrix:
    """The vectors of a shard as they are kept; what is taken out of it is float32.

    Attributes:
        codes: (rows, dimension) float32, float16 or int8, memory-mapped.
        scales: (rows,) float32 with int8: a vector is its codes times its scale; None with the others.
    """

    codes: np.ndarray
    scales: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, dimension)``."""
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return some rows as float32: a view where they are kept so and ``rows`` is a slice, else a copy."""
        codes = self.codes[rows]
        if self.scales is not None:
            return codes * self.scales[rows, None]
        return codes.astype(np.float32, copy=False)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype=dtype, copy=copy)


@dataclass(frozen=True)
class Vectors:
    """A finished folder of vectors.

    Attributes:
        folder: where it is.
        facts: what made it: encoder, pooling, prompts, dimension, counts.
        ids: one per row, over all shards.
        shards: matrices (rows, dimension), memory-mapped; their rows come out as float32.
    """

    folder: Path
    facts: dict[str, Any]
    ids: list[str]
    shards: list[Matrix]

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = False) -> Vectors:
        """Open a folder made by `encode` or `import_vectors`.

        Always compared with the manifest: which shards there are, the size of every file, the counts of ids and of
        vectors. No vector is read for that, so that a folder of any size opens at once.

        Args:
            folder: the vectors.
            verify: also compare the SHA-256 of every file, which reads all of it; `encode` does the same when it
                is run on a folder that exists.

        Raises:
            UserError: no such folder or unfinished; shards missing (by number), a file that does not belong, a
                shard that is damaged or has more or fewer ids than vectors.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, "vectors", facts={"kind": str, "dimension": int, "shards": int, "count": int})
        facts = manifest["facts"]
        store, count = facts.get("dtype", "float32"), facts["shards"]
        if store not in get_args(Store):
            raise UserError(f"fact dtype is {store!r}, expected one of {', '.join(get_args(Store))}", folder / MANIFEST)
        _refuse_gaps(folder, count, store)
        refuse_strangers(folder, {MANIFEST, *manifest["files"]})
        ids: list[str] = []
        shards = []
        for number in range(count):
            try:
                shard, vectors = read_shard(folder, number, facts["dimension"], store)
            except UserError as error:
                raise UserError(error.what, error.where, _AGAIN) from None
            ids += shard.ids
            shards.append(vectors)
        for fault in damaged_files(folder, manifest, verify=verify).values():
            raise UserError(fault.what, fault.where, _AGAIN)
        if len(ids) != facts["count"]:
            raise UserError(f"fact count is {facts['count']:,}, but there are {len(ids):,} ids", folder / MANIFEST)
        return cls(folder, facts, ids, shards)

    def blocks(self, rows: int = _BLOCK_ROWS) -> Iterator[np.ndarray]:
        """Yield all vectors in the order of ``ids`` as float32 blocks of at most ``rows``, which never cross shards.

        What is kept as float32 is not copied; of the others one block at a time is in memory.
        """
        for shard in self.shards:
            for start in range(0, len(shard), rows):
                yield shard[start : start + rows]

    def matrix(self) -> np.ndarray:
        """Return all rows as one (n, dimension) float32 array; memory-mapped if one shard of that type, else a copy."""
        if not self.shards:
            return np.empty((0, self.facts["dimension"]), dtype=np.float32)
        return self.shards[0][:] if len(self.shards) == 1 else np.concatenate([shard[:] for shard in self.shards])


@dataclass(frozen=True)
class Shard:
    """What is kept beside a shard's vectors: the ids of its rows, and how many of its texts were cut."""

    ids: list[str]
    cut: int


def vectors_file(folder: Path, number: int) -> Path:
    """Return the path of a shard's matrix."""
    return folder / f"vectors-{number:05d}.npy"


def scales_file(folder: Path, number: int) -> Path:
    """Return the path of the scales of a shard of int8."""
    return folder / f"scales-{number:05d}.npy"


def ids_file(folder: Path, number: int) -> Path:
    """Return the path of a shard's ids."""
    return folder / f"ids-{number:05d}.json"


def shard_files(number: int, store: Store) -> list[str]:
    """Return the names of a shard's files."""
    files = (vectors_file, scales_file, ids_file) if store == "int8" else (vectors_file, ids_file)
    return [file(Path(), number).name for file in files]


def write_shard(folder: Path, number: int, vectors: np.ndarray, shard: Shard, store: Store = "float32") -> None:
    """Write a shard, each of its files whole or not at all.

    Args:
        folder: where the shards are.
        number: of this one.
        vectors: (rows, dimension) float32.
        shard: the rows' ids.
        store: what the vectors are kept as; for int8 see `to_int8`.

    Raises:
        UserError: a vector that is not finite, or too large for float16, by the id of its text.
    """
    import orjson

    _refuse_rows(
        ~np.isfinite(vectors).all(axis=1), "is not finite", shard.ids, vectors_file(folder, number),
        "the encoder's weights are broken: was it trained to the end?",
    )  # fmt: skip
    codes, scales = vectors, None
    if store == "int8":
        codes, scales = to_int8(vectors)
    elif store == "float16":
        with np.errstate(over="ignore"):
            codes = vectors.astype(np.float16)
        _refuse_rows(
            ~np.isfinite(codes).all(axis=1), "has numbers too large for float16", shard.ids,
            vectors_file(folder, number), "use --store float32",
        )  # fmt: skip
    _write_array(vectors_file(folder, number), codes)
    fault_point("vectors-written")
    if scales is not None:
        _write_array(scales_file(folder, number), scales)
    with atomic_write_bytes(ids_file(folder, number)) as stream:
        stream.write(orjson.dumps(asdict(shard)))
    fault_point("ids-written")


def to_int8(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(codes, scales)``, (n, d) int8 and (n,) float32: the largest number of each row becomes 127 or -127.

    No number changes by more than half its row's scale, which is its largest number over 127.
    """
    scales = np.abs(vectors).max(axis=1, initial=0).astype(np.float32) / np.float32(127)
    divisors = np.where(scales > 0, scales, np.float32(1))
    return np.rint(vectors / divisors[:, None]).clip(-127, 127).astype(np.int8), scales


def read_shard(folder: Path, number: int, dimension: int, store: Store = "float32") -> tuple[Shard, Matrix]:
    """Return a shard's ids and its memory-mapped vectors.

    Raises:
        UserError: a file missing or damaged, another dimension or type, or other counts of ids and vectors.
    """
    names, matrix = ids_file(folder, number), vectors_file(folder, number)
    codes = map_matrix(matrix, dimension, store)
    scales = None
    if store == "int8":
        scales = open_array(scales_file(folder, number))
        if scales.dtype != np.float32 or scales.shape != (len(codes),):
            raise UserError(f"is {_described(scales)}, expected {len(codes):,} float32", scales_file(folder, number))
    stored = read_ids(names)
    if len(stored.ids) != len(codes):
        raise UserError(f"has {len(codes):,} vectors, but {names} has {len(stored.ids):,} ids", matrix)
    return stored, Matrix(codes, scales)


def read_ids(file: Path) -> Shard:
    """Read the ids of a shard."""
    import orjson

    try:
        stored = orjson.loads(existing_file(file).read_bytes())
        return Shard(check_ids(stored["ids"], file), int(stored["cut"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise UserError("is not a list of ids as `condenser encode` writes it", file) from None


def check_ids(ids: object, file: Path) -> list[str]:
    """Return ``ids`` if they are a list of texts; raise UserError for what a damaged or foreign file holds."""
    if not isinstance(ids, list) or not set(map(type, ids)) <= {str}:
        raise UserError("holds something else than a list of ids", file, "make the folder anew")
    return ids


def map_matrix(file: Path, dimension: int, store: str = "float32") -> np.ndarray:
    """Memory-map a ``.npy`` matrix of rows of ``dimension`` numbers; raise UserError for anything else."""
    matrix = open_array(file)
    if matrix.dtype != np.dtype(store) or matrix.ndim != 2 or matrix.shape[1] != dimension:
        raise UserError(f"is {_described(matrix)}, expected {store} rows of {dimension}", file)
    return matrix


def open_array(file: Path) -> np.ndarray:
    """Memory-map a ``.npy`` file; raise UserError for one that is damaged, of another format or of objects."""
    try:
        array: np.ndarray = np.load(existing_file(file), mmap_mode="r", allow_pickle=False)
    except PermissionError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"is not a whole .npy matrix ({error})", file) from None
    return array


def refuse_strangers(folder: Path, expected: set[str]) -> None:
    """Refuse a folder with files that do not belong to it; hidden ones and drafts of other writers do not count.

    Raises:
        UserError: such a file, by name.
    """
    names = (entry.name for entry in folder.iterdir())
    strangers = sorted(name for name in names if name not in expected and name[0] != "." and ".tmp-" not in name)
    if strangers:
        raise UserError(f"holds {sample(strangers)}, which does not belong to these vectors", folder, "move it away")


def check_same_space(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str = "queries") -> None:
    """Compare what made two sets of vectors, by their facts.

    Args:
        ours: facts of an index.
        theirs: facts of what is to meet it.
        what: how messages call the latter.

    Raises:
        UserError: they come from different encoders or settings; both values and both encoders' paths are named.
    """
    for name in SPACE:
        if ours.get(name) != theirs.get(name):
            made_by = ours.get("encoder_fingerprint")
            shortened = name == "dimension" and made_by is not None and made_by == theirs.get("encoder_fingerprint")
            raise UserError(
                f"{name.replace('_', ' ')} is {ours.get(name)!r} in the index (encoder {ours.get('encoder')}) "
                f"but {theirs.get(name)!r} in the {what} (encoder {theirs.get('encoder')})",
                hint="encode both with the same --dim" if shortened else f"index and {what} need the same encoder",
            )


def _refuse_gaps(folder: Path, count: int, store: Store) -> None:
    missing = [n for n in range(count) if not all((folder / name).is_file() for name in shard_files(n, store))]
    if missing:
        numbers = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        shards = f"shard {numbers} of {count:,} is" if len(missing) == 1 else f"shards {numbers} of {count:,} are"
        lost = next(name for name in shard_files(missing[0], store) if not (folder / name).is_file())
        raise UserError(f"{shards} missing: there is no {lost}", folder, _AGAIN)


def _refuse_rows(bad: np.ndarray, fault: str, ids: Sequence[str], file: Path, hint: str) -> None:
    rows = np.flatnonzero(bad)
    if len(rows):
        counts = f"{len(rows):,} of {len(bad):,} in this shard"
        raise UserError(f"the vector of {ids[rows[0]]!r} {fault} ({counts})", file, hint)


def _write_array(file: Path, array: np.ndarray) -> None:
    with atomic_write_bytes(file) as stream:
        np.save(stream, np.ascontiguousarray(array), allow_pickle=False)


def _described(array: np.ndarray) -> str:
    return f"{array.dtype} of shape {' x '.join(map(str, array.shape))}"
