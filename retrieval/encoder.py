"""The encoder: a transformer, its tokenizer and how a text becomes one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from condenser.errors import UserError
from condenser.files import atomic_write
from condenser.hub import local_folder, position_limit
from condenser.manifest import fingerprint
from condenser.models.packed import PackedForward, packed_forward_of
from condenser.models.pooling import pool_padded, pool_texts
from condenser.models.rows import batches_by_length, padded_rows, resolve_device
from retrieval.encoder_files import PASSAGE_TOWER, QUERY_TOWER, EncoderConfig, read_config, write_pair
from retrieval.encoder_weights import Tower, check_same, load_towers, save_tower, tokenizer_digest
from retrieval.records import Passage

__all__ = ["Encoder", "EncoderConfig", "batches_by_length", "resolve_device"]

Kind = Literal["query", "passage"]

# Measured: on a CPU each product lays out its weights anew, which must pay; 8-bit ones do not, and gain from states
# that stay in its cache; a GPU needs many tokens to have all its parts at work.
_BATCH_TOKENS = {"cpu": 3072, "int8": 768, "cuda": 16384}


class Encoder(nn.Module):
    """Transformer states, pooled to one vector per text: one tower for queries and passages, or one for each.

    Args:
        model: a transformers encoder without pooler; with untied towers that of the passages.
        tokenizer: its tokenizer.
        config: pooling, normalisation, towers, projection, prompts, template and length limits.
        source: the folder it was loaded from.
        query_model: the queries' own encoder; None copies ``model`` and ``head`` where the config is untied.
        head: the linear layer after pooling, new if None and the config has a projection (Tevatron's pooler).
        query_head: the linear layer of ``query_model``.
        dimension: only so many first numbers of each vector (Matryoshka); normalised anew where the config
            normalises. A way to use the encoder: it is not saved with it.

    Raises:
        UserError: a length limit that leaves no room beside the special tokens or exceeds the model's
            positions; a vocabulary larger than the embedding table; a template with ``{sep}`` for a tokenizer
            without a separator; a dimension above the vectors'; towers with vectors of different lengths.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EncoderConfig,
        source: Path | None = None,
        *,
        query_model: Any = None,
        head: nn.Linear | None = None,
        query_head: nn.Linear | None = None,
        dimension: int | None = None,
    ) -> None:
        super().__init__()
        if config.projection and head is None:
            head = nn.Linear(model.config.hidden_size, config.projection)
        if config.untied and query_model is None:
            query_model, query_head = deepcopy(model), deepcopy(head)
        self.model = model
        self.query_model = query_model
        self.head = head
        self.query_head = query_head
        self.tokenizer = tokenizer
        self.config = config
        self.source = source
        self.truncated = dimension
        # What encodes in a tower's place, where it was rounded; see `retrieval.precision`.
        self.quantized: dict[Kind, PackedForward] = {}
        # Truncation and padding at the right keep [CLS] first and let equal positions mean equal things,
        # whatever side the tokenizer's files ask for.
        tokenizer.truncation_side = tokenizer.padding_side = "right"
        self._check()

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        device: str = "cpu",
        dimension: int | None = None,
        **overrides: str | bool | int | None,
    ) -> Self:
        """Load a folder or a hub name in float32, ready to encode.

        Args:
            name: our encoder or pretrained folder, a sentence-transformers folder, any Hugging Face encoder,
                or a hub name (from the local cache, or downloaded). A tower of an untied encoder (its
                subfolder ``query`` or ``passage``) is an encoder as well.
            device: ``cpu``, ``cuda`` or ``auto``.
            dimension: see `Encoder`.
            overrides: fields of `EncoderConfig`; None keeps what the folder says. ``untied=True`` starts two
                towers from the folder's one, ``projection`` a new linear layer.

        Raises:
            UserError: no such folder or name; config, tokenizer or safetensors weights missing or damaged; an
                override that the weights contradict; and what `Encoder` itself refuses.
        """
        place = resolve_device(device)
        folder = local_folder(name)
        passages, queries = load_towers(folder)
        stored = read_config(folder, position_limit(passages.model.config), passages.projection)
        config = stored.changed(overrides)
        if queries and not config.untied:
            raise UserError(
                "has a tower for queries and one for passages, untied=False asks for one",
                folder,
                f"load {folder / PASSAGE_TOWER} or {folder / QUERY_TOWER}",
            )
        if stored.projection and config.projection != stored.projection:
            raise UserError(f"projection is {config.projection}, these weights have one to {stored.projection}", folder)
        encoder = cls(
            passages.model,
            passages.tokenizer,
            config,
            source=folder,
            query_model=queries and queries.model,
            head=passages.head,
            query_head=queries and queries.head,
            dimension=dimension,
        )
        return encoder.eval().to(place)

    @classmethod
    def join(cls, queries: Encoder, passages: Encoder) -> Self:
        """Make one untied encoder of two: DPR publishes its towers one by one.

        Args:
            queries: encodes queries, by its own prompt and length limit.
            passages: encodes passages, and says all else.

        Raises:
            UserError: they differ in tokenizer, pooling, normalisation or length of vector.
        """
        ours, theirs = queries.config, passages.config
        check_same("tokenizer", queries.tokenizer_fingerprint(), passages.tokenizer_fingerprint(), queries.source)
        check_same("pooling", ours.pooling, theirs.pooling, queries.source)
        check_same("normalize", ours.normalize, theirs.normalize, queries.source)
        config = replace(theirs, untied=True, query_prompt=ours.query_prompt, query_max_length=ours.query_max_length)
        model, tokenizer, head = queries.tower("query")
        joined = cls(passages.model, tokenizer, config, query_model=model, head=passages.head, query_head=head)
        return joined.eval().to(passages.device)

    @property
    def dimension(self) -> int:
        """Length of a vector, after projection and truncation."""
        return self.tower("passage").length if self.truncated is None else self.truncated

    def tower(self, kind: Kind) -> Tower:
        """Return what encodes one kind of text."""
        if kind == "query" and self.query_model is not None:
            return Tower(self.query_model, self.tokenizer, self.query_head)
        return Tower(self.model, self.tokenizer, self.head)

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
        return tokenizer_digest(self.tokenizer)

    def facts(self) -> dict[str, Any]:
        """Return what an artifact made with this encoder records, for the next stage to compare."""
        return {
            "encoder": str(self.source),
            "encoder_fingerprint": self.fingerprint(),
            "tokenizer": self.tokenizer_fingerprint(),
            "pooling": self.config.pooling,
            "normalize": self.config.normalize,
            "untied": self.config.untied,
            "projection": self.config.projection,
            "similarity": self.config.similarity,
            "query_prompt": self.config.query_prompt,
            "passage_prompt": self.config.passage_prompt,
            "passage_template": self.config.passage_template,
            "dimension": self.dimension,
            "truncated": self.truncated,
        }

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, kind: Kind = "passage") -> Tensor:
        """Return the vectors of a batch, with gradients.

        Args:
            input_ids: (n, length), padded at the right.
            attention_mask: (n, length), 1 on tokens and 0 on padding; None when no row is padded, which
                lets attention run without a mask.
            kind: which tower, where there are two.

        Returns:
            (n, dimension); of length 1 if the config normalises.
        """
        states = self.tower(kind).model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.finish(pool_padded(states, attention_mask, self.config.pooling), kind)

    def finish(self, pooled: Tensor, kind: Kind) -> Tensor:
        """Return (n, dimension) from pooled states (n, hidden): projected, truncated, normalised."""
        head = self.tower(kind).head
        vectors = pooled if head is None else head(pooled.to(head.weight.dtype))
        vectors = vectors[:, : self.dimension]
        return nn.functional.normalize(vectors, dim=1) if self.config.normalize else vectors

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
        # A tokenizer without special tokens makes nothing of an empty text; the model needs one token at least.
        blank = [self.tokenizer.pad_token_id or 0]
        return [ids or blank for ids in encoded["input_ids"]], sum(1 for one in encoded.encodings if one.overflowing)

    def max_length(self, kind: Kind) -> int:
        """Return the limit of one kind of text in tokens, the special ones included."""
        return self.config.query_max_length if kind == "query" else self.config.passage_max_length

    def passage_text(self, passage: Passage) -> str:
        """Join title and text by the config's template."""
        return self.config.passage_text(passage.title, passage.text, self.tokenizer.sep_token)

    def pad(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Return ``(input_ids, attention_mask)``, each (n, longest), padded at the right, on the encoder's device.

        The mask is None when all rows are of one length.
        """
        return padded_rows(token_ids, self.tokenizer.pad_token_id or 0, self.device)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors of queries, (n, dimension) float32, in their order."""
        _refuse_one_text(texts)
        return self.encode_token_ids(self.tokenize(texts, "query"), "query")

    def encode_passages(self, passages: Sequence[Passage | str]) -> np.ndarray:
        """Return the vectors of passages, (n, dimension) float32, in their order; a string has no title."""
        _refuse_one_text(passages)
        records = [Passage("", "", one) if isinstance(one, str) else one for one in passages]
        return self.encode_token_ids(self.tokenize([self.passage_text(one) for one in records], "passage"), "passage")

    def encode_token_ids(
        self,
        token_ids: Sequence[Sequence[int]],
        kind: Kind = "passage",
        *,
        batch_tokens: int | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Encode texts of like length together, without dropout or gradients.

        Args:
            token_ids: as `tokenize` gives them.
            kind: which tower, where there are two.
            batch_tokens: most tokens in a batch, counted as if padded; a longer text is a batch of its own. None
                takes what suits the device.
            on_batch: called after each batch with the number of texts in it.

        Returns:
            (n, dimension) float32, row i for text i.
        """
        place = "int8" if kind in self.quantized else self.device.type
        budget = batch_tokens or _BATCH_TOKENS.get(place, _BATCH_TOKENS["cpu"])
        vectors = np.empty((len(token_ids), self.dimension), dtype=np.float32)
        packed = self.quantized.get(kind) or packed_forward_of(self.tower(kind).model)
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                for rows in batches_by_length([len(ids) for ids in token_ids], budget):
                    texts = [token_ids[row] for row in rows]
                    batch = self._packed(packed, texts, kind) if packed else self(*self.pad(texts), kind=kind)
                    vectors[rows] = batch.float().cpu().numpy()
                    if on_batch:
                        on_batch(len(rows))
        finally:
            self.train(was_training)
        return vectors

    def _packed(self, forward: PackedForward, token_ids: Sequence[Sequence[int]], kind: Kind) -> Tensor:
        """Return what calling this encoder gives, from a forward pass without padding."""
        if self.config.pooling == "mean":
            pooled = pool_texts(*forward(token_ids), "mean")
        else:
            pooled = forward(token_ids, "cls" if self.config.pooling == "cls" else "last")[0].float()
        return self.finish(pooled, kind)

    def save(self, folder: str | Path, card: str) -> None:
        """Write a folder that `load`, AutoModel and SentenceTransformer open with the same vectors.

        Two towers are two such folders, ``query`` and ``passage``, in one that SentenceTransformer opens too.

        Args:
            folder: where; made if need be. For a folder that appears whole, give a workspace's path.
            card: the model card, in Markdown, for README.md.
        """
        folder = Path(folder)
        if self.query_model is None:
            # One limit for both kinds is all that sentence-transformers has; queries are far below it anyway.
            self._save_tower(folder, "passage")
        else:
            self._save_tower(folder / PASSAGE_TOWER, "passage")
            self._save_tower(folder / QUERY_TOWER, "query")
            write_pair(folder, self.config)
        with atomic_write(folder / "README.md") as stream:
            stream.write(card)

    def _save_tower(self, folder: Path, kind: Kind) -> None:
        save_tower(folder, self.tower(kind), replace(self.config, untied=False), max_length=self.max_length(kind))

    def _check(self) -> None:
        self._check_tower("query")
        self._check_tower("passage")
        full = self.tower("passage").length
        check_same("length of a vector", self.tower("query").length, full, self.source)
        if not 1 <= self.dimension <= full:
            raise UserError(f"dimension is {self.dimension}, this encoder's vectors have {full} numbers", self.source)
        if "{sep}" in self.config.passage_template and not self.tokenizer.sep_token:
            raise UserError(
                f"passage template {self.config.passage_template!r} has {{sep}}, the tokenizer has no separator token",
                self.source,
            )

    def _check_tower(self, kind: Kind) -> None:
        model = self.tower(kind).model
        rows = model.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > rows:
            raise UserError(
                f"tokenizer has {len(self.tokenizer):,} entries, the embedding table {rows:,} rows",
                self.source,
                "tokenizer and weights are of different models",
            )
        special = self.tokenizer.num_special_tokens_to_add()
        longest = position_limit(model.config)
        name, length = f"{kind}_max_length", self.max_length(kind)
        if length <= special:
            raise UserError(f"{name} is {length}, expected more than the {special} special tokens", self.source)
        if length > longest:
            raise UserError(f"{name} is {length}, the model has positions for {longest} tokens", self.source)


def _refuse_one_text(texts: object) -> None:
    """Raise UserError for a text where a list of texts is due: its letters would be taken for texts."""
    if isinstance(texts, str):
        raise UserError("expected a list of texts, found one text", hint="put it into a list: [text]")
