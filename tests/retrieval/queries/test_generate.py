"""Queries written for passages: reproducible, under their constraints, counted, and the same after a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from condenser.decoding.hypotheses import Hypothesis
from condenser.errors import RunFailed, UserError
from condenser.manifest import load_manifest
from condenser.models.language_model import Network
from condenser.models.query_writer import QueryWriter, WriterSettings
from retrieval.collections import open_collection
from retrieval.examples import read_examples
from retrieval.queries import generate as generating
from retrieval.queries.generate import generate
from retrieval.queries.options import QueriesGenerateOptions
from retrieval.queries.pool import Written, read_written, written_in
from retrieval.queries.writers import load_writer
from retrieval.records import Passage
from tests.command import start
from tests.folders import assert_same_files

TEXTS = ["the river bank", "a red heart and blood", "", "the king runs the city", "water in the river"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    records = [{"_id": f"p{number}", "title": "", "text": text} for number, text in enumerate(TEXTS)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file.parent)


@pytest.fixture(scope="module")
def writer(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A query writer with random weights, large enough that its words are not all alike."""
    folder = tmp_path_factory.mktemp("writer")
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    network = Network(
        vocabulary_size=len(tokenizer), cell="lstm", embedding_size=32, hidden_size=16, layers=1, dropout=0.0, tied=True
    )
    encoder = BertModel.from_pretrained(tiny_bert, add_pooling_layer=False)
    model = QueryWriter(encoder, tokenizer, network, WriterSettings(passage_max_length=16))
    with torch.no_grad():
        model.decoder.embedding.weight.normal_(0, 1.5)
        model.decoder.output.bias[model.frame.end] = 8.0  # so that drawn queries come to an end
    model.save(folder)
    return str(folder)


def options_for(corpus: str, writer: str, output: Path, **others: Any) -> QueriesGenerateOptions:
    settings: dict[str, Any] = {
        "per_passage": 4, "max_length": 8, "min_length": 1, "batch_size": 8, "shard_size": 2, "device": "cpu",
        "top_k": None,
    }  # fmt: skip
    return QueriesGenerateOptions(collection=corpus, writer=writer, output=str(output), **(settings | others))


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def test_every_query_says_how_it_came_about_and_keeps_its_constraint(corpus: str, writer: str, tmp_path: Path) -> None:
    pool = generate(
        options_for(corpus, writer, tmp_path / "out", max_length=16, top_p=None, per_passage=6, constrained=0.34)
    )
    written = list(read_written(pool.output))
    assert pool.counts.queries == len(written) and pool.counts.left_out["passages without a text"] == 1
    searched = [one for one in written if one.constraint]
    assert len(searched) == 8, "two for each passage with a text: there is always a text that holds a word"
    for one in searched:
        forms = re.findall(r'"([^"]+)"', str(one.constraint))
        assert set(forms) & set(words_of(one.text)), one
        assert set(forms) & set(words_of(TEXTS[int(one.passage_id[1:])])), one
        assert one.decoder["mode"] == "constrained"
    drawn = [one for one in written if not one.constraint]
    assert drawn and all(one.decoder["mode"] == "sample" and one.decoder["seed"] > 0 for one in drawn)
    assert all(one.id.startswith(f"{one.passage_id}-g") for one in written)


def test_log_probabilities_are_those_of_the_model(corpus: str, writer: str, tmp_path: Path) -> None:
    pool = generate(options_for(corpus, writer, tmp_path / "out"))
    model = load_writer(writer)
    passages = open_collection(corpus).lookup()
    checked = 0
    for one in read_written(pool.output):
        ids = model.tokenizer(one.text, add_special_tokens=False)["input_ids"]
        if len(ids) + 1 != one.tokens:
            continue  # the tokenizer cuts the text otherwise than it was written
        generator = model.generator([passages[one.passage_id]])
        log_probs, state = generator.start()
        total = 0.0
        for token in [*ids, model.end]:
            total += float(log_probs[0, token])
            log_probs, state = generator.step(torch.tensor([token]), state)
        assert one.log_prob == pytest.approx(total, abs=1e-4)
        [again] = model.log_probs([passages[one.passage_id]], [one.text])
        assert again == (pytest.approx(total, abs=1e-4), one.tokens)
        checked += 1
    assert checked > 3


def test_batch_and_other_passages_do_not_matter(corpus: str, writer: str, tmp_path: Path) -> None:
    told = {"top_p": None}  # at which a last bit could make one token more or less
    whole = generate(options_for(corpus, writer, tmp_path / "whole", **told))
    some = generate(options_for(corpus, writer, tmp_path / "some", passages=2, batch_size=1, shard_size=1, **told))
    assert some.counts.passages == 2
    by_id = {one.id: one for one in read_written(whole.output)}
    for one in read_written(some.output):
        assert one == by_id[one.id]._replace(log_prob=one.log_prob)
        assert one.log_prob == pytest.approx(by_id[one.id].log_prob, abs=1e-4)


