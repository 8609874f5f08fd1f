"""Words, phrases and patterns against regular expressions over the text that the tokens spell."""

from __future__ import annotations

import copy
import itertools
import random
import re
import time
from pathlib import Path

import pytest
from transformers import BertTokenizer

from condenser.decoding.expressions import automaton_of
from condenser.decoding.phrases import any_phrase, any_spelling
from condenser.decoding.pieces import BROKEN, Pieces, pieces_of
from condenser.decoding.regular import matching
from condenser.errors import UserError

KINDS = ("wordpiece", "bpe", "unigram", "words")
PHRASE = {"wordpiece": "treatment s fever", "bpe": "uric acid", "unigram": "uric acid", "words": "uric acid"}
PATTERNS = [
    "[a-z ]*",
    "the .*",
    "(a|the )*[^e]?",
    ".* .*",
    r"\w+",
    r"(\w\w?)+ ?",
    "t(h|x)e|",
    ".{3,5}",
    "[^ ]* [^ ]*",
    r"\.",
    "(a*)*|x",
    "(the )?(a |pain){1,2}",
    "(t|th|the){2,}",
    "a{0}the",
]


def whole_words(phrase: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)")


def some_texts(pieces: Pieces, phrase: str, count: int = 4000) -> list[tuple[int, ...]]:
    """Return random texts made mostly of what the phrase is made of."""
    drawn = random.Random(0)
    cuts = pieces.cuts(phrase)
    own = sorted({token for way in cuts for token in way})
    spelt = {letter for letter in phrase}
    letters = [token for token, text in enumerate(pieces.texts) if text and set(text) <= spelt]
    others = [token for token, text in enumerate(pieces.texts) if text]
    texts: list[tuple[int, ...]] = []
    for _ in range(count):
        parts = [
            drawn.choice([*cuts, *cuts, (drawn.choice(own),), (drawn.choice(letters),), (drawn.choice(others),)])
            for _ in range(drawn.randint(0, 5))
        ]
        texts.append(tuple(itertools.chain(*parts)))
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_tokens_joined(kind: str, pieces_by_kind: dict[str, Pieces]) -> None:
    pieces = pieces_by_kind[kind]
    for text in ("the pain of", "the king s fever" if kind == "wordpiece" else "a gout and acid"):
        for way in pieces.cuts(text):
            assert pieces.join(way) == text
            assert pieces.tokenizer.decode(list(way)).strip() == text
    assert pieces.texts[pieces.tokenizer.all_special_ids[0]] == ""


@pytest.mark.parametrize("kind", KINDS)
def test_phrases_come_as_whole_words(kind: str, pieces_by_kind: dict[str, Pieces]) -> None:
    """As the tokenizer cuts them: nothing else is accepted, and nothing that it cuts is missed."""
    pieces, phrase = pieces_by_kind[kind], PHRASE[kind]
    whole = whole_words(phrase)
    cut, spelt = any_phrase([phrase], pieces), any_spelling([phrase], pieces)
    accepted = 0
    for text in some_texts(pieces, phrase):
        inside = bool(whole.search(pieces.join(text)))
        assert spelt.accepts(text) == inside
        assert inside or not cut.accepts(text)
        accepted += cut.accepts(text)
        again = pieces.tokenizer.encode(pieces.join(text), add_special_tokens=False)
        if kind != "wordpiece" and pieces.join(again) == pieces.join(text):
            assert cut.accepts(again) == inside
    assert 400 < accepted < 3600


def test_a_word_goes_on_by_a_piece(pieces_by_kind: dict[str, Pieces]) -> None:
    pieces = pieces_by_kind["wordpiece"]
    number = pieces.tokenizer.convert_tokens_to_ids
    treat, ment, fever, dot = (number(name) for name in ("treat", "##ment", "fever", "."))
    one = any_phrase(["treat"], pieces)
    assert one.states == 3
    assert one.accepts([treat]) and one.accepts([fever, treat, dot]) and one.accepts([treat, ment, treat])
    assert not one.accepts([treat, ment]) and not one.accepts([fever])
    assert any_phrase(["Treatment"], pieces).accepts([treat, ment])


def test_a_phrase_that_begins_again_in_itself(pieces_by_kind: dict[str, Pieces]) -> None:
    pieces = pieces_by_kind["words"]
    gout, pain = pieces.cuts("gout pain")[0]
    phrase = any_phrase(["gout gout pain"], pieces)
    assert phrase.accepts([gout, gout, gout, pain])
    assert not phrase.accepts([gout, pain, gout, pain])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_patterns_match_the_whole_text(kind: str, pattern: str, pieces_by_kind: dict[str, Pieces]) -> None:
    pieces = pieces_by_kind[kind]
    automaton = matching(pattern, pieces)
    ours = re.compile(pattern, re.DOTALL | re.ASCII)
    wanted = {" the", "the", "the ", "t", "h", "e", " a", "a", " pain", ".", " .", " ", "s", " x"}
    tokens = [token for token, text in enumerate(pieces.texts) if text in wanted]
    assert len(tokens) > 5
    for length in range(4):
        for text in itertools.product(tokens, repeat=length):
            assert automaton.accepts(text) == bool(ours.fullmatch(pieces.join(text))), pieces.join(text)


def test_a_character_in_several_tokens(pieces_by_kind: dict[str, Pieces]) -> None:
    pieces = pieces_by_kind["bpe"]
    tokens = pieces.tokenizer.encode("gout\N{EN DASH}")
    assert pieces.join(tokens) == f"gout{3 * BROKEN}"
    assert matching("gout.*", pieces).accepts(tokens)
    # what the bytes are is not looked at: they may be a letter, and they may not
    assert not any_phrase(["gout"], pieces).accepts(tokens)
    assert any_spelling(["gout"], pieces).accepts(tokens)
    byte_by_byte = pieces.tokenizer.encode("a g\N{LATIN SMALL LETTER E WITH ACUTE}n")
    spelt = any_spelling(["g\N{LATIN SMALL LETTER E WITH ACUTE}n"], pieces)
    assert len(byte_by_byte) > 4 and spelt.accepts(byte_by_byte) and not spelt.accepts(byte_by_byte[:-1])


