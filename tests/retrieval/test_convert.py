"""Two published towers become one encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, DPRConfig, DPRContextEncoder, DPRQuestionEncoder

from retrieval.cli import main
from retrieval.encoder import Encoder
from retrieval.records import Passage
from tests.condenser.test_interop import plant

QUESTIONS = ["who is the king", "where is the bank", ""]
PASSAGES = [Passage("1", "the heart", "beats"), Passage("2", "", "river " * 40)]


@pytest.fixture(params=["safetensors", "pickles"])
def dpr(request: pytest.FixtureRequest, tiny_bert: Path, tmp_path: Path) -> tuple[Path, Path]:
    """DPR's two towers as transformers saves them, or as they were published, with what was left of the training."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    torch.manual_seed(0)
    folders = []
    for kind, place in ((DPRQuestionEncoder, "question_encoder"), (DPRContextEncoder, "ctx_encoder")):
        folder = tmp_path / place
        config = DPRConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.2, **size)
        model = kind(config)
        model.save_pretrained(folder)
        if request.param == "pickles":
            (folder / "model.safetensors").unlink()
            left = {"embeddings.position_ids": torch.arange(64)[None], "pooler.dense.bias": torch.zeros(32)}
            more = {f"{place}.bert_model.{name}": value for name, value in left.items()}
            torch.save(model.state_dict() | more, folder / "pytorch_model.bin")
            plant(folder / "training_args.bin", tmp_path / "canary")
            (folder / "vocab.txt").write_bytes((tiny_bert / "vocab.txt").read_bytes())
            (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
        else:
            tokenizer.save_pretrained(folder)
        folders.append(folder)
    return folders[0], folders[1]


def expected_vectors(dpr: tuple[Path, Path]) -> tuple[np.ndarray, np.ndarray]:
    """What transformers' own classes make of each text alone."""
    vectors = []
    pairs: list[list[tuple[str, ...]]] = [[(text,) for text in QUESTIONS], [("the heart", "beats"), ("river " * 40,)]]
    for kind, folder, texts in zip((DPRQuestionEncoder, DPRContextEncoder), dpr, pairs, strict=True):
        model, tokenizer = kind.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        rows = []
        for text in texts:
            inputs = tokenizer(*text, return_tensors="pt", return_token_type_ids=False)
            with torch.no_grad():
                rows.append(model(**inputs).pooler_output[0].numpy())
        vectors.append(np.stack(rows))
    return vectors[0], vectors[1]


def test_dprs_towers_become_one_encoder(dpr: tuple[Path, Path], tmp_path: Path) -> None:
    questions, passages = expected_vectors(dpr)
    words = ["convert", str(dpr[0]), "--passages", str(dpr[1]), "--allow_pickle", "--output", str(tmp_path / "both")]
    assert main(words) == 0
    encoder = Encoder.load(tmp_path / "both")
    assert encoder.config.untied and encoder.config.passage_template == "{title}{sep}{text}"
    np.testing.assert_allclose(encoder.encode_queries(QUESTIONS), questions, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_passages(PASSAGES), passages, atol=1e-5)
    theirs = SentenceTransformer(str(tmp_path / "both"), device="cpu")
    np.testing.assert_allclose(theirs.encode_query(QUESTIONS), questions, atol=1e-5)
    texts = [encoder.passage_text(passage) for passage in PASSAGES]
    np.testing.assert_allclose(theirs.encode_document(texts), passages, atol=1e-5)
    assert not (tmp_path / "canary").exists()
    assert "Queries are encoded by `question_encoder`" in (tmp_path / "both" / "README.md").read_text()


def test_joining_twice_is_up_to_date(
    dpr: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(dpr[0]), "--passages", str(dpr[1]), "--allow_pickle", "--output", str(tmp_path / "both")]
    assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().err == f"{tmp_path / 'both'}: up to date\n"


def test_what_cannot_be_joined_is_refused_in_one_line(
    tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R22 among them."""
    settings = {"cls": {}, "mean": {"pooling": "mean"}, "cosine": {"normalize": True}, "short": {"projection": 8}}
    for name, changes in settings.items():
        Encoder.load(tiny_bert, **changes).save(tmp_path / name, card="")
    closed = tmp_path / "closed"
    Encoder.load(tiny_bert).save(closed, card="")
    (closed / "model.safetensors").rename(closed / "pytorch_model.bin")
    lines = {
        "mean": "pooling is 'cls' for queries, 'mean' for passages",
        "cosine": "normalize is False for queries, True for passages",
        "short": "length of a vector is 32 for queries, 8 for passages",
        "closed": f"{closed}/pytorch_model.bin: is a pickle, which is opened only with --allow_pickle",
        "none": f"{tmp_path}/none: no such folder, expected a model folder",
    }
    capsys.readouterr()
    for name, line in lines.items():
        words = ["convert", str(tmp_path / "cls"), "--passages", str(tmp_path / name)]
        assert main([*words, "--output", str(tmp_path / "both")]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and line in said[0]
        assert not list(tmp_path.glob("both*")), "nothing half written"
    words = ["convert", str(tmp_path / "cls"), "--passages", str(tmp_path / "cls"), "--to", "reference"]
    assert main([*words, "--output", str(tmp_path / "both")]) == 2
    assert "--passages joins two encoders; --from and --to are for one" in capsys.readouterr().err


def test_join_keeps_each_sides_prompt_and_limit(tiny_bert: Path) -> None:
    queries = Encoder.load(tiny_bert, query_prompt="what is ", query_max_length=10, passage_prompt="unused ")
    passages = Encoder.load(tiny_bert, query_prompt="unused ", passage_prompt="the ", passage_max_length=20)
    config = Encoder.join(queries, passages).config
    assert (config.query_prompt, config.query_max_length) == ("what is ", 10)
    assert (config.passage_prompt, config.passage_max_length) == ("the ", 20)
