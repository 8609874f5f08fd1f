"""How plausible a text is: its pseudo-log-likelihood, by Electric in one pass or by a masked language model in many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from condenser.corpus.tokens import bare_tokenizer, load_tokenizer
from condenser.errors import UserError
from condenser.hub import local_folder, position_limit
from condenser.models.backbone import Backbone, load_backbone
from condenser.models.discriminator import load_discriminator
from condenser.models.electric import ElectricModel, energies, has_noise, load_noise
from condenser.models.half import at_least_float32
from condenser.models.rows import batches_by_length, padded_rows, resolve_device
from condenser.score_options import Method

_BATCH_TOKENS = {"cpu": 3072, "cuda": 16384}


class Score(NamedTuple):
    """How plausible a text is.

    Attributes:
        token_ids: the tokens that were scored.
        values: (tokens,) float32, each token's part: -E of Electric, or log p of a masked language model.
        cut: whether tokens were left out for want of room.
    """

    token_ids: list[int]
    values: np.ndarray
    cut: bool

    @property
    def pll(self) -> float:
        """The pseudo-log-likelihood: the sum over tokens."""
        return float(self.values.sum(dtype=np.float64))

    @property
    def per_token(self) -> float | None:
        """Its mean over tokens, for texts of different lengths; None of a text without tokens."""
        return self.pll / len(self.values) if len(self.values) else None


class Gain(NamedTuple):
    """What a passage tells of a query: the query's score before the passage, and alone."""

    given: Score
    alone: Score

    @property
    def gain(self) -> float:
        """PLL(query | passage) - PLL(query)."""
        return self.given.pll - self.alone.pll


class LogZ(NamedTuple):
    """Estimates of log Z, the log of the sum over the vocabulary of exp(-E), at a sample of positions.

    Scores can be read as log-probabilities as far as it is zero.
    """

    mean: float
    spread: float
    positions: int


class _Row(NamedTuple):
    """Token ids in their frame of special tokens, of which those from ``start`` to ``stop`` are scored."""

    ids: list[int]
    start: int
    stop: int
    cut: bool


