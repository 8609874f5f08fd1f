"""Wires corpus, model, objective and loop together: the verb ``pretrain``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from condenser.artifacts import Workspace, result_config
from condenser.corpus.batches import Frame, PretrainBatch, SpanBatches
from condenser.corpus.corruption import masking_policy
from condenser.corpus.tokens import TokenStore, load_tokenizer, require_words
from condenser.errors import UserError
from condenser.hub import local_folder
from condenser.manifest import fingerprint, identity
from condenser.models.backbone import Backbone, load_backbone, new_backbone
from condenser.models.condenser import SETTINGS_FILE, CondenserModel, read_settings
from condenser.options import PretrainOptions
from condenser.talk import say, warn
from condenser.training.contrastive import span_contrastive_loss
from condenser.training.distributed import rank, world_size
from condenser.training.loop import LoopSettings, start_accelerator, train
from condenser.training.steps import Step, accumulate, cached
from condenser.weights import has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ObjectiveKind:
    """What tells one objective from another."""

    has_head: bool
    pairs: bool


OBJECTIVES = {
    "mlm": ObjectiveKind(has_head=False, pairs=False),
    "mlm_contrastive": ObjectiveKind(has_head=False, pairs=True),
    "condenser": ObjectiveKind(has_head=True, pairs=False),
    "cocondenser": ObjectiveKind(has_head=True, pairs=True),
}


def masked_lm_objective(model: nn.Module, batch: PretrainBatch, *, share: float, fraction: float) -> dict[str, Tensor]:
    """Masked-LM losses of the last layer and of the head: means over all masked tokens of the step."""
    out = model(batch.input_ids, batch.attention_mask, batch.labels)
    return {name: loss * share for name, loss in out.losses.items()}


def contrastive_objective(
    model: nn.Module, batch: PretrainBatch, *, share: float, fraction: float
) -> dict[str, Tensor]:
    """Masked-LM losses plus the contrastive loss over the spans of the micro-batch on all processes."""
    out = model(batch.input_ids, batch.attention_mask, batch.labels)
    losses = {name: loss * share for name, loss in out.losses.items()}
    return losses | {"contrastive": span_contrastive_loss(out.cls[: batch.paired_rows]) * batch.pair_share}


def pretrain(options: PretrainOptions) -> Path:
    """Pretrain an encoder on a token store.

    Args:
        options: see `PretrainOptions`.

    Returns:
        A folder that opens in AutoModel and AutoModelForMaskedLM, with the tokenizer, the training
        log, and for Condenser its head (condenser_head.safetensors, condenser.json). A killed run
        leaves ``OUTPUT.partial`` and goes on from its newest checkpoint.

    Raises:
        UserError: no or two starts (--init, --model_size) or lengths (--max_steps, --epochs), options of a
            head that the objective lacks, data of another vocabulary, lengths beyond the model's positions,
            or a batch the data cannot fill.
    """
    kind = OBJECTIVES[options.objective]
    for one, other in (("init", "model_size"), ("max_steps", "epochs")):
        if (getattr(options, one) is None) == (getattr(options, other) is None):
            raise UserError(f"give exactly one of --{one} and --{other}")
    _check_head_options(options, kind)
    accelerator = start_accelerator(loop_settings(options, max_steps=options.max_steps or 0))
    inputs = {"data": fingerprint(options.data)}
    if options.init is not None:
        inputs["init"] = identity(options.init)
    workspace = Workspace(options.output, "pretrained", config=result_config(options), inputs=inputs, resumable=True)
    with workspace if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        if workspace.done or (not accelerator.is_main_process and workspace.output.is_dir()):
            return workspace.output
        # a flipped bit in the corpus would train in silence
        store = TokenStore(options.data, verify=accelerator.is_main_process)
        tokenizer = load_tokenizer(store.tokenizer_folder)
        torch.manual_seed(options.seed)
        model, new_parameters = build_model(options, kind, store, tokenizer)
        batches = build_batches(options, kind, store, tokenizer, model.backbone)
        steps = options.max_steps or max(1, round(float(options.epochs or 0) * batches.steps_per_epoch))
        settings = loop_settings(options, max_steps=steps)
        if accelerator.is_main_process:
            say(
                f"{options.objective}: {batches.describe()}; "
                f"{steps:,} steps of {options.batch_size:,} "
                f"({steps / batches.steps_per_epoch:.2f} epochs) on {accelerator.num_processes} processes"
            )
        run_step = step_function(options, kind)
        train(model, run_step, batches, settings, accelerator, workspace, new_parameters=new_parameters)
        if accelerator.is_main_process:
            _finish(workspace, model, tokenizer, options, steps)
        accelerator.wait_for_everyone()
        return workspace.output


def _check_head_options(options: PretrainOptions, kind: ObjectiveKind) -> None:
    for name in ("skip_from", "head_layers", "late_mlm"):
        if not kind.has_head and getattr(options, name) is not None:
            raise UserError(f"--{name} is for objectives with a Condenser head, {options.objective} has none")


def step_function(options: PretrainOptions, kind: ObjectiveKind) -> Step:
    """Return how a step of this objective is run.

    Raises:
        UserError: gradient caching without a contrastive loss, or together with accumulation.
    """
    if options.cache_chunk is None:
        return accumulate(contrastive_objective if kind.pairs else masked_lm_objective)
    if not kind.pairs:
        raise UserError(
            f"--cache_chunk is for contrastive objectives, {options.objective} has no loss over the whole batch"
        )
    if options.gradient_accumulation > 1:
        raise UserError("--cache_chunk stands in the place of --gradient_accumulation", hint="give one of them")
    return cached(lambda cls, batch: span_contrastive_loss(cls[: batch.paired_rows]), options.cache_chunk)


def loop_settings(options: Any, **others: Any) -> LoopSettings:
    """Take the loop's settings from a verb's options."""
    names = LoopSettings.__dataclass_fields__
    values = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return LoopSettings(**(values | others))


def build_model(
    options: PretrainOptions, kind: ObjectiveKind, store: TokenStore, tokenizer: PreTrainedTokenizerBase
) -> tuple[CondenserModel, list[nn.Parameter]]:
    """Return the model to train, and its freshly started parameters (none when all are fresh).

    Raises:
        UserError: the data's ids do not fit the vocabulary, or the head's stored settings differ.
    """
    if options.init is None:
        size = str(options.model_size)
        backbone = new_backbone(size, len(tokenizer), options.max_length or 512, _pad_id(tokenizer))
        fresh_vocabulary_head = False
    else:
        counts = store.unigram_counts(len(tokenizer))
        backbone, fresh_vocabulary_head = load_backbone(options.init, counts)
        _check_vocabulary(backbone, tokenizer, options)
    head_folder = _head_folder(options, kind)
    stored = read_settings(head_folder) if head_folder else {}
    model = CondenserModel(
        backbone,
        head_layers=_first(options.head_layers, stored.get("head_layers"), 2) if kind.has_head else 0,
        skip_from=_first(options.skip_from, stored.get("skip_from"), backbone.layers // 2),
        late_mlm=_first(options.late_mlm, stored.get("late_mlm"), True),
    )
    if head_folder:
        model.load_head(head_folder)
    new: list[nn.Parameter] = []
    if fresh_vocabulary_head:
        new += backbone.head_parameters().values()
    if kind.has_head and not head_folder:
        new += list(model.head.parameters())
        if options.init is not None:
            _announce_new_head(options, model)
    if new and options.init is not None and not options.head_warmup_steps:
        say("--head_warmup_steps N would let what is new settle for N steps while the encoder stands still")
    return model, new


def _announce_new_head(options: PretrainOptions, model: CondenserModel) -> None:
    text = f"{options.init}: no Condenser head in these weights; {model.head_layers} new layers are started"
    if options.objective == "cocondenser":
        warn(f"{text}: pretrain with --objective condenser first, or keep --late_mlm and a warm-up")
    else:
        say(text)


def _head_folder(options: PretrainOptions, kind: ObjectiveKind) -> Path | None:
    if kind.has_head and options.init is not None and (Path(options.init) / SETTINGS_FILE).is_file():
        return Path(options.init)
    return None


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _check_vocabulary(backbone: Backbone, tokenizer: PreTrainedTokenizerBase, options: PretrainOptions) -> None:
    hint = "build the spans with the model's own tokenizer"
    rows = backbone.lm.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"the data's tokenizer has {len(tokenizer):,} entries, the model's vocabulary {rows:,}", options.data, hint
        )
    folder = local_folder(str(options.init))
    if not has_tokenizer(folder):
        return
    own = load_tokenizer(folder)
    if own.get_vocab() != tokenizer.get_vocab():
        described = [f"{type(one).__name__} of {len(one):,} entries" for one in (tokenizer, own)]
        raise UserError(
            f"the data's tokenizer ({described[0]}) is not the model's ({described[1]})", options.data, hint
        )


def build_batches(
    options: PretrainOptions,
    kind: ObjectiveKind,
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    backbone: Backbone,
) -> SpanBatches:
    """Return the source of batches for this process."""
    length = options.max_length or int(store.manifest["facts"]["max_length"])
    if length > backbone.max_length:
        raise UserError(
            f"spans of {length} tokens do not fit the model's {backbone.max_length} positions", options.data
        )
    special = tokenizer.num_special_tokens_to_add()
    if length <= special:
        raise UserError(f"--max_length {length} leaves no room for text beside {special} special tokens")
    require_words(tokenizer)
    policy = masking_policy(
        len(tokenizer),
        tokenizer.all_special_ids,
        mask_id=_token(tokenizer, "mask"),
        probability=options.mlm_probability,
        random_tokens=options.random_tokens,
    )
    return SpanBatches(
        store,
        pairs=kind.pairs,
        batch_size=options.batch_size,
        micro_batches=options.gradient_accumulation,
        policy=policy,
        frame=Frame(_token(tokenizer, "cls"), _token(tokenizer, "sep"), _pad_id(tokenizer)),
        room=length - special,
        seed=options.seed,
        rank=rank(),
        world=world_size(),
    )


def _token(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    value = getattr(tokenizer, f"{name}_token_id")
    if value is None:
        raise UserError(f"the tokenizer has no {name} token, which pretraining needs", tokenizer.name_or_path)
    return int(value)


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return _token(tokenizer, "pad")


def _finish(
    workspace: Workspace,
    model: CondenserModel,
    tokenizer: PreTrainedTokenizerBase,
    options: PretrainOptions,
    steps: int,
) -> None:
    model.save(workspace.path)
    tokenizer.save_pretrained(workspace.path)
    workspace.commit(
        {
            "objective": options.objective,
            "init": options.init or options.model_size,
            "steps": steps,
            "dimension": model.backbone.config.hidden_size,
            "tokenizer": fingerprint(Path(options.data) / "tokenizer"),
        }
    )
    say(f"{options.objective}: {steps:,} steps done, saved to {workspace.output}")
