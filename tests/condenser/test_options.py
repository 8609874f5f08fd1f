"""Numbers out of range: refused in one place, whatever the verb, from the command line, a file or Python."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from condenser.errors import UserError
from condenser.options import PretrainOptions, Range, SpansOptions
from eval.options import CompareOptions, EvaluateOptions
from retrieval.cli import VERBS, load
from retrieval.options import Bm25Options, FinetuneOptions

CLASSES = {verb: load(entry.options) for verb, entry in VERBS.items()}


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (Range(minimum=1), [1, 2**62], [0, -1], "1 or more"),
        (Range(minimum=0, maximum=1), [0, 0.5, 1], [-0.1, 1.1], "0 to 1"),
        (Range(above=0), [1e-30], [0, -1.0], "more than 0"),
        (Range(above=0, maximum=1), [1], [0, 2], "more than 0 and at most 1"),
        (Range(above=0, below=1), [0.5], [0, 1], "more than 0 and less than 1"),
        (Range(), [-1e300, 0], [], "a finite number"),
    ],
)
def test_ranges(allowed: Range, inside: list[float], outside: list[float], words: str) -> None:
    assert str(allowed) == words
    assert all(map(allowed.holds, inside))
    assert not any(map(allowed.holds, [*outside, float("nan"), float("inf"), -float("inf")]))


@pytest.mark.parametrize(
    ("options", "values", "line"),
    [
        (SpansOptions, {"min_tokens": 0}, "--min_tokens is 0, expected 1 or more"),
        (SpansOptions, {"train_tokenizer": 5}, "--train_tokenizer is 5, expected 6 to 10000000"),
        (PretrainOptions, {"max_steps": -1}, "--max_steps is -1, expected 1 or more"),
        (PretrainOptions, {"learning_rate": -1.0}, "--learning_rate is -1.0, expected 0 or more"),
        (PretrainOptions, {"learning_rate": float("nan")}, "--learning_rate is nan, expected 0 or more"),
        (PretrainOptions, {"warmup_ratio": 5.0}, "--warmup_ratio is 5.0, expected 0 to 1"),
        (PretrainOptions, {"mlm_probability": 2.0}, "--mlm_probability is 2.0, expected more than 0 and at most 1"),
        (PretrainOptions, {"log_every": 0}, "--log_every is 0, expected 1 or more"),
        (FinetuneOptions, {"temperature": 0.0}, "--temperature is 0.0, expected more than 0"),
        (FinetuneOptions, {"seed": -1}, "--seed is -1, expected 0 to 4294967295"),
        (Bm25Options, {"k": 10**20}, f"--k is {10**20}, expected a number that fits into 64 bits"),
        (EvaluateOptions, {"depths": [5, 0]}, "--depths is 0, expected 1 or more"),
        (CompareOptions, {"confidence": 1.0}, "--confidence is 1.0, expected more than 0 and less than 1"),
    ],
)
def test_numbers_out_of_range_are_one_line(options: Any, values: dict[str, Any], line: str) -> None:
    needed = {field.name for field in dataclasses.fields(options) if field.default is dataclasses.MISSING}
    with pytest.raises(UserError) as caught:
        options(**{**dict.fromkeys(needed, "x"), **values})
    assert str(caught.value) == line


@pytest.mark.parametrize("verb", VERBS)
def test_every_number_has_a_range(verb: str) -> None:
    hints = get_type_hints(CLASSES[verb])
    # which layers there are, and what a cross-encoder's scores are, only the model knows
    free = {"skip_from", "cross_threshold"}
    for field in dataclasses.fields(CLASSES[verb]):
        kinds = {hints[field.name], *get_args(hints[field.name])}  # of lists and of what may be None, too
        if kinds & {int, float} and field.name not in free:
            assert any(bound is not None for bound in field.metadata["range"]), field.name
