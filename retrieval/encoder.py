"""The encoder: a transformer, its tokenizer and how a text becomes one vector."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from condenser.artifacts import fingerprint
from condenser.errors import UserError, first_line
from condenser.files import atomic_write, disk_faults
from condenser.hub import local_folder, position_limit, quiet_transformers
from condenser.weights import check_shapes
from retrieval.encoder_files import EncoderConfig, check_folder, read_config, write_config
from retrieval.records import Passage

__all__ = ["Encoder", "EncoderConfig", "batches_by_length", "resolve_device"]

Kind = Literal["query", "passage"]

# On a CPU the states of more tokens no longer fit its cache; a GPU needs many to have all its parts at work.
_BATCH_TOKENS = {"cpu": 1024, "cuda": 16384}


class Encoder(torch.nn.Module):
    """One tower for queries and passages: transformer states, pooled to one vector per text.

    Args:
        model: a transformers encoder without pooler.
        tokenizer: its tokenizer.
        config: pooling, normalisation, prompts, template and length limits.
        source: the folder it was loaded from.

    Raises:
        UserError: a length limit that leaves no room beside the special tokens or exceeds the model's
            positions; a vocabulary larger than the embedding table.
    """

    def __init__(self, model: Any, tokenizer: Any, config: EncoderConfig, source: Path | None = None) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.source = source
        # Truncation and padding at the right keep [CLS] first and let equal positions mean equal things,
        # whatever side the tokenizer's files ask for.
        tokenizer.truncation_side = tokenizer.padding_side = "right"
        self._check_limits()

    @classmethod
    def load(cls, name: str | Path, *, device: str = "cpu", **overrides: str | bool | int | None) -> Self:
        """Load a folder or a hub name in float32, ready to encode.

        Args:
            name: our encoder or pretrained folder, a sentence-transformers folder, any Hugging Face encoder,
                or a hub name (from the local cache, or downloaded).
            device: ``cpu``, ``cuda`` or ``auto``.
            overrides: fields of `EncoderConfig`; None keeps what the folder says.

        Raises:
            UserError: no such folder or name; config, tokenizer or safetensors weights missing or damaged;
                and what `Encoder` itself refuses.
        """
        place = resolve_device(device)
        folder = local_folder(name)
        check_folder(folder)
        model, tokenizer = _load_transformer(folder)
        config = read_config(folder, longest=position_limit(model.config)).changed(overrides)
        return cls(model, tokenizer, config, source=folder).eval().to(place)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self.model.config.hidden_size)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def fingerprint(self) -> str:
        """Return the digest of the folder this was loaded from, which training in memory does not change.

        Raises:
            UserError: the encoder was built in memory and has no folder yet.
        """
        if self.source is None:
            raise UserError("this encoder was not loaded from a folder and has no fingerprint", hint="save and load it")
        return fingerprint(self.source)

    def tokenizer_fingerprint(self) -> str:
        """Return a digest of vocabulary and tokenization rules."""
        return hashlib.sha256(self._reset_tokenizer().to_str().encode()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """Return what an artifact made with this encoder records, for the next stage to compare."""
        return {
            "encoder": str(self.source),
            "encoder_fingerprint": self.fingerprint(),
            "tokenizer": self.tokenizer_fingerprint(),
            "pooling": self.config.pooling,
            "normalize": self.config.normalize,
            "similarity": self.config.similarity,
            "query_prompt": self.config.query_prompt,
            "passage_prompt": self.config.passage_prompt,
            "passage_template": self.config.passage_template,
            "dimension": self.dimension,
        }

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the vectors of a batch, with gradients.

        Args:
            input_ids: (n, length), padded at the right.
            attention_mask: (n, length), 1 on tokens and 0 on padding; None when no row is padded, which
                lets attention run without a mask.

        Returns:
            (n, dimension); of length 1 if the config normalises.
        """
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.config.pooling == "cls":
            vectors = states[:, 0]
        elif attention_mask is None:
            vectors = states.mean(dim=1)
        else:
            weights = attention_mask.unsqueeze(-1).to(states.dtype)
            vectors = (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        return torch.nn.functional.normalize(vectors, dim=1) if self.config.normalize else vectors

    def tokenize(self, texts: Sequence[str], kind: Kind) -> list[list[int]]:
        """Return each text's token ids with its kind's prompt, the frame of special tokens kept when cut.

        The limit counts the special tokens, and what is over it is cut at the end: from the text, or from
        the title when that alone is too long.
        """
        return self.tokenize_and_count(texts, kind)[0]

    def tokenize_and_count(self, texts: Sequence[str], kind: Kind) -> tuple[list[list[int]], int]:
        """Like `tokenize`; also return how many texts were cut."""
        if not texts:
            return [], 0
        prompt = self.config.query_prompt if kind == "query" else self.config.passage_prompt
        encoded = self.tokenizer(
            [prompt + text for text in texts],
            truncation=True,
            max_length=self.max_length(kind),
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return encoded["input_ids"], sum(1 for one in encoded.encodings if one.overflowing)

    def max_length(self, kind: Kind) -> int:
        """Return the limit of one kind of text in tokens, the special ones included."""
        return self.config.query_max_length if kind == "query" else self.config.passage_max_length

    def passage_text(self, passage: Passage) -> str:
        """Join title and text by the config's template."""
        return self.config.passage_text(passage.title, passage.text)

    def pad(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Return ``(input_ids, attention_mask)``, each (n, longest), padded at the right, on the encoder's device.

        The mask is None when all rows are of one length.
        """
        lengths = [len(row) for row in token_ids]
        longest = max(lengths)
        if min(lengths) == longest:
            return torch.tensor(token_ids, dtype=torch.long, device=self.device), None
        pad_id = self.tokenizer.pad_token_id or 0
        padded = torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in token_ids], dtype=torch.long)
        mask = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
        return padded.to(self.device), mask.long().to(self.device)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries, (n, dimension) float32, in their order."""
        return self.encode_token_ids(self.tokenize(texts, "query"))

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Return the vectors of passages, (n, dimension) float32, in their order."""
        return self.encode_token_ids(self.tokenize([self.passage_text(passage) for passage in passages], "passage"))

    def encode_token_ids(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        batch_tokens: int | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Encode texts of like length together, without dropout or gradients.

        Args:
            token_ids: as `tokenize` gives them.
            batch_tokens: most tokens in a batch, padding included; a longer text is a batch of its own. None
                takes what suits the device.
            on_batch: called after each batch with the number of texts in it.

        Returns:
            (n, dimension) float32, row i for text i.
        """
        budget = batch_tokens or _BATCH_TOKENS.get(self.device.type, _BATCH_TOKENS["cpu"])
        vectors = np.empty((len(token_ids), self.dimension), dtype=np.float32)
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                for rows in batches_by_length([len(ids) for ids in token_ids], budget):
                    vectors[rows] = self(*self.pad([token_ids[row] for row in rows])).float().cpu().numpy()
                    if on_batch:
                        on_batch(len(rows))
        finally:
            self.train(was_training)
        return vectors

    def save(self, folder: str | Path, card: str) -> None:
        """Write a folder that `load`, AutoModel and SentenceTransformer open with the same vectors.

        Args:
            folder: where; made if need be. For a folder that appears whole, give a workspace's path.
            card: the model card, in Markdown, for README.md.
        """
        folder = Path(folder)
        with quiet_transformers(), disk_faults(folder):
            self.model.save_pretrained(folder)
            self._reset_tokenizer()
            self.tokenizer.save_pretrained(folder)
        write_config(folder, self.config, self.dimension)
        with atomic_write(folder / "README.md") as stream:
            stream.write(card)

    def _reset_tokenizer(self) -> Any:
        """Undo the truncation a call leaves in the tokenizer, so that what is saved or hashed is always the same."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _check_limits(self) -> None:
        rows = self.model.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > rows:
            raise UserError(
                f"tokenizer has {len(self.tokenizer):,} entries, the embedding table {rows:,} rows",
                self.source,
                "tokenizer and weights are of different models",
            )
        special = self.tokenizer.num_special_tokens_to_add()
        longest = position_limit(self.model.config)
        for name in ("query_max_length", "passage_max_length"):
            length = getattr(self.config, name)
            if length <= special:
                raise UserError(f"{name} is {length}, expected more than the {special} special tokens", self.source)
            if length > longest:
                raise UserError(f"{name} is {length}, the model has positions for {longest} tokens", self.source)


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the rows of each batch, longest texts first, so that a batch too large for memory shows at once.

    Args:
        lengths: tokens per text.
        batch_tokens: most tokens in a batch once its rows are padded to the longest.
    """
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if rows and (len(rows) + 1) * lengths[rows[0]] > batch_tokens:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def resolve_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``; raise UserError when there is no GPU to use."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU here", hint="use --device cpu, or install a CUDA build")
    return torch.device(name)


def _load_transformer(folder: Path) -> tuple[Any, Any]:
    """Return model and tokenizer; refuse weights that leave parts of the model at random."""
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoTokenizer

    settings: dict[str, Any] = {
        "dtype": torch.float32,
        "use_safetensors": True,
        "local_files_only": True,
        "trust_remote_code": False,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            try:
                model, info = AutoModel.from_pretrained(folder, add_pooling_layer=False, **settings)
            except TypeError as error:
                # Families without BERT's pooler do not know the switch.
                if "add_pooling_layer" not in str(error):
                    raise
                model, info = AutoModel.from_pretrained(folder, **settings)
        except SafetensorError as error:
            raise UserError(
                f"weights are damaged ({error})", folder / "model.safetensors", "copy or make them anew"
            ) from None
        except Exception as error:  # what the libraries raise depends on where a file goes wrong
            raise UserError(f"cannot be loaded: {first_line(error)}", folder) from None
    check_shapes(info["mismatched_keys"], folder)
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"weights lack {len(missing)} of the model's tensors, first {missing[0]!r}",
            folder,
            "they are of another architecture than config.json says",
        )
    if not tokenizer.is_fast:
        raise UserError("tokenizer has no fast version (tokenizer.json)", folder)
    return model, tokenizer
