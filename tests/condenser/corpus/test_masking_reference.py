"""Whole-word masking against statistics of the original Condenser code, and for tokenizers of other kinds.

Where our rule is the same, so are the figures. It differs in three places, on purpose: every span with an
ordinary word asks for at least one token; special tokens are no replacements unless asked for; and ids and
masks are cut to one window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from condenser.corpus.batches import Frame, collate, window
from condenser.corpus.corruption import IGNORED, Corrupted, MaskingPolicy, corrupt, find_words, masking_policy
from condenser.corpus.cutting import Batch, Cutter, CuttingRules
from condenser.corpus.documents import Document
from condenser.corpus.spans import build_spans
from condenser.corpus.tokens import SpanTokens, bare_tokenizer, load_tokenizer, require_words
from condenser.errors import UserError
from condenser.options import RandomTokens, SpansOptions
from tests.reference_numbers import golden_json

SPECIAL, WORDS, VOCABULARY, MASK = 5, 405, 505, 4  # the golden file's: 5 specials, 400 words, 100 pieces
STATS = golden_json("wwm_stats.json")
CASES = [name for name, case in STATS.items() if "masked_count_histogram" in case]


@pytest.fixture(scope="module")
def stats() -> dict[str, Any]:
    return STATS


def policy_of(probability: float = 0.15, random_tokens: RandomTokens = "ordinary") -> MaskingPolicy:
    return masking_policy(
        VOCABULARY, range(SPECIAL), mask_id=MASK, probability=probability, random_tokens=random_tokens
    )


def draw_span(length: int, rng: np.random.Generator) -> SpanTokens:
    """Draw words and pieces; about three of ten tokens go on with a word."""
    starts = rng.random(length) > 0.3
    starts[:1] = True
    ids = np.where(starts, rng.integers(SPECIAL, WORDS, length), rng.integers(WORDS, VOCABULARY, length))
    return SpanTokens(ids.astype(np.int32), starts)


def corrupt_many(length: int, count: int, policy: MaskingPolicy) -> list[tuple[SpanTokens, Corrupted]]:
    rng = np.random.default_rng(length)
    spans = [draw_span(length, rng) for _ in range(count)]
    return [(span, corrupt(span, policy, rng)) for span in spans]


@pytest.mark.parametrize("name", CASES)
def test_counts_and_shares_are_those_of_the_original_code(stats: dict[str, Any], name: str) -> None:
    case = stats[name]
    length, count = case["tokens_before_specials"], case["sequences"]
    rows = corrupt_many(length, count, policy_of(case["mlm_probability"]))
    budget = case["formula_num_to_predict"]
    none_there = 0
    for span, row in rows:
        asked = row.labels != IGNORED
        sizes = find_words(span.word_starts)[1]
        word = np.cumsum(span.word_starts)
        for number in np.unique(word[asked]):
            assert asked[word == number].all(), "whole words only"
        if sizes.min() <= budget:
            assert 1 <= asked.sum() <= budget
        else:
            none_there += 1  # the original code asks for nothing here
            assert asked.sum() == sizes.min()
        assert np.array_equal(row.ids[~asked], span.ids[~asked])
        assert np.array_equal(row.labels[asked], span.ids[asked])
    histogram = {int(masked): masks for masked, masks in case["masked_count_histogram"].items()}
    if 0 in histogram:
        assert none_there / count == pytest.approx(histogram[0] / case["sequences"], abs=0.02)
    counts = np.array([(row.labels != IGNORED).sum() for _, row in rows])
    if set(histogram) == {budget}:
        assert set(counts) == {budget}
    masked = np.concatenate([row.ids[row.labels != IGNORED] for _, row in rows])
    labels = np.concatenate([row.labels[row.labels != IGNORED] for _, row in rows])
    noise = 4 * (0.16 / len(masked) + 0.16 / case["total_masked"]) ** 0.5
    assert (masked == MASK).mean() == pytest.approx(case["frac_MASK"], abs=noise)
    assert (masked == labels).mean() == pytest.approx(case["frac_unchanged"], abs=noise)
    assert ((masked != MASK) & (masked != labels)).mean() == pytest.approx(case["frac_random_other"], abs=noise)


def test_random_tokens_are_ordinary_unless_all_are_asked_for(stats: dict[str, Any]) -> None:
    shares = {}
    for random_tokens in ("ordinary", "all"):
        rows = corrupt_many(126, 4000, policy_of(random_tokens=random_tokens))
        replaced = np.concatenate([row.ids[(row.labels != IGNORED) & (row.ids != row.labels)] for _, row in rows])
        replaced = replaced[replaced != MASK]
        shares[random_tokens] = (replaced < SPECIAL).mean()
        assert replaced.max() == VOCABULARY - 1
    reference = stats["random_replacement"]
    noise = 4 * (2 * 0.008 / reference["of"]) ** 0.5
    assert shares["all"] == pytest.approx(reference["special_ids_used_as_replacement"] / reference["of"], abs=noise)
    assert shares["ordinary"] == 0


def test_ids_and_masks_come_from_one_window(stats: dict[str, Any]) -> None:
    """Case R18: the original code draws two windows, which broke words in most of its over-long rows."""
    case = stats["overlong_truncation"]
    assert case["rows_with_partially_masked_word"] > case["rows"] / 2
    starts = set()
    for seed in range(case["rows"]):
        rng = np.random.default_rng(seed)
        span = draw_span(case["text_tokens"], rng)
        cut = window(span, case["kept"], rng)
        row = corrupt(cut, policy_of(), rng)
        asked = row.labels != IGNORED
        assert np.array_equal(row.labels[asked], cut.ids[asked])
        word = np.cumsum(cut.word_starts)
        assert all(asked[word == number].all() for number in np.unique(word[asked]))
        places = [n for n in range(31) if np.array_equal(span.ids[n : n + case["kept"]], cut.ids)]
        starts.update(places)
    assert len(starts) == case["n_distinct_left_offsets"]


def test_words_of_wordpiece_are_the_original_codes(stats: dict[str, Any]) -> None:
    """But an unknown word ends one: ``w1 [UNK] ##p1``, which no text gives, is one word to the original code."""
    compared = 0
    for case in stats["bert_candidates"]:
        tokens = case["tokens"]
        if tokens == ["w1", "[UNK]", "##p1"]:
            continue
        starts = np.array([not token.startswith("##") for token in tokens], bool)
        ordinary = np.array([not token.startswith("[") for token in tokens], bool)
        begins, sizes = find_words(starts, ordinary)
        assert [list(range(b, b + n)) for b, n in zip(begins, sizes, strict=True)] == case["candidates"]
        compared += 1
    assert compared >= len(stats["bert_candidates"]) - 1