def test_constrained_queries_are_drawn_by_seed_or_the_best_ones(corpus: str, writer: str, tmp_path: Path) -> None:
    """Best ones: the same by any seed, and none drawn is more probable; drawn: others by another seed."""
    texts, probable = {}, {}
    for search in ("best", "drawn"):
        for seed in (1, 2):
            told = {"search": search, "seed": seed, "constrained": 1.0, "per_passage": 1, "beam": 8}
            pool = generate(options_for(corpus, writer, tmp_path / f"{search}{seed}", **told))
            written = list(read_written(pool.output))
            texts[search, seed] = [one.text for one in written]
            probable[search, seed] = [one.log_prob for one in written]
            assert {one.decoder["search"] for one in written} == {search}
            assert all(("seed" in one.decoder) == (search == "drawn") for one in written)
    assert texts["best", 1] == texts["best", 2] and texts["drawn", 1] != texts["drawn", 2]
    pairs = zip(probable["best", 1], probable["drawn", 1], strict=True)
    assert all(best >= drawn - 1e-5 for best, drawn in pairs)


def test_a_killed_run_goes_on_to_the_same_bytes(corpus: str, writer: str, tmp_path: Path) -> None:
    options = options_for(corpus, writer, tmp_path / "killed")
    killed = start("queries generate", options, CONDENSER_FAULT="shard-written")
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    straight = generate(dataclasses.replace(options, output=str(tmp_path / "straight")))
    again = generate(options)
    assert_same_files(again.output, straight.output)
    assert str(generate(options)) == str(again), "and is up to date then"


