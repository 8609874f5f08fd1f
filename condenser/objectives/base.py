"""What an objective is, and what all of them share: how one is begun from weights, checked against the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import nn

from condenser.corpus.corruption import MaskingPolicy
from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.errors import UserError
from condenser.hub import local_folder, position_limit
from condenser.options import PretrainOptions, is_given
from condenser.training.steps import Step
from condenser.weights import has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POSITIONS = 512


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
        model: a module with ``save(folder)``, which writes the run's result.
        new: its freshly started parameters, which may settle first; none when all are fresh.
        config: of the encoder in it: its positions, its dimension.
    """

    model: Any
    new: list[nn.Parameter]
    config: Any


class Builder(Protocol):
    """How an objective's model is made.

    Raises of a call:
        UserError: weights that do not fit the objective, the data's vocabulary or the options.
    """

    def __call__(self, options: PretrainOptions, store: TokenStore, tokenizer: PreTrainedTokenizerBase) -> Start:
        """Return the model to train, from ``--init`` or with random weights of ``--model_size``."""
        ...


@dataclass(frozen=True)
class Objective:
    """One row of the table of objectives.

    Attributes:
        start: makes the model.
        policy: how spans are corrupted: what a batch looks like.
        step: how a step is run: which losses there are, by name.
        pairs: batches are of documents, two spans of each.
        takes: options that not every objective takes.
    """

    start: Builder
    policy: Callable[[PretrainOptions, PreTrainedTokenizerBase], MaskingPolicy]
    step: Callable[[PretrainOptions, TokenStore, PreTrainedTokenizerBase], Step]
    pairs: bool = False
    takes: tuple[str, ...] = ()


def check_options(options: PretrainOptions, table: dict[str, Objective]) -> None:
    """Refuse options that the objective does not take.

    Raises:
        UserError: one is given, with a value that is not its default.
    """
    foreign = {name for row in table.values() for name in row.takes} - set(table[options.objective].takes)
    for name in sorted(foreign):
        if is_given(options, name):
            takers = [objective for objective, row in table.items() if name in row.takes]
            raise UserError(f"--{name} is for {', '.join(takers)}; {options.objective} does not take it")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, init: str, data: str) -> None:
    """See that the data's ids are those of the weights.

    Args:
        tokenizer: the data's.
        rows: ids that the weights have a word embedding for.
        init: folder or hub name of the weights.
        data: the token store.

    Raises:
        UserError: too many ids, or a tokenizer beside the weights that is another one.
    """
    hint = "build the spans with the model's own tokenizer"
    if len(tokenizer) > rows:
        raise UserError(
            f"the data's tokenizer has {len(tokenizer):,} entries, the model's vocabulary {rows:,}", data, hint
        )
    folder = local_folder(init)
    if not has_tokenizer(folder):
        return
    own = load_tokenizer(folder)
    if own.get_vocab() != tokenizer.get_vocab():
        described = [f"{type(one).__name__} of {len(one):,} entries" for one in (tokenizer, own)]
        raise UserError(f"the data's tokenizer ({described[0]}) is not the model's ({described[1]})", data, hint)


def span_length(options: PretrainOptions, store: TokenStore) -> int:
    """Return how many tokens a span may have, CLS and SEP included."""
    return options.max_length or int(store.manifest["facts"]["max_length"])


def new_positions(options: PretrainOptions, store: TokenStore) -> int:
    """Return how many positions a new model has: ``--max_length``, or BERT's 512, more for longer spans."""
    return options.max_length or max(_POSITIONS, span_length(options, store))


def check_length(length: int, config: Any, data: str) -> None:
    """See that spans of a length fit the positions of a model.

    Raises:
        UserError: they do not.
    """
    limit = position_limit(config)
    if length > limit:
        raise UserError(f"spans of {length} tokens do not fit the model's {limit} positions", data)


def token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """Return the id of a special token: ``cls``, ``sep``, ``pad`` or ``mask``.

    Raises:
        UserError: the tokenizer has no such token.
    """
    value = getattr(tokenizer, f"{name}_token_id")
    if value is None:
        raise UserError(f"the tokenizer has no {name} token, which pretraining needs", tokenizer.name_or_path)
    return int(value)
