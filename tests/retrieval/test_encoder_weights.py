"""An encoder's folder: written once, opened with the same vectors here, in AutoModel and in sentence-transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, DPRConfig, DPRContextEncoder, DPRQuestionEncoder, DPRReader

from condenser.errors import UserError
from condenser.manifest import write_manifest
from retrieval.encoder import Encoder
from retrieval.records import Passage
from retrieval.vectors import check_same_space
from tests.condenser.test_interop import plant

TEXTS = [" ".join(["river bank money water"] * count) for count in (12, 1, 8, 1, 3)] + ["heart", ""]
PROMPTS = {"query_prompt": "what is ", "passage_prompt": "the "}


@pytest.fixture()
def copied(tiny_bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


def untied(folder: Path, **settings: str | bool | int) -> Encoder:
    """Two towers that differ in all their parts."""
    torch.manual_seed(0)
    encoder = Encoder.load(folder, untied=True, **settings)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name.startswith("query_"):
                parameter.add_(0.05 * torch.randn(parameter.shape))
    return encoder


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("projection", [None, 16])
@pytest.mark.parametrize("normalize", [False, True])
def test_saved_folder_gives_the_same_vectors_everywhere(
    tiny_bert: Path, tmp_path: Path, pooling: str, projection: int | None, normalize: bool
) -> None:
    """Case B34."""
    encoder = Encoder.load(tiny_bert, pooling=pooling, projection=projection, normalize=normalize, **PROMPTS)
    encoder.save(tmp_path / "encoder", card="# a card\n")
    queries, documents = encoder.encode_queries(TEXTS[1:2]), encoder.encode_passages(TEXTS)
    assert queries.dtype == documents.dtype == np.float32 and documents.shape == (7, projection or 32)

    again = Encoder.load(tmp_path / "encoder")
    assert again.config == encoder.config
    np.testing.assert_array_equal(again.encode_passages(TEXTS), documents)

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


@pytest.mark.parametrize(
    "settings", [{}, {"pooling": "mean", "projection": 16, "normalize": True}, {"pooling": "last", "projection": 16}]
)
def test_two_towers_are_two_whole_folders_in_one(
    tiny_bert: Path, tmp_path: Path, settings: dict[str, str | bool | int]
) -> None:
    encoder = untied(tiny_bert, query_max_length=24, passage_max_length=40, **PROMPTS, **settings)
    encoder.save(tmp_path / "encoder", card="# a card\n")
    vectors = {"query": encoder.encode_queries(TEXTS), "passage": encoder.encode_passages(TEXTS)}
    assert np.abs(vectors["query"] - vectors["passage"]).max() > 1e-2

    again = Encoder.load(tmp_path / "encoder")
    assert again.config == encoder.config and again.query_model is not None
    both = SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    for kind, expected in vectors.items():
        tower = Encoder.load(tmp_path / "encoder" / kind)
        assert tower.query_model is None and not tower.config.untied
        theirs = SentenceTransformer(str(tmp_path / "encoder" / kind), device="cpu")
        for one in (again, tower):
            encode = one.encode_queries if kind == "query" else one.encode_passages
            np.testing.assert_array_equal(encode(TEXTS), expected)
        for model in (theirs, both):
            encode = model.encode_query if kind == "query" else model.encode_document
            np.testing.assert_allclose(encode(TEXTS), expected, atol=1e-5)
        _, info = AutoModel.from_pretrained(
            tmp_path / "encoder" / kind, add_pooling_layer=False, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]


def test_two_towers_do_not_become_one_by_an_option(tiny_bert: Path, tmp_path: Path) -> None:
    untied(tiny_bert).save(tmp_path, card="")
    with pytest.raises(UserError) as caught:
        Encoder.load(tmp_path, untied=False)
    assert str(caught.value) == (
        f"{tmp_path}: has a tower for queries and one for passages, untied=False asks for one "
        f"(load {tmp_path / 'passage'} or {tmp_path / 'query'})"
    )


def test_facts_tell_towers_and_projections_apart(tiny_bert: Path, tmp_path: Path) -> None:
    for name, settings in {"tied": {}, "untied": {"untied": True}, "projected": {"projection": 32}}.items():
        Encoder.load(tiny_bert, **settings).save(tmp_path / name, card="")
    tied, two, projected = (Encoder.load(tmp_path / name).facts() for name in ("tied", "untied", "projected"))
    assert len({facts["encoder_fingerprint"] for facts in (tied, two, projected)}) == 3
    with pytest.raises(UserError, match="untied is False in the index"):
        check_same_space(tied, two)
    same = {"encoder_fingerprint": "", "encoder": "e"}
    with pytest.raises(UserError, match="untied is False in the index"):
        check_same_space(tied | same, two | same)
    with pytest.raises(UserError, match="projection is None in the index"):
        check_same_space(tied | same, projected | same)


def test_saving_twice_gives_the_same_bytes(tiny_bert: Path, tmp_path: Path) -> None:
    tiny = untied(tiny_bert, projection=16)
    tiny.save(tmp_path / "one", card="")
    tiny.encode_queries(["river " * 50])  # leaves a truncation rule in the tokenizer
    tiny.save(tmp_path / "two", card="")
    for file in (tmp_path / "one").rglob("*.*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "two" / file.relative_to(tmp_path / "one")).read_bytes(), file.name


def test_a_family_without_a_pooler_loads(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import ElectraConfig, ElectraModel

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    sizes = {"hidden_size": 16, "embedding_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ElectraModel(ElectraConfig(vocab_size=len(tokenizer), intermediate_size=16, **sizes)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = Encoder.load(tmp_path)
    inputs = AutoTokenizer.from_pretrained(tmp_path)("river bank", return_tensors="pt")
    expected = model(**inputs).last_hidden_state[0, 0].detach().numpy()
    np.testing.assert_allclose(encoder.encode_queries(["river bank"])[0], expected, atol=1e-6)


DPR_SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


@pytest.mark.parametrize("projection", [0, 16])
@pytest.mark.parametrize("tower", [DPRQuestionEncoder, DPRContextEncoder])
def test_a_tower_of_dpr_is_the_bert_that_it_is(
    tower: type, projection: int, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    model = tower(DPRConfig(vocab_size=len(tokenizer), projection_dim=projection, **DPR_SIZE)).eval()
    model.save_pretrained(tmp_path / "dpr")
    tokenizer.save_pretrained(tmp_path / "dpr")
    capsys.readouterr()
    encoder = Encoder.load(tmp_path / "dpr")
    assert capsys.readouterr().err == (
        f"{tmp_path / 'dpr'}: a tower of DPR, taking the CLS vector, not normalised, "
        "and passages as {title}{sep}{text}\n"
    )
    inputs = tokenizer("the heart", "beats", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        expected = model(**inputs).pooler_output.numpy()
    passage = Passage("1", "the heart", "beats")
    np.testing.assert_allclose(encoder.encode_passages([passage]), expected, atol=1e-5)
    encoder.save(tmp_path / "ours", card="")
    np.testing.assert_allclose(Encoder.load(tmp_path / "ours").encode_passages([passage]), expected, atol=1e-5)
    other = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(other.encode_document([encoder.passage_text(passage)]), expected, atol=1e-5)


def test_dprs_reader_is_no_encoder(tiny_bert: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    DPRReader(DPRConfig(**DPR_SIZE)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="architecture is DPRReader, expected DPRQuestionEncoder or DPRContextEncoder"):
        Encoder.load(tmp_path)


def test_weights_stored_in_16_bits_are_used_in_32(copied: Path, tmp_path: Path) -> None:
    """Case B27."""
    Encoder.load(copied, projection=16).save(tmp_path / "encoder", card="")
    for folder in (tmp_path / "encoder", tmp_path / "encoder" / "2_Dense"):
        tensors = {name: value.half() for name, value in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(tmp_path / "encoder" / "config.json", dtype="float16")
    encoder = Encoder.load(tmp_path / "encoder")
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    assert encoder.encode_queries(["river"]).dtype == np.float32
    encoder.save(tmp_path / "again", card="")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "float32"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def old_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }


def old_buffers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"bert.embeddings.position_ids": torch.arange(64)[None]}


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("bert."): value.clone() for name, value in tensors.items() if not name.startswith("cls.")}


@pytest.mark.parametrize("change", [old_names, old_buffers, without_prefix])
def test_older_layouts_of_the_weights_load(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tiny_bert: Path, copied: Path
) -> None:
    """Case B32."""
    rewrite(copied, change)
    expected = Encoder.load(tiny_bert).encode_passages(TEXTS)
    np.testing.assert_array_equal(Encoder.load(copied).encode_passages(TEXTS), expected)


def test_no_pickle_in_the_folder_is_opened(copied: Path, tmp_path: Path) -> None:
    """Case R22."""
    Encoder.load(copied, projection=16).save(tmp_path / "encoder", card="")
    for name in ("pytorch_model.bin", "2_Dense/pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        plant(tmp_path / "encoder" / name, tmp_path / "canary")
    Encoder.load(tmp_path / "encoder").encode_queries(["river"])
    for name in ("model.safetensors", "2_Dense/model.safetensors"):
        (tmp_path / "encoder" / name).unlink()
        with pytest.raises(UserError, match="which is a pickle and is not opened"):
            Encoder.load(tmp_path / "encoder")
    assert not (tmp_path / "canary").exists()


def pair(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Damage one tower of two, or the folder that holds them."""

    def damage(folder: Path) -> None:
        encoder = untied(folder, projection=16)
        shutil.rmtree(folder)
        encoder.save(folder, card="")
        change(folder)

    return damage


