"""A cross-encoder reads query and passage together and gives them a score: a slow judge of what a search found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from condenser.errors import UserError, first_line
from condenser.files import atomic_write, disk_faults, read_json, write_json
from condenser.hub import local_folder, position_limit, quiet_transformers
from condenser.models.half import at_least_float32
from condenser.models.unpadded import classify_texts, prepare_classifier
from condenser.weights import check_config, check_shapes, check_weights
from retrieval.encoder import batches_by_length, resolve_device
from retrieval.encoder_files import fill_template
from retrieval.encoder_weights import check_keys, plain_core
from retrieval.precision import resolve_dtype
from retrieval.records import Passage

PAIRS_FILE = "cross_encoder.json"

_MAX_LENGTH = 512
_QUERY_LENGTH, _PASSAGE_LENGTH = 32, 128
_BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """How a query and a passage become one row of tokens.

    Attributes:
        query_max_length: longest query in tokens, its two special ones included; None: as long as the pair allows,
            and of a pair that is too long the longer text loses its end. With a limit the passage does.
        max_length: longest pair in tokens, all special ones included.
        passage_template: how ``{title}`` and ``{text}`` are joined; ``{sep}`` is the tokenizer's separator.
    """

    query_max_length: int | None = None
    max_length: int = _MAX_LENGTH
    passage_template: str = "{title} {text}"


class PairTokens(NamedTuple):
    """Pairs as a model reads them.

    Attributes:
        ids: the tokens of each pair.
        types: 0 on the tokens of the query and 1 on those of the passage, for models that are told; else None.
        cut: for each pair, whether it was too long.
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    cut: list[bool]

    def take(self, rows: Sequence[int]) -> PairTokens:
        """Return some of the pairs."""
        types = None if self.types is None else [self.types[row] for row in rows]
        return PairTokens([self.ids[row] for row in rows], types, [self.cut[row] for row in rows])


