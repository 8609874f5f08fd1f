"""Recurrent language models: the verbs ``lm train``, ``lm perplexity`` and ``lm sample``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from condenser.artifacts import Workspace, result_config
from condenser.corpus.corruption import IGNORED
from condenser.corpus.streams import (
    StreamBatch,
    Streams,
    TextFrame,
    TokenDocuments,
    read_token_documents,
    stored_documents,
    text_frame,
)
from condenser.corpus.tokens import TokenStore, load_tokenizer, no_text
from condenser.corpus.wordvectors import read_word_vectors
from condenser.decoding.generators import Recurrent
from condenser.decoding.sampling import SampleSettings, sample
from condenser.errors import UserError
from condenser.files import dump_json, existing_file
from condenser.lm_options import MOST_TEXTS, LmPerplexityOptions, LmSampleOptions, LmTrainOptions
from condenser.manifest import MANIFEST, fingerprint, load_manifest
from condenser.models.language_model import LanguageModel, Network, StreamModel
from condenser.models.rows import batches_by_length, resolve_device
from condenser.talk import say
from condenser.training.loop import Evaluation, evaluating, start_accelerator, train, write_weights
from condenser.training.settings import loop_settings
from condenser.training.steps import accumulate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULT_EMBEDDING = 256
# What is read at one time when nothing is trained, padding included.
_TOKENS_AT_ONCE = 8192
_TEXTS_AT_ONCE = 256


def next_token_objective(model: nn.Module, batch: StreamBatch, *, share: float, fraction: float) -> dict[str, Tensor]:
    """Cross-entropy of each next token, in nats: the mean over all that are asked for in the step."""
    return {"nll": model(batch.tokens, batch.targets, batch.resets) * share}


def train_lm(options: LmTrainOptions) -> Path:
    """Train a recurrent language model on the documents of a token store.

    Args:
        options: see `LmTrainOptions`.

    Returns:
        A folder with the network's shape, its weights, the tokenizer and the training log; the weights are those
        of the lowest dev perplexity where --dev is given, else the last. A killed run leaves ``OUTPUT.partial``
        and goes on from its newest checkpoint, with the state behind the last chunk.

    Raises:
        UserError: options that do not go together, more than one process, a tokenizer without tokens around a text,
            and what the store, the vectors and the loop refuse.
    """
    _check(options)
    accelerator = start_accelerator(loop_settings(options, max_steps=options.max_steps or 0))
    if accelerator.num_processes > 1:
        raise UserError("lm train runs in one process: its streams are read in a row", hint="start it without torchrun")
    inputs = {"data": fingerprint(options.data)}
    inputs |= {f"dev {number}": fingerprint(existing_file(file)) for number, file in enumerate(options.dev, 1)}
    if options.vectors is not None:
        inputs["vectors"] = fingerprint(existing_file(options.vectors))
    config = result_config(options)
    with Workspace(options.output, "language model", config=config, inputs=inputs, resumable=True) as workspace:
        if workspace.done:
            return workspace.output
        store = TokenStore(options.data, verify=True)
        tokenizer = load_tokenizer(store.tokenizer_folder)
        frame = text_frame(tokenizer)
        torch.manual_seed(options.seed)
        model = new_model(options, store, tokenizer)
        streams = Streams(
            stored_documents(store),
            frame,
            streams=options.batch_size,
            chunk=options.chunk,
            apart=options.reset,
            seed=options.seed,
        )
        steps = options.max_steps or max(1, round(options.epochs * streams.steps_per_epoch))
        read = options.batch_size * options.chunk
        settings = loop_settings(options, max_steps=steps, batch_size=read, unit="tokens")
        weights = sum(parameter.numel() for parameter in model.parameters())
        say(
            f"lm train: {streams.count:,} documents, {streams.tokens:,} tokens; {steps:,} steps of "
            f"{options.batch_size:,} streams by {options.chunk:,} tokens "
            f"({steps / streams.steps_per_epoch:.2f} epochs); {weights:,} weights"
        )

        evaluation = None
        if options.dev:
            held_out = read_token_documents(options.dev, tokenizer)
            every = options.eval_every or streams.steps_per_epoch
            evaluation = Evaluation(every=every, score=lambda: _dev_scores(model, held_out, frame), save=model.save)
        train(
            StreamModel(model, options.batch_size),
            accumulate(next_token_objective),
            streams,
            settings,
            accelerator,
            workspace,
            evaluation=evaluation,
        )
        write_weights(workspace, model.save)
        tokenizer.save_pretrained(workspace.path)
        workspace.commit({"steps": steps, "tokens_read": steps * read, "vocabulary": len(tokenizer)})
        say(f"lm train: {steps:,} steps done, saved to {workspace.output}")
        return workspace.output


def new_model(options: LmTrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """Return a network with new weights that begins with the frequencies of the tokens.

    Raises:
        UserError: vectors of another length than --embedding_size, or what reading them raises.
    """
    counts = store.unigram_counts(len(tokenizer))
    frequencies = torch.from_numpy((counts + 1) / (counts.sum() + len(counts)))
    vectors = None
    if options.vectors is not None:
        rows, vectors = read_word_vectors(options.vectors, tokenizer.get_vocab())
        if options.embedding_size not in (None, vectors.shape[1]):
            raise UserError(
                f"--embedding_size is {options.embedding_size}, the vectors have {vectors.shape[1]} numbers",
                options.vectors,
            )
        say(
            f"{options.vectors}: vectors of {len(rows):,} of {len(tokenizer):,} entries; the others are drawn at random"
        )
    network = Network(
        vocabulary_size=len(tokenizer),
        cell=options.cell,
        embedding_size=options.embedding_size or (_DEFAULT_EMBEDDING if vectors is None else vectors.shape[1]),
        hidden_size=options.hidden_size,
        layers=options.layers,
        dropout=options.dropout,
        tied=options.tied,
    )
    model = LanguageModel(network)
    with torch.no_grad():
        model.output.bias.copy_(frequencies.log())
        if vectors is not None:
            model.embedding.weight[torch.from_numpy(rows)] = torch.from_numpy(vectors)
    model.embedding.weight.requires_grad_(not options.freeze_vectors)
    return model


class Perplexity(NamedTuple):
    """How well texts are foreseen; the end of each text is one token and one word of it.

    Attributes:
        nll: negative log-probability of all tokens, in nats.
        tokens: how many they are.
        words: how many words they make.
    """

    nll: float
    tokens: int
    words: int

    @property
    def per_token(self) -> float:
        """exp(nll / tokens)."""
        return _exp(self.nll / self.tokens)

    @property
    def per_word(self) -> float:
        """exp(nll / words): the same scale for any vocabulary without unknown words."""
        return _exp(self.nll / self.words)


def measure(model: LanguageModel, documents: TokenDocuments, frame: TextFrame) -> Perplexity:
    """Take the perplexity of documents, each read on its own from its first token on."""
    device = model.output.bias.device
    nll = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for tokens, targets in _padded(documents, frame):
            state = model.initial_state(len(tokens))
            width = max(1, _TOKENS_AT_ONCE // len(tokens))
            for part, asked in zip(tokens.to(device).split(width, 1), targets.to(device).split(width, 1), strict=True):
                features, state = model(part, state)
                nll += model.loss(features, asked).double()
    count = len(documents.lengths)
    return Perplexity(float(nll), len(documents.tokens) + count, documents.words + count)


def perplexity(options: LmPerplexityOptions) -> str:
    """Measure a language model on files of documents.

    Returns:
        A line with both perplexities and counts, or a JSON object.

    Raises:
        UserError: no language model, or what reading the documents raises.
    """
    model, tokenizer = load_lm(options.model)
    model.to(resolve_device(options.device))
    found = measure(model, read_token_documents(options.input, tokenizer), text_frame(tokenizer))
    figures = {"perplexity_per_token": found.per_token, "perplexity_per_word": found.per_word, **found._asdict()}
    if options.json:
        return dump_json(figures).decode().rstrip()
    return (
        f"perplexity {found.per_token:.2f} per token ({found.tokens:,} tokens), "
        f"{found.per_word:.2f} per word ({found.words:,} words); {found.nll / found.tokens:.4f} nats per token"
    )


def sample_texts(options: LmSampleOptions) -> str:
    """Draw texts from a language model.

    Returns:
        One text a line, each with the prompt.

    Raises:
        UserError: no language model.
    """
    model, tokenizer = load_lm(options.model)
    model.to(resolve_device(options.device))
    frame = text_frame(tokenizer)
    prompt = [frame.start, *tokenizer(options.prompt, add_special_tokens=False)["input_ids"]]
    settings = SampleSettings(
        end=frame.end,
        max_length=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        forbidden=tuple(sorted(no_text(tokenizer) - {frame.end})),
    )
    lines = []
    for start in range(0, options.count, _TEXTS_AT_ONCE):
        numbers = range(start, min(start + _TEXTS_AT_ONCE, options.count))
        read = torch.tensor([prompt] * len(numbers), device=model.output.bias.device)
        state = model.initial_state(len(read))
        with torch.inference_mode():
            for tokens in read[:, :-1].T:
                _, state = model(tokens[:, None], state)
        generator = Recurrent(model, state, read[:, -1])
        drawn = sample(generator, settings, [options.seed * MOST_TEXTS + number for number in numbers])
        texts = (str(tokenizer.decode([*prompt[1:], *one.tokens], skip_special_tokens=True)) for one in drawn)
        lines += [" ".join(text.split()) for text in texts]
    return "\n".join(lines)


def load_lm(folder: str | Path) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """Load a language model and its tokenizer, in eval mode on the CPU.

    Raises:
        UserError: no such folder, no language model in it, or files that differ from its manifest.
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        load_manifest(folder, verify=True)
    model = LanguageModel.load(folder)
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) != model.network.vocabulary_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} entries, the network {model.network.vocabulary_size:,}", folder
        )
    return model, tokenizer


