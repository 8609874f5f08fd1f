"""The objectives that repair masked tokens: MLM and Condenser, each also with the contrastive loss over spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from condenser.corpus.batches import PretrainBatch
from condenser.corpus.corruption import IGNORED, MaskingPolicy, masking_policy
from condenser.corpus.tokens import TokenStore
from condenser.errors import UserError
from condenser.hub import local_folder
from condenser.models.backbone import Backbone, load_backbone, new_backbone
from condenser.models.condenser import SETTINGS_FILE, CondenserModel, read_settings
from condenser.models.electra import draw_tokens
from condenser.objectives.base import Start, check_length, check_vocabulary, new_positions, span_length, token_id
from condenser.options import PretrainOptions
from condenser.talk import say, warn
from condenser.training.contrastive import span_contrastive_loss
from condenser.training.steps import Step, accumulate, cached

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def masked_lm_losses(model: nn.Module, batch: PretrainBatch, *, share: float, fraction: float) -> dict[str, Tensor]:
    """Masked-LM losses of the last layer and of the head: means over all masked tokens of the step."""
    out = model(batch.input_ids, batch.attention_mask, batch.labels)
    return {name: loss * share for name, loss in out.losses.items()}


def contrastive_losses(model: nn.Module, batch: PretrainBatch, *, share: float, fraction: float) -> dict[str, Tensor]:
    """Masked-LM losses plus the contrastive loss over the spans of the micro-batch on all processes."""
    out = model(batch.input_ids, batch.attention_mask, batch.labels)
    losses = {name: loss * share for name, loss in out.losses.items()}
    return losses | {"contrastive": span_contrastive_loss(out.cls[: batch.paired_rows]) * batch.pair_share}


def masked_lm_step(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Step:
    """Return the step of MLM and Condenser."""
    return _corrupted(accumulate(masked_lm_losses), options, store, tokenizer)


def contrastive_step(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Step:
    """Return the step of objectives with the contrastive loss.

    Raises:
        UserError: gradient caching together with accumulation.
    """
    if options.cache_chunk is None:
        return _corrupted(accumulate(contrastive_losses), options, store, tokenizer)
    if options.gradient_accumulation > 1:
        raise UserError("--cache_chunk stands in the place of --gradient_accumulation", hint="give one of them")
    step = cached(lambda cls, batch: span_contrastive_loss(cls[: batch.paired_rows]), options.cache_chunk)
    return _corrupted(step, options, store, tokenizer)


def _corrupted(step: Step, options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Step:
    """Let a generator fill the masked tokens before a step, where one is asked for."""
    name = generator_of(options)
    if name is None:
        return step
    generator, fresh = load_backbone(name)
    if fresh:
        raise UserError("has no masked-LM head to draw tokens with", name, "give --corruption a masked language model")
    check_vocabulary(tokenizer, generator.lm.get_input_embeddings().num_embeddings, name, options.data)
    check_length(span_length(options, store), generator.config, options.data)
    return filled(step, generator, len(tokenizer))


def filled(step: Step, generator: Backbone, vocabulary: int) -> Step:
    """Return a step whose chosen tokens are draws of a frozen masked language model (SimLM, Wang et al. 2023).

    What is drawn depends on the masked text and on its seed alone. The labels stay: a draw that happens to be the
    text's own token is asked for like any other.

    Args:
        step: what is run on the filled batches.
        generator: reads the masked batches.
        vocabulary: ids below it may be drawn.
    """
    generator.eval().requires_grad_(False)

    def run(model: nn.Module, micro_batches: Sequence[PretrainBatch], accelerator: Accelerator) -> dict[str, Tensor]:
        generator.to(accelerator.device)
        with accelerator.autocast():
            batches = [_fill(batch.to(accelerator.device), generator, vocabulary) for batch in micro_batches]
        return step(model, batches, accelerator)

    return run


@torch.no_grad()
def _fill(batch: PretrainBatch, generator: Backbone, vocabulary: int) -> PretrainBatch:
    asked = batch.labels != IGNORED
    row = generator.in_one_row(batch.input_ids, batch.attention_mask)
    if row is None:
        states = generator.hidden_states(batch.input_ids, batch.attention_mask)[-1][asked]
    else:
        states = generator.hidden_states(row.ids, row)[-1][0][row.unpadded(asked)]
    logits = generator.vocabulary_logits(states)[:, :vocabulary]
    drawn = draw_tokens(logits, asked.sum(dim=1).tolist(), batch.seeds)
    return replace(batch, input_ids=batch.input_ids.masked_scatter(asked, drawn))


def generator_of(options: PretrainOptions) -> str | None:
    """Return the folder or hub name of the generator in ``--corruption``, None for the mask token.

    Raises:
        UserError: --corruption is neither.
    """
    kind, _, name = options.corruption.partition(":")
    if options.corruption != "mask" and (kind != "generator" or not name):
        raise UserError(f"--corruption is {options.corruption!r}, expected mask or generator:DIR")
    return name or None


def masked_lm_policy(options: PretrainOptions, tokenizer: PreTrainedTokenizerBase) -> MaskingPolicy:
    """Return BERT's corruption in whole words; a generator fills all of the chosen tokens."""
    policy = masking_policy(
        len(tokenizer),
        tokenizer.all_special_ids,
        mask_id=token_id(tokenizer, "mask"),
        probability=options.mlm_probability,
        random_tokens=options.random_tokens,
    )
    policy = replace(policy, whole_words=options.whole_words is not False)
    return policy if generator_of(options) is None else replace(policy, masked=1.0, random=0.0, generator=True)


