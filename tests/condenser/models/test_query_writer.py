"""The conditional language model: what it reads, what it says step by step, and its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from condenser.corpus.corruption import IGNORED
from condenser.decoding.beam import beam_search
from condenser.decoding.generators import Recurrent
from condenser.decoding.hypotheses import SearchSettings
from condenser.errors import UserError
from condenser.models.language_model import Network
from condenser.models.query_writer import SETTINGS_FILE, QueryWriter, WriterSettings

PASSAGES = ["the heart and the blood", "a dog", "fever is a symptom of disease and pain"]
QUERIES = ["what is blood", "dog", "who treatment fever"]


def writer_from(tiny_bert: Path, *, frozen: bool = False, query_max_length: int = 8, **others: object) -> QueryWriter:
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    encoder = AutoModel.from_pretrained(tiny_bert, add_pooling_layer=False)
    shape: dict[str, object] = {"embedding_size": 12, "hidden_size": 10, "layers": 2, "tied": True}
    settings = {name: bool(others.pop(name, True)) for name in ("attention", "copying")}
    network = Network(vocabulary_size=len(tokenizer), **(shape | others))  # type: ignore[arg-type]
    known = WriterSettings(passage_max_length=9, query_max_length=query_max_length, **settings)
    return QueryWriter(encoder, tokenizer, network, known, frozen=frozen).eval()


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("copying", [True, False])
def test_steps_are_the_whole_query_and_padding_changes_nothing(
    tiny_bert: Path, attention: bool, copying: bool, cell: str
) -> None:
    """Teacher forcing over a padded batch, against each pair alone, token by token, rows reordered on the way."""
    writer = writer_from(tiny_bert, attention=attention, copying=copying, cell=cell)
    ids, mask = writer.passage_tokens(PASSAGES)
    assert mask is not None and ids.shape == (3, 9)
    query, targets = writer.query_tokens(QUERIES)
    total = float(writer(ids, mask, query, targets).detach())
    alone = 0.0
    with torch.no_grad():
        for passage, text in zip(PASSAGES, QUERIES, strict=True):
            (read,), (asked,) = writer.query_tokens([text])
            state = writer.start_state(*writer.passage_tokens([passage]))
            state = writer.reorder(state, torch.tensor([0, 0]))
            assert all(part.shape[1] == 2 for part in state)
            for token, target in zip(read, asked, strict=True):
                log_probs, state = writer.step(token.repeat(2), state)
                state = writer.reorder(state, torch.tensor([1]))
                state = writer.reorder(state, torch.tensor([0, 0]))
                alone -= float(log_probs[0, target])
    assert total == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("attention", [True, False])
def test_what_is_written_depends_on_the_passage(tiny_bert: Path, attention: bool) -> None:
    writer = writer_from(tiny_bert, attention=attention)
    first = torch.full((3,), writer.frame.start)
    with torch.no_grad():
        log_probs, _ = writer.step(first, writer.start_state(*writer.passage_tokens(PASSAGES)))
    assert not torch.allclose(log_probs[0], log_probs[1], atol=1e-4)


def test_attention_is_its_formula(tiny_bert: Path) -> None:
    """c = sum over the passage's tokens of softmax(f A m) m, against a loop over places."""
    writer = writer_from(tiny_bert, copying=False)
    assert writer.match is not None and writer.combine is not None
    ids, mask = writer.passage_tokens(PASSAGES)
    assert mask is not None
    token = torch.tensor([[7], [8], [9]])
    with torch.no_grad():
        state = writer.start_state(ids, mask)
        features, _, _ = writer._read(token, state)
        plain, _ = writer.decoder(token, state[:-2])
        for row in range(3):
            memory = writer.encoder(ids[row : row + 1, : int(mask[row].sum())]).last_hidden_state[0]
            weights = torch.stack([(writer.match(plain[row, 0]) * place).sum() for place in memory]).softmax(0)
            context = sum(weight * place for weight, place in zip(weights, memory, strict=True))
            expected = torch.tanh(writer.combine(torch.cat([plain[row, 0], context])))  # type: ignore[list-item]
            torch.testing.assert_close(features[row, 0], expected, rtol=1e-4, atol=1e-5)


def test_a_query_that_is_cut_has_no_end(tiny_bert: Path) -> None:
    writer = writer_from(tiny_bert, query_max_length=2)
    words = writer.tokenizer.convert_tokens_to_ids(["what", "is", "dog"])
    read, targets = writer.query_tokens(["what is blood", "dog"])
    start, end = writer.frame
    assert read.tolist() == [[start, words[0], end], [start, words[2], end]]
    assert targets.tolist() == [[*words[:2], IGNORED], [words[2], end, IGNORED]]


