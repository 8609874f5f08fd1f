"""The encoder: one text, one vector, the same in this toolkit, in AutoModel and in sentence-transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from condenser.errors import UserError
from retrieval.encoder import Encoder, EncoderConfig, batches_by_length
from retrieval.records import Passage

TEXTS = [" ".join(["river bank money water"] * count) for count in (12, 1, 8, 1, 3)] + ["heart", ""]


@pytest.fixture(scope="module")
def tiny(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert)


@pytest.fixture()
def copied(tiny_bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


def with_config(encoder: Encoder, **changes: object) -> Encoder:
    return Encoder(encoder.model, encoder.tokenizer, replace(encoder.config, **changes)).eval()


def test_a_bare_folder_is_cls_pooled_and_says_so(tiny_bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = Encoder.load(tiny_bert)
    assert capsys.readouterr().err == f"{tiny_bert}: no pooling recorded here, taking the CLS vector, not normalised\n"
    # The default passage limit of 128 is lowered to the model's 64 positions.
    assert encoder.config == EncoderConfig(pooling="cls", normalize=False, query_max_length=32, passage_max_length=64)
    model = AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False)
    inputs = AutoTokenizer.from_pretrained(tiny_bert)("river bank", return_tensors="pt")
    expected = model(**inputs).last_hidden_state[0, 0].detach().numpy()
    np.testing.assert_allclose(encoder.encode_queries(["river bank"])[0], expected, atol=1e-6)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
def test_saved_folder_gives_the_same_vectors_everywhere(
    tiny: Encoder, tmp_path: Path, pooling: str, normalize: bool
) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = with_config(tiny, pooling=pooling, normalize=normalize, query_prompt="what is ", passage_prompt="the ")
    encoder.save(tmp_path / "encoder", card="# a card\n")
    passages = [Passage(str(number), "", text) for number, text in enumerate(TEXTS)]
    queries, documents = encoder.encode_queries(TEXTS[1:2]), encoder.encode_passages(passages)
    assert queries.dtype == documents.dtype == np.float32

    again = Encoder.load(tmp_path / "encoder")
    assert again.config == encoder.config
    np.testing.assert_array_equal(again.encode_passages(passages), documents)

    other = SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    np.testing.assert_allclose(other.encode_query(TEXTS[1:2]), queries, atol=1e-5)
    np.testing.assert_allclose(other.encode_document(TEXTS), documents, atol=1e-5)
    assert other.similarity_fn_name == ("cosine" if normalize else "dot")

    _, info = AutoModel.from_pretrained(tmp_path / "encoder", add_pooling_layer=False, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    # The pooler, which no encoder of ours uses, is all that a plain AutoModel adds.
    _, info = AutoModel.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert info["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}
    assert (tmp_path / "encoder" / "README.md").read_text() == "# a card\n"


def test_sentence_transformers_own_files_are_read(tiny: Encoder, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    with_config(tiny, pooling="mean", normalize=True, query_prompt="what is ").save(tmp_path / "ours", card="")
    SentenceTransformer(str(tmp_path / "ours"), device="cpu").save(str(tmp_path / "theirs"))
    assert not (tmp_path / "theirs" / "encoder.json").exists()
    config = Encoder.load(tmp_path / "theirs").config
    assert (config.pooling, config.normalize, config.query_prompt) == ("mean", True, "what is ")
    assert config.passage_max_length == 64


def test_saving_twice_gives_the_same_bytes(tiny: Encoder, tmp_path: Path) -> None:
    tiny.save(tmp_path / "one", card="")
    tiny.encode_queries(["river " * 50])  # leaves a truncation rule in the tokenizer
    tiny.save(tmp_path / "two", card="")
    for file in (tmp_path / "one").rglob("*.*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "two" / file.relative_to(tmp_path / "one")).read_bytes(), file.name


def test_rows_stay_in_input_order_and_equal_the_text_alone(tiny: Encoder) -> None:
    """Case B35."""
    texts = [" ".join(["fever"] * count) for count in (50, 1, 30, 2, 10)]
    encoder = with_config(tiny, query_max_length=64)
    together = encoder.encode_token_ids(encoder.tokenize(texts, "query"), batch_tokens=64)
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert np.abs(alone[0] - alone[1]).max() > 1e-2


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_batch_size_does_not_change_vectors(tiny: Encoder, pooling: str) -> None:
    """Case B38."""
    encoder = with_config(tiny, pooling=pooling, query_max_length=64)
    words = ("heart blood cell disease river bank money " * 10).split()
    ids = encoder.tokenize([" ".join(words[:count]) for count in range(1, 62, 4)], "query")
    assert len({len(row) for row in ids}) == 16
    one_by_one = encoder.encode_token_ids(ids, batch_tokens=1)
    for batch_tokens in (192, 2048):
        np.testing.assert_allclose(encoder.encode_token_ids(ids, batch_tokens=batch_tokens), one_by_one, atol=1e-5)


def test_one_text_and_no_text(tiny: Encoder) -> None:
    """Cases B39 and B35."""
    assert tiny.encode_queries(["river"]).shape == (1, 32)
    assert tiny.encode_queries([]).shape == (0, 32)
    assert tiny.encode_passages([]).shape == (0, 32)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_empty_and_odd_texts_have_finite_vectors(tiny: Encoder, pooling: str) -> None:
    """Case B40."""
    vectors = with_config(tiny, pooling=pooling, normalize=True).encode_queries(["", "   ", "\u200b", "a"])
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[1:3], vectors[[0, 0]], atol=1e-6)


def test_left_padding_in_the_tokenizers_files_is_overruled(copied: Path) -> None:
    """Case B43."""
    file = copied / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left", "truncation_side": "left"}))
    assert AutoTokenizer.from_pretrained(copied).padding_side == "left"
    encoder = Encoder.load(copied)
    texts = ["river bank money", " ".join(["fever"] * 20)]
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    np.testing.assert_allclose(encoder.encode_queries(texts), alone, atol=1e-5)
    cut = encoder.tokenize(["river " * 40 + "bank"], "query")[0]
    assert encoder.tokenizer.convert_ids_to_tokens(cut)[-2:] == ["river", "[SEP]"]


def test_truncation_keeps_the_frame(tiny: Encoder) -> None:
    """Case B18: the limit counts the special tokens, and the end of the text goes first."""
    encoder = with_config(tiny, passage_max_length=16, query_max_length=8)
    passage = encoder.passage_text(Passage("1", "heart " * 30, "blood " * 30))
    (ids,), cut = encoder.tokenize_and_count([passage], "passage")
    tokens = encoder.tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["[CLS]", *["heart"] * 14, "[SEP]"] and cut == 1
    ids_of_query = encoder.tokenize(["blood " * 30], "query")[0]
    assert encoder.tokenizer.convert_ids_to_tokens(ids_of_query) == ["[CLS]", *["blood"] * 6, "[SEP]"]
    assert encoder.tokenize_and_count(["blood " * 6, "blood " * 7], "query")[1] == 1


def test_template_and_prompts(tiny: Encoder) -> None:
    assert tiny.passage_text(Passage("1", "the heart", "beats")) == "the heart beats"
    assert tiny.passage_text(Passage("1", "", " beats")) == " beats"
    assert EncoderConfig(passage_template="{title}: {text}").passage_text("{text}", "x") == "{text}: x"
    prompted = with_config(tiny, query_prompt="what is ", passage_prompt="the ")
    assert prompted.tokenize(["fever"], "query") == tiny.tokenize(["what is fever"], "query")
    assert prompted.tokenize(["fever"], "passage") == tiny.tokenize(["the fever"], "passage")


def test_forward_has_gradients_and_encoding_leaves_training_mode(tiny_bert: Path) -> None:
    encoder = Encoder.load(tiny_bert, pooling="mean", normalize=True).train()
    encoder.encode_queries(["river"])
    assert encoder.training and encoder.model.training
    vectors = encoder(*encoder.pad(encoder.tokenize(["river bank", "fever"], "query")))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    vectors.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_pad_has_no_mask_for_equal_lengths(tiny: Encoder) -> None:
    ids, mask = tiny.pad([[2, 7, 3], [2, 8, 3]])
    assert ids.tolist() == [[2, 7, 3], [2, 8, 3]] and mask is None
    ids, mask = tiny.pad([[2, 7, 3], [2, 3]])
    assert mask is not None
    assert ids.tolist() == [[2, 7, 3], [2, 3, 0]] and mask.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_batches_hold_every_row_once_within_the_budget() -> None:
    lengths = [5, 64, 3, 3, 40, 3, 200]
    batches = list(batches_by_length(lengths, 100))
    assert sorted(row for rows in batches for row in rows) == list(range(7))
    assert batches[0] == [6], "a text over the budget is a batch of its own, the longest first"
    assert all(len(rows) * max(lengths[row] for row in rows) <= 100 for rows in batches[1:])


def test_a_family_without_a_pooler_loads(tiny: Encoder, tmp_path: Path) -> None:
    from transformers import ElectraConfig, ElectraModel

    sizes = {"hidden_size": 16, "embedding_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ElectraModel(ElectraConfig(vocab_size=len(tiny.tokenizer), intermediate_size=16, **sizes)).eval()
    model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    encoder = Encoder.load(tmp_path)
    inputs = AutoTokenizer.from_pretrained(tmp_path)("river bank", return_tensors="pt")
    expected = model(**inputs).last_hidden_state[0, 0].detach().numpy()
    np.testing.assert_allclose(encoder.encode_queries(["river bank"])[0], expected, atol=1e-6)


def remove(name: str) -> object:
    return lambda folder: (folder / name).unlink()


def truncate_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(5000)


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def wrong_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)


def larger_vocabulary(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=20)


def index_outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')


def unknown_key(folder: Path) -> None:
    (folder / "encoder.json").write_text('{"pooling": "cls", "poling": "mean"}')


def max_pooling(folder: Path) -> None:
    (folder / "modules.json").write_text(
        '[{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]'
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (remove("config.json"), "no config.json here, expected a Hugging Face model folder"),
        (remove("tokenizer.json"), "no tokenizer here"),
        (remove("model.safetensors"), "no weights here, expected model.safetensors"),
        (pickle_only, "weights are only there as .bin, which is a pickle and is not opened"),
        (truncate_weights, "weights are damaged"),
        (wrong_architecture, "weights lack 16 of the model's tensors, first 'encoder.layer.2"),
        (larger_vocabulary, "config.json says (20, 32)"),
        (index_outside, "lists '../../secret.safetensors', which lies outside the folder"),
        (unknown_key, "unknown key 'poling'"),
        (max_pooling, "pooling is max_tokens, expected cls, mean or last"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(copied: Path, damage: object, line: str) -> None:
    (copied / "vocab.txt").unlink()
    damage(copied)  # type: ignore[operator]
    with pytest.raises(UserError) as caught:
        Encoder.load(copied)
    assert line in str(caught.value) and str(copied) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"passage_max_length": 65}, "passage_max_length is 65, the model has positions for 64 tokens"),
        ({"query_max_length": 2}, "query_max_length is 2, expected more than the 2 special tokens"),
        ({"pooling": "max"}, "pooling is 'max', expected cls, mean or last"),
        ({"passage_template": "{title}"}, "passage template '{title}' has no {text}"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(tiny_bert: Path, overrides: dict[str, str | int], line: str) -> None:
    with pytest.raises(UserError, match=line.replace("{", r"\{").replace("[", r"\[")):
        Encoder.load(tiny_bert, **overrides)


def test_tokenizer_of_another_model_is_refused(tiny: Encoder) -> None:
    small = AutoModel.from_config(type(tiny.model.config)(**tiny.model.config.to_dict() | {"vocab_size": 20}))
    with pytest.raises(UserError, match=r"tokenizer has \d+ entries, the embedding table 20 rows"):
        Encoder(small, tiny.tokenizer, tiny.config)
