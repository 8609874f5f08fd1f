"""Training of a query writer on a collection's judged pairs: the verb ``lm train-writer``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from condenser.artifacts import Workspace, result_config
from condenser.corpus.corruption import IGNORED
from condenser.manifest import identity
from condenser.models.language_model import Network
from condenser.models.query_writer import QueryWriter, WriterSettings
from condenser.talk import say
from condenser.training.distributed import rank, world_size
from condenser.training.loop import Evaluation, evaluating, start_accelerator, train, write_weights
from condenser.training.settings import loop_settings
from condenser.training.steps import accumulate
from retrieval.batches import Order
from retrieval.collections import open_collection
from retrieval.encoder import Encoder
from retrieval.encoder_files import fill_template
from retrieval.examples import Examples, read_examples
from retrieval.records import Passage
from retrieval.writer_options import TrainWriterOptions

# Pairs that are read at one time when nothing is trained.
_DEV_ROWS = 32


@dataclass(frozen=True)
class WriterBatch:
    """Passages and their queries as `QueryWriter.forward` takes them."""

    passage_ids: Tensor
    passage_mask: Tensor | None
    query_ids: Tensor
    targets: Tensor

    @property
    def weight(self) -> float:
        """Number of tokens that are asked for."""
        return float((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> WriterBatch:
        """Return a copy on ``device``."""
        mask = None if self.passage_mask is None else self.passage_mask.to(device)
        moved = (self.passage_ids.to(device), mask, self.query_ids.to(device), self.targets.to(device))
        return WriterBatch(*moved)


def writing_objective(model: nn.Module, batch: WriterBatch, *, share: float, fraction: float) -> dict[str, Tensor]:
    """Cross-entropy of each next token of the queries, in nats: the mean over all tokens of the step."""
    return {"nll": model(batch.passage_ids, batch.passage_mask, batch.query_ids, batch.targets) * share}


class WriterBatches:
    """Batches of queries, each with one of its positives, drawn anew each epoch.

    Args:
        examples: the training queries.
        passages: by id, at least all positives of the examples.
        writer: for its tokenizer, template and length limits.
        batch_size: queries per step over all processes.
        seed: decides order and choices.
    """

    def __init__(
        self, examples: Examples, passages: Mapping[str, Passage], writer: QueryWriter, *, batch_size: int, seed: int
    ) -> None:
        self._order = Order(len(examples), batch_size, seed, rank(), world_size())
        self._examples, self._passages, self._writer, self._seed = examples, passages, writer, seed
        self.count, self.steps_per_epoch = len(examples), self._order.steps_per_epoch

    def __call__(self, step: int) -> list[WriterBatch]:
        """Return the step's batch for this process, as the one micro-batch of the step."""
        epoch, chosen = step // self.steps_per_epoch, self._order.own(step)
        rows = []
        for index in chosen:
            positives = self._examples.positives[index]
            draw = np.random.default_rng([self._seed, epoch, index])
            rows.append(positives[int(draw.integers(len(positives)))])
        passages = [self._passages[self._examples.passage_ids[row]] for row in rows]
        return [writer_batch(self._writer, passages, [self._examples.texts[index] for index in chosen])]

    def names(self, step: int) -> list[str]:
        """Return the ids of a step's queries, over all processes."""
        return [self._examples.query_ids[index] for index in self._order.whole(step)]


def passage_text(writer: QueryWriter, passage: Passage) -> str:
    """Return what a query writer reads of a passage."""
    settings = writer.settings
    separator = writer.tokenizer.sep_token
    return settings.passage_prompt + fill_template(settings.passage_template, passage.title, passage.text, separator)


def writer_batch(writer: QueryWriter, passages: Sequence[Passage], queries: Sequence[str]) -> WriterBatch:
    """Tokenize passages and their queries."""
    read = writer.passage_tokens([passage_text(writer, one) for one in passages])
    return WriterBatch(*read, *writer.query_tokens(queries))


