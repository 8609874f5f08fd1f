"""What a folder says of its vectors: our encoder.json, and sentence-transformers' files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from condenser.errors import UserError
from retrieval.cli import main
from retrieval.encoder import Encoder, EncoderConfig

TEXTS = ["river bank", "the heart beats", "", "fever " * 30]


@pytest.fixture()
def copied(tiny_bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to change."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


def save_theirs(folder: Path, pooling: str = "cls", *more: torch.nn.Module, **settings: object) -> SentenceTransformer:
    """Turn a folder into one that sentence-transformers saved itself."""
    modules = [Transformer(str(folder)), Pooling(32, pooling), *more]
    model = SentenceTransformer(modules=modules, device="cpu", **{"similarity_fn_name": "dot"} | settings)
    shutil.rmtree(folder)
    model.save(str(folder))
    assert not (folder / "encoder.json").exists()
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("normalize", [False, True])
def test_sentence_transformers_own_files_are_read(copied: Path, pooling: str, normalize: bool) -> None:
    theirs = save_theirs(copied, pooling, *[Normalize()] * normalize, prompts={"query": "what is ", "document": "the "})
    encoder = Encoder.load(copied)
    assert encoder.config == EncoderConfig(
        pooling=pooling.removesuffix("token"),
        normalize=normalize,
        query_prompt="what is ",
        passage_prompt="the ",
        query_max_length=64,
        passage_max_length=64,
    )
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), theirs.encode_query(TEXTS), atol=1e-5)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), theirs.encode_document(TEXTS), atol=1e-5)


def test_the_passages_prompt_has_three_names(copied: Path) -> None:
    save_theirs(copied)
    for name in ("document", "passage", "corpus"):
        prompts = {"query": "what is ", "document": "", name: "the "}
        edit_json(copied / "config_sentence_transformers.json", prompts=prompts)
        config = Encoder.load(copied).config
        assert (config.query_prompt, config.passage_prompt) == ("what is ", "the ")


def test_cosine_is_the_inner_product_of_vectors_of_length_one(copied: Path) -> None:
    """That library normalises while it compares; here scores are inner products, so the encoder does."""
    theirs = save_theirs(copied, "mean", similarity_fn_name="cosine")
    encoder = Encoder.load(copied)
    assert encoder.config.normalize
    vectors = encoder.encode_passages(TEXTS)
    np.testing.assert_allclose(vectors @ vectors.T, theirs.similarity(*[theirs.encode(TEXTS)] * 2), atol=1e-5)


def test_lower_case_is_the_tokenizers_matter(copied: Path) -> None:
    save_theirs(copied)
    edit_json(copied / "sentence_bert_config.json", do_lower_case=True)
    expected = SentenceTransformer(str(copied), device="cpu").encode(["The KING"])
    np.testing.assert_allclose(Encoder.load(copied).encode_queries(["The KING"]), expected, atol=1e-5)
    file = copied / "tokenizer.json"
    file.write_text(file.read_text().replace('"lowercase": true', '"lowercase": false'))
    edit_json(copied / "tokenizer_config.json", do_lower_case=False)
    with pytest.raises(UserError, match=r"sentence_bert_config.json: asks for lower case \(do_lower_case\) from a"):
        Encoder.load(copied)


def test_older_pooling_files_are_read(copied: Path) -> None:
    """As sentence-transformers wrote them up to 5.1."""
    save_theirs(copied)
    file = copied / "1_Pooling" / "config.json"
    for mode, expected in (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")):
        modes = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "lasttoken"), False) | {mode: True}
        stored = {f"pooling_mode_{name}": on for name, on in modes.items()}
        file.write_text(json.dumps({"word_embedding_dimension": 32, "include_prompt": True, **stored}))
        assert Encoder.load(copied).config.pooling == expected


def test_templates_are_saved_with_the_model(tiny_bert: Path, tmp_path: Path) -> None:
    Encoder.load(tiny_bert, passage_template="{title}{sep}{text}", query_prompt="what is ").save(tmp_path, card="")
    config = Encoder.load(tmp_path).config
    assert (config.passage_template, config.query_prompt) == ("{title}{sep}{text}", "what is ")


def test_template_is_filled_once() -> None:
    assert EncoderConfig().passage_text("the heart", "beats") == "the heart beats"
    assert EncoderConfig().passage_text("", " beats") == " beats"
    joined = EncoderConfig(passage_template="{title}{sep}{text}")
    assert joined.passage_text("{text}", "{sep}", "[SEP]") == "{text}[SEP]{sep}"
    assert joined.passage_text("", "beats", "[SEP]") == "beats"
    assert EncoderConfig(passage_template="{title} {sep} {text}").passage_text("", "beats", "[SEP]") == "beats"
    assert EncoderConfig(passage_template="{title}: {text}").passage_text("{text}", "x") == "{text}: x"


def dense(**settings: object) -> Dense:
    return Dense(32, 16, **{"activation_function": torch.nn.Identity()} | settings)


@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_module_is_a_projection(copied: Path, tmp_path: Path, bias: bool) -> None:
    theirs = save_theirs(copied, "cls", dense(bias=bias), Normalize())
    encoder = Encoder.load(copied)
    assert (encoder.config.projection, encoder.config.normalize, encoder.dimension) == (16, True, 16)
    expected = theirs.encode(TEXTS)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), expected, atol=1e-5)
    encoder.save(tmp_path / "again", card="")
    np.testing.assert_allclose(SentenceTransformer(str(tmp_path / "again")).encode(TEXTS), expected, atol=1e-5)
    with pytest.raises(UserError, match="projection is 8, these weights have one to 16"):
        Encoder.load(copied, projection=8)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"activation_function": torch.nn.Tanh()}, "activation is torch.nn.modules.activation.Tanh, expected a linear"),
        ({"use_residual": True}, "activation is torch.nn.modules.linear.Identity with a residual, expected a linear"),
    ],
)
def test_a_dense_module_that_is_not_linear_is_refused(copied: Path, settings: dict[str, object], line: str) -> None:
    save_theirs(copied, "cls", dense(**settings))
    with pytest.raises(UserError) as caught:
        Encoder.load(copied)
    assert str(caught.value).startswith(f"{copied / '2_Dense' / 'config.json'}: {line}")


def test_a_dense_module_in_a_pickle_is_converted_by_wish(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases R21 and R22: older sentence-transformers folders have safetensors beside a small pickle."""
    expected = save_theirs(copied, "cls", dense()).encode(TEXTS)
    weights = copied / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    with pytest.raises(UserError) as caught:
        Encoder.load(copied)
    assert "2_Dense: weights are only there as .bin, which is a pickle and is not opened" in str(caught.value)
    words = ["convert", "--from", "transformers", str(copied), "--output", str(tmp_path / "new")]
    assert main(words) == 2
    assert "2_Dense/pytorch_model.bin: is a pickle, which is opened only with --allow_pickle" in capsys.readouterr().err
    assert main([*words, "--allow_pickle"]) == 0
    np.testing.assert_allclose(Encoder.load(tmp_path / "new").encode_passages(TEXTS), expected, atol=1e-5)


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def modules(*kinds: str) -> str:
    return json.dumps(
        [{"path": f"{n}_{kind}" if n else "", "type": f"x.{kind.split('/')[-1]}"} for n, kind in enumerate(kinds)]
    )


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("encoder.json", '{"pooling": "cls", "poling": "mean"}', "unknown key 'poling'"),
        ("encoder.json", '{"pooling": "max"}', "pooling is 'max', expected cls, mean or last"),
        ("encoder.json", '{"normalize": 1}', "normalize is 1, expected bool"),
        ("encoder.json", '{"projection": "16"}', "projection is '16', expected int | None"),
        ("encoder.json", '{"projection": 16}', "projection is 16, the folder has a layer to None"),
        ("encoder.json", '{"untied": true}', "no config.json here"),
        ("encoder.json", '{"similarity": "cosine"}', "similarity is 'cosine', which does not go with normalize False"),
        ("modules.json", "{}", "modules are none, expected Transformer, Pooling, Dense, Normalize in this order"),
        ("modules.json", '[{"path": "1"}]', "expected a JSON array of modules with type and path"),
        (
            "modules.json",
            modules("Transformer", "../up/Pooling"),
            "'1_../up/Pooling', which lies outside",
        ),
        ("modules.json", modules("Transformer", "Normalize", "Pooling"), "modules are Transformer, Normalize, Pooling"),
        ("modules.json", modules("Transformer", "Pooling", "Dense", "Dense"), "Pooling, Dense, Dense, expected"),
        ("modules.json", modules("Transformer", "WeightedLayerPooling"), "modules are Transformer, WeightedLayer"),
        (
            "modules.json",
            '[{"path": "", "type": "Transformer"}, {"path": "..", "type": "Pooling"}]',
            "lists '..', which",
        ),
        ("sentence_bert_config.json", '{"max_seq_length": "64"}', "max_seq_length is '64', expected int"),
        ("config_sentence_transformers.json", '{"prompts": ["a "]}', "prompts is ['a '], expected dict"),
        ("config_sentence_transformers.json", '{"prompts": {"query": 1}}', "query is 1, expected str"),
        ("1_Pooling/config.json", '{"pooling_mode": "max"}', "pooling is max, expected cls, mean or last"),
        ("1_Pooling/config.json", '{"pooling_mode": 1}', "pooling is 1, expected cls, mean or last"),
        ("1_Pooling/config.json", '{"pooling_mode": ["cls", "mean"]}', "pooling is cls + mean, expected cls, mean"),
        ("1_Pooling/config.json", '{"include_prompt": false}', "pooling leaves the prompt out (include_prompt false)"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(copied: Path, file: str, text: str, line: str) -> None:
    """Case R23 among them."""
    (copied / "1_Pooling").mkdir()
    (copied / "1_Pooling" / "config.json").write_text("{}")
    (copied / "modules.json").write_text(modules("Transformer", "Pooling"))
    (copied / file).write_text(text)
    with pytest.raises(UserError) as caught:
        Encoder.load(copied)
    assert line in str(caught.value) and str(copied) in str(caught.value) and "\n" not in str(caught.value)