def test_blank_queries_and_repeats_are_dropped_and_counted(
    corpus: str, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B65: a generator that returns nothing, a blank, and one query for two passages."""
    model = load_writer(writer)
    answers = {"p0": ["", " ", "What is it", "what  is IT"], "p1": ["what is it"] * 4}
    monkeypatch.setattr("retrieval.queries.writers.load_writer", lambda *_, **__: model)
    given: dict[tuple[int, ...], str] = {}

    def written(self: Any, passages: Any) -> Any:
        for passage in passages:
            for number, text in enumerate(answers.get(passage.id, [])):
                tokens = (len(given),)
                given[tokens] = text
                yield generating._Wanted(passage, number, None), Hypothesis(tokens, -1.0, -1.0)

    monkeypatch.setattr(generating._Work, "_written", written)
    monkeypatch.setattr(model, "text", lambda tokens: given[tuple(tokens)])
    pool = generate(options_for(corpus, writer, tmp_path / "out"))
    assert [(one.id, one.text) for one in read_written(pool.output)] == [
        ("p0-g2", "What is it"),
        ("p1-g0", "what is it"),
    ]
    assert pool.counts.left_out["blank queries"] == 2
    assert pool.counts.left_out["repeats for the same passage"] == 4
    assert "2 blank queries" in str(pool)


def test_ids_of_queries_and_judgements_agree_and_training_takes_them(corpus: str, writer: str, tmp_path: Path) -> None:
    collection = open_collection(generate(options_for(corpus, writer, tmp_path / "out")).output)
    queries = {query.id: query.text for query in collection.queries("train")}
    assert collection.qrels("train") == {name: {name.rsplit("-g", 1)[0]: 1} for name in queries}
    assert [passage.text for passage in collection.passages()] == TEXTS
    assert len(read_examples(collection, "train")) == len(queries)


@pytest.mark.parametrize("search", ["best", "drawn"])
def test_an_expression_holds_for_all_and_gives_different_texts(
    corpus: str, writer: str, tmp_path: Path, search: str
) -> None:
    """Three for each of four passages: the best ones differ, drawn ones may be repeats, which are counted."""
    told = {"constraint": "regex:who is .*", "constrained": 0.75, "search": search}
    pool = generate(options_for(corpus, writer, tmp_path / "out", **told))
    searched = [one for one in read_written(pool.output) if one.constraint == "regex:who is .*"]
    repeats = pool.counts.left_out["repeats for the same passage"]
    assert len(searched) == 12 if search == "best" else 8 <= len(searched) <= 12 <= len(searched) + repeats
    assert all(words_of(one.text)[:2] == ["who", "is"] for one in searched)
    assert len({(one.passage_id, one.text) for one in searched}) == len(searched)
    if search == "drawn":
        assert len({one.decoder["seed"] for one in searched}) == len(searched)


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_published_models_write_too(corpus: str, tiny_bert: Path, tmp_path: Path, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": tokenizer.sep_token_id, "vocab_size": len(tokenizer)}
    if family == "t5":
        model = T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, **special)
        )
    else:
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **special))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompt = "{title} {text}" if family == "t5" else "{title} {text} what ?"
    options = options_for(corpus, str(tmp_path / "model"), tmp_path / "out", max_length=16, prompt=prompt)
    written = list(read_written(generate(options).output))
    searched = [one for one in written if one.constraint]
    assert len(searched) == 8
    for one in searched:
        assert set(re.findall(r'"([^"]+)"', str(one.constraint))) & set(words_of(one.text))
    model = load_writer(tmp_path / "model", prompt=prompt)
    passages = open_collection(corpus).lookup()
    same = [
        one
        for one in searched
        if len(model.tokenizer(one.text, add_special_tokens=False)["input_ids"]) + 1 == one.tokens
    ]
    found = model.log_probs([passages[one.passage_id] for one in same], [one.text for one in same])
    assert same and [total for total, _ in found] == pytest.approx([one.log_prob for one in same], abs=1e-3)


def test_a_prompt_keeps_its_end_where_the_passage_is_cut(tiny_bert: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, vocab_size=len(tokenizer), eos_token_id=3)
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = load_writer(tmp_path / "model", prompt="{text} what ?", passage_max_length=8)
    [passage] = [Passage("p", "", "river " * 30)]
    generator = model.generator([passage])
    ids = generator._ids[0].tolist()  # type: ignore[attr-defined]
    assert len(ids) == 8 and tokenizer.decode(ids[-2:]) == "what?"


def published(family: str, tiny_bert: Path, folder: Path, *, positions: int = 32, more_tokens: int = 0) -> str:
    """Save a model of transformers, with random weights and few positions."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    shared = {"pad_token_id": 0, "eos_token_id": 3, "vocab_size": len(tokenizer) + more_tokens}
    model: Any
    if family == "bart":
        layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 2}
        config = BartConfig(d_model=16, max_position_embeddings=positions, **layers, **heads, **shared)
        model = BartForConditionalGeneration(config)
    else:
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=positions, **shared))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_a_long_passage_leaves_the_query_its_positions(tiny_bert: Path, tmp_path: Path, family: str) -> None:
    folder = published(family, tiny_bert, tmp_path / "model")
    (tmp_path / "corpus").mkdir()
    record = {"_id": "p", "title": "river", "text": "the bank of the city " * 20}
    (tmp_path / "corpus" / "corpus.jsonl").write_text(json.dumps(record) + "\n")
    options = options_for(str(tmp_path / "corpus"), folder, tmp_path / "out", max_length=20, constrained=1.0)
    assert generate(options).counts.queries > 0
    with pytest.raises(UserError, match=r"query of up to 40 tokens .* the model has positions for 32"):
        generate(dataclasses.replace(options, max_length=40, output=str(tmp_path / "longer")))
    assert not list(tmp_path.glob("longer*"))
    # how much is read for a long query does not change what is said of a short one beside it
    model, passage = load_writer(folder), Passage("p", "river", record["text"])
    texts = ["what is a bank", "who is the king " * 5]
    alone = [model.log_probs([passage], [text])[0] for text in texts]
    together = model.log_probs([passage] * 2, texts)
    assert [total for total, _ in together] == pytest.approx([total for total, _ in alone], abs=1e-4)
    with pytest.raises(UserError, match="query of up to 36 tokens"):
        model.log_probs([passage], ["who is the king " * 9])


