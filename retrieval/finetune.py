"""Bi-encoder fine-tuning on a collection's judgements: the verb ``finetune``."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from condenser.artifacts import Workspace, identity, result_config
from condenser.files import read_json
from condenser.pretrain import loop_settings
from condenser.talk import say
from condenser.training.distributed import rank, world_size
from condenser.training.loop import BEST, Evaluation, start_accelerator, train
from condenser.training.steps import accumulate
from retrieval.batches import PairBatch, PairBatches
from retrieval.collections import Collection, open_collection
from retrieval.dev import DevSearch
from retrieval.encoder import Encoder, batches_by_length
from retrieval.examples import read_examples
from retrieval.losses import shared_in_batch_softmax
from retrieval.options import FinetuneOptions

# Texts of like length go through the encoder together: less padding at the same result.
_FORWARD_TOKENS = 1024


class BiEncoder(nn.Module):
    """The tied towers of one training step: token ids in, vectors of queries and passages out.

    Args:
        encoder: encodes both kinds of text.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, queries: list[list[int]], passages: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return vectors (n, d) and (m, d) in the order of the texts, with gradients."""
        texts = queries + passages
        groups = list(batches_by_length([len(ids) for ids in texts], _FORWARD_TOKENS))
        vectors = torch.cat([self.encoder(*self.encoder.pad([texts[i] for i in group])) for group in groups])
        order = torch.empty(len(texts), dtype=torch.long)
        order[torch.tensor([i for group in groups for i in group])] = torch.arange(len(texts))
        vectors = vectors[order.to(vectors.device)]
        return vectors[: len(queries)], vectors[len(queries) :]


def finetune(options: FinetuneOptions) -> Path:
    """Train an encoder so that queries land near their passages.

    Args:
        options: see `FinetuneOptions`.

    Returns:
        An encoder folder that opens in AutoModel and SentenceTransformer, with its model card and
        training log; the weights are those of the best dev MRR@10 where there is a dev split, else
        the last. A killed run leaves ``OUTPUT.partial`` and goes on from its newest checkpoint.

    Raises:
        UserError: what the encoder, the collection and the loop refuse.
    """
    settings = loop_settings(options, max_steps=options.max_steps or 0)
    accelerator = start_accelerator(settings)
    collection = open_collection(options.collection[0])
    inputs = {"encoder": identity(options.encoder), "collection": collection.fingerprint()}
    workspace = Workspace(options.output, "encoder", config=result_config(options), inputs=inputs, resumable=True)
    with workspace if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        if workspace.done or (not accelerator.is_main_process and workspace.output.is_dir()):
            return workspace.output
        torch.manual_seed(options.seed)
        encoder = load_encoder(options)
        examples = read_examples(
            collection, options.split, with_negatives=options.negatives > 0, drop_empty=options.drop_empty
        )
        has_dev = options.dev_split in collection.splits()
        if not has_dev and accelerator.is_main_process:
            say(f"no judgements for split {options.dev_split!r}: the weights will be those of the last step")
        batches = PairBatches(
            examples,
            collection.lookup(),
            encoder,
            batch_size=options.batch_size,
            negatives=options.negatives,
            seed=options.seed,
            rank=rank(),
            world=world_size(),
        )
        steps = options.max_steps or max(1, round(options.epochs * batches.steps_per_epoch))
        settings = loop_settings(options, max_steps=steps)
        evaluation = None
        if has_dev:
            search = DevSearch(collection, options.dev_split, pool=options.eval_pool, seed=options.seed)
            evaluation = Evaluation(
                every=options.eval_every or math.ceil(steps / 4),
                score=lambda: search(encoder),
                save=lambda folder: encoder.save(folder, _card(options, collection)),
            )
        if accelerator.is_main_process:
            candidates = options.batch_size * (1 + options.negatives)
            left = len(examples) % options.batch_size
            left_over = f" ({left:,} left over in each epoch, others each time)" if left else ""
            say(
                f"finetune: {len(examples):,} queries{left_over}, {steps:,} steps of {options.batch_size:,} queries "
                f"({steps / batches.steps_per_epoch:.2f} epochs) against {candidates:,} candidates at most, "
                f"on {accelerator.num_processes} processes"
            )
        train(
            BiEncoder(encoder),
            accumulate(lambda model, batch, *, share, fraction: _softmax_loss(model, batch, options.temperature)),
            batches,
            settings,
            accelerator,
            workspace,
            evaluation=evaluation,
        )
        if accelerator.is_main_process:
            _finish(workspace, encoder, options, collection, steps)
        accelerator.wait_for_everyone()
        return workspace.output


def load_encoder(options: FinetuneOptions) -> Encoder:
    """Load the start, with the options that are given in place of what it says of itself."""
    return Encoder.load(
        options.encoder,
        pooling=options.pooling,
        normalize=options.normalize,
        passage_template=options.passage_template,
        query_prompt=options.query_prompt,
        passage_prompt=options.passage_prompt,
        query_max_length=options.query_max_length,
        passage_max_length=options.passage_max_length,
    )


def _softmax_loss(model: nn.Module, batch: PairBatch, temperature: float) -> dict[str, Tensor]:
    queries, passages = model(batch.queries, batch.passages)
    loss = shared_in_batch_softmax(
        queries, passages, batch.targets, batch.passage_rows, batch.positives, temperature=temperature
    )
    return {"contrastive": loss}


def _card(options: FinetuneOptions, collection: Collection) -> str:
    """Return the model card in Markdown."""
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [condenser-ir, dense-retrieval]
---
# Dense retriever trained on {collection.name}

Bi-encoder with tied towers, started from `{Path(options.encoder).name}` and trained with in-batch
negatives ({options.batch_size} queries a step, {options.negatives} hard negatives a query, temperature
{options.temperature}, learning rate {options.learning_rate}, seed {options.seed}) on split `{options.split}`.

    from sentence_transformers import SentenceTransformer
    model = SentenceTransformer("this folder")
    scores = model.encode_query(["a question"]) @ model.encode_document(["a passage"]).T

`log.jsonl` holds the training log with the dev figures, `manifest.json` every option and version.
"""


def _finish(
    workspace: Workspace, encoder: Encoder, options: FinetuneOptions, collection: Collection, steps: int
) -> None:
    best = workspace.scratch / BEST
    if best.is_dir():
        shutil.copytree(best, workspace.path, dirs_exist_ok=True)
    else:
        encoder.save(workspace.path, _card(options, collection))
    workspace.commit(
        {
            **read_json(workspace.path / "encoder.json"),
            "dimension": encoder.dimension,
            "collection": collection.name,
            "steps": steps,
        }
    )
    say(f"finetune: {steps:,} steps done, saved to {workspace.output}")