def train_writer(options: TrainWriterOptions) -> Path:
    """Train a network that writes a query for what an encoder has read.

    Args:
        options: see `TrainWriterOptions`.

    Returns:
        A folder with all that writing needs: encoder, network, tokenizer, settings; the weights are those of the
        lowest dev perplexity where there is a dev split, else the last. A killed run leaves ``OUTPUT.partial``
        and goes on from its newest checkpoint.

    Raises:
        UserError: what the encoder, the collection and the loop refuse.
    """
    accelerator = start_accelerator(loop_settings(options, max_steps=options.max_steps or 0))
    collection = open_collection(options.collection, options.format)
    inputs = {"encoder": identity(options.encoder), "collection": collection.fingerprint()}
    config = result_config(options)
    workspace = Workspace(options.output, "query writer", config=config, inputs=inputs, resumable=True)
    with workspace if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        if workspace.published():
            return workspace.output
        torch.manual_seed(options.seed)
        writer = new_writer(options)
        passages = collection.lookup()
        examples = read_examples(collection, options.split, drop_empty=options.drop_empty)
        batches = WriterBatches(examples, passages, writer, batch_size=options.batch_size, seed=options.seed)
        steps = options.max_steps or max(1, round(options.epochs * batches.steps_per_epoch))
        evaluation = None
        if options.dev_split in collection.splits():
            judged = read_examples(collection, options.dev_split, drop_empty=True)
            evaluation = Evaluation(
                every=options.eval_every or math.ceil(steps / 4),
                score=lambda: dev_scores(writer, judged, passages),
                save=writer.save,
            )
        if accelerator.is_main_process:
            trained = sum(parameter.numel() for parameter in writer.parameters() if parameter.requires_grad)
            say(
                f"lm train-writer: {batches.count:,} queries, {steps:,} steps of {options.batch_size:,} "
                f"({steps / batches.steps_per_epoch:.2f} epochs); {trained:,} weights are trained"
            )
        train(
            writer,
            accumulate(writing_objective),
            batches,
            loop_settings(options, max_steps=steps, unit="queries"),
            accelerator,
            workspace,
            evaluation=evaluation,
        )
        if accelerator.is_main_process:
            write_weights(workspace, writer.save)
            workspace.commit({"steps": steps, "collection": collection.name, "encoder": options.encoder})
            say(f"lm train-writer: {steps:,} steps done, saved to {workspace.output}")
        accelerator.wait_for_everyone()
        return workspace.output


def new_writer(options: TrainWriterOptions) -> QueryWriter:
    """Return a writer whose decoder begins with the encoder's word vectors.

    Raises:
        UserError: what loading the encoder raises, or a tokenizer without tokens around a text.
    """
    encoder = Encoder.load(options.encoder, passage_max_length=options.passage_max_length)
    tower, config = encoder.tower("passage"), encoder.config
    vectors = tower.model.get_input_embeddings().weight[: len(tower.tokenizer)]
    network = Network(
        vocabulary_size=len(tower.tokenizer),
        cell=options.cell,
        embedding_size=vectors.shape[1],
        hidden_size=options.hidden_size or int(tower.model.config.hidden_size),
        layers=options.layers,
        dropout=options.dropout,
        tied=True,
    )
    settings = WriterSettings(
        attention=options.attention,
        copying=options.copying,
        passage_prompt=config.passage_prompt,
        passage_template=config.passage_template,
        passage_max_length=config.passage_max_length,
        query_max_length=options.query_max_length,
    )
    writer = QueryWriter(tower.model, tower.tokenizer, network, settings, frozen=not options.train_encoder)
    with torch.no_grad():
        writer.decoder.embedding.weight.copy_(vectors)
    return writer


def dev_scores(writer: QueryWriter, examples: Examples, passages: Mapping[str, Passage]) -> dict[str, float]:
    """Return the mean log-probability of the tokens of judged queries, and the perplexity.

    Each query is taken with its first positive.
    """
    nll, tokens = 0.0, 0.0
    with evaluating(writer):
        for start in range(0, len(examples), _DEV_ROWS):
            part = examples[start : start + _DEV_ROWS]
            read = [passages[one.positives[0]] for one in part]
            batch = writer_batch(writer, read, [one.text for one in part])
            nll += float(writer(batch.passage_ids, batch.passage_mask, batch.query_ids, batch.targets))
            tokens += batch.weight
    return {"dev_log_prob": -nll / tokens, "dev_perplexity": math.exp(nll / tokens)}
