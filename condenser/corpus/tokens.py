"""The token store: spans of tokens kept by document in a memory-mapped Arrow file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from condenser.errors import UserError, first_line
from condenser.files import existing_file
from condenser.hub import local_folder
from condenser.manifest import load_manifest

if TYPE_CHECKING:
    import pyarrow as pa
    import tokenizers
    from transformers import PreTrainedTokenizerBase

TOKENS_FILE = "tokens.arrow"
FRAME_TOKENS = 2  # CLS and SEP, which training puts around each span
_FREE_PLACE = re.compile(r"\[unused\d+\]|<extra_id_\d+>|<unused\d+>")
_COLUMNS = ["id", "ids", "word_starts"]


class SpanTokens(NamedTuple):
    """One span without special tokens: ``ids`` int32 (n,), ``word_starts`` bool (n,)."""

    ids: np.ndarray
    word_starts: np.ndarray


class DocumentTokens(NamedTuple):
    """One document's spans."""

    id: str
    spans: list[SpanTokens]


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or by hub name.

    Raises:
        UserError: no such folder, nothing loadable in it, or no fast version of it.
    """
    from transformers import AutoTokenizer

    folder = local_folder(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what the libraries raise depends on where a file goes wrong
        raise UserError(f"no tokenizer could be loaded: {first_line(error)}", name) from None
    if not tokenizer.is_fast:
        raise UserError("tokenizer has no fast version, which word boundaries need", name)
    return tokenizer


def bare_tokenizer(tokenizer: PreTrainedTokenizerBase) -> tokenizers.Tokenizer:
    """Return a copy of the tokenizer's engine that neither truncates nor pads."""
    from tokenizers import Tokenizer

    engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    engine.no_truncation()
    engine.no_padding()
    return engine


