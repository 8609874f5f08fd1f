"""Wires corpus, model, objective and loop together: the verb ``pretrain``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from condenser.artifacts import Workspace, result_config
from condenser.corpus.batches import Frame, SpanBatches
from condenser.corpus.tokens import FRAME_TOKENS, TokenStore, load_tokenizer, require_words
from condenser.errors import UserError
from condenser.manifest import fingerprint, identity
from condenser.models.electra import GENERATOR_FOLDER
from condenser.objectives.base import Objective, Start, check_length, check_options, span_length, token_id
from condenser.objectives.electra import electra_policy, electra_step, start_electra
from condenser.objectives.electric import electric_step, single_tokens, start_electric
from condenser.objectives.masked_lm import (
    contrastive_step,
    generator_of,
    masked_lm_policy,
    masked_lm_step,
    start_condenser,
    start_mlm,
)
from condenser.options import PretrainOptions
from condenser.talk import say
from condenser.training.distributed import rank, world_size
from condenser.training.loop import start_accelerator, train
from condenser.training.settings import loop_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MASKS = ("corruption", "random_tokens", "whole_words")
_HEAD = ("skip_from", "head_layers", "late_mlm")
_GENERATOR = (
    "init_generator", "generator_size", "generator_hidden", "generator_layers", "embedding_sharing", "masked_share",
    "discriminator_weight", "special_tokens_judged", "whole_words",
)  # fmt: skip
_NOISE = ("generator_size", "nce_weight", "nce_ratio", "nce_over")

OBJECTIVES = {
    "mlm": Objective(start_mlm, masked_lm_policy, masked_lm_step, takes=_MASKS),
    "mlm_contrastive": Objective(
        start_mlm, masked_lm_policy, contrastive_step, pairs=True, takes=(*_MASKS, "cache_chunk")
    ),
    "condenser": Objective(start_condenser, masked_lm_policy, masked_lm_step, takes=(*_MASKS, *_HEAD)),
    "cocondenser": Objective(
        start_condenser, masked_lm_policy, contrastive_step, pairs=True, takes=(*_MASKS, *_HEAD, "cache_chunk")
    ),
    "electra": Objective(start_electra, electra_policy, electra_step, takes=_GENERATOR),
    "electric": Objective(start_electric, single_tokens, electric_step, takes=_NOISE),
}


def pretrain(options: PretrainOptions) -> Path:
    """Pretrain an encoder on a token store.

    Args:
        options: see `PretrainOptions`.

    Returns:
        A folder that opens in AutoModel and in the class of the objective, with the tokenizer, the training
        log, and what belongs to the objective: Condenser's head (condenser_head.safetensors, condenser.json),
        ELECTRA's generator (a folder within), Electric's noise model. A killed run leaves ``OUTPUT.partial``
        and goes on from its newest checkpoint.

    Raises:
        UserError: no or two starts (--init, --model_size) or lengths (--max_steps, --epochs), options that the
            objective does not take, data of another vocabulary, lengths beyond the model's positions, or a
            batch the data cannot fill.
    """
    objective = OBJECTIVES[options.objective]
    for one, other in (("init", "model_size"), ("max_steps", "epochs")):
        if (getattr(options, one) is None) == (getattr(options, other) is None):
            raise UserError(f"give exactly one of --{one} and --{other}")
    check_options(options, OBJECTIVES)
    accelerator = start_accelerator(loop_settings(options, max_steps=options.max_steps or 0))
    inputs = {"data": fingerprint(options.data)}
    read = {"init": options.init, "init_generator": options.init_generator, "corruption": generator_of(options)}
    inputs |= {name: identity(place) for name, place in read.items() if place is not None}
    workspace = Workspace(options.output, "pretrained", config=result_config(options), inputs=inputs, resumable=True)
    with workspace if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        if workspace.published():
            return workspace.output
        # a flipped bit in the corpus would train in silence
        store = TokenStore(options.data, verify=accelerator.is_main_process)
        tokenizer = load_tokenizer(store.tokenizer_folder)
        torch.manual_seed(options.seed)
        start = objective.start(options, store, tokenizer)
        if start.new and options.init is not None and not options.head_warmup_steps:
            say("--head_warmup_steps N would let what is new settle for N steps while the encoder stands still")
        warm_up = options.head_warmup_steps
        if warm_up and not start.new:
            if accelerator.is_main_process:
                say("nothing is new in these weights: the --head_warmup_steps are steps like all others")
            warm_up = 0
        batches = build_batches(options, objective, store, tokenizer, start.config)
        run_step = objective.step(options, store, tokenizer)
        steps = options.max_steps or max(1, round(float(options.epochs or 0) * batches.steps_per_epoch))
        settings = replace(loop_settings(options, max_steps=steps), head_warmup_steps=warm_up)
        if accelerator.is_main_process:
            say(
                f"{options.objective}: {batches.describe()}; "
                f"{steps:,} steps of {options.batch_size:,} "
                f"({steps / batches.steps_per_epoch:.2f} epochs) on {accelerator.num_processes} processes"
            )
        train(start.model, run_step, batches, settings, accelerator, workspace, new_parameters=start.new)
        if accelerator.is_main_process:
            _finish(workspace, start, tokenizer, options, steps)
        accelerator.wait_for_everyone()
        return workspace.output


def build_batches(
    options: PretrainOptions,
    objective: Objective,
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
) -> SpanBatches:
    """Return the source of batches for this process.

    Args:
        options: see `PretrainOptions`.
        objective: the row of the table.
        store: the corpus.
        tokenizer: the store's.
        config: of the encoder, for its positions.
    """
    length = span_length(options, store)
    check_length(length, config, options.data)
    if length <= FRAME_TOKENS:
        raise UserError(f"--max_length {length} leaves no room for text beside {FRAME_TOKENS} special tokens")
    require_words(tokenizer)
    return SpanBatches(
        store,
        pairs=objective.pairs,
        batch_size=options.batch_size,
        micro_batches=options.gradient_accumulation,
        policy=objective.policy(options, tokenizer),
        frame=Frame(*(token_id(tokenizer, name) for name in ("cls", "sep", "pad"))),
        room=length - FRAME_TOKENS,
        seed=options.seed,
        rank=rank(),
        world=world_size(),
    )


def _finish(
    workspace: Workspace,
    start: Start,
    tokenizer: PreTrainedTokenizerBase,
    options: PretrainOptions,
    steps: int,
) -> None:
    start.model.save(workspace.path)
    tokenizer.save_pretrained(workspace.path)
    if (workspace.path / GENERATOR_FOLDER).is_dir():
        tokenizer.save_pretrained(workspace.path / GENERATOR_FOLDER)
    workspace.commit(
        {
            "objective": options.objective,
            "init": options.init or options.model_size,
            "steps": steps,
            "dimension": start.config.hidden_size,
            "tokenizer": fingerprint(Path(options.data) / "tokenizer"),
        }
    )
    say(f"{options.objective}: {steps:,} steps done, saved to {workspace.output}")
