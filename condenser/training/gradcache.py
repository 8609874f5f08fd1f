"""Gradient caching: contrastive batches larger than memory, at the gradient of the whole batch.

Gao et al. 2021 (Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup) split the
backward pass at the representations. Three steps, each a function here:

1. `represent`: forward over small chunks without a graph; keep the vectors and the random states.
2. `cache_gradients`: the loss over all vectors, and its gradient with respect to each of them.
3. `replay`: forward over each chunk again with a graph and the same random states, and backward from
   the cached gradients, so that no more than one chunk's graph exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from condenser.errors import UserError

Chunk = TypeVar("Chunk")


class RandomState:
    """torch's random states at one moment, on the CPU and on the devices of a computation's tensors.

    Args:
        devices: CUDA devices whose generators are used; others are left alone.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run a block from this state, then leave the generators as they were before it."""
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def represent(
    encode: Callable[[Chunk], Tensor], chunks: Sequence[Chunk], devices: Sequence[torch.device] = ()
) -> tuple[Tensor, list[RandomState]]:
    """Encode chunks without a graph.

    Args:
        encode: one chunk to its vectors (rows, d).
        chunks: in order.
        devices: CUDA devices that ``encode`` draws random numbers on.

    Returns:
        The vectors of all chunks, and the random state before each chunk.
    """
    vectors, states = [], []
    with torch.no_grad():
        for chunk in chunks:
            states.append(RandomState(devices))
            vectors.append(encode(chunk))
    return torch.cat(vectors), states


def cache_gradients(
    loss_of: Callable[..., Tensor],
    vectors: Sequence[Tensor],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> tuple[Tensor, list[Tensor]]:
    """Compute a loss over vectors and its gradient with respect to each of them.

    Args:
        loss_of: takes the tensors of ``vectors``, returns a scalar.
        vectors: one (n, d) tensor per encoder, without a graph.
        backward: runs the backward pass (a gradient scaler's, for float16).

    Returns:
        The detached loss, and one gradient (n, d) per tensor; zeros where the loss does not depend on it.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in vectors]
    with torch.enable_grad():
        loss = loss_of(*leaves)
    backward(loss)
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return loss.detach(), gradients


def surrogate(vectors: Tensor, gradient: Tensor) -> Tensor:
    """Return a scalar whose gradient with respect to ``vectors`` is ``gradient``.

    In float32 whatever the autocast type: a dot product over a whole chunk overflows half precision.
    """
    wide = torch.float64 if vectors.dtype == torch.float64 else torch.float32
    return torch.dot(vectors.flatten().to(wide), gradient.flatten().to(wide))


def replay(
    chunks: Sequence[Chunk],
    states: Sequence[RandomState],
    gradient: Tensor,
    step: Callable[[Chunk, Tensor], int],
    last_context: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext(),
) -> None:
    """Run each chunk's forward and backward again from its cached gradient.

    Args:
        chunks: as given to `represent`.
        states: as returned by `represent`.
        gradient: (n, d) over the rows of all chunks.
        step: takes a chunk and the rows of ``gradient`` from its first row on; runs forward and
            backward; returns how many rows the chunk had.
        last_context: entered around each chunk, told whether it is the last: gradients of several
            processes should meet only once.
    """
    start = 0
    for position, (chunk, state) in enumerate(zip(chunks, states, strict=True)):
        with last_context(position == len(chunks) - 1), state.restored():
            start += step(chunk, gradient[start:])


