"""Models that write queries for passages, ours and published ones, behind one face."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from condenser.corpus.tokens import load_tokenizer, no_text
from condenser.decoding.generators import CausalModel, Generator, Recurrent, Repeated, SequenceToSequence
from condenser.decoding.pieces import Pieces, pieces_of
from condenser.errors import UserError, first_line
from condenser.files import read_json
from condenser.hub import local_folder, position_limit, quiet_transformers
from condenser.models.query_writer import SETTINGS_FILE, QueryWriter
from condenser.models.rows import padded_rows, resolve_device
from condenser.weights import CONFIG, check_config, check_weights
from retrieval.encoder_files import fill_template
from retrieval.query_writer import passage_text
from retrieval.records import Passage


class Writer(ABC):
    """A model that writes a query for what it has read of a passage.

    Attributes:
        tokenizer: of the queries.
        end: the token that ends a query.
        forbidden: tokens that are no text, which no query may hold.
        device: where it computes.
        spare: so many tokens the model has positions for behind the longest passage.

    Args:
        tokenizer: see above.
        end: see above.
        device: see above.
        vocabulary: how many tokens the model gives a probability; what the tokenizer has no name for is no text.
    """

    spare: int = 1_000_000

    def __init__(self, tokenizer: Any, end: int, device: torch.device, vocabulary: int) -> None:
        self.tokenizer, self.end, self.device = tokenizer, end, device
        nameless = set(range(vocabulary)).difference(tokenizer.get_vocab().values())
        self.forbidden = tuple(sorted((no_text(tokenizer) | nameless) - {end}))
        self._pieces: Pieces | None = None

    @property
    def pieces(self) -> Pieces:
        """What each token adds to a text, for constraints."""
        if self._pieces is None:
            self._pieces = pieces_of(self.tokenizer)
        return self._pieces

    @abstractmethod
    def generator(self, passages: Sequence[Passage], longest: Sequence[int] | None = None) -> Generator:
        """Return the model as it has read these passages, one input each.

        Args:
            passages: what is read.
            longest: how many tokens will follow each, its query's end aside: where the model has few positions, less
                is read of the passage.

        Raises:
            UserError: more tokens than the model has positions for.
        """

    def text(self, tokens: Sequence[int]) -> str:
        """Return a query as text, blanks in a row made one."""
        return " ".join(str(self.tokenizer.decode(tokens, skip_special_tokens=True)).split())

    def log_probs(self, passages: Sequence[Passage], queries: Sequence[str]) -> list[tuple[float, int]]:
        """Return for each query its log-probability given its passage, its end counted, and how many tokens it has.

        The tokens are those into which the tokenizer cuts the text.
        """
        rows = self.tokenizer(list(queries), add_special_tokens=False)["input_ids"]
        # Each passage is read once, unless a query is so long that less can be read for it.
        asked = [(one, len(row) if len(row) > self.spare else 0) for one, row in zip(passages, rows, strict=True)]
        rows = [[*row, self.end] for row in rows]
        places = {one: place for place, one in enumerate(dict.fromkeys(asked))}
        read = self.generator([passage for passage, _ in places], [length for _, length in places])
        generator = Repeated(read, [places[one] for one in asked])
        log_probs, state = generator.start()
        sums = [0.0] * len(rows)
        live = list(range(len(rows)))
        for place in range(max(map(len, rows))):
            wanted = torch.tensor([rows[row][place] for row in live], device=log_probs.device)
            of_wanted = log_probs.gather(1, wanted[:, None])[:, 0].tolist()
            for row, value in zip(live, of_wanted, strict=True):
                sums[row] += value
            going = [index for index, row in enumerate(live) if place + 1 < len(rows[row])]
            if not going:
                break
            chosen = torch.tensor(going, device=log_probs.device)
            log_probs, state = generator.step(wanted[chosen], generator.reorder(state, chosen))
            live = [live[index] for index in going]
        return [(total, len(row)) for total, row in zip(sums, rows, strict=True)]


def load_writer(
    name: str | Path, *, device: str = "cpu", passage_max_length: int = 256, prompt: str = "{title} {text}"
) -> Writer:
    """Load a model that writes queries.

    Args:
        name: folder made by `condenser lm train-writer`, or folder or hub name of a sequence-to-sequence or a causal
            model of transformers.
        device: ``cpu``, ``cuda`` or ``auto``.
        passage_max_length: longest passage in tokens; a writer of ours has its own.
        prompt: what a published model reads of a passage; a writer of ours has its own.

    Raises:
        UserError: no such model, weights that cannot be loaded or that are another tokenizer's, a model that writes no
            text, or a prompt that does not hold the passage.
    """
    folder = local_folder(name)
    place = resolve_device(device)
    if (folder / SETTINGS_FILE).is_file():
        return OurWriter(QueryWriter.load(folder).to(place))
    if "{text}" not in prompt:
        raise UserError(f"--prompt {prompt!r} has no {{text}}, where the passage is put in")
    check_writer(folder)
    check_weights(folder)
    tokenizer = load_tokenizer(folder)
    model = _published(folder).to(place)
    rows = model.get_input_embeddings().num_embeddings
    if max(tokenizer.get_vocab().values()) >= rows:
        raise UserError(
            f"tokenizer has {len(tokenizer):,} entries, the embedding table {rows:,} rows", folder,
            "tokenizer and weights are of different models",
        )  # fmt: skip
    if model.config.is_encoder_decoder:
        return PublishedWriter(model, tokenizer, passage_max_length, prompt)
    return PromptedWriter(model, tokenizer, passage_max_length, prompt)


def check_writer(name: str | Path) -> None:
    """Look at what a folder says of its model, before anything is loaded.

    Raises:
        UserError: no such model, or one that writes no text.
    """
    folder = local_folder(name)
    if (folder / SETTINGS_FILE).is_file():
        return
    check_config(folder)
    heads = read_json(folder / CONFIG).get("architectures")
    if (
        isinstance(heads, list)
        and heads
        and not any(str(head).endswith(("Generation", "ForCausalLM", "LMHeadModel")) for head in heads)
    ):
        raise UserError(
            f"holds a {heads[0]}, which writes no text", folder,
            "give a folder of `lm train-writer`, a T5 or BART for generation, or a causal model",
        )  # fmt: skip


def _published(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    settings = {"local_files_only": True, "trust_remote_code": False}
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(folder, **settings)
            kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model = kind.from_pretrained(folder, config=config, use_safetensors=True, dtype=torch.float32, **settings)
        except Exception as error:  # transformers and safetensors raise many kinds
            raise UserError(f"model could not be loaded: {first_line(error)}", folder) from None
    return model.eval()


class OurWriter(Writer):
    """A query writer of ours: an encoder reads, a recurrent network writes."""

    def __init__(self, model: QueryWriter) -> None:
        vocabulary = model.decoder.network.vocabulary_size
        super().__init__(model.tokenizer, model.frame.end, model.device, vocabulary)
        self.model = model

    @torch.inference_mode()
    def generator(self, passages: Sequence[Passage], longest: Sequence[int] | None = None) -> Generator:
        """Let the encoder read the passages."""
        read = self.model.passage_tokens([passage_text(self.model, one) for one in passages])
        first = torch.full((len(passages),), self.model.frame.start, device=self.device)
        return Recurrent(self.model, self.model.start_state(*read), first)


class PublishedWriter(Writer):
    """A sequence-to-sequence model, such as a doc2query T5.

    Args:
        model: the model, in eval mode.
        tokenizer: its tokenizer.
        passage_max_length: longest passage in tokens.
        prompt: template of what is read.
    """

    def __init__(self, model: Any, tokenizer: Any, passage_max_length: int, prompt: str) -> None:
        end = model.generation_config.eos_token_id or tokenizer.eos_token_id
        end = end[0] if isinstance(end, list) else end
        if end is None:
            raise UserError("the model names no token that ends a text", tokenizer.name_or_path)
        super().__init__(tokenizer, int(end), model.device, model.get_input_embeddings().num_embeddings)
        self.model, self.prompt = model, prompt
        self.positions = position_limit(model.config)
        self.max_length = min(passage_max_length, self.positions)
        self.spare = self._spare()

    def _spare(self) -> int:
        return self.positions - 1  # the decoder has positions of its own, of which the token it begins with takes one

    def generator(self, passages: Sequence[Passage], longest: Sequence[int] | None = None) -> Generator:
        """Let the model's encoder read the passages."""
        if max(longest or (), default=0) > self.spare:
            self._refuse_length(max(longest or ()), 1)
        texts = [fill_template(self.prompt, one.title, one.text) for one in passages]
        read = self._padded(self.tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"])
        return SequenceToSequence(self.model, *read)

    def _refuse_length(self, tokens: int, others: int) -> None:
        raise UserError(
            f"a query of up to {tokens:,} tokens with {others:,} before it, the model has positions for "
            f"{self.positions:,}",
            self.tokenizer.name_or_path,
            "write queries with a lower --max_length",
        )

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        ids, mask = padded_rows(rows, 0, self.device)
        return ids, torch.ones_like(ids) if mask is None else mask


class PromptedWriter(PublishedWriter):
    """A causal language model that goes on where the prompt ends."""

    def _spare(self) -> int:
        return self.positions - self.max_length

    def generator(self, passages: Sequence[Passage], longest: Sequence[int] | None = None) -> Generator:
        """Let the model read the prompts; what is cut of a long one is the passage's end, not the words behind it."""
        head, _, tail = self.prompt.partition("{text}")
        behind = self.tokenizer(tail, add_special_tokens=False)["input_ids"] if tail.strip() else []
        least = len(behind) + self.tokenizer.num_special_tokens_to_add() + 1
        texts = [fill_template(f"{head}{{text}}", one.title, one.text) for one in passages]
        rooms = [min(self.max_length, self.positions - length) for length in longest or [0] * len(texts)]
        rows: list[list[int]] = [[]] * len(texts)
        for room in sorted(set(rooms)):
            if room < least:
                if room == self.max_length:
                    raise UserError(f"--prompt leaves the passage none of {room:,} tokens")
                self._refuse_length(self.positions - room, least)
            those = [number for number, own in enumerate(rooms) if own == room]
            asked = [texts[number] for number in those]
            read = self.tokenizer(asked, truncation=True, max_length=room - len(behind))["input_ids"]
            for number, row in zip(those, read, strict=True):
                rows[number] = [*row, *behind]
        return CausalModel(self.model, *self._padded(rows))