class Scorer:
    """Scores texts. ::

        scorer = Scorer.load("folder")
        scorer.score(["a text", "another"])[0].pll
        scorer.gain(["a passage"], ["a query"])[0].gain

    Args:
        model: an Electric model, or a masked language model.
        folder: where its tokenizer lies.
        device: ``cpu``, ``cuda`` or ``auto``.
        max_length: longest text or pair in tokens; default: as many as the model has positions for.
        batch_tokens: tokens per batch, padding included.
    """

    def __init__(
        self,
        model: ElectricModel | Backbone,
        folder: Path,
        *,
        device: str = "cpu",
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        self.device = resolve_device(device)
        self.model = model.eval().to(self.device)
        config = model.energy.config if isinstance(model, ElectricModel) else model.config
        limit = position_limit(config)
        if (max_length or 0) > limit:
            raise UserError(f"--max_length {max_length} is beyond the model's {limit} positions", folder)
        self.max_length = min(max_length or limit, limit)
        self._batch_tokens = batch_tokens or _BATCH_TOKENS[self.device.type]
        tokenizer = load_tokenizer(folder)
        self._tokenizer = bare_tokenizer(tokenizer)
        ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")}
        if absent := [name for name, value in ids.items() if value is None]:
            raise UserError(f"the tokenizer has no {absent[0]} token, which scoring needs", folder)
        self._cls, self._sep, self._pad, self._mask = ids.values()

    @property
    def method(self) -> Method:
        """How it scores."""
        return "electric" if isinstance(self.model, ElectricModel) else "masked_lm"

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        method: Method | None = None,
        device: str = "cpu",
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> Scorer:
        """Load a scorer from a folder or by hub name.

        Args:
            name: of ``condenser pretrain --objective electric``, or of a masked language model.
            method: ``electric`` or ``masked_lm``; default: the first if the folder has a noise model.
            device: ``cpu``, ``cuda`` or ``auto``.
            max_length: longest text or pair in tokens; default: as many as the model has positions for.
            batch_tokens: tokens per batch, padding included; default: 3072 on a CPU, 16384 on a GPU.

        Raises:
            UserError: no such model, or weights that cannot score by this method.
        """
        folder = local_folder(name)
        if method is None:
            method = "electric" if has_noise(folder) else "masked_lm"
        model: ElectricModel | Backbone
        if method == "electric":
            energy, fresh = load_discriminator(folder)
            if fresh:
                raise UserError("weights have no head that gives energies", name)
            model = ElectricModel(energy, load_noise(folder, energy))
        else:
            model, headless = load_backbone(folder)
            if headless:
                raise UserError(
                    "weights have no masked-LM head, and no noise model of Electric lies beside them", name,
                    "score with what `condenser pretrain --objective electric` or a masked-LM objective made",
                )  # fmt: skip
        return cls(model, folder, device=device, max_length=max_length, batch_tokens=batch_tokens)

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Return the score of each text; one that is too long is scored as far as it fits."""
        return self._scores([self._alone(ids, self.max_length - 2) for ids in self._tokenize(texts)])

    def _alone(self, ids: list[int], room: int) -> _Row:
        kept = ids[:room]
        return _Row([self._cls, *kept, self._sep], 1, 1 + len(kept), len(kept) < len(ids))

    def gain(
        self, passages: Sequence[str], queries: Sequence[str], *, passage_max_length: int | None = None
    ) -> list[Gain]:
        """Return what each passage tells of its query; of a pair that is too long the passage loses its end,
        and of a query that alone is too long both times its own.

        The query comes first, so that its tokens have the same positions as alone: what differs is the passage.

        Args:
            passages: one for each query.
            queries: their texts.
            passage_max_length: tokens that are read of a passage, at most: as many as the model saw in training.

        Raises:
            UserError: not as many queries as passages; a ``max_length`` that leaves no room for a word.
        """
        if len(passages) != len(queries):
            raise UserError(f"{len(passages):,} passages and {len(queries):,} queries, expected pairs")
        if self.max_length < 4:
            raise UserError(f"max_length is {self.max_length}, expected 4 or more: three special tokens and a word")
        rows, alone = [], []
        for passage, query in zip(self._tokenize(passages), self._tokenize(queries), strict=True):
            asked = query[: self.max_length - 3]
            alone.append(self._alone(query, len(asked)))
            told = passage[: self.max_length - 3 - len(asked)][:passage_max_length]
            cut = len(told) + len(asked) < len(passage) + len(query)
            rows.append(_Row([self._cls, *asked, self._sep, *told, self._sep], 1, 1 + len(asked), cut))
        return [Gain(*scores) for scores in zip(self._scores(rows), self._scores(alone), strict=True)]

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as text, as the vocabulary has them."""
        return [self._tokenizer.id_to_token(token) or "" for token in token_ids]

    @torch.inference_mode()
    def log_z(self, texts: Sequence[str], *, draws: int = 64, seed: int = 42) -> LogZ:
        """Estimate log Z at one random position of each text that has tokens (Electric only).

        At a position, Z is the mean over the noise model's draws x' of exp(-E(x')) / q(x'), each x' put there in a
        pass of its own. The log of a mean of few draws is too small by a little, the more the further q is from
        exp(-E).

        Args:
            texts: a sample of what is scored.
            draws: per position.
            seed: of the positions and the draws.

        Raises:
            UserError: a masked language model, whose scores are log-probabilities of words given all others.
        """
        if not isinstance(self.model, ElectricModel):
            raise UserError("log Z is asked of a masked language model, which has none to estimate")
        rng = np.random.default_rng(seed)
        estimates = []
        for ids in self._tokenize(texts):
            ids = ids[: self.max_length - 2]
            if not ids:
                continue
            row = torch.tensor([[self._cls, *ids, self._sep]], device=self.device)
            place = int(rng.integers(1, len(ids) + 1))
            context = self.model.noise(row, None)[0, place]
            drawn, log_q = self.model.noise.sample(context.expand(draws, -1), [draws], [int(rng.integers(2**62))])
            distinct, which = drawn.unique(return_inverse=True)
            variants = row.repeat(len(distinct), 1)
            variants[:, place] = distinct
            energy = torch.cat([
                energies(self.model.energy, part, None)[:, place]
                for part in variants.split(max(1, self._batch_tokens // row.shape[1]))
            ])  # fmt: skip
            estimates.append(float((-energy.double()[which] - log_q.double()).logsumexp(0)) - np.log(draws))
        if not estimates:
            return LogZ(0.0, 0.0, 0)
        return LogZ(float(np.mean(estimates)), float(np.std(estimates)), len(estimates))

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        if isinstance(texts, str):  # its letters would be taken for texts
            raise UserError("expected a list of texts, found one text", hint="put it into a list: [text]")
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _scores(self, rows: Sequence[_Row]) -> list[Score]:
        if isinstance(self.model, ElectricModel):
            values = self._by_electric(self.model, rows)
        else:
            values = self._by_masking(self.model, rows)
        return [Score(row.ids[row.start : row.stop], part, row.cut) for row, part in zip(rows, values, strict=True)]

    @torch.inference_mode()
    def _by_electric(self, model: ElectricModel, rows: Sequence[_Row]) -> list[np.ndarray]:
        """Return -E of each row's tokens: one pass for all of them."""
        values = [np.empty(0, np.float32)] * len(rows)
        for batch in batches_by_length([len(row.ids) for row in rows], self._batch_tokens):
            energy = energies(
                model.energy, *padded_rows([rows[number].ids for number in batch], self._pad, self.device)
            )
            for number, of_row in zip(batch, energy.float().cpu().numpy(), strict=True):
                values[number] = -of_row[rows[number].start : rows[number].stop]
        return values

    @torch.inference_mode()
    def _by_masking(self, model: Backbone, rows: Sequence[_Row]) -> list[np.ndarray]:
        """Return log p of each row's tokens given all others: a pass for each, in which it is masked."""
        values = [np.empty(row.stop - row.start, np.float32) for row in rows]
        asked = [(number, place) for number, row in enumerate(rows) for place in range(row.start, row.stop)]
        for batch in batches_by_length([len(rows[number].ids) for number, _ in asked], self._batch_tokens):
            ids, mask = padded_rows([rows[asked[one][0]].ids for one in batch], self._pad, self.device)
            places = torch.tensor([asked[one][1] for one in batch], device=self.device)
            at = torch.arange(len(batch), device=self.device)
            wanted = ids[at, places]
            ids[at, places] = self._mask
            states = model.hidden_states(ids, mask)[-1]
            log_p = at_least_float32(model.vocabulary_logits(states[at, places])).log_softmax(-1)
            for one, value in zip(batch, log_p[at, wanted].float().tolist(), strict=True):
                number, place = asked[one]
                values[number][place - rows[number].start] = value
        return values