def test_words_of_byte_level_bpe_are_as_the_original_code_meant_them(stats: dict[str, Any]) -> None:
    """Its rule for RoBERTa was never called. Ours parts punctuation from the word before, as WordPiece does."""
    for case in stats["roberta_candidates"]:
        tokens = case["tokens"]
        starts = np.array([token[0] == "\u0120" or token in ",." for token in tokens])
        begins, sizes = find_words(starts)
        ours = [list(range(b, b + n)) for b, n in zip(begins, sizes, strict=True)]
        expected = [[1], [2]] if case["candidates"][-1] == [1, 2] else case["candidates"][1:]
        assert ours[1:] == expected and ours[0] == case["candidates"][0]


def spans_of(tokenizer: Path, text: str) -> tuple[SpanTokens, list[str]]:
    loaded = load_tokenizer(tokenizer)
    cutter = Cutter(bare_tokenizer(loaded).to_str(), CuttingRules(room=200))
    rows, _ = cutter(Batch(0, [Document("a", "", (text,), False)]))
    ids, starts = rows.column("ids").to_pylist()[0][0], rows.column("word_starts").to_pylist()[0][0]
    return SpanTokens(np.array(ids, np.int32), np.array(starts)), loaded.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("kind", ["byte_level_bpe", "sentencepiece_like"])