def test_a_frozen_encoder_stands_still(tiny_bert: Path) -> None:
    writer = writer_from(tiny_bert, frozen=True).train()
    assert not writer.encoder.training and writer.decoder.training
    writer(*writer.passage_tokens(PASSAGES), *writer.query_tokens(QUERIES)).backward()
    assert all(parameter.grad is None for parameter in writer.encoder.parameters())
    moved = {name for name, parameter in writer.named_parameters() if parameter.grad is not None}
    assert {"bridge.weight", "match.weight", "combine.weight", "decoder.embedding.weight"} <= moved


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("copying", [True, False])
def test_the_folder_is_all_it_needs(tiny_bert: Path, tmp_path: Path, attention: bool, copying: bool) -> None:
    writer = writer_from(tiny_bert, attention=attention, copying=copying)
    writer.save(tmp_path)
    again = QueryWriter.load(tmp_path)
    assert (again.settings, again.decoder.network) == (writer.settings, writer.decoder.network)
    inputs = (*writer.passage_tokens(PASSAGES), *writer.query_tokens(QUERIES))
    assert torch.equal(again(*inputs), writer(*inputs))
    assert AutoTokenizer.from_pretrained(tmp_path)("dog")["input_ids"] == writer.tokenizer("dog")["input_ids"]


def test_a_folder_of_before_there_was_copying(tiny_bert: Path, tmp_path: Path) -> None:
    writer = writer_from(tiny_bert, copying=False)
    writer.save(tmp_path)
    file = tmp_path / SETTINGS_FILE
    settings = json.loads(file.read_text())
    del settings["copying"]
    file.write_text(json.dumps(settings))
    assert QueryWriter.load(tmp_path).settings == writer.settings


def test_it_learns_to_say_what_it_reads_and_a_search_finds_it(tiny_bert: Path) -> None:
    """With no other help than the passage's states, after some steps each query is the passage's own."""
    writer = writer_from(tiny_bert, hidden_size=32, frozen=True, copying=False)
    optimizer = torch.optim.Adam([one for one in writer.parameters() if one.requires_grad], lr=2e-2)
    inputs = (*writer.passage_tokens(PASSAGES), *writer.query_tokens(QUERIES))
    for _ in range(60):
        loss = writer(*inputs)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(writer.parameters(), 1.0)
        optimizer.step()
    state = writer.start_state(*inputs[:2])
    generator = Recurrent(writer, state, torch.full((3,), writer.frame.start))
    found = beam_search(generator, SearchSettings(end=writer.frame.end, beam=3, max_length=8))
    written = [writer.tokenizer.decode(one.hypotheses[0].tokens) for one in found]
    assert written == ["what is blood", "dog", "who treatment fever"]


def test_a_word_that_no_query_had_is_copied(tiny_bert: Path) -> None:
    """The pairs ask for what stands behind "the"; the words of the last passage were in no query before."""
    learnt = ["blood", "dog", "fever", "heart", "treatment", "symptom"]
    writer = writer_from(tiny_bert, hidden_size=32, layers=1)
    optimizer = torch.optim.Adam(writer.parameters(), lr=1e-2)
    inputs = (*writer.passage_tokens([f"what is the {word} and a" for word in learnt]), *writer.query_tokens(learnt))
    for _ in range(60):
        loss = writer(*inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        state = writer.start_state(*writer.passage_tokens(["what is the pain and a", "what is the disease and a"]))
    generator = Recurrent(writer, state, torch.full((2,), writer.frame.start))
    found = beam_search(generator, SearchSettings(end=writer.frame.end, beam=3, max_length=8))
    assert [writer.tokenizer.decode(one.hypotheses[0].tokens) for one in found] == ["pain", "disease"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "yes"}, "attention is 'yes', expected bool"),
        ({"copying": "yes"}, "copying is 'yes', expected bool"),
        ({"copying": False}, r"weights have 'pointer.gate.bias' of shape \(1,\), the settings beside them None"),
        ({"network": None}, "has no object 'network'"),
        ({"attention": False}, r"weights have 'combine.bias' of shape \(12,\), the settings beside them None"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    tiny_bert: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    writer_from(tiny_bert).save(tmp_path)
    file = tmp_path / SETTINGS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message):
        QueryWriter.load(tmp_path)
    with pytest.raises(UserError, match=r"no query_writer\.json here"):
        QueryWriter.load(tiny_bert)
