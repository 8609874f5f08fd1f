"""The conditional language model: an encoder reads a passage, a recurrent network writes queries for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from condenser.corpus.corruption import IGNORED
from condenser.corpus.streams import TextFrame, text_frame
from condenser.corpus.tokens import load_tokenizer
from condenser.errors import UserError, first_line
from condenser.files import disk_faults, read_json, write_json
from condenser.hub import load_encoder_alone, quiet_transformers
from condenser.manifest import MANIFEST, load_manifest
from condenser.models.language_model import LanguageModel, Network, State, load_parameters, network_from
from condenser.models.pointer import Copies, Pointer, all_with_copies, first_places, with_copies
from condenser.weights import WEIGHTS, check_config, check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SETTINGS_FILE = "query_writer.json"
ENCODER_FOLDER = "encoder"


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """What a query writer's weights do not tell of it.

    Attributes:
        attention: each step also looks at the states of the passage's tokens.
        copying: a token may also be copied from the passage.
        passage_prompt: put before each passage.
        passage_template: how a passage's ``{title}`` and ``{text}`` are joined.
        passage_max_length: longest passage in tokens, the special ones included.
        query_max_length: longest query that was trained on, in tokens without the special ones.
    """

    attention: bool = True
    copying: bool = True
    passage_prompt: str = ""
    passage_template: str = "{title} {text}"
    passage_max_length: int = 128
    query_max_length: int = 32


class QueryWriter(nn.Module):
    """Guesses each token of a query from those before it and from a passage.

    The decoder starts from h_0 = tanh(W cls + b), with the state of the passage's first token. With attention
    (Luong et al. 2015, general) the features f_t of a step become tanh(C [f_t ; c_t]), c_t = sum_s a_ts m_s over
    the states m_s of the passage's tokens, a_t = softmax_s(f_t A m_s). With copying, see `Pointer`.

    Args:
        encoder: a transformers encoder; its first token's state stands for the passage.
        tokenizer: the encoder's; queries are written in its tokens.
        network: the decoder's shape.
        settings: see `WriterSettings`.
        frozen: the encoder stands still, in training too.
    """

    def __init__(
        self,
        encoder: Any,
        tokenizer: PreTrainedTokenizerBase,
        network: Network,
        settings: WriterSettings,
        *,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = LanguageModel(network)
        self.tokenizer = tokenizer
        self.frame: TextFrame = text_frame(tokenizer)
        self.settings = settings
        self.frozen = frozen
        if frozen:
            encoder.requires_grad_(False)
        width, states = self.decoder.output.in_features, int(encoder.config.hidden_size)
        self._decoder_parts = len(self.decoder.initial_state(1))
        self.bridge = nn.Linear(states, network.hidden_size * network.layers * self._decoder_parts)
        self.match = nn.Linear(width, states, bias=False) if settings.attention else None
        self.combine = nn.Linear(width + states, width) if settings.attention else None
        self.pointer = Pointer(width, states) if settings.copying else None
        self.never_copied: Tensor
        self.register_buffer("never_copied", torch.tensor(tokenizer.all_special_ids), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.bridge.weight.device

    def train(self, mode: bool = True) -> Self:
        """Switch dropout, but for an encoder that stands still."""
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def forward(self, passage_ids: Tensor, passage_mask: Tensor | None, query_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of queries given their passages, by teacher forcing.

        Args:
            passage_ids: (rows, length), padded at the right.
            passage_mask: (rows, length), 1 on tokens; None when no row is padded.
            query_ids: (rows, n), what is read: the first token of a text, then the query.
            targets: (rows, n), the token after each; -100 where nothing is asked.
        """
        features, copies, _ = self._read(query_ids, self.start_state(passage_ids, passage_mask))
        if copies is None:
            return self.decoder.loss(features, targets)
        asked = targets != IGNORED
        written = -self.decoder.cross_entropies(features[asked], targets[asked])
        copied = ((passage_ids[:, None] == targets[:, :, None]) * copies.weights).sum(-1)
        return -with_copies(written, copies.gate[asked], copied[asked]).sum()

    def start_state(self, passage_ids: Tensor, passage_mask: Tensor | None) -> State:
        """Return what the decoder knows before a query's first token, one row a passage.

        With attention the passage's token states (length, rows, d) are part of it, and 0 or minus infinity for
        each (length, rows); with copying the places' keys (length, rows, key size), and (length, rows) each: their
        tokens, where each token stands first, and which places are never copied, padding and special tokens. Rows
        lie along the second axis of every part.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            states = self.encoder(input_ids=passage_ids, attention_mask=passage_mask).last_hidden_state
        start = torch.tanh(self.bridge(states[:, 0]))
        network = self.decoder.network
        parts = start.view(len(start), -1, network.layers, network.hidden_size).permute(1, 2, 0, 3)
        known = [part.contiguous() for part in parts]
        if self.match is not None:
            hidden = torch.zeros(states.shape[:2], dtype=states.dtype, device=states.device)
            if passage_mask is not None:
                hidden = hidden.masked_fill(passage_mask == 0, -torch.inf)
            known += [states.transpose(0, 1), hidden.transpose(0, 1)]
        if self.pointer is not None:
            barred = torch.isin(passage_ids, self.never_copied)
            if passage_mask is not None:
                barred = barred | (passage_mask == 0)
            keys = self.pointer.key(states)
            known += [keys.transpose(0, 1), passage_ids.T, first_places(passage_ids).T, barred.T]
        return tuple(known)

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one token per row (rows,); return log-probabilities (rows, vocabulary) of the next, and the state."""
        features, copies, state = self._read(tokens[:, None], state)
        log_probs = self.decoder.log_probs(features[:, 0])
        if copies is not None:
            log_probs = all_with_copies(log_probs, copies, state[-3].T, state[-2].T)
        return log_probs, state

    def reorder(self, state: State, rows: Tensor) -> State:
        """Return the state of these rows in this order; a row may come more than once, or not at all."""
        return self.decoder.reorder(state, rows)

    def passage_tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Return ids and mask of passages, of which template and prompt have made one text each; see `forward`."""
        encoded = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.settings.passage_max_length,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        mask = encoded["attention_mask"].to(self.device)
        return encoded["input_ids"].to(self.device), None if bool(mask.all()) else mask

    def query_tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return what is read of queries and what is asked for, (rows, n) each; see `forward`.

        Where a query is cut, its end is not asked for.
        """
        most = self.settings.query_max_length
        rows = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        longest = min(most, max(map(len, rows)))
        ids = torch.full((len(rows), longest + 1), self.frame.end)
        targets = torch.full((len(rows), longest + 1), IGNORED)
        ids[:, 0] = self.frame.start
        for number, row in enumerate(rows):
            asked = torch.tensor([*row, self.frame.end][: most if len(row) > most else None])
            targets[number, : len(asked)] = asked
            ids[number, 1 : len(asked)] = asked[:-1]
        return ids.to(self.device), targets.to(self.device)

    def save(self, folder: Path) -> None:
        """Write a folder, made if need be, from which `load` makes the same writer and AutoTokenizer its tokenizer."""
        folder.mkdir(exist_ok=True)
        own = {name: parameter for name, parameter in self.named_parameters() if not name.startswith("encoder.")}
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in own.items()}
        with quiet_transformers(), disk_faults(folder):
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            self.encoder.save_pretrained(folder / ENCODER_FOLDER)
            self.tokenizer.backend_tokenizer.no_truncation()
            self.tokenizer.backend_tokenizer.no_padding()
            self.tokenizer.save_pretrained(folder)
        settings = {"network": asdict(self.decoder.network), **asdict(self.settings)}
        write_json(folder / SETTINGS_FILE, settings)

    @classmethod
    def load(cls, folder: str | Path) -> QueryWriter:
        """Load what `save` wrote, in eval mode on the CPU.

        Raises:
            UserError: no query writer in this folder, or files missing, damaged or of different models.
        """
        folder = Path(folder)
        file = folder / SETTINGS_FILE
        if not file.is_file():
            raise UserError(f"no {SETTINGS_FILE} here, expected a folder made by `condenser lm train-writer`", folder)
        if (folder / MANIFEST).is_file():
            load_manifest(folder, verify=True)
        # of a writer made before there was copying nothing is said of it
        stored = {"copying": False, **read_json(file)}
        network = stored.pop("network", None)
        if not isinstance(network, dict):
            raise UserError("has no object 'network'", file)
        for field in fields(WriterSettings):
            if type(stored.get(field.name)) is not type(field.default):
                kind = type(field.default).__name__
                raise UserError(f"{field.name} is {stored.get(field.name)!r}, expected {kind}", file)
        settings = WriterSettings(**{field.name: stored[field.name] for field in fields(WriterSettings)})
        encoder = _load_encoder(folder / ENCODER_FOLDER)
        writer = cls(encoder, load_tokenizer(folder), network_from(network, file), settings)
        load_parameters(writer, folder / WEIGHTS, without="encoder.")
        return writer.eval()

    def _read(self, tokens: Tensor, state: State) -> tuple[Tensor, Copies | None, State]:
        """Read tokens (rows, n); return features (rows, n, width), what the pointer says, and the state."""
        decoder, passage = state[: self._decoder_parts], state[self._decoder_parts :]
        features, after = self.decoder(tokens, decoder)
        if self.match is not None and self.combine is not None:
            memory, hidden = passage[:2]
            # (rows, n, d) x (rows, d, length)
            scores = self.match(features) @ memory.permute(1, 2, 0) + hidden.transpose(0, 1)[:, None]
            context = scores.softmax(-1) @ memory.transpose(0, 1)
            features = torch.tanh(self.combine(torch.cat([features, context], dim=-1)))
        copies = None
        if self.pointer is not None:
            keys, ids, _, barred = passage[-4:]
            copies = self.pointer(features, tokens, keys.transpose(0, 1), ids.T, barred.T)
        return features, copies, (*after, *passage)


def _load_encoder(folder: Path) -> Any:
    check_config(folder)
    check_weights(folder)
    settings = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32, "trust_remote_code": False}
    with quiet_transformers():
        try:
            return load_encoder_alone(folder, **settings)
        except Exception as error:  # transformers and safetensors raise many kinds
            raise UserError(f"encoder could not be loaded: {first_line(error)}", folder) from None