class GradCache:
    """The three steps in the call form of the GradCache package.

    Calling it accumulates gradients into the models' parameters and returns the detached loss;
    clipping, stepping and zeroing stay with the caller.

    Args:
        models: encoders; the same module twice for tied towers.
        chunk_sizes: rows per chunk, one number for all models or one each.
        loss_fn: takes one representation tensor per model, and the keyword arguments of the call.
        split_input_fn: ``(input, chunk_size) -> list of inputs``; default: tensors, lists of tensors,
            dicts of tensors and (list, dict) pairs are split along their first axis.
        get_rep_fn: takes a model's output, returns its representation (rows first); default: the
            output itself if it is a tensor.
        fp16: run each pass under float16 autocast.
        scaler: a `torch.amp.GradScaler`, with ``fp16``.

    Raises:
        UserError: numbers of models, chunk sizes and inputs that do not match, or an input that
            cannot be split.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        chunk_sizes: int | Sequence[int],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, int], list[Any]] | None = None,
        get_rep_fn: Callable[[Any], Tensor] | None = None,
        fp16: bool = False,
        scaler: Any = None,
    ) -> None:
        self.models = list(models)
        self.chunk_sizes = [chunk_sizes] * len(models) if isinstance(chunk_sizes, int) else list(chunk_sizes)
        if len(self.chunk_sizes) != len(self.models):
            raise UserError(f"{len(self.models)} models but {len(self.chunk_sizes)} chunk sizes")
        if min(self.chunk_sizes) < 1:
            raise UserError(f"chunk sizes are {self.chunk_sizes}, expected at least 1")
        self._loss_fn = loss_fn
        self._split = split_input_fn or split_input
        self._rep = get_rep_fn or _only_tensor
        self._fp16, self._scaler = fp16, scaler

    def __call__(self, *inputs: Any, no_sync_except_last: bool = False, **loss_arguments: Any) -> Tensor:
        """Run `cache_step`."""
        return self.cache_step(*inputs, no_sync_except_last=no_sync_except_last, **loss_arguments)

    def cache_step(self, *inputs: Any, no_sync_except_last: bool = False, **loss_arguments: Any) -> Tensor:
        """Accumulate the gradient of the whole batch.

        Args:
            inputs: one per model, in order: a tensor (called ``model(x)``), a list (``model(*x)``), a
                dict (``model(**x)``) or a (list, dict) pair.
            no_sync_except_last: for DDP models: exchange gradients on each model's last chunk only.
            loss_arguments: passed on to ``loss_fn``.

        Returns:
            The detached loss.
        """
        if len(inputs) != len(self.models):
            raise UserError(f"{len(self.models)} models but {len(inputs)} inputs")
        chunks = [self._split(one, size) for one, size in zip(inputs, self.chunk_sizes, strict=True)]
        represented = [
            represent(lambda chunk, model=model: self._encode(model, chunk), parts, _devices(parts))  # type: ignore[misc]
            for model, parts in zip(self.models, chunks, strict=True)
        ]
        loss, gradients = cache_gradients(
            lambda *vectors: self._loss(vectors, loss_arguments),
            [vectors for vectors, _ in represented],
            self._backward,
        )
        for model, parts, (_, states), gradient in zip(self.models, chunks, represented, gradients, strict=True):
            quiet_until_last = no_sync_except_last and hasattr(model, "no_sync")
            replay(
                parts,
                states,
                gradient,
                lambda chunk, rest, model=model: self._forward_backward(model, chunk, rest),  # type: ignore[misc]
                lambda last, model=model, quiet=quiet_until_last: (  # type: ignore[misc]
                    model.no_sync() if quiet and not last else nullcontext()
                ),
            )
        return loss

    def _encode(self, model: nn.Module, chunk: Any) -> Tensor:
        # autocast keeps casts of weights made under no_grad, so each pass opens its own
        with self._autocast():
            return self._rep(_call(model, chunk))

    def _loss(self, vectors: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
        with self._autocast():
            return self._loss_fn(*vectors, **arguments)

    def _backward(self, loss: Tensor) -> None:
        (self._scaler.scale(loss) if self._scaler is not None else loss).backward()

    def _forward_backward(self, model: nn.Module, chunk: Any, gradient: Tensor) -> int:
        vectors = self._encode(model, chunk)
        # the cached gradient carries the scale already
        surrogate(vectors, gradient[: len(vectors)]).backward()
        return len(vectors)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=torch.float16) if self._fp16 else nullcontext()


def split_input(value: Any, size: int) -> list[Any]:
    """Split tensors, lists of tensors, dicts of tensors or (list, dict) pairs along the first axis.

    Raises:
        UserError: another kind of input.
    """
    if isinstance(value, Tensor):
        return list(value.split(size))
    if isinstance(value, Mapping) and all(isinstance(tensor, Tensor) for tensor in value.values()):
        parts = {name: tensor.split(size) for name, tensor in value.items()}
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
    if isinstance(value, list) and all(isinstance(tensor, Tensor) for tensor in value):
        return [list(row) for row in zip(*(tensor.split(size) for tensor in value), strict=True)]
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], list) and isinstance(value[1], Mapping):
        listed, named = split_input(value[0], size), split_input(value[1], size)
        return (
            list(zip(listed, named, strict=True))
            if listed and named
            else [(a, {}) for a in listed] or [([], b) for b in named]
        )
    raise UserError(
        f"cannot split an input of kind {type(value).__name__}", hint="give split_input_fn, or tensors by name"
    )


def _call(model: nn.Module, chunk: Any) -> Any:
    if isinstance(chunk, Tensor):
        return model(chunk)
    if isinstance(chunk, Mapping):
        return model(**chunk)
    if isinstance(chunk, list):
        return model(*chunk)
    return model(*chunk[0], **chunk[1])


def _only_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    raise UserError(f"the model returned {type(output).__name__}, expected a tensor", hint="give get_rep_fn")


def _devices(chunks: Sequence[Any]) -> list[torch.device]:
    """Return the devices of the tensors in the first chunk: those the encoder draws on."""
    found: dict[torch.device, None] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.device] = None
        elif isinstance(value, Mapping):
            for one in value.values():
                visit(one)
        elif isinstance(value, list | tuple):
            for one in value:
                visit(one)

    visit(chunks[0] if chunks else None)
    return list(found)
