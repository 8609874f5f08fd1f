"""A recurrent language model: words as vectors, read one after the other, each time a guess at the next."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from condenser.corpus.corruption import IGNORED
from condenser.errors import UserError
from condenser.files import disk_faults, read_json, write_json
from condenser.lm_options import Cell
from condenser.models.half import at_least_float32
from condenser.weights import WEIGHTS, check_whole

SETTINGS_FILE = "language_model.json"

State = tuple[Tensor, ...]
"""What a network knows of what it has read: tensors (layers, rows, hidden), two for an LSTM and one for the others."""

_CELLS: dict[str, Any] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
# Scores that are held at one time in training: 128 MiB in float32.
_LOGITS_AT_ONCE = 2**25
_EMBEDDING_DEVIATION = 0.1


@dataclass(frozen=True, kw_only=True)
class Network:
    """The shape of a recurrent language model.

    Attributes:
        vocabulary_size: entries of the vocabulary.
        cell: ``rnn`` (Elman, tanh), ``gru`` or ``lstm``.
        embedding_size: length of a word's vector.
        hidden_size: length of a layer's state.
        layers: recurrent layers, one above the other.
        dropout: share of the numbers that are set to zero in training: in word vectors and between and behind layers.
        tied: the word vectors also weigh the output, behind a linear map where states are of another length.
    """

    vocabulary_size: int
    cell: Cell = "lstm"
    embedding_size: int = 256
    hidden_size: int = 512
    layers: int = 1
    dropout: float = 0.0
    tied: bool = False


class LanguageModel(nn.Module):
    """Guesses each token of a text from those before it.

    With e_t the row of the embedding matrix for token t, that is one-hot times matrix:
    h_t = cell(h_{t-1}, e_t), p(next) = softmax(A h_t + b).

    Args:
        network: its shape; weights are drawn from torch's generator.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.embedding = nn.Embedding(network.vocabulary_size, network.embedding_size)
        nn.init.normal_(self.embedding.weight, std=_EMBEDDING_DEVIATION)
        self.rnn = _CELLS[network.cell](
            network.embedding_size,
            network.hidden_size,
            network.layers,
            dropout=network.dropout if network.layers > 1 else 0.0,
            batch_first=True,
        )
        self.dropout = nn.Dropout(network.dropout)
        narrowed = network.tied and network.hidden_size != network.embedding_size
        self.projection = nn.Linear(network.hidden_size, network.embedding_size) if narrowed else nn.Identity()
        width = network.embedding_size if network.tied else network.hidden_size
        self.output = nn.Linear(width, network.vocabulary_size)
        nn.init.zeros_(self.output.bias)
        if network.tied:
            self.output.weight = self.embedding.weight

    def initial_state(self, rows: int) -> State:
        """Return the state of texts of which nothing has been read: zeros."""
        zeros = self.output.bias.new_zeros(self.network.layers, rows, self.network.hidden_size)
        return (zeros, zeros) if self.network.cell == "lstm" else (zeros,)

    def forward(self, tokens: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        """Read tokens (rows, length) behind a state.

        Args:
            tokens: see above.
            state: what was read before.
            resets: (rows, length) bool, True where everything read before this token is forgotten first.

        Returns:
            Features (rows, length, width), from which `log_probs` and `loss` take what they say of the token after
            each; and the state behind the last.
        """
        words = self.dropout(self.embedding(tokens))
        bounds = [0, tokens.shape[1]]
        if resets is not None:
            # the kernels read a stretch at once, in which no row is reset
            bounds = sorted({*bounds, *resets.any(dim=0).nonzero().flatten().tolist()})
        stretches = []
        for start, stop in pairwise(bounds):
            if resets is not None:
                state = tuple(part.masked_fill(resets[:, start, None], 0.0) for part in state)
            states, state = self._run(words[:, start:stop], state)
            stretches.append(states)
        return self.projection(self.dropout(torch.cat(stretches, dim=1))), state

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one token per row (rows,); return log-probabilities (rows, vocabulary) of the next, and the state."""
        features, state = self(tokens[:, None], state)
        return self.log_probs(features[:, 0]), state

    def reorder(self, state: State, rows: Tensor) -> State:
        """Return the state of these rows in this order; a row may come more than once, or not at all."""
        return tuple(part.index_select(1, rows) for part in state)

    def log_probs(self, features: Tensor) -> Tensor:
        """Return log-probabilities (..., vocabulary) of the next token."""
        return at_least_float32(self.output(features)).log_softmax(-1)

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross-entropy over the targets (rows, length) that are asked for, in nats."""
        asked = targets != IGNORED
        return self.cross_entropies(features[asked], targets[asked]).sum()

    def cross_entropies(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return minus the log-probability (n,), in nats, of each target (n,) by its features (n, width).

        With a large vocabulary scores are computed again in the backward pass, so that only some are held at a time.
        """
        at_once = max(1, _LOGITS_AT_ONCE // self.network.vocabulary_size)
        if len(targets) <= at_once:
            return self._cross_entropies(features, targets)
        parts = zip(features.split(at_once), targets.split(at_once), strict=True)
        return torch.cat([checkpoint(self._cross_entropies, *part, use_reentrant=False) for part in parts])

    def save(self, folder: Path) -> None:
        """Write weights and shape into a folder, made if need be; a tokenizer beside them makes it whole."""
        folder.mkdir(exist_ok=True)
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in self.named_parameters()}
        with disk_faults(folder):
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        write_json(folder / SETTINGS_FILE, asdict(self.network))

    @classmethod
    def load(cls, folder: Path) -> LanguageModel:
        """Load what `save` wrote, in eval mode.

        Raises:
            UserError: no language model in this folder; settings or weights missing, damaged or of different models.
        """
        if not (folder / SETTINGS_FILE).is_file():
            raise UserError(f"no {SETTINGS_FILE} here, expected a language model made by `condenser lm train`", folder)
        model = cls(network_from(read_json(folder / SETTINGS_FILE), folder / SETTINGS_FILE))
        load_parameters(model, folder / WEIGHTS)
        return model.eval()

    def _run(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        if self.network.cell == "lstm":
            states, after = self.rnn(words, state)
            return states, tuple(after)
        states, hidden = self.rnn(words, *state)
        return states, (hidden,)

    def _cross_entropies(self, features: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(at_least_float32(self.output(features)), targets, reduction="none")


class StreamModel(nn.Module):
    """A language model that reads parallel streams chunk by chunk: truncated back-propagation through time.

    The state behind a chunk is where the next one begins; no gradient goes back over the border. It is a buffer,
    so that it stands in every checkpoint.

    Args:
        model: what is trained.
        streams: how many are read side by side.
    """

    def __init__(self, model: LanguageModel, streams: int) -> None:
        super().__init__()
        self.model = model
        self._carried = [f"carried_{number}" for number in range(len(model.initial_state(1)))]
        for name, part in zip(self._carried, model.initial_state(streams), strict=True):
            self.register_buffer(name, part.clone())  # an LSTM's two begin as one tensor

    def forward(self, tokens: Tensor, targets: Tensor, resets: Tensor) -> Tensor:
        """Return the summed loss over the targets of a chunk; see `condenser.corpus.streams.StreamBatch`."""
        features, state = self.model(tokens, tuple(getattr(self, name) for name in self._carried), resets)
        for name, part in zip(self._carried, state, strict=True):
            setattr(self, name, part.detach().to(getattr(self, name).dtype))
        return self.model.loss(features, targets)


def network_from(stored: dict[str, Any], file: Path) -> Network:
    """Make a network's shape of what stood in a file.

    Raises:
        UserError: a field is missing or of another type.
    """
    defaults = asdict(Network(vocabulary_size=1))
    for field in fields(Network):
        value, kind = stored.get(field.name), type(defaults[field.name])
        if type(value) is not kind or (field.name == "cell" and value not in _CELLS):
            expected = f"one of {', '.join(_CELLS)}" if field.name == "cell" else kind.__name__
            raise UserError(f"{field.name} is {value!r}, expected {expected}", file)
    return Network(**{field.name: stored[field.name] for field in fields(Network)})


def load_parameters(model: nn.Module, file: Path, *, without: str | None = None) -> None:
    """Take a model's parameters by name from a safetensors file, but for those whose names begin with ``without``.

    Raises:
        UserError: missing or damaged; tensors missing, unexpected or of another shape.
    """
    check_whole(file)
    tensors = load_file(file)
    own = ((name, one) for name, one in model.named_parameters() if not (without and name.startswith(without)))
    wanted = {name: tuple(parameter.shape) for name, parameter in own}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"weights have {name!r} of shape {found.get(name)}, the settings beside them {wanted.get(name)}",
                file,
                "settings and weights are of different models",
            )
    model.load_state_dict(tensors, strict=False)