def no_text(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that are no piece of a text: special ones, and places kept free for some use later."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = {number for name, number in tokenizer.get_vocab().items() if _FREE_PLACE.fullmatch(name)}
    return added | set(tokenizer.all_special_ids) | free


def require_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that does not tell where words begin: it could only mask pieces of words.

    Raises:
        UserError: it sees one word in a text of four, or a new word in every piece.
    """
    encoding = bare_tokenizer(tokenizer).encode("Testing masking whole words", add_special_tokens=False)
    words = len(set(encoding.word_ids))
    if words != 4:
        raise UserError(
            f"tokenizer finds {words} words in 'Testing masking whole words', so that whole words cannot be masked",
            tokenizer.name_or_path,
            "choose a tokenizer whose pre-tokenizer splits at blanks",
        )


class TokenStoreWriter:
    """Writes documents in batches, so that memory does not grow with the corpus."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / TOKENS_FILE

    def __enter__(self) -> TokenStoreWriter:
        import pyarrow as pa

        self._file = self._path.open("wb")
        self._writer = pa.ipc.new_stream(self._file, _schema())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def write(self, rows: pa.RecordBatch) -> None:
        """Append documents, see `record_batch`."""
        if len(rows):
            self._writer.write_batch(rows)


def record_batch(documents: Sequence[DocumentTokens]) -> pa.RecordBatch:
    """Return documents as rows of the store."""
    import pyarrow as pa

    if not documents:
        return pa.RecordBatch.from_pylist([], schema=_schema())
    columns = [
        pa.array([document.id for document in documents], pa.string()),
        _nested([[span.ids for span in document.spans] for document in documents], pa.int32()),
        _nested([[span.word_starts for span in document.spans] for document in documents], pa.bool_()),
    ]
    return pa.record_batch(columns, schema=_schema())


def _schema() -> pa.Schema:
    import pyarrow as pa

    types = pa.string(), pa.list_(pa.list_(pa.int32())), pa.list_(pa.list_(pa.bool_()))
    return pa.schema(list(zip(_COLUMNS, types, strict=True)))


def _nested(documents: Sequence[Sequence[np.ndarray]], value_type: pa.DataType) -> pa.ListArray:
    """Build a list<list<value>> array from numpy spans without touching single values in Python."""
    import pyarrow as pa

    spans = [span for document in documents for span in document]
    span_ends = np.cumsum([0, *(len(span) for span in spans)])
    document_ends = np.cumsum([0, *(len(document) for document in documents)])
    values = pa.array(np.concatenate(spans), value_type)
    inner = pa.ListArray.from_arrays(pa.array(span_ends, pa.int32()), values)
    return pa.ListArray.from_arrays(pa.array(document_ends, pa.int32()), inner)


class TokenStore:
    """Random access to spans by document, straight from the memory-mapped file.

    Args:
        folder: made by `condenser spans`.
        verify: compare the files' SHA-256 too, which reads them all.

    Raises:
        UserError: not a finished token store, or a damaged one.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        import pyarrow as pa
        from datasets import Dataset

        self.folder = Path(folder)
        self.manifest = load_manifest(self.folder, "spans", verify=verify, facts={"max_length": int})
        file = existing_file(self.folder / TOKENS_FILE)
        try:
            table = Dataset.from_file(str(file)).data.table
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"is not a whole token store: {first_line(error)}", file, "build it anew") from None
        if table.schema.names != _COLUMNS:
            raise UserError(f"has columns {table.schema.names}, expected {_COLUMNS}", file, "build it anew")
        self._names: pa.ChunkedArray = table.column("id")
        self._ids: list[pa.ListArray] = table.column("ids").chunks
        self._starts: list[pa.ListArray] = table.column("word_starts").chunks
        self._chunk_ends = np.cumsum([len(chunk) for chunk in self._ids])
        self.spans_per_document = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in self._ids])
        self._span_ends = np.cumsum(self.spans_per_document)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.spans_per_document)

    @property
    def span_count(self) -> int:
        """Number of spans of all documents."""
        return int(self._span_ends[-1])

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer that made the ids."""
        return self.folder / "tokenizer"

    def span(self, document: int, index: int) -> SpanTokens:
        """Return span ``index`` of a document (both counted from 0)."""
        chunk = int(np.searchsorted(self._chunk_ends, document, side="right"))
        row = document - (int(self._chunk_ends[chunk - 1]) if chunk else 0)
        position = self._ids[chunk].offsets[row].as_py() + index
        ids, starts = self._ids[chunk].values[position].values, self._starts[chunk].values[position].values
        return SpanTokens(ids.to_numpy(), starts.to_numpy(zero_copy_only=False))

    def span_at(self, position: int) -> SpanTokens:
        """Return a span by its position among all spans of the corpus."""
        document = self.document_of(position)
        before = int(self._span_ends[document - 1]) if document else 0
        return self.span(document, position - before)

    def document_of(self, position: int) -> int:
        """Return the document that holds the span at this position among all spans."""
        return int(np.searchsorted(self._span_ends, position, side="right"))

    def name(self, document: int) -> str:
        """Return a document's id in the source."""
        return str(self._names[document].as_py())

    def joined(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Return all tokens int32 (n,), the bounds of the documents int64 (len + 1,), and the number of words."""
        tokens = np.concatenate(list(self._values()))
        lengths = np.concatenate([np.diff(chunk.values.offsets.to_numpy()) for chunk in self._ids])
        span_bounds = np.concatenate([[0], np.cumsum(lengths)])
        words = sum(int(chunk.values.values.true_count) for chunk in self._starts)
        return tokens, span_bounds[np.concatenate([[0], self._span_ends])], words

    def spans_longer_than(self, tokens: int) -> int:
        """Count the spans of more than ``tokens`` tokens."""
        return sum(int((np.diff(chunk.values.offsets.to_numpy()) > tokens).sum()) for chunk in self._ids)

    def unigram_counts(self, vocabulary_size: int) -> np.ndarray:
        """Count each token id over the whole store; int64 (vocabulary_size,)."""
        counts = np.zeros(vocabulary_size, np.int64)
        for values in self._values():
            if len(values) and values.max() >= vocabulary_size:
                raise UserError(
                    f"token id {values.max()} is outside the model's vocabulary of {vocabulary_size:,}",
                    self.folder,
                    "build the spans with the model's own tokenizer",
                )
            counts += np.bincount(values, minlength=vocabulary_size)
        return counts

    def _values(self) -> Iterator[np.ndarray[Any, Any]]:
        for chunk in self._ids:
            yield chunk.values.values.to_numpy()