def test_a_published_model_and_its_tokenizer_must_fit(corpus: str, tiny_bert: Path, tmp_path: Path) -> None:
    more = load_writer(published("gpt2", tiny_bert, tmp_path / "more", more_tokens=5))
    size = len(more.tokenizer)
    assert set(range(size, size + 5)) <= set(more.forbidden), "tokens without a name are no text"
    fewer = published("gpt2", tiny_bert, tmp_path / "fewer", more_tokens=-5)
    with pytest.raises(UserError, match=f"tokenizer has {size} entries, the embedding table {size - 5} rows"):
        generate(options_for(corpus, fewer, tmp_path / "out"))
    with pytest.raises(UserError, match=r"--prompt 'what is \{title\}' has no \{text\}"):
        generate(options_for(corpus, str(tmp_path / "more"), tmp_path / "out", prompt="what is {title}"))
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_that_cannot_be_constrained_is_told(
    corpus: str, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every term would seem one that it cannot spell, and all queries would be drawn."""
    model = load_writer(writer)
    model.tokenizer.backend_tokenizer.decoder = decoders.BPEDecoder()
    monkeypatch.setattr("retrieval.queries.writers.load_writer", lambda *_, **__: model)
    with pytest.raises(UserError, match="tokenizer joins its tokens by BPEDecoder"):
        generate(options_for(corpus, writer, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_corpus_of_links_is_copied_as_a_file(corpus: str, writer: str, tmp_path: Path) -> None:
    """In the hub's cache a file is a link, beside which its target is named."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blob").write_bytes((Path(corpus) / "corpus.jsonl").read_bytes())
    (tmp_path / "snapshots" / "corpus.jsonl").symlink_to("../blob")
    pool = generate(options_for(str(tmp_path / "snapshots"), writer, tmp_path / "far" / "out", passages=1))
    written = pool.output / "corpus.jsonl"
    assert not written.is_symlink() and written.read_bytes() == (tmp_path / "blob").read_bytes()


@pytest.mark.parametrize("name", ["a\tb", "a\nb"])
def test_an_id_that_judgements_cannot_hold_is_refused(writer: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "corpus.jsonl").write_text(json.dumps({"_id": name, "text": "a river"}) + "\n")
    with pytest.raises(UserError, match="holds a tab or a line break"):
        generate(options_for(str(tmp_path / "corpus"), writer, tmp_path / "out"))
    assert [file.name for file in tmp_path.iterdir()] == ["corpus"]


def test_where_no_query_has_an_end_nothing_is_left_for_other_options_to_find(
    corpus: str, writer: str, tmp_path: Path
) -> None:
    options = options_for(corpus, writer, tmp_path / "out", constrained=0.0, max_length=1)
    with pytest.raises(UserError, match="no query was written for 4 passages; left out: 16 free queries without an"):
        generate(options)
    assert not list(tmp_path.iterdir())
    assert generate(dataclasses.replace(options, constrained=0.5, max_length=8)).counts.queries


def test_damaged_weights_are_named(corpus: str, writer: str, tmp_path: Path) -> None:
    model = QueryWriter.load(writer)
    with torch.no_grad():
        model.bridge.weight.fill_(float("nan"))
    model.save(tmp_path / "damaged")
    with pytest.raises(RunFailed, match="damaged: the model gives NaN") as caught:
        generate(options_for(corpus, str(tmp_path / "damaged"), tmp_path / "out"))
    assert caught.value.exit_status == 1 and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"constraint": "words:river and not any:river"}, "accepts no text at all"),
        ({"constraint": "word:river"}, "expected words:, any:, regex:"),
        ({"constraint": "regex:who .*", "constrained": 0.0}, "--constrained above 0"),
        ({"length_exponent": 1.0}, "--length_exponent goes with --search best"),
        ({"min_length": 9}, "--min_length 9 is more than --max_length 8"),
        ({"writer": "nowhere/at/all"}, "no such folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    corpus: str, writer: str, tmp_path: Path, others: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        generate(options_for(corpus, **({"writer": writer} | others), output=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_an_encoder_and_blank_passages_are_refused(corpus: str, tiny_bert: Path, writer: str, tmp_path: Path) -> None:
    BertModel.from_pretrained(tiny_bert, add_pooling_layer=False).save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "encoder")
    with pytest.raises(UserError, match="BertModel, which writes no text"):
        generate(options_for(corpus, str(tmp_path / "encoder"), tmp_path / "out"))
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "corpus.jsonl").write_text('{"_id": "a", "text": " "}\n')
    with pytest.raises(UserError, match="none of its 1 passages has a text"):
        generate(options_for(str(tmp_path / "blank"), writer, tmp_path / "out"))


def test_a_line_without_a_passage_is_told_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "queries.jsonl"
    good = Written("p-g0", "what", "p", {"mode": "sample"}, None, -1.0, 2)
    file.write_text(good.line + '{"_id": "p-g1", "text": "who", "metadata": {}}\n')
    found = written_in(file)
    assert next(found) == good
    with pytest.raises(UserError, match=r"queries.jsonl:2: query has no metadata.passage_id"):
        next(found)


def test_the_users_corpus_is_copied_and_a_finished_one_shared(corpus: str, writer: str, tmp_path: Path) -> None:
    """What is appended to the first changes no pool; the second never changes."""
    own = tmp_path / "own"
    shutil.copytree(corpus, own)
    pool = generate(options_for(str(own), writer, tmp_path / "pool", passages=1)).output
    assert not os.path.samefile(own / "corpus.jsonl", pool / "corpus.jsonl")
    with (own / "corpus.jsonl").open("a") as stream:
        stream.write('{"_id": "new", "text": "a river"}\n')
    load_manifest(pool, verify=True)
    again = generate(options_for(str(pool), writer, tmp_path / "again", passages=1)).output
    assert os.path.samefile(pool / "corpus.jsonl", again / "corpus.jsonl")
