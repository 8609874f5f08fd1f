"""The encoder: one text, one vector, the same in this toolkit, in AutoModel and in sentence-transformers."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer

from condenser.errors import UserError
from retrieval.cli import main
from retrieval.encoder import Encoder, EncoderConfig, batches_by_length
from retrieval.records import Passage

TEXTS = [" ".join(["river bank money water"] * count) for count in (12, 1, 8, 1, 3)] + ["heart", ""]


@pytest.fixture(scope="module")
def tiny(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert)


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


def test_rows_stay_in_input_order_and_equal_the_text_alone(tiny: Encoder) -> None:
    """Case B35."""
    texts = [" ".join(["fever"] * count) for count in (50, 1, 30, 2, 10)]
    encoder = with_config(tiny, query_max_length=64)
    together = encoder.encode_token_ids(encoder.tokenize(texts, "query"), batch_tokens=64)
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert np.abs(alone[0] - alone[1]).max() > 1e-2


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
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


def test_one_text_is_not_taken_for_a_list_of_letters(tiny: Encoder) -> None:
    for encode in (tiny.encode_queries, tiny.encode_passages):
        with pytest.raises(UserError, match="expected a list of texts, found one text"):
            encode("river")


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_empty_and_odd_texts_have_finite_vectors(tiny: Encoder, pooling: str) -> None:
    """Case B40."""
    vectors = with_config(tiny, pooling=pooling, normalize=True).encode_queries(["", "   ", "\u200b", "a"])
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[1:3], vectors[[0, 0]], atol=1e-6)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_left_padding_in_the_tokenizers_files_is_overruled(pooling: str, tiny_bert: Path, tmp_path: Path) -> None:
    """Case B43."""
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left", "truncation_side": "left"}))
    assert AutoTokenizer.from_pretrained(folder).padding_side == "left"
    encoder = Encoder.load(folder, pooling=pooling)
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


def test_last_pooling_takes_the_state_of_the_last_token(tiny: Encoder) -> None:
    encoder = with_config(tiny, pooling="last")
    ids, mask = encoder.pad(encoder.tokenize(["river bank money", "fever"], "query"))
    with torch.no_grad():
        states = encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(encoder(ids, mask), torch.stack([states[0, 4], states[1, 2]]))
        torch.testing.assert_close(encoder(ids[:1]), states[:1, 4], atol=1e-5, rtol=0)


def test_shorter_vectors_are_the_first_numbers_scaled_anew(tiny_bert: Path) -> None:
    for settings in ({}, {"projection": 16}):
        torch.manual_seed(0)
        full = Encoder.load(tiny_bert, normalize=True, **settings).encode_queries(TEXTS)
        torch.manual_seed(0)
        encoder = Encoder.load(tiny_bert, normalize=True, dimension=8, **settings)
        first = full[:, :8]
        np.testing.assert_allclose(
            encoder.encode_queries(TEXTS), first / np.linalg.norm(first, axis=1)[:, None], atol=1e-6
        )
        assert (encoder.dimension, encoder.facts()["dimension"], encoder.facts()["truncated"]) == (8, 8, 8)
    bare = Encoder.load(tiny_bert, dimension=8)
    np.testing.assert_array_equal(bare.encode_passages(TEXTS), Encoder.load(tiny_bert).encode_passages(TEXTS)[:, :8])


def test_index_and_search_agree_on_shorter_vectors(tiny_bert: Path, tmp_path: Path) -> None:
    """Encoding says how short; searching takes it from the index."""
    Encoder.load(tiny_bert, pooling="mean", normalize=True).save(tmp_path / "encoder", card="")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f'{{"_id": "{name}", "text": "{name}"}}\n' for name in ("river", "fever", "king")))
    (tmp_path / "queries.jsonl").write_text('{"_id": "1", "text": "fever"}\n')
    device = ["--device", "cpu"]
    vectors, index, run = (str(tmp_path / name) for name in ("vectors", "index", "run.trec"))
    made = ["--encoder", str(tmp_path / "encoder"), "--dim", "4", "--input", str(corpus), "--output", vectors]
    assert main(["encode", *made, *device]) == 0
    assert main(["index", "--vectors", vectors, "--output", index]) == 0
    queries = ["--queries", str(tmp_path / "queries.jsonl"), "--output", run]
    assert main(["search", "--index", index, *queries, *device]) == 0
    assert Path(run).read_text().split()[2] == "fever"
    assert float(Path(run).read_text().split()[4]) == pytest.approx(1, abs=1e-6)


def test_titles_joined_by_the_separator_are_one_segment(tiny: Encoder) -> None:
    """The coCondenser recipe: [CLS] title [SEP] text [SEP]."""
    encoder = with_config(tiny, passage_template="{title}{sep}{text}")
    for title, text in (("the heart", "beats"), ("heart", " blood cell"), ("", "beats")):
        words = [encoder.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (title, text)]
        frame = [encoder.tokenizer.cls_token_id, *words[0], *([3] if title else []), *words[1], 3]
        assert encoder.tokenizer.sep_token_id == 3
        assert encoder.tokenize([encoder.passage_text(Passage("1", title, text))], "passage") == [frame]


def test_strings_are_passages_without_a_title(tiny: Encoder) -> None:
    records = [Passage("1", "", "the heart"), Passage("2", "", "beats")]
    np.testing.assert_array_equal(tiny.encode_passages(["the heart", "beats"]), tiny.encode_passages(records))


def test_template_and_prompts(tiny: Encoder) -> None:
    assert tiny.passage_text(Passage("1", "the heart", "beats")) == "the heart beats"
    assert tiny.passage_text(Passage("1", "", " beats")) == " beats"
    assert EncoderConfig(passage_template="{title}: {text}").passage_text("{text}", "x") == "{text}: x"
    prompted = with_config(tiny, query_prompt="what is ", passage_prompt="the ")
    assert prompted.tokenize(["fever"], "query") == tiny.tokenize(["what is fever"], "query")
    assert prompted.tokenize(["fever"], "passage") == tiny.tokenize(["the fever"], "passage")


def test_each_kind_of_text_goes_through_its_own_tower(tiny_bert: Path) -> None:
    torch.manual_seed(0)
    encoder = Encoder.load(tiny_bert, untied=True, projection=16)
    assert encoder.query_model is not None and encoder.query_head is not None
    np.testing.assert_array_equal(encoder.encode_queries(["river"]), encoder.encode_passages(["river"]))
    with torch.no_grad():
        encoder.query_model.embeddings.word_embeddings.weight.mul_(2)
    ids = encoder.tokenize(["river bank"], "query")
    query, passage = (encoder.encode_token_ids(ids, kind) for kind in ("query", "passage"))
    assert np.abs(query - passage).max() > 1e-2
    np.testing.assert_array_equal(encoder.encode_token_ids(ids), passage)
    encoder(torch.tensor(ids), kind="query").sum().backward()
    grads = {name.split(".")[0] for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    assert grads == {"query_model", "query_head"}, "starting from one tower makes two that share nothing"


def test_the_names_of_the_weights_are_those_of_the_parts(tiny_bert: Path) -> None:
    """Checkpoints of a training run keep to them."""
    torch.manual_seed(0)
    encoder = Encoder.load(tiny_bert, untied=True, projection=16)
    of_model = encoder.model.state_dict().keys()
    names = [f"{tower}.{name}" for tower in ("model", "query_model") for name in of_model]
    names += [f"{head}.{name}" for head in ("head", "query_head") for name in ("weight", "bias")]
    assert list(encoder.state_dict()) == names
    assert list(Encoder.load(tiny_bert).state_dict()) == [f"model.{name}" for name in of_model]
    other = Encoder.load(tiny_bert, untied=True, projection=16)
    other.load_state_dict(encoder.state_dict())
    np.testing.assert_array_equal(other.encode_queries(TEXTS), encoder.encode_queries(TEXTS))


def test_a_text_without_any_token_has_a_vector(tiny: Encoder) -> None:
    """Case B40, for a tokenizer that adds no special tokens."""
    tokenizer = deepcopy(tiny.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    encoder = Encoder(tiny.model, tokenizer, replace(tiny.config, pooling="last"))
    assert encoder.tokenize(["", "river"], "query")[0] == [0] and len(encoder.tokenize(["river"], "query")[0]) == 1
    assert np.isfinite(encoder.encode_queries(["", ""])).all()


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


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"passage_max_length": 65}, "passage_max_length is 65, the model has positions for 64 tokens"),
        ({"query_max_length": 2}, "query_max_length is 2, expected more than the 2 special tokens"),
        ({"pooling": "max"}, "pooling is 'max', expected cls, mean or last"),
        ({"passage_template": "{title}"}, "passage template '{title}' has no {text}"),
        ({"dimension": 33}, "dimension is 33, this encoder's vectors have 32 numbers"),
        ({"dimension": 0}, "dimension is 0, this encoder's vectors have 32 numbers"),
        ({"dimension": 17, "projection": 16}, "dimension is 17, this encoder's vectors have 16 numbers"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(tiny_bert: Path, overrides: dict[str, str | int], line: str) -> None:
    with pytest.raises(UserError, match=line.replace("{", r"\{").replace("[", r"\[")):
        Encoder.load(tiny_bert, **overrides)


def test_tokenizer_of_another_model_is_refused(tiny: Encoder) -> None:
    small = AutoModel.from_config(type(tiny.model.config)(**tiny.model.config.to_dict() | {"vocab_size": 20}))
    with pytest.raises(UserError, match=r"tokenizer has \d+ entries, the embedding table 20 rows"):
        Encoder(small, tiny.tokenizer, tiny.config)


def test_a_separator_needs_a_tokenizer_that_has_one(tiny: Encoder) -> None:
    tokenizer = deepcopy(tiny.tokenizer)
    tokenizer.sep_token = None
    with pytest.raises(UserError, match=r"has \{sep\}, the tokenizer has no separator token"):
        Encoder(tiny.model, tokenizer, replace(tiny.config, passage_template="{title}{sep}{text}"))