@pytest.mark.parametrize(
    ("expression", "meaning"),
    [
        ("words:gout,pain", lambda text: has(text, "gout") and has(text, "pain")),
        ("any:gout, uric acid", lambda text: has(text, "gout") or has(text, "uric acid")),
        ("not words:gout", lambda text: not has(text, "gout")),
        ("not any:gout,pain", lambda text: not has(text, "gout") and not has(text, "pain")),
        (
            "words:gout or words:pain and words:the",
            lambda text: has(text, "gout") or (has(text, "pain") and has(text, "the")),
        ),
        (
            "(words:gout or any:pain)and not regex:.*the.*",
            lambda text: (has(text, "gout") or has(text, "pain")) and "the" not in text,
        ),
        (
            'words:"gout" and regex:"(gout|the)( (gout|pain))*"',
            lambda text: has(text, "gout") and re.fullmatch("(gout|the)( (gout|pain))*", text),
        ),
        ("not not words:gout", lambda text: has(text, "gout")),
        ("regex:gout (and|pain) .*", lambda text: re.fullmatch("gout (and|pain) .*", text)),
    ],
)
def test_expressions(expression: str, meaning, pieces_by_kind: dict[str, Pieces]) -> None:  # type: ignore[no-untyped-def]
    pieces = pieces_by_kind["words"]
    automaton = automaton_of(expression, pieces)
    tokens = pieces.cuts("gout pain uric acid the and")[0]
    for length in range(4):
        for text in itertools.product(tokens, repeat=length):
            assert automaton.accepts(text) == bool(meaning(pieces.join(text))), pieces.join(text)


def has(text: str, phrase: str) -> bool:
    return bool(whole_words(phrase).search(text))


@pytest.mark.parametrize("expression", ["not words:uric acid", "words:gout and not any:uric acid,pain"])
def test_not_means_however_it_is_spelt(expression: str, pieces_by_kind: dict[str, Pieces]) -> None:
    pieces = pieces_by_kind["bpe"]
    automaton = automaton_of(expression, pieces)
    for text in some_texts(pieces, "uric acid gout"):
        if automaton.accepts(text):
            joined = pieces.join(text)
            assert not has(joined, "uric acid")
            assert expression.startswith("not") or (has(joined, "gout") and not has(joined, "pain"))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "character 1: found the end, expected words:"),
        ("gout", "character 1: found 'gout', expected words:"),
        ("words:", "character 7: found the end, expected a word"),
        ("words:gout,,pain", "character 12: found ',pain', expected a word"),
        ("words:gout and", "character 15: found the end"),
        ("(any:gout", "character 10: found the end, expected a closing bracket"),
        ("any:gout) or", r"character 9: found '\) or', expected and, or, or the end"),
        ('any:"gout', "character 10: found the end, expected a closing quote"),
        ('any:"gout" pain', "character 12: found 'pain', expected and, or"),
        ("not " * 60 + "any:gout", "at most 50"),
        ("regex:(a", "no regular expression"),
        ("regex:^gout", "anchor"),
        ("regex:.*a.{20}", r"'\.\*a\.\{20\}' needs more than 4,096 states"),
        ("regex:a{100000}", "needs more than 4,096 states"),
        ("words:日本", "does not know"),
        ('words:" "', "holds no text"),
        ("__import__('os')", "character 1"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(
    expression: str, message: str, pieces_by_kind: dict[str, Pieces]
) -> None:
    with pytest.raises(UserError, match=message):
        automaton_of(expression, pieces_by_kind["wordpiece"])


def test_a_tokenizer_of_another_kind_is_refused(tokenizers_by_kind) -> None:  # type: ignore[no-untyped-def]
    from tokenizers import decoders

    tokenizer = tokenizers_by_kind["words"]
    tokenizer.backend_tokenizer.decoder = decoders.BPEDecoder()
    try:
        with pytest.raises(UserError, match="joins its tokens by BPEDecoder"):
            pieces_of(tokenizer)
    finally:
        tokenizer.backend_tokenizer.decoder = None


def test_places_that_a_vocabulary_keeps_free_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "unused"])
    )
    pieces = pieces_of(BertTokenizer(str(tmp_path / "vocab.txt")))
    assert pieces.texts == ["", "", "", "", "", "", " unused"]


@pytest.mark.parametrize(
    ("pattern", "states"), [(r"(how|what|why) .{1,40}\?", 100), (".{0,200}", 210), (r"[a-z ]{5,80}\?", 100)]
)
def test_ordinary_repetitions_are_written_out_at_once(
    pattern: str, states: int, pieces_by_kind: dict[str, Pieces]
) -> None:
    began = time.process_time()
    assert matching(pattern, pieces_by_kind["wordpiece"]).states <= states
    assert time.process_time() - began < 20  # not minutes


def test_tokens_that_were_added_to_a_byte_level_vocabulary_are_text(pieces_by_kind: dict[str, Pieces]) -> None:
    tokenizer = copy.deepcopy(pieces_by_kind["bpe"].tokenizer)
    tokenizer.add_tokens(["  ", "日本"])
    pieces = pieces_of(tokenizer)
    for text in ("  ", "日本"):
        assert (
            pieces.texts[tokenizer.convert_tokens_to_ids(text)]
            == text
            == tokenizer.decode(tokenizer.convert_tokens_to_ids([text]))
        )