def test_pieces_of_a_bpe_word_are_masked_together(kind: str, request: pytest.FixtureRequest) -> None:
    """Case B14: ``Testing| mask|ing| whole| words``, 1,000 draws."""
    folder = request.getfixturevalue(kind)
    span, tokens = spans_of(folder, "Testing masking whole words")
    begins = np.flatnonzero(span.word_starts)
    words = ["".join(tokens[a:b]) for a, b in zip(begins, [*begins[1:], len(tokens)], strict=True)]
    assert [word.lstrip("\u0120\u2581") for word in words] == ["Testing", "masking", "whole", "words"]
    if kind == "byte_level_bpe":
        assert tokens == ["Testing", "\u0120mask", "ing", "\u0120whole", "\u0120words"]
    policy = masking_policy(300, range(5), mask_id=4, probability=0.4, random_tokens="ordinary")
    together = 0
    for seed in range(1000):
        asked = corrupt(span, policy, np.random.default_rng(seed)).labels != IGNORED
        inside = asked[begins[1] : begins[2]]
        assert inside.all() or not inside.any()
        together += bool(inside.all())
    assert 100 < together < 900


def test_unknown_words_are_never_asked_for(tiny_bert: Path) -> None:
    span, tokens = spans_of(tiny_bert, "cats \u20ac treatment \u20ac [MASK] king")
    assert tokens == ["cat", "##s", "[UNK]", "treat", "##ment", "[UNK]", "[MASK]", "king"]
    special = load_tokenizer(tiny_bert).all_special_ids
    policy = masking_policy(90, special, mask_id=MASK, probability=0.9, random_tokens="ordinary")
    for seed in range(200):
        labels = corrupt(span, policy, np.random.default_rng(seed)).labels
        assert not set(labels.tolist()) & set(special)
    nothing = SpanTokens(span.ids[2:3], span.word_starts[2:3])
    assert corrupt(nothing, policy, np.random.default_rng(0)).labels.tolist() == [IGNORED]


def test_what_may_be_masked_and_how_much() -> None:
    """Case B15: 200 sequences of 20 to 128 tokens, 1,000 padded batches."""
    rng = np.random.default_rng(0)
    spans = [draw_span(length, rng) for length in rng.integers(20, 129, 199)]
    spans.append(SpanTokens(np.array([7, 410, 411], np.int32), np.array([True, False, False])))  # one word
    frame, policy = Frame(cls_id=2, sep_id=3, pad_id=0), policy_of()
    real = asked = masked = kept = 0
    for _ in range(1000):
        chosen = [spans[place] for place in rng.choice(200, 6)]
        batch = collate([corrupt(span, policy, rng) for span in chosen], frame)
        ids, labels = batch.input_ids.numpy(), batch.labels.numpy()
        for row, span in enumerate(chosen):
            stop = len(span.ids) + 1
            assert (ids[row, 0], ids[row, stop]) == (2, 3) and (ids[row, stop + 1 :] == 0).all()
            outside = np.r_[labels[row, :1], labels[row, stop:]]
            assert (outside == IGNORED).all(), "special tokens and padding are never masked"
            here = labels[row, 1:stop] != IGNORED
            assert here.any(), "also one word gets one mask"
            word = np.cumsum(span.word_starts)
            assert np.isin(word, word[here])[~here].sum() == 0, "whole words only"
            real += len(span.ids)
        chosen_labels = labels != IGNORED
        asked += chosen_labels.sum()
        masked += (ids[chosen_labels] == MASK).sum()
        kept += (ids[chosen_labels] == labels[chosen_labels]).sum()
        assert (ids[chosen_labels & (ids != MASK)] >= SPECIAL).all()
    assert asked / real == pytest.approx(0.15, abs=0.01)
    assert masked / asked == pytest.approx(0.8, abs=0.02)
    assert kept / asked == pytest.approx(0.1, abs=0.02)


def test_a_tokenizer_whose_words_cannot_be_told_apart_is_refused(
    wordless: Path, sentencepiece_like: Path, tmp_path: Path
) -> None:
    """Case B14: refused before any work, not masked wrongly."""
    require_words(load_tokenizer(sentencepiece_like))
    (tmp_path / "docs.txt").write_text("The cat ran.\n")
    options = SpansOptions(input=[str(tmp_path / "docs.txt")], tokenizer=str(wordless), output=str(tmp_path / "store"))
    with pytest.raises(UserError, match="finds 1 words in 'Testing masking whole words'"):
        build_spans(options)
    assert [path.name for path in tmp_path.iterdir()] == ["docs.txt"]
