"""Electric: energies of all tokens, learnt against what a two-tower cloze model draws into their places."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor, nn

from condenser.corpus.batches import PretrainBatch
from condenser.corpus.corruption import IGNORED, MaskingPolicy
from condenser.corpus.tokens import TokenStore
from condenser.hub import local_folder
from condenser.models.cloze import TwoTowerCloze, tower_config
from condenser.models.discriminator import load_discriminator, new_discriminator
from condenser.models.electric import ElectricModel, has_noise, load_noise
from condenser.objectives.base import Start, check_vocabulary, new_positions, token_id
from condenser.options import PretrainOptions
from condenser.talk import say
from condenser.training.steps import Step, accumulate, share_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOISE_SIZE = 0.25


def single_tokens(options: PretrainOptions, tokenizer: PreTrainedTokenizerBase) -> MaskingPolicy:
    """Return the choice of single tokens, of all kinds, into whose places noise is drawn."""
    none = np.zeros(0, np.int64)
    return MaskingPolicy(
        token_id(tokenizer, "mask"), none, none, options.mlm_probability,
        whole_words=False, round_up=True, masked=0.0, random=0.0, generator=True,
    )  # fmt: skip


def start_electric(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Start:
    """Return an energy model and a noise model.

    Beside ``--init`` may lie a noise model, which goes on; else a new one is started over the embeddings there.

    Raises:
        UserError: weights that are not of the ELECTRA or the BERT family, or a damaged noise model.
    """
    if options.init is None:
        positions = new_positions(options, store)
        energy = new_discriminator(str(options.model_size), len(tokenizer), positions, token_id(tokenizer, "pad"))
        noise = _new_noise(energy, options)
        return Start(_model(energy, noise, options), [], energy.config)
    energy, new = load_discriminator(options.init)
    check_vocabulary(tokenizer, energy.config.vocab_size, options.init, options.data)
    folder = local_folder(options.init)
    if has_noise(folder):
        noise = load_noise(folder, energy)
    else:
        say(f"{options.init}: no noise model in these weights; a new one is started")
        noise = _new_noise(energy, options)
        new += noise.own_parameters().values()
    return Start(_model(energy, noise, options), new, energy.config)


def _new_noise(energy: Any, options: PretrainOptions) -> TwoTowerCloze:
    return TwoTowerCloze(tower_config(energy.config, options.generator_size or _NOISE_SIZE), energy.electra.embeddings)


def _model(energy: Any, noise: TwoTowerCloze, options: PretrainOptions) -> ElectricModel:
    return ElectricModel(energy, noise, ratio=options.nce_ratio, over=options.nce_over)


def electric_losses(
    model: nn.Module,
    batch: PretrainBatch,
    *,
    share: float,
    fraction: float,
    scored_share: float,
    candidate_share: float,
    weight: float,
) -> dict[str, Tensor]:
    """Noise model's loss plus ``weight`` times the noise contrastive one: means over the step's positions; and figures.

    Args:
        model: an `ElectricModel`.
        batch: spans as they are, with the tokens to replace as labels.
        share: of a replaced token in the step's mean.
        fraction: not used: both losses are sums.
        scored_share: of a token that the noise contrastive loss is taken of.
        candidate_share: of a token that the noise model is asked for.
        weight: of the noise contrastive loss.
    """
    out = model(batch.input_ids, batch.attention_mask, batch.labels != IGNORED, batch.seeds)
    nce, noise_mle = out.nce * scored_share, out.noise_mle * candidate_share
    figures = {name: value * share for name, value in out.figures.items()}
    return {"loss": weight * nce + noise_mle, "nce": nce, "noise_mle": noise_mle, **figures}


def electric_step(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Step:
    """Return Electric's step."""

    def step(model: nn.Module, micro_batches: Sequence[PretrainBatch], accelerator: Accelerator) -> dict[str, Tensor]:
        candidates = share_of((batch.tokens - 2 * len(batch.input_ids) for batch in micro_batches), accelerator)
        attended = share_of((batch.tokens for batch in micro_batches), accelerator)
        losses = partial(
            electric_losses,
            scored_share=candidates if options.nce_over == "candidates" else attended,
            candidate_share=candidates,
            weight=options.nce_weight,
        )
        return accumulate(losses)(model, micro_batches, accelerator)

    return step