class CrossEncoder(nn.Module):
    """A classifier of pairs of texts, as `AutoModelForSequenceClassification` opens it.

    Args:
        model: with one output, that is the score; with two, the score is the second less the first, which is the
            log of the odds that the passage answers the query.
        tokenizer: its tokenizer, a fast one.
        config: lengths and template.
        source: the folder it was loaded from.

    Raises:
        UserError: another number of outputs, a tokenizer that is not fast or has more entries than the model, a
            limit above the model's positions or without room for a text.
    """

    def __init__(self, model: Any, tokenizer: Any, config: PairConfig, source: Path | None = None) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.source = source
        self._check()
        tokenizer.truncation_side = tokenizer.padding_side = "right"
        self._without_padding = prepare_classifier(model)

    @classmethod
    def load(
        cls, name: str | Path, *, device: str = "cpu", max_length: int | None = None, dtype: str = "float32"
    ) -> Self:
        """Load a trained cross-encoder, ready to score.

        Args:
            name: folder or hub name: ours, or any model for the classification of sequences.
            device: ``cpu``, ``cuda`` or ``auto``.
            max_length: longest pair in tokens; default: as the folder says, else 512 or what the model can.
            dtype: ``float32``; on a GPU ``float16``, ``bfloat16`` or ``auto``: the type of all but the classifier.

        Raises:
            UserError: no such folder, weights that are missing or damaged or lack the classifier, half precision
                on a CPU, and what `CrossEncoder` itself refuses.
        """
        place = resolve_device(device)
        dtype = resolve_dtype(dtype, place)
        folder = local_folder(name)
        model, tokenizer, missing = _load(folder)
        if missing:
            what = f"weights lack {len(missing)} of the model's tensors, first {missing[0]!r}"
            raise UserError(what, folder, "a cross-encoder has a classifier that was trained on pairs")
        config = _read_config(folder, model, tokenizer)
        if max_length is not None:
            limit = config.query_max_length and min(config.query_max_length, max_length // 2)
            config = replace(config, max_length=max_length, query_max_length=limit)
        cross = cls(model, tokenizer, config, folder).eval().to(place)
        cross._compute_in(getattr(torch, dtype))
        return cross

    @classmethod
    def start(
        cls,
        name: str | Path,
        *,
        query_max_length: int | None = None,
        passage_max_length: int | None = None,
        passage_template: str | None = None,
    ) -> tuple[Self, bool]:
        """Load any encoder as the start of a cross-encoder, in float32 on the CPU.

        A classifier with one output is taken over, else one is started from torch's generator.

        Args:
            name: folder or hub name.
            query_max_length: longest query; default: as the folder of a cross-encoder says, else 32.
            passage_max_length: what is added for the passage; default: likewise, else 128 or what the model can.
            passage_template: see `PairConfig`.

        Returns:
            The cross-encoder, and whether its classifier is new.

        Raises:
            UserError: as for `load`, but for the classifier.
        """
        folder = local_folder(name)
        model, tokenizer, missing = _load(folder, num_labels=1)
        stored = _read_config(folder, model, tokenizer)
        if stored.query_max_length is None:
            room = min(_PASSAGE_LENGTH, position_limit(model.config) - (query_max_length or _QUERY_LENGTH))
            stored = replace(stored, query_max_length=_QUERY_LENGTH, max_length=_QUERY_LENGTH + room)
        stored_query = stored.query_max_length or _QUERY_LENGTH
        query = query_max_length or stored_query
        passage = passage_max_length or stored.max_length - stored_query
        template = stored.passage_template if passage_template is None else passage_template
        config = PairConfig(query_max_length=query, max_length=query + passage, passage_template=template)
        return cls(model, tokenizer, config, folder), bool(missing)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def passage_text(self, passage: Passage) -> str:
        """Join title and text by the config's template."""
        return fill_template(self.config.passage_template, passage.title, passage.text, self.tokenizer.sep_token)

    def tokenize(self, pairs: Sequence[tuple[str, str]]) -> PairTokens:
        """Return the tokens of (query, passage) pairs of texts, cut as the config says."""
        if not pairs:
            return PairTokens([], None, [])
        shortened = self._shortened({query for query, _ in pairs})
        encoded = self.tokenizer(
            [shortened[query] for query, _ in pairs],
            [passage for _, passage in pairs],
            truncation="longest_first" if self.config.query_max_length is None else "only_second",
            max_length=self.config.max_length,
            return_attention_mask=False,
        )
        cut = [
            bool(one.overflowing) or shortened[query] != query
            for one, (query, _) in zip(encoded.encodings, pairs, strict=True)
        ]
        return PairTokens(encoded["input_ids"], encoded.get("token_type_ids"), cut)

    def forward(self, tokens: PairTokens) -> Tensor:
        """Return the scores (n,) of pairs in float32, with gradients."""
        ids, types = tokens.ids, tokens.types
        if self._without_padding:
            by_length = sorted(range(len(ids)), key=lambda row: (-len(ids[row]), row))
            ordered = tokens.take(by_length)
            logits = classify_texts(self.model, ordered.ids, self.device, ordered.types)
            logits = logits[torch.tensor(by_length, device=self.device).argsort()]
        else:
            batch = {
                "input_ids": _padded(ids, self.tokenizer.pad_token_id or 0),
                "attention_mask": _padded([[1] * len(row) for row in ids], 0),
            }
            if types is not None:
                batch["token_type_ids"] = _padded(types, 0)
            logits = self.model(**{name: one.to(self.device) for name, one in batch.items()}).logits
        logits = at_least_float32(logits)
        return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]

    def score(self, pairs: Sequence[tuple[str, str]], *, batch_tokens: int | None = None) -> np.ndarray:
        """Return the scores of (query, passage) pairs of texts, (n,) float32; see `score_tokens`."""
        return self.score_tokens(self.tokenize(pairs), batch_tokens=batch_tokens)

    def score_tokens(
        self, tokens: PairTokens, *, batch_tokens: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Score pairs of like length together, without dropout or gradients.

        Args:
            tokens: as `tokenize` gives them.
            batch_tokens: tokens per batch, counted as if padded; default: 2048 on a CPU, 65536 on a GPU.
            on_batch: called after each batch with the number of pairs in it.

        Returns:
            (n,) float32.
        """
        scores = np.empty(len(tokens.ids), np.float32)
        most = batch_tokens or _BATCH_TOKENS.get(self.device.type, _BATCH_TOKENS["cpu"])
        was_training = self.training
        self.eval()
        try:
            with torch.inference_mode():
                for rows in batches_by_length([len(ids) for ids in tokens.ids], most):
                    scores[rows] = self(tokens.take(rows)).cpu().numpy()
                    if on_batch:
                        on_batch(len(rows))
        finally:
            self.train(was_training)
        return scores

    def save(self, folder: str | Path, card: str) -> None:
        """Write a folder that `load`, AutoModelForSequenceClassification and sentence-transformers' CrossEncoder open.

        Args:
            folder: where; made if need be.
            card: the model card, in Markdown, for README.md.
        """
        folder = Path(folder)
        # Without this line sentence-transformers would put a sigmoid behind the one output.
        self.model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
        self.tokenizer.model_max_length = self.config.max_length
        with quiet_transformers(), disk_faults(folder):
            self.model.save_pretrained(folder)
            plain_core(self.tokenizer)
            self.tokenizer.save_pretrained(folder)
        write_json(folder / PAIRS_FILE, asdict(self.config))
        with atomic_write(folder / "README.md") as stream:
            stream.write(card)

    def _shortened(self, queries: set[str]) -> dict[str, str]:
        """Return each query as it is, or its beginning up to the last token that the limit leaves."""
        limit = self.config.query_max_length
        if limit is None:
            return {query: query for query in queries}
        room = limit - self.tokenizer.num_special_tokens_to_add()
        texts = sorted(queries)
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        return {
            text: text if len(places) <= room else text[: places[room - 1][1]]
            for text, places in zip(texts, encoded["offset_mapping"], strict=True)
        }

    def _compute_in(self, dtype: torch.dtype) -> None:
        """Round all but the classifier: scores in half precision would tie where the model told passages apart."""
        if dtype == torch.float32:
            return
        for child in self.model.children():
            if child is self.model.base_model:
                child.to(dtype)
            else:
                child.register_forward_pre_hook(lambda _, states: tuple(one.float() for one in states))

    def _check(self) -> None:
        outputs = self.model.config.num_labels
        if outputs not in (1, 2):
            raise UserError(f"gives {outputs} numbers for a pair, expected 1 or 2", self.source)
        if not self.tokenizer.is_fast:
            raise UserError("tokenizer has no fast version (tokenizer.json)", self.source)
        rows = self.model.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > rows:
            what = f"tokenizer has {len(self.tokenizer):,} entries, the embedding table {rows:,} rows"
            raise UserError(what, self.source, "tokenizer and weights are of different models")
        longest, special = position_limit(self.model.config), self.tokenizer.num_special_tokens_to_add(pair=True)
        query, pair = self.config.query_max_length, self.config.max_length
        if pair > longest:
            parts = "" if query is None else f" ({query:,} for the query, {pair - query:,} for the passage)"
            raise UserError(f"pairs have up to {pair:,} tokens{parts}, the model has positions for {longest:,}",
                            self.source, "lower --passage_max_length or --max_length")  # fmt: skip
        least = special + 2
        if pair < least or (query is not None and not special <= query <= pair - special):
            room = f"{pair:,} tokens" if query is None else f"{query:,} and {pair - query:,} tokens"
            raise UserError(f"{room} for query and passage leave no room beside the special ones", self.source)


def _load(folder: Path, **overrides: Any) -> tuple[Any, Any, list[str]]:
    """Return model and tokenizer in float32, and the names of the classifier's tensors that were not in the folder.

    Raises:
        UserError: config, tokenizer or weights missing or damaged, weights that lack parts of the encoder.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check_config(folder)
    check_weights(folder)
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                folder,
                use_safetensors=True,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **overrides,
            )
        except Exception as error:  # what the libraries raise depends on where a file goes wrong
            raise UserError(f"cannot be loaded: {first_line(error)}", folder) from None
    base = model.base_model_prefix

    def in_classifier(name: str) -> bool:
        return not name.startswith(f"{base}.") or name.startswith(f"{base}.pooler.")

    mismatched = {name for name, _, _ in info["mismatched_keys"]}
    check_shapes([one for one in info["mismatched_keys"] if not (overrides and in_classifier(one[0]))], folder)
    missing = set(info["missing_keys"])
    encoder = {name for name in missing if not in_classifier(name)}
    check_keys(model.base_model, {"missing_keys": encoder, "unexpected_keys": info["unexpected_keys"]}, folder)
    return model, tokenizer, sorted(missing | mismatched)


def _read_config(folder: Path, model: Any, tokenizer: Any) -> PairConfig:
    """Return what our file says, else what tokenizer and model allow."""
    file = folder / PAIRS_FILE
    if not file.is_file():
        return PairConfig(max_length=min(_MAX_LENGTH, int(tokenizer.model_max_length), position_limit(model.config)))
    stored = read_json(file)
    kinds = {"query_max_length": int | None, "max_length": int, "passage_template": str}
    for field in fields(PairConfig):
        if not isinstance(stored.get(field.name), kinds[field.name]) or isinstance(stored[field.name], bool):
            found = stored.get(field.name)
            raise UserError(f"{field.name} is {found!r}, expected {field.type}", file)
    if "{text}" not in stored["passage_template"]:
        raise UserError(f"passage template {stored['passage_template']!r} has no {{text}}", file)
    return PairConfig(**{name: stored[name] for name in kinds})


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
