"""The objective ELECTRA: a generator and a discriminator that learn together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import ElectraForMaskedLM

from condenser.corpus.batches import PretrainBatch
from condenser.corpus.corruption import MaskingPolicy, masking_policy
from condenser.corpus.tokens import TokenStore
from condenser.errors import UserError
from condenser.hub import local_folder
from condenser.models.backbone import Backbone, load_backbone
from condenser.models.cloze import tower_config, tower_of
from condenser.models.discriminator import load_discriminator, new_discriminator
from condenser.models.electra import GENERATOR_FOLDER, ElectraPair
from condenser.objectives.base import Start, check_length, check_vocabulary, new_positions, span_length, token_id
from condenser.options import PretrainOptions
from condenser.talk import say, warn
from condenser.training.steps import Step, accumulate, share_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATOR_SIZE = 0.25


def electra_losses(
    model: nn.Module, batch: PretrainBatch, *, share: float, fraction: float, token_share: float, weight: float
) -> dict[str, Tensor]:
    """Generator's loss plus ``weight`` times the discriminator's: means over slots and tokens of the step; and figures.

    Args:
        model: an `ElectraPair`.
        batch: masked spans.
        share: of a slot in the step's mean.
        fraction: not used: both losses are sums.
        token_share: of a token that the discriminator judges in the step's mean.
        weight: of the discriminator's loss.
    """
    out = model(batch.input_ids, batch.attention_mask, batch.labels, batch.seeds)
    parts = {name: value * share for name, value in out.slots.items()}
    parts |= {name: value * token_share for name, value in out.tokens.items()}
    return {"loss": parts["generator"] + weight * parts["discriminator"], **parts}


def electra_step(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Step:
    """Return ELECTRA's step."""
    frame = 0 if options.special_tokens_judged else 2

    def step(model: nn.Module, micro_batches: Sequence[PretrainBatch], accelerator: Accelerator) -> dict[str, Tensor]:
        judged = (batch.tokens - frame * len(batch.input_ids) for batch in micro_batches)
        losses = partial(electra_losses, token_share=share_of(judged, accelerator), weight=options.discriminator_weight)
        return accumulate(losses)(model, micro_batches, accelerator)

    return step


def electra_policy(options: PretrainOptions, tokenizer: PreTrainedTokenizerBase) -> MaskingPolicy:
    """Return ELECTRA's corruption: single tokens, all of them masked or as many as ``--masked_share`` says."""
    masks = masking_policy(
        len(tokenizer),
        tokenizer.all_special_ids,
        mask_id=token_id(tokenizer, "mask"),
        probability=options.mlm_probability,
        random_tokens="ordinary",
    )
    whole_words = options.whole_words is True
    return replace(masks, whole_words=whole_words, masked=options.masked_share, random=0.0, generator=True)


def start_electra(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Start:
    """Return a discriminator and its generator, from weights or new.

    Raises:
        UserError: sizes for a generator that is not new, or sizes that two models cannot have or share.
    """
    new: list[nn.Parameter] = []
    if options.init is None:
        size, pad_id = str(options.model_size), token_id(tokenizer, "pad")
        discriminator: Any = new_discriminator(size, len(tokenizer), new_positions(options, store), pad_id)
    else:
        discriminator, new = load_discriminator(options.init)
        check_vocabulary(tokenizer, discriminator.config.vocab_size, options.init, options.data)
    generator, fresh = _generator(options, discriminator.config, store, tokenizer)
    if options.init_generator is not None and options.embedding_sharing != "none":
        kept, dropped = (one.get_input_embeddings().weight for one in (discriminator, generator.lm))
        if kept.shape == dropped.shape and not torch.equal(kept, dropped):
            warn(
                f"{options.init_generator}: its word embeddings are not those of the discriminator, which it gets now; "
                "with --embedding_sharing none it keeps them"
            )
    model = ElectraPair(
        discriminator, generator, sharing=options.embedding_sharing, special_tokens=options.special_tokens_judged
    )
    if options.init is not None:
        # what the two share is the discriminator's now; what it took the place of is in no model any more
        trained = {id(parameter) for parameter in generator.parameters()}
        trained -= {id(parameter) for parameter in discriminator.parameters()}
        new += [parameter for parameter in fresh if id(parameter) in trained]
    return Start(model, new, discriminator.config)


def _generator(
    options: PretrainOptions, config: Any, store: TokenStore, tokenizer: PreTrainedTokenizerBase
) -> tuple[Backbone, list[nn.Parameter]]:
    """Return the generator, and its parameters that are fresh; what it will share is among them still."""
    name = options.init_generator
    beside = None if options.init is None else local_folder(options.init) / GENERATOR_FOLDER
    sizes = [one for one in ("size", "hidden", "layers") if getattr(options, f"generator_{one}") is not None]
    if name is None and beside is not None and beside.is_dir() and not sizes:
        name = str(beside)
        say(f"{name}: taken for the generator")
    if name is None:
        generator = Backbone(ElectraForMaskedLM(_generator_config(options, config)))
        return generator, list(generator.parameters())
    if sizes:
        raise UserError(f"--generator_{sizes[0]} is for a new generator, not for that of --init_generator", name)
    generator, fresh = load_backbone(name, store.unigram_counts(len(tokenizer)))
    if generator.config.model_type != "electra":
        raise UserError(f"model family {generator.config.model_type!r} cannot be ELECTRA's generator", name)
    check_vocabulary(tokenizer, generator.config.vocab_size, name, options.data)
    check_length(span_length(options, store), generator.config, options.data)
    return generator, list(generator.head_parameters().values()) if fresh else []


def _generator_config(options: PretrainOptions, config: Any) -> Any:
    if options.generator_hidden is None:
        chosen = tower_config(config, options.generator_size or _GENERATOR_SIZE)
    elif options.generator_size is not None:
        raise UserError("--generator_hidden stands in the place of --generator_size", hint="give one of them")
    else:
        chosen = tower_config(config, options.generator_hidden / config.hidden_size)
        if chosen.hidden_size != options.generator_hidden:
            raise UserError(
                f"--generator_hidden {options.generator_hidden} is not a multiple of its "
                f"{chosen.num_attention_heads} attention heads",
                hint=f"{chosen.hidden_size} is",
            )
    return tower_of(chosen, num_hidden_layers=options.generator_layers or config.num_hidden_layers)
