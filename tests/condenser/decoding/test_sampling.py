"""Drawing: what is drawn from, by which seed, and that nothing else in the batch matters."""

from __future__ import annotations

import collections
import math

import pytest
import torch

from condenser.decoding.generators import CausalModel
from condenser.decoding.sampling import SampleSettings, drawn_from, greedy, sample, sample_at
from condenser.errors import RunFailed, UserError
from tests.condenser.decoding.tiny import END, TextModel, padded, random_next, tiny_transformer

FOUR = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.3}, [1, 0, 0, 0]),
        ({"top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),  # 0.4 + 0.3 of 0.9
        ({"top_k": 3, "top_p": 0.9}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ],
)
def test_what_is_drawn_from(told: dict[str, float], wanted: list[float]) -> None:
    found = drawn_from(FOUR, SampleSettings(end=0, **told))  # type: ignore[arg-type]
    assert found[0].tolist() == pytest.approx(wanted, abs=1e-12)


def test_equal_tokens_at_a_cut_are_taken_from_below() -> None:
    flat = torch.zeros(1, 5).log_softmax(1)
    assert drawn_from(flat, SampleSettings(end=0, top_k=2))[0].tolist() == pytest.approx([0.5, 0.5, 0, 0, 0])


def test_a_text_is_that_of_its_seed_in_any_batch() -> None:
    log_probs = random_next(8)
    told = SampleSettings(end=END, max_length=12, temperature=1.5, top_k=6, top_p=0.95)
    same_input = lambda one, text: log_probs(0, text)  # noqa: E731
    together = sample(TextModel(5, same_input), told, [11, 12, 13, 11, 2**32 - 1])
    assert together[0] == together[3] != together[1]
    for seed, text in zip([11, 12, 13], together, strict=False):
        assert sample(TextModel(1, same_input), told, [seed]) == [text]
    short = sample(
        TextModel(1, same_input), SampleSettings(end=END, max_length=3, temperature=1.5, top_k=6, top_p=0.95), [13]
    )
    assert short[0].tokens == together[2].tokens[:3]


def test_texts_come_as_often_as_the_model_says() -> None:
    table = {(): [0.2, 0.5, 0.3], (0,): [0.0, 0.0, 1.0], (1,): [0.6, 0.1, 0.3], (1, 0): [0, 0, 1], (1, 1): [0, 0, 1]}

    def log_probs(number: int, text: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(table[text], dtype=torch.float64).log()

    count = 4000
    found = sample(TextModel(count, log_probs), SampleSettings(end=2), list(range(count)))
    often = collections.Counter(one.tokens for one in found)
    for text, share in {(): 0.3, (0,): 0.2, (1,): 0.15, (1, 0): 0.3, (1, 1): 0.05}.items():
        assert abs(often[text] / count - share) < 4 * math.sqrt(share * (1 - share) / count)
    for one in found:
        assert one.log_prob == pytest.approx(
            math.log({(): 0.3, (0,): 0.2, (1,): 0.15, (1, 0): 0.3, (1, 1): 0.05}[one.tokens])
        )


def test_places_at_the_ends_of_the_distribution() -> None:
    """The first and the last token that can come, also where others of probability 0 stand before and behind."""
    some = torch.tensor([-torch.inf, math.log(0.3), math.log(0.7), -torch.inf], dtype=torch.float64)
    model = TextModel(2, lambda one, text: some)
    ends = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    assert [one.tokens for one in sample_at(model, SampleSettings(end=3, max_length=1), ends)] == [(1,), (2,)]


def test_padding_side_and_batch_do_not_change_greedy_texts() -> None:
    prompts = [[3, 4, 5], [6, 3, 3, 4, 5, 6, 4, 4, 3, 6, 5, 3]]
    model = tiny_transformer("gpt2")
    told = SampleSettings(end=END, max_length=10, forbidden=(0, 1))
    alone = [greedy(CausalModel(model, *padded([prompt], "right")), told)[0] for prompt in prompts]
    assert alone[0].tokens != alone[1].tokens
    for side in ("left", "right", "both"):
        together = greedy(CausalModel(model, *padded(prompts, side)), told)
        assert [one.tokens for one in together] == [one.tokens for one in alone]
        assert [one.log_prob for one in together] == pytest.approx([one.log_prob for one in alone], abs=1e-12)


def test_greedy_keeps_the_lengths() -> None:
    eager = torch.tensor([-3.0, -4.0, -0.1])
    model = TextModel(1, lambda one, text: eager)
    assert greedy(model, SampleSettings(end=2))[0].tokens == ()
    (long,) = greedy(model, SampleSettings(end=2, min_length=2))
    assert long.tokens == (0, 0) and long.finished and long.log_prob == pytest.approx(-6.1)
    (cut,) = greedy(model, SampleSettings(end=1, max_length=3))
    assert cut.tokens == (2, 2, 2) and not cut.finished


def test_where_nothing_can_be_drawn_it_is_said() -> None:
    only_the_end = torch.tensor([-torch.inf, -torch.inf, 0.0])
    model = TextModel(2, lambda one, text: only_the_end)
    with pytest.raises(UserError, match=r"input 0 .*after 0 tokens no allowed token"):
        sample(model, SampleSettings(end=2, min_length=1), [1, 2])
    with pytest.raises(RunFailed, match="NaN"):
        greedy(TextModel(1, lambda one, text: torch.full((3,), torch.nan)), SampleSettings(end=2))


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_length": 4, "max_length": 3}]
)
def test_settings_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match="lengths" if "min_length" in bad else next(iter(bad))):
        SampleSettings(end=END, **bad)  # type: ignore[arg-type]