def _check(options: LmTrainOptions) -> None:
    if options.freeze_vectors and options.vectors is None:
        raise UserError("--freeze_vectors needs --vectors: new ones would stay as they were drawn")
    if options.eval_every is not None and not options.dev:
        raise UserError("--eval_every needs --dev: texts to measure")


def _dev_scores(model: LanguageModel, documents: TokenDocuments, frame: TextFrame) -> dict[str, float]:
    """Return the mean log-probability of a token, of which more is better, and both perplexities."""
    found = measure(model, documents, frame)
    return {
        "dev_log_prob": -found.nll / found.tokens,
        "dev_perplexity": found.per_token,
        "dev_perplexity_per_word": found.per_word,
    }


def _padded(documents: TokenDocuments, frame: TextFrame) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and targets (rows, length) of documents of like length, padded at the right, longest first."""
    lengths = (documents.lengths + 1).tolist()
    for rows in batches_by_length(lengths, _TOKENS_AT_ONCE):
        length = lengths[rows[0]]
        tokens = np.full((len(rows), length + 1), frame.end, np.int64)
        targets = np.full((len(rows), length), IGNORED, np.int64)
        tokens[:, 0] = frame.start
        for row, number in enumerate(rows):
            tokens[row, 1 : lengths[number]] = documents.document(number)
            targets[row, : lengths[number]] = tokens[row, 1 : lengths[number] + 1]
        yield torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