def other_tokenizer(folder: Path) -> None:
    file = folder / "query" / "tokenizer.json"
    file.write_text(file.read_text().replace("[MASK]", "[HIDE]"))


def other_length(folder: Path) -> None:
    save_file({"linear.weight": torch.ones(8, 32)}, folder / "query" / "2_Dense" / "model.safetensors")
    edit_json(folder / "query" / "2_Dense" / "config.json", out_features=8)


def dense_of_another_size(folder: Path) -> None:
    save_file({"linear.weight": torch.ones(16, 8)}, folder / "passage" / "2_Dense" / "model.safetensors")


def no_dense(folder: Path) -> None:
    shutil.rmtree(folder / "query" / "2_Dense")


def cut_query_weights(folder: Path) -> None:
    truncate_weights(folder / "query")


def changed_after_it_was_sealed(folder: Path) -> None:
    write_manifest(folder, {"schema": 1, "kind": "encoder", "config": {}, "inputs": {}, "facts": {}})
    file = folder / "query" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def one_tensor_less(folder: Path) -> None:
    rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if k != "bert.encoder.layer.1.output.dense.bias"})


def more_layers_than_said(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=1)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def without_folder(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.rmtree(folder / name)


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
        (one_tensor_less, "weights lack 1 of the model's tensors, first 'encoder.layer.1.output.dense.bias'"),
        (more_layers_than_said, "weights have 16 tensors that the model has no place for, first 'encoder.layer.1"),
        (pair(without_folder("query")), "query: no config.json here"),
        (pair(cut_query_weights), "query/model.safetensors: weights are damaged"),
        (pair(other_tokenizer), "tokenizer is '"),
        (pair(other_length), "length of a vector is 8 for queries, 16 for passages"),
        (pair(no_dense), "query/2_Dense/config.json: no such file"),
        (
            pair(dense_of_another_size),
            "has tensors of shapes {'weight': (16, 8)}, expected {'weight': (16, 32), 'bias': (16,)}",
        ),
        (pair(changed_after_it_was_sealed), "query/model.safetensors"),
        (max_pooling, "pooling is max_tokens, expected cls, mean or last"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(copied: Path, damage: Callable[[Path], None], line: str) -> None:
    """Cases B32, R21, R23, R25, R27 and R28."""
    (copied / "vocab.txt").unlink()
    damage(copied)
    with pytest.raises(UserError) as caught:
        Encoder.load(copied)
    assert line in str(caught.value) and str(copied) in str(caught.value) and "\n" not in str(caught.value)
