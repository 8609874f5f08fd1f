"""Where cuts fall, for every kind of tokenizer, against the original code's golden numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from condenser.corpus import cutting
from condenser.corpus.cutting import Batch, Cutter, CuttingRules, SpanCounts, cut_spans
from condenser.corpus.documents import Document
from condenser.corpus.tokens import bare_tokenizer, load_tokenizer
from condenser.errors import UserError

TEXT = "The cat ran to the bank. A dog sings!  Testing masking whole words.\nThe words ran to the whole bank."


def text_of(*texts: str, title: str = "", is_cut: bool = False) -> Document:
    return Document("a", title, texts, is_cut)


def cut(tokenizer: Path, documents: list[Document], **rules: object) -> tuple[list[list[str]], SpanCounts]:
    """Return each document's spans decoded, and the counts."""
    loaded = load_tokenizer(tokenizer)
    cutter = Cutter(bare_tokenizer(loaded).to_str(), CuttingRules(**({"room": 14, "min_tokens": 3} | rules)))
    rows, counts = cutter(Batch(0, documents))
    return [[loaded.decode(ids) for ids in row] for row in rows.column("ids").to_pylist()], counts


def test_cuts_fall_at_the_last_sentence_that_fits() -> None:
    assert cut_spans([4, 7, 12], range(20), 20, 10) == [(0, 7), (7, 12), (12, 20)]


def test_a_long_sentence_is_cut_between_words() -> None:
    assert cut_spans([], [0, 3, 5, 8, 9], 11, 4) == [(0, 3), (3, 5), (5, 9), (9, 11)]


def test_a_long_word_is_cut_at_the_limit() -> None:
    assert cut_spans([], [0], 9, 4) == [(0, 4), (4, 8), (8, 9)]


def test_a_span_shorter_than_the_least_goes_past_its_sentence() -> None:
    assert cut_spans([2], range(12), 12, 8, min_tokens=4) == [(0, 8), (8, 12)]


@given(
    length=st.integers(0, 60),
    room=st.integers(1, 20),
    least=st.integers(1, 20),
    sentences=st.sets(st.integers(1, 59)),
    words=st.sets(st.integers(0, 59)),
    limits=st.none() | st.integers(0, 99),
)
def test_cuts_cover_all_tokens_once_within_the_room(
    length: int, room: int, least: int, sentences: set[int], words: set[int], limits: int | None
) -> None:
    rng = np.random.default_rng(limits)
    limit = None if limits is None else lambda: int(rng.integers(1, room + 1))
    inside = sorted(place for place in sentences if place < length)
    cuts = cut_spans(inside, sorted(words), length, room, least, limit)
    assert [token for a, b in cuts for token in range(a, b)] == list(range(length))
    assert all(0 < b - a <= room for a, b in cuts)


def test_sentences_are_packed_as_the_original_code_packs_them(golden: Path) -> None:
    """But a sentence longer than the limit, which it leaves whole and truncates later, is cut between words."""
    compared = 0
    for case in json.loads((golden / "data_and_formats.json").read_text())["create_train_blocks"]:
        lengths, room = case["sentence_lengths"], case["target_len"]
        starts = np.cumsum(lengths)[:-1].tolist()
        blocks = [b - a for a, b in cut_spans(starts, range(sum(lengths)), sum(lengths), room)]
        if max(lengths) <= room:
            assert blocks == case["block_lengths"]
            compared += 1
        else:
            assert sum(blocks) == sum(lengths) and max(blocks) <= room < max(case["block_lengths"])
    assert compared >= 5


def test_short_spans_are_as_frequent_as_in_the_original_code(golden: Path) -> None:
    case = json.loads((golden / "data_and_formats.json").read_text())["create_train_short_prob_stats"]
    size, room = case["sentence_len"], case["max_len"] - 2
    rng = np.random.default_rng(0)

    def limit() -> int:
        return int(rng.integers(1, room + 1)) if rng.random() < case["short_sentence_prob"] else room

    length = size * 40_000
    blocks = np.array([b - a for a, b in cut_spans(range(size, length, size), range(length), length, room, 1, limit)])
    assert set(blocks % size) == {0}, "a short span ends with a sentence, too"
    assert blocks.max() == case["max"] and blocks.min() <= case["min"]
    # 238 blocks lie behind the golden share
    assert (blocks == room).mean() == pytest.approx(case["frac_at_full_126"], abs=3 * (0.9 * 0.1 / 238) ** 0.5)


def test_a_short_limit_never_cuts_a_sentence_that_fits() -> None:
    assert cut_spans([6, 12], range(18), 18, 10, 1, lambda: 2) == [(0, 6), (6, 12), (12, 18)]


