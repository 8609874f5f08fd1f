"""In which type an encoder computes, what is refused, and what the artifacts record of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from condenser.errors import UserError
from condenser.models.int8 import is_available
from retrieval.encode import encode
from retrieval.encoder import Encoder
from retrieval.index_build import build_index
from retrieval.options import EncodeOptions, IndexOptions, SearchOptions
from retrieval.precision import set_precision
from retrieval.search import search
from retrieval.vectors import Vectors

TEXTS = ["river bank money", "heart blood", "fever pain doctor cat dog bird", "the old king"]


@pytest.mark.skipif(not is_available(), reason="this build of PyTorch has no 8-bit products")
def test_int8_is_near_and_the_same_in_any_batch(tiny_bert: Path) -> None:
    encoder = Encoder.load(tiny_bert, normalize=True, pooling="mean")
    exact = encoder.encode_queries(TEXTS)
    assert set_precision(encoder, "query", quantize="int8") == "int8"
    rounded = encoder.encode_queries(TEXTS)
    assert (exact * rounded).sum(axis=1).min() > 0.98 and not np.allclose(exact, rounded, atol=1e-5)
    alone = np.concatenate([encoder.encode_queries([text]) for text in TEXTS])
    np.testing.assert_allclose(rounded, alone, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dtype": "float16"}, "--dtype float16 is for GPUs; this CPU computes in float32 (leave --dtype out)"),
        ({"dtype": "float32", "quantize": "int8"}, "--quantize int8 and --dtype float32 are two types"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tiny_bert: Path, settings: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        set_precision(Encoder.load(tiny_bert), "passage", **settings)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_bfloat16_on_a_cpu_wants_instructions_for_it(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder.load(tiny_bert, normalize=True, pooling="mean")
    exact = encoder.encode_queries(TEXTS)
    monkeypatch.setattr("retrieval.precision.cpu_multiplies_bfloat16", lambda: False)
    with pytest.raises(UserError, match=r"--dtype bfloat16 is for GPUs; this CPU computes in float32 \(leave"):
        set_precision(encoder, "query", "bfloat16")
    monkeypatch.setattr("retrieval.precision.cpu_multiplies_bfloat16", lambda: True)
    assert set_precision(encoder, "query", "bfloat16") == "bfloat16"
    rounded = encoder.encode_queries(TEXTS)
    assert rounded.dtype == np.float32
    assert (exact * rounded).sum(axis=1).min() > 0.999 and not np.allclose(exact, rounded, atol=1e-5)


@pytest.mark.skipif(not is_available(), reason="this build of PyTorch has no 8-bit products")
def test_int8_of_a_family_it_does_not_know_is_refused(tiny_bert: Path) -> None:
    encoder = Encoder.load(tiny_bert)
    encoder.model.config.is_decoder = True
    with pytest.raises(UserError, match="--quantize int8 does not know the model family 'bert'"):
        set_precision(encoder, "passage", quantize="int8")


def test_float32_is_what_a_cpu_takes(tiny_bert: Path) -> None:
    encoder = Encoder.load(tiny_bert)
    assert set_precision(encoder, "passage") == "float32"
    assert encoder.model.dtype == torch.float32 and not encoder.quantized


@pytest.mark.skipif(not is_available(), reason="this build of PyTorch has no 8-bit products")
def test_a_search_over_int8_passages_says_so_once(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passages, queries = tmp_path / "passages.tsv", tmp_path / "queries.tsv"
    passages.write_text("".join(f"d{row}\t{text}\n" for row, text in enumerate(TEXTS)))
    queries.write_text("q1\triver bank money\n")
    vectors = encode(
        EncodeOptions(
            encoder=str(tiny_bert), input=str(passages), output=str(tmp_path / "v"), device="cpu", quantize="int8"
        )
    )
    assert Vectors.load(vectors).facts["compute"] == "int8"
    index = build_index(IndexOptions(vectors=str(vectors), output=str(tmp_path / "index")))
    capsys.readouterr()
    search(SearchOptions(index=str(index), queries=str(queries), output=str(tmp_path / "run.trec"), device="cpu"))
    line = f"{index}: its passages were encoded in int8, the queries in float32"
    assert capsys.readouterr().err.count(line) == 1
    with pytest.raises(UserError, match="quantize"):
        encode(EncodeOptions(encoder=str(tiny_bert), input=str(passages), output=str(vectors), device="cpu"))
