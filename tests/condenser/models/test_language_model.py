"""The recurrent language model against reference numbers: likelihoods, truncated gradients, given draws."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from condenser.corpus.corruption import IGNORED
from condenser.decoding.generators import Recurrent
from condenser.decoding.sampling import SampleSettings, sample_at
from condenser.errors import UserError
from condenser.models import language_model
from condenser.models.language_model import LanguageModel, Network, StreamModel
from tests.reference_numbers import golden_folder, golden_json

FOLDER = "electra_lm/lm"
KINDS = ("lstm", "gru")
NAMES = {"emb": "embedding", "rnn": "rnn", "out": "output"}


def ours(theirs: str) -> str:
    """Return our name of a reference parameter."""
    first, rest = theirs.split(".", 1)
    return f"{NAMES[first]}.{rest}"


def reference(kind: str) -> LanguageModel:
    model = LanguageModel(Network(vocabulary_size=8, cell=kind, embedding_size=5, hidden_size=6)).double()  # type: ignore[arg-type]
    weights = load_file(golden_folder() / FOLDER / "weights.safetensors")
    own = {ours(name.removeprefix(f"{kind}.")): w for name, w in weights.items() if name.startswith(f"{kind}.")}
    model.load_state_dict(own)
    return model.eval()


def expected(kind: str) -> dict[str, Any]:
    return golden_json(f"{FOLDER}/expected.json")[kind]


def close(value: float | Tensor, wanted: float | Tensor) -> None:
    torch.testing.assert_close(
        torch.as_tensor(value), torch.as_tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forcing(kind: str) -> None:
    model, wanted = reference(kind), expected(kind)["nll_sequence"]
    tokens = torch.tensor([wanted["tokens"]])
    features, _ = model(tokens[:, :-1], model.initial_state(1))
    log_probs = model.log_probs(features)[0].gather(1, tokens[0, 1:, None])[:, 0]
    close(log_probs, torch.tensor(wanted["per_token_logprob"], dtype=torch.float64))
    close(model.loss(features, tokens[:, 1:]), wanted["nll_sum"])


@pytest.mark.parametrize("chunks", [(12,), (4, 4, 4), (5, 5, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_truncated_back_propagation(kind: str, chunks: tuple[int, ...]) -> None:
    """Chunks add up to the whole likelihood, and their gradients are the truncated ones."""
    model, wanted = reference(kind), expected(kind)["tbptt"]
    name = "full" if len(chunks) == 1 else "tbptt_" + "_".join(map(str, chunks))
    read = StreamModel(model, 2).double()
    losses, start = [], 0
    streams = torch.tensor(wanted["stream"])
    for length in chunks:
        tokens, targets = streams[:, start : start + length], streams[:, start + 1 : start + length + 1]
        losses.append(read(tokens, targets, torch.zeros_like(tokens, dtype=torch.bool)))
        losses[-1].backward()
        start += length
    close(sum(losses), wanted["full_nll_sum"])
    if len(chunks) > 1:
        known = wanted["_".join(map(str, chunks))]
        close(torch.stack(losses), torch.tensor(known["chunk_nll_sums"], dtype=torch.float64))
        close(read.carried_0, torch.tensor(known["final_hidden"], dtype=torch.float64))
    gradients = load_file(golden_folder() / FOLDER / "tbptt_grads.safetensors")
    compared = 0
    for key, gradient in gradients.items():
        if key.startswith(f"{kind}.{name}."):
            close(model.get_parameter(ours(key.removeprefix(f"{kind}.{name}."))).grad, gradient)
            compared += 1
    assert compared == len(list(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_reset_forgets(kind: str) -> None:
    """The reference's wrong variant, by asking for it: reset at the start of each chunk of 4."""
    model, wanted = reference(kind), expected(kind)["tbptt"]
    streams = torch.tensor(wanted["stream"])
    resets = torch.zeros(2, 12, dtype=torch.bool)
    resets[:, ::4] = True
    features, _ = model(streams[:, :-1], model.initial_state(2), resets)
    close(model.loss(features, streams[:, 1:]), wanted["nll_sum_if_state_reset_each_chunk_of_4_(wrong)"])


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_rows_are_reset_one_by_one(cell: str) -> None:
    """What stands behind a reset in a row is what that text would give alone; other rows do not feel it."""
    torch.manual_seed(0)
    model = LanguageModel(Network(vocabulary_size=9, cell=cell, embedding_size=4, hidden_size=5, layers=2)).eval()  # type: ignore[arg-type]
    tokens = torch.randint(9, (3, 7))
    resets = torch.zeros(3, 7, dtype=torch.bool)
    resets[1, 3] = resets[2, 0] = resets[2, 5] = True
    features, state = model(tokens, model.initial_state(3), resets)
    for row, cuts in enumerate(([0, 7], [0, 3, 7], [0, 5, 7])):
        for start, stop in pairwise(cuts):
            alone, last = model(tokens[row : row + 1, start:stop], model.initial_state(1))
            torch.testing.assert_close(features[row, start:stop], alone[0])
        for part, own in zip(state, last, strict=True):
            torch.testing.assert_close(part[:, row], own[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_draws_at_given_places(kind: str) -> None:
    model, wanted = reference(kind), expected(kind)["sampling"]
    uniforms = torch.tensor(wanted["uniforms"], dtype=torch.float64)
    rows, most = uniforms.shape
    generator = Recurrent(model, model.initial_state(rows), torch.full((rows,), 1))
    drawn = sample_at(generator, SampleSettings(end=2, max_length=most), uniforms)
    assert [[*one.tokens, 2] if one.finished else list(one.tokens) for one in drawn] == wanted["tokens"]


def test_one_hot_times_matrix_is_the_look_up() -> None:
    model = reference("lstm")
    tokens = torch.tensor([3, 7, 2, 3])
    one_hot = torch.nn.functional.one_hot(tokens, 8).double()
    assert torch.equal(one_hot @ model.embedding.weight, model.embedding(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_whole_text(kind: str) -> None:
    """Token by token, rows in another order on the way, the model says what it says of a text at once."""
    model = reference(kind)
    tokens = torch.tensor([[1, 3, 5, 4], [1, 6, 6, 7]])
    features, _ = model(tokens, model.initial_state(2))
    _, state = model.step(tokens[:, 0], model.initial_state(2))
    _, state = model.step(tokens[:, 1], state)
    state = model.reorder(state, torch.tensor([1, 0, 1]))
    log_probs, _ = model.step(tokens[[1, 0, 1], 2], state)
    close(log_probs, model.log_probs(features[[1, 0, 1], 2]))


def test_a_large_vocabulary_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores computed part by part, and again in the backward pass: the same loss and gradient."""
    tokens = torch.tensor([[1, 3, 5, 4, 6], [1, 6, 6, 7, 2]])
    targets = tokens[:, 1:].clone()
    targets[0, 2] = IGNORED
    losses, gradients = [], []
    for at_once in (2**25, 24):  # all, or three rows at a time
        monkeypatch.setattr(language_model, "_LOGITS_AT_ONCE", at_once)
        model = reference("gru")
        losses.append(model.loss(model(tokens[:, :-1], model.initial_state(2))[0], targets))
        losses[-1].backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    close(*losses)
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient)


@pytest.mark.parametrize("hidden", [5, 6])
def test_a_tied_output_has_the_word_vectors(hidden: int, tmp_path: Path) -> None:
    network = Network(vocabulary_size=8, embedding_size=5, hidden_size=hidden, tied=True)
    model = LanguageModel(network).eval()
    assert model.output.weight is model.embedding.weight
    model.save(tmp_path)
    again = LanguageModel.load(tmp_path)
    assert again.output.weight is again.embedding.weight and again.network == network
    tokens = torch.tensor([[1, 3, 5, 4, 6]])
    for one, other in zip(model(tokens, model.initial_state(1)), again(tokens, again.initial_state(1)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": "lsmt"}, "cell is 'lsmt', expected one of rnn, gru, lstm"),
        ({"layers": "1"}, "layers is '1', expected int"),
        ({"hidden_size": 7}, r"weights have 'output.weight' of shape \(8, 6\), the settings beside them \(8, 7\)"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    LanguageModel(Network(vocabulary_size=8, embedding_size=5, hidden_size=6)).save(tmp_path)
    file = tmp_path / language_model.SETTINGS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message):
        LanguageModel.load(tmp_path)
