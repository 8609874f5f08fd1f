"""Every family says of the next token what it says without cache, batch and padding."""

from __future__ import annotations

import pytest
import torch

from condenser.decoding.generators import CausalModel, SequenceToSequence
from condenser.errors import UserError
from tests.condenser.decoding.tiny import next_of_transformer, padded, tiny_transformer

INPUTS = [[3, 4, 5], [6, 3, 3, 4, 5, 6]]
CAUSAL = ("gpt2", "llama")


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("family", [*CAUSAL, "t5", "bart", "bert2bert"])
def test_steps_equal_a_whole_pass(family: str, side: str) -> None:
    model = tiny_transformer(family)
    alone = next_of_transformer(model, INPUTS)
    generator = (CausalModel if family in CAUSAL else SequenceToSequence)(model, *padded(INPUTS, side))
    log_probs, state = generator.start()
    texts: list[tuple[int, tuple[int, ...]]] = [(0, ()), (1, ())]
    # rows come twice, change places, and one is left out
    for rows, tokens in (([1, 0, 0], [3, 4, 5]), ([2, 0, 1], [5, 5, 6]), ([1, 1], [3, 4])):
        torch.testing.assert_close(log_probs, torch.stack([alone(*text) for text in texts]), rtol=0, atol=1e-12)
        state = generator.reorder(state, torch.tensor(rows))
        log_probs, state = generator.step(torch.tensor(tokens), state)
        texts = [(texts[row][0], (*texts[row][1], token)) for row, token in zip(rows, tokens, strict=True)]
    torch.testing.assert_close(log_probs, torch.stack([alone(*text) for text in texts]), rtol=0, atol=1e-12)


def test_half_precision_is_summed_up_in_float32() -> None:
    model = tiny_transformer("gpt2").bfloat16()
    log_probs, _ = CausalModel(model, *padded(INPUTS, "left")).start()
    assert log_probs.dtype == torch.float32
    assert torch.allclose(log_probs.exp().sum(1), torch.ones(2), atol=1e-6)


def test_an_input_without_a_token_is_refused() -> None:
    with pytest.raises(UserError, match=r"prompt 1 .*has no token"):
        CausalModel(tiny_transformer("gpt2"), *padded([[3], []], "left"))


def test_a_model_that_does_not_say_how_texts_begin_is_refused() -> None:
    model = tiny_transformer("bert2bert")
    model.config.decoder_start_token_id = None
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(UserError, match="decoder_start_token_id"):
        SequenceToSequence(model, *padded(INPUTS, "left"))