def test_given_spans_are_tokenized_as_by_the_original_code(golden: Path) -> None:
    """But spans without a partner are kept, for the MLM losses; and what exceeds the room is cut and counted."""
    case = json.loads((golden / "data_and_formats.json").read_text())["create_train_co"]
    engine = Tokenizer(models.WordLevel({str(number): number for number in range(20)}, unk_token="0"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    documents = [text_of(*document["spans"], is_cut=True) for document in case["in"]]
    rows, counts = Cutter(engine.to_str(), CuttingRules(room=50, min_tokens=8))(Batch(0, documents))
    ids = rows.column("ids").to_pylist()
    assert [spans for spans in ids if len(spans) > 1] == [json.loads(line)["spans"] for line in case["out_lines"]]
    assert [spans for spans in ids if len(spans) == 1] == [[[7, 8]]]
    assert (counts.documents, counts.empty_documents, counts.documents_with_two_spans) == (4, 1, 2)
    _, counts = Cutter(engine.to_str(), CuttingRules(room=2))(Batch(0, documents))
    assert counts.spans_cut == 2 and "2 given spans cut (25.0 %)" in counts.summary()


@pytest.mark.parametrize("kind", ["tiny_bert", "byte_level_bpe", "sentencepiece_like"])
def test_every_kind_of_tokenizer_cuts_at_sentences(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    engine = bare_tokenizer(load_tokenizer(folder))
    whole = engine.encode(TEXT, add_special_tokens=False).ids
    sentences = TEXT.replace("\n", "  ").split("  ")
    room = 1 + max(len(engine.encode(sentence, add_special_tokens=False).ids) for sentence in sentences)
    rows, _ = Cutter(engine.to_str(), CuttingRules(room, 3))(Batch(0, [text_of(TEXT)]))
    spans = rows.column("ids").to_pylist()[0]
    assert [token for span in spans for token in span] == whole, "no token is lost or made anew"
    starts = [engine.decode(span).strip().lower()[:4] for span in spans]
    assert set(starts) <= {"the ", "a do", "test"} and len(starts) >= 3


def test_a_sentence_begins_with_the_blank_of_its_first_word(byte_level_bpe: Path) -> None:
    spans, _ = cut(byte_level_bpe, [text_of("The cat ran. The dog ran. The cat sings.")], room=9)
    assert spans[0][1:] and all(span.startswith(" The") for span in spans[0][1:])


def test_scripts_without_blanks_have_sentences_too(tiny_bert: Path) -> None:
    engine = bare_tokenizer(load_tokenizer(tiny_bert)).to_str()
    text = "\u6c34\u6c34\u6c34\u3002" * 6
    rows, _ = Cutter(engine, CuttingRules(room=10, min_tokens=1))(Batch(0, [text_of(text)]))
    assert [len(ids) for ids in rows.column("ids").to_pylist()[0]] == [8, 8, 8]


def test_a_title_goes_first_everywhere_or_nowhere(tiny_bert: Path) -> None:
    document = text_of("The cat sing. The dog runs to the bank. A king of the city.", title="Old water")
    spans = {titles: cut(tiny_bert, [document], titles=titles)[0][0] for titles in ("first", "every", "drop")}
    assert spans["first"] == ["old water the cat sing. the dog runs to the bank.", "a king of the city."]
    assert spans["every"] == ["old water the cat sing. the dog runs to the bank.", "old water a king of the city."]
    assert spans["drop"] == [span.removeprefix("old water ") for span in spans["first"]]


def test_a_blank_stands_between_title_and_text(byte_level_bpe: Path) -> None:
    document = text_of("The cat ran. The dog ran.", title="A dog")
    assert cut(byte_level_bpe, [document], titles="every", room=9)[0] == [["A dog The cat ran.", "A dog The dog ran."]]


def test_a_long_title_leaves_half_of_each_span_to_the_text(tiny_bert: Path) -> None:
    document = text_of("the cat sing. The dog runs.", title="water " * 30)
    spans, _ = cut(tiny_bert, [document], titles="every", room=10)
    assert spans == [["water water water water water the cat sing.", "water water water water water the dog runs."]]
    assert cut(tiny_bert, [text_of("", title="Old water")], titles="every")[0] == [["old water"]]
    assert cut(tiny_bert, [text_of("", title="Old water")], titles="drop")[1].empty_documents == 1


def test_spans_given_by_the_user_get_no_title(tiny_bert: Path) -> None:
    document = text_of("the cat", "the dog", title="Old water", is_cut=True)
    assert cut(tiny_bert, [document], titles="every")[0] == [["the cat", "the dog"]]


def test_a_query_and_its_passage_are_one_span(tiny_bert: Path) -> None:
    separator = load_tokenizer(tiny_bert).sep_token_id
    pair = Document("p", "", ("what is a cat", "the cat sing. the dog runs to the bank."), is_cut=False, is_pair=True)
    assert cut(tiny_bert, [pair], separator=separator, titles="every")[0] == [
        ["what is a cat [SEP] the cat sing. the dog runs to the"]
    ]
    long = pair._replace(texts=("water " * 30, "the cat sing"))
    assert cut(tiny_bert, [long], room=6, separator=separator)[0] == [["water water water [SEP] the cat"]]
    with pytest.raises(UserError, match="no separator token"):
        cut(tiny_bert, [pair])


@pytest.mark.parametrize("kind", ["tiny_bert", "byte_level_bpe"])
def test_long_texts_are_tokenized_in_pieces_to_the_same_tokens(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = request.getfixturevalue(kind)
    document = text_of(" ".join([TEXT.replace("\n", " ").replace("!  ", "! ")] * 20))
    whole = cut(tokenizer, [document])
    monkeypatch.setattr(cutting, "_PIECE", 70)
    assert cut(tokenizer, [document]) == whole
    blanks = text_of("x" * 500)
    assert sum(len(span.replace(" ", "")) for span in cut(tokenizer, [blanks], min_tokens=1)[0][0]) >= 7


def test_short_spans_depend_on_seed_and_document_number_alone(tiny_bert: Path) -> None:
    engine = bare_tokenizer(load_tokenizer(tiny_bert)).to_str()
    documents = [text_of("The cat sing. The dog runs. " * 10)] * 6

    def lengths(seed: int, batches: list[Batch]) -> list[list[int]]:
        cutter = Cutter(engine, CuttingRules(room=30, short_spans=0.5, seed=seed))
        return [[len(ids) for ids in row] for b in batches for row in cutter(b)[0].column("ids").to_pylist()]

    straight = lengths(1, [Batch(0, documents)])
    assert lengths(1, [Batch(0, documents[:2]), Batch(2, documents[2:])]) == straight
    assert lengths(2, [Batch(0, documents)]) != straight
    assert len({tuple(row) for row in straight}) > 1, "documents differ"