def start_mlm(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Start:
    """Return a masked language model."""
    return _start(options, store, tokenizer, has_head=False)


def start_condenser(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Start:
    """Return a masked language model with a Condenser head: that of ``--init`` if it has one, else a new one.

    Raises:
        UserError: the head's stored settings are not those asked for.
    """
    return _start(options, store, tokenizer, has_head=True)


def _start(options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase, *, has_head: bool) -> Start:
    if options.init is None:
        positions = new_positions(options, store)
        backbone = new_backbone(str(options.model_size), len(tokenizer), positions, token_id(tokenizer, "pad"))
        fresh_vocabulary_head = False
    else:
        counts = store.unigram_counts(len(tokenizer))
        backbone, fresh_vocabulary_head = load_backbone(options.init, counts)
        rows = backbone.lm.get_input_embeddings().num_embeddings
        check_vocabulary(tokenizer, rows, options.init, options.data)
    head_folder = _head_folder(options) if has_head else None
    stored = read_settings(head_folder) if head_folder else {}
    model = CondenserModel(
        backbone,
        head_layers=_first(options.head_layers, stored.get("head_layers"), 2) if has_head else 0,
        skip_from=_first(options.skip_from, stored.get("skip_from"), backbone.layers // 2),
        late_mlm=_first(options.late_mlm, stored.get("late_mlm"), True),
    )
    if head_folder:
        model.load_head(head_folder)
    new: list[nn.Parameter] = []
    if fresh_vocabulary_head:
        new += backbone.head_parameters().values()
    if has_head and not head_folder:
        new += list(model.head.parameters())
        if options.init is not None:
            _announce_new_head(options, model)
    return Start(model, new, backbone.config)


def _announce_new_head(options: PretrainOptions, model: CondenserModel) -> None:
    text = f"{options.init}: no Condenser head in these weights; {model.head_layers} new layers are started"
    if options.objective == "cocondenser":
        warn(f"{text}: pretrain with --objective condenser first, or keep --late_mlm and a warm-up")
    else:
        say(text)


def _head_folder(options: PretrainOptions) -> Path | None:
    folder = None if options.init is None else local_folder(options.init)
    return folder if folder is not None and (folder / SETTINGS_FILE).is_file() else None


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
