"""A cross-encoder reads query and passage together and gives them a score: a slow judge of what a search found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from condenser.errors import UserError, first_line
from condenser.hub import local_folder, position_limit, quiet_transformers
from condenser.weights import check_config, check_shapes, check_weights
from retrieval.encoder import batches_by_length, resolve_device

_MAX_LENGTH = 512


class CrossEncoder:
    """A classifier of pairs of texts, as `AutoModelForSequenceClassification` opens it.

    Args:
        name: folder or hub name. With one output, that is the score; with two, the score is the second less the
            first, which is the log of the odds that the passage answers the query.
        device: ``cpu``, ``cuda`` or ``auto``.
        max_length: longest pair in tokens; default: 512, or as many as the model has positions for.

    Raises:
        UserError: no such folder, weights that are missing or damaged or lack the classifier, another number of
            outputs.
    """

    def __init__(self, name: str | Path, *, device: str = "cpu", max_length: int | None = None) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        folder = local_folder(name)
        check_config(folder)
        check_weights(folder)
        with quiet_transformers():
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(folder)
                model, info = AutoModelForSequenceClassification.from_pretrained(
                    folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True
                )
            except Exception as error:  # what the libraries raise depends on where a file goes wrong
                raise UserError(f"cannot be loaded: {first_line(error)}", folder) from None
        check_shapes(info["mismatched_keys"], folder)
        if missing := sorted(info["missing_keys"]):
            what = f"weights lack {len(missing)} of the model's tensors, first {missing[0]!r}"
            raise UserError(what, folder, "a cross-encoder has a classifier that was trained on pairs")
        if model.config.num_labels not in (1, 2):
            raise UserError(f"gives {model.config.num_labels} numbers for a pair, expected 1 or 2", folder)
        self.device = resolve_device(device)
        self.max_length = min(max_length or _MAX_LENGTH, position_limit(model.config))
        self._model = model.eval().to(self.device)

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[str, str]], *, batch_tokens: int | None = None) -> np.ndarray:
        """Return the scores of (query, passage) pairs, (n,) float32.

        Args:
            pairs: texts; a pair that is too long loses the end of its longer text.
            batch_tokens: tokens per batch, padding included; default: 2048 on a CPU, 65536 on a GPU.
        """
        scores = np.empty(len(pairs), np.float32)
        if not pairs:
            return scores
        tokens = self._tokenizer(
            [query for query, _ in pairs],
            [passage for _, passage in pairs],
            truncation="longest_first",
            max_length=self.max_length,
        )
        lengths = [len(ids) for ids in tokens["input_ids"]]
        most = batch_tokens or (2048 if self.device.type == "cpu" else 65536)
        for rows in batches_by_length(lengths, most):
            batch = self._tokenizer.pad(
                {name: [values[row] for row in rows] for name, values in tokens.items()}, return_tensors="pt"
            )
            logits = self._model(**batch.to(self.device)).logits.float()
            scores[rows] = (logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]).cpu().numpy()
        return scores
