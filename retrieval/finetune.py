"""Fine-tuning on judged pairs, a teacher's scores or scored pairs: the verb ``finetune``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from condenser.artifacts import Workspace, result_config
from condenser.errors import UserError
from condenser.files import existing_file
from condenser.manifest import fingerprint, identity
from condenser.talk import say
from condenser.training.distributed import rank, world_size
from condenser.training.loop import Evaluation, start_accelerator, train, write_weights
from condenser.training.settings import loop_settings
from condenser.training.steps import Step
from retrieval.batches import Batches, MixedBatches, PairBatches, ScoredPairBatches
from retrieval.collections import Collection, open_collection
from retrieval.cross_training import check_kind, cross_encoder_trainee
from retrieval.dev import DevPairs, DevSearch
from retrieval.encoder import Encoder
from retrieval.examples import read_examples, read_pairs
from retrieval.lora import add_lora, require_peft, without_lora
from retrieval.losses import loss_named
from retrieval.model_card import write_model_card
from retrieval.options import FinetuneOptions
from retrieval.recompute import recompute_layers
from retrieval.towers import BiEncoder, cached_step, plain_step
from retrieval.trainee import Trainee

_GIB = 2**30
_TEACHERS = ("margin_mse", "kl")


def finetune(options: FinetuneOptions) -> Path:
    """Train an encoder so that queries land near their passages, or a cross-encoder that tells them apart.

    Args:
        options: see `FinetuneOptions`.

    Returns:
        A folder that opens in AutoModel and SentenceTransformer (a cross-encoder in
        AutoModelForSequenceClassification and CrossEncoder), with its model card and training log;
        the weights are those of the best dev MRR@10 where there is a dev split, else the last. A
        killed run leaves ``OUTPUT.partial`` and goes on from its newest checkpoint.

    Raises:
        UserError: options that do not go together; what the encoder, the collections and the loop refuse.
    """
    _check(options)
    settings = loop_settings(options, max_steps=options.max_steps or 0, unit="queries")
    accelerator = start_accelerator(settings)
    collections = [open_collection(name, options.format) for name in options.collection]
    dev_collection = (
        collections[0] if options.dev_collection is None else open_collection(options.dev_collection, options.format)
    )
    inputs = {"encoder": identity(options.encoder), "dev_collection": dev_collection.fingerprint()}
    inputs |= {f"collection {i}": one.fingerprint() for i, one in enumerate(collections, 1)}
    for name in ("negatives_file", "scores_file"):
        inputs |= {f"{name} {i}": fingerprint(existing_file(file)) for i, file in enumerate(getattr(options, name), 1)}
    if options.dev_run is not None:
        inputs["dev_run"] = fingerprint(existing_file(options.dev_run))
    kind = "cross-encoder" if options.cross_encoder else "encoder"
    workspace = Workspace(options.output, kind, config=result_config(options), inputs=inputs, resumable=True)
    with workspace if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        if workspace.published():
            return workspace.output
        torch.manual_seed(options.seed)
        prepare = cross_encoder_trainee if options.cross_encoder else _bi_encoder_trainee
        trainee = prepare(options, collections, dev_collection)
        steps = options.max_steps or max(1, round(options.epochs * trainee.batches.steps_per_epoch))
        settings = loop_settings(options, max_steps=steps, unit="queries")
        evaluation = None
        if trainee.score is not None:
            every = options.eval_every or math.ceil(steps / 4)
            evaluation = Evaluation(every=every, score=trainee.score, save=trainee.save)
        elif accelerator.is_main_process:
            say(f"no judgements for split {options.dev_split!r}: the weights will be those of the last step")
        if accelerator.is_main_process:
            say(_plan(options, trainee, steps, accelerator.num_processes))
        train(
            trainee.model,
            trainee.step,
            trainee.batches,
            settings,
            accelerator,
            workspace,
            evaluation=evaluation,
        )
        if accelerator.is_main_process:
            write_weights(workspace, trainee.save)
            names = [one.name for one in collections]
            trainee.write_card(workspace.path, names)
            workspace.commit({**trainee.facts, "collections": names, "steps": steps})
            say(f"finetune: {steps:,} steps done, saved to {workspace.output}")
        accelerator.wait_for_everyone()
        return workspace.output


def _bi_encoder_trainee(
    options: FinetuneOptions, collections: Sequence[Collection], dev_collection: Collection
) -> Trainee:
    """Load the start and join it with its data."""
    encoder = load_encoder(options)
    batches = _batches(options, collections, encoder)
    dev = _dev(options, dev_collection)
    if options.lora:
        add_lora(encoder, options.lora, options.seed)
    if options.gradient_checkpointing:
        recompute_layers(encoder)
    config = encoder.config
    return Trainee(
        model=BiEncoder(encoder),
        step=_step(options, encoder),
        batches=batches,
        against=_against(options),
        score=None if dev is None else partial(dev, encoder),
        save=lambda folder: without_lora(encoder).save(folder, card=""),
        write_card=lambda folder, names: write_model_card(folder, options, names, config, encoder.dimension),
        facts={**asdict(config), "similarity": config.similarity, "dimension": encoder.dimension},
    )


def load_encoder(options: FinetuneOptions) -> Encoder:
    """Load the start, with the options that are given in place of what it says of itself."""
    encoder = Encoder.load(
        options.encoder,
        untied=options.untied,
        pooling=options.pooling,
        projection=options.projection,
        normalize=options.normalize,
        passage_template=options.passage_template,
        query_prompt=options.query_prompt,
        passage_prompt=options.passage_prompt,
        query_max_length=options.query_max_length,
        passage_max_length=options.passage_max_length,
    )
    longest = max(options.matryoshka, default=0)
    if longest >= encoder.dimension:
        raise UserError(f"--matryoshka {longest} is not below the {encoder.dimension:,} numbers of the vectors")
    return encoder


def _check(options: FinetuneOptions) -> None:
    """Refuse options that do not go together, before anything is read."""
    if options.weights and len(options.weights) != len(options.collection):
        raise UserError(
            f"--weights gives {len(options.weights)} numbers for {len(options.collection)} collections",
            hint="give one for each, in their order",
        )
    check_kind(options)
    if options.lora:
        require_peft()
    if options.graph_memory and options.cache_tokens is None:
        raise UserError("--graph_memory goes with --cache_tokens: without it the whole graph is kept anyway")
    if options.loss == "regression":
        if options.negatives:
            raise UserError("--negatives does not go with --loss regression: a scored pair has none")
        if options.untied:
            raise UserError("--untied does not go with --loss regression: both texts of a pair are of one kind")
    _check_files(options)
    if options.loss in _TEACHERS and not options.negatives:
        raise UserError(
            f"--loss {options.loss} compares a positive with others that a teacher scored",
            hint="say how many of them to take: --negatives 1 or more",
        )


def _check_files(options: FinetuneOptions) -> None:
    """Refuse negatives and scores that nothing would be done with."""
    if options.negatives_file and options.loss in _TEACHERS:
        raise UserError(f"--negatives_file does not go with --loss {options.loss}: --scores_file names its negatives")
    if options.negatives_file and not options.negatives:
        raise UserError("--negatives_file needs --negatives: how many of them a query brings")
    if options.negatives_pool is not None and not options.negatives:
        raise UserError("--negatives_pool needs --negatives: how many of the pool a query brings")
    if options.scores_file and options.loss not in _TEACHERS:
        raise UserError(f"--scores_file does not go with --loss {options.loss}", hint=f"losses: {', '.join(_TEACHERS)}")
    if (options.negatives_file or options.scores_file) and len(options.collection) > 1:
        raise UserError("--negatives_file and --scores_file go with one --collection, whose ids they name")


def _batches(options: FinetuneOptions, collections: Sequence[Collection], encoder: Encoder) -> Batches:
    parts = [_batches_of(options, collection, encoder) for collection in collections]
    if len(parts) == 1:
        return parts[0]
    return MixedBatches(parts, [one.name for one in collections], options.weights, seed=options.seed)


def _batches_of(options: FinetuneOptions, collection: Collection, encoder: Encoder) -> Batches:
    if options.loss == "regression":
        return ScoredPairBatches(
            read_pairs(collection, options.split),
            encoder,
            batch_size=options.batch_size,
            seed=options.seed,
            rank=rank(),
            world=world_size(),
        )
    examples = read_examples(
        collection,
        options.split,
        with_negatives=options.negatives > 0,
        with_scores=options.loss in _TEACHERS,
        drop_empty=options.drop_empty,
        negatives_files=options.negatives_file,
        negatives_pool=options.negatives_pool,
        seed=options.seed,
        scores_files=options.scores_file,
    )
    return PairBatches(
        examples,
        collection.lookup(),
        encoder,
        batch_size=options.batch_size,
        negatives=options.negatives,
        seed=options.seed,
        rank=rank(),
        world=world_size(),
    )


def _dev(options: FinetuneOptions, collection: Collection) -> Callable[[Encoder], dict[str, float]] | None:
    """Return what judges checkpoints; None without a dev split."""
    if options.dev_split not in collection.splits():
        return None
    if rank():  # only the first process judges, and it alone needs passages and queries for that
        return lambda encoder: {}
    if options.loss == "regression":
        return DevPairs(collection, options.dev_split)
    return DevSearch(collection, options.dev_split, pool=options.eval_pool, seed=options.seed)


def _step(options: FinetuneOptions, encoder: Encoder) -> Step:
    loss_of = loss_named(
        options.loss,
        temperature=options.temperature,
        share_negatives=options.share_negatives,
        lengths=options.matryoshka,
        normalize=encoder.config.normalize,
    )
    if options.cache_tokens is None:
        return plain_step(loss_of)
    return cached_step(loss_of, options.cache_tokens, int(options.graph_memory * _GIB))


def _against(options: FinetuneOptions) -> str:
    """Say what a bi-encoder's queries are trained against."""
    if options.loss == "regression":
        return "to the scores of their pairs"
    if options.loss in _TEACHERS:
        return f"to a teacher's scores of {1 + options.negatives:,} passages each"
    processes = world_size()
    shared = options.batch_size if options.share_negatives else options.batch_size // processes
    against = f"against {shared * (1 + options.negatives):,} candidates at most"
    if processes > 1:
        against += ", shared by all processes" if options.share_negatives else ", those of their own process"
    return against


def _plan(options: FinetuneOptions, trainee: Trainee, steps: int, processes: int) -> str:
    """Say what one step is made of."""
    batches = trainee.batches
    left = batches.count % options.batch_size if len(options.collection) == 1 else 0
    left_over = f" ({left:,} left over in each epoch, others each time)" if left else ""
    together = "1 process" if processes == 1 else f"{processes} processes"
    return (
        f"finetune: {batches.count:,} queries{left_over}, {steps:,} steps of {options.batch_size:,} queries "
        f"({steps / batches.steps_per_epoch:.2f} epochs) {trainee.against}, on {together}; "
        f"loss {options.loss}, learning rate {options.learning_rate:g}"
    )
