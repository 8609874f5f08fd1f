"""The key terms of a passage: the words that few other passages have."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, islice
from typing import NamedTuple

import Stemmer
from bm25s.stopwords import STOPWORDS_EN_PLUS

from condenser.talk import track
from retrieval.records import Passage

# Vowel signs and accents that stand alone are parts of their words, and no \w.
_MARKS = "".join(letter for letter in map(chr, range(0x300, 0x1F000)) if unicodedata.category(letter)[0] == "M")
_WORD = re.compile(rf"[^\W\d_](?:[\w{_MARKS}'-]*[\w{_MARKS}])?")
_SHORTEST = 3
_STOP_WORDS = frozenset(STOPWORDS_EN_PLUS)


class KeyTerm(NamedTuple):
    """A word in the forms that stand in a passage, the most frequent first, and what makes it stand out there."""

    forms: tuple[str, ...]
    weight: float

    @property
    def constraint(self) -> str:
        """The expression that one of the forms comes in a text."""
        return "any:" + ",".join(f'"{form}"' for form in self.forms)


class KeyTerms:
    """Counts in how many passages each word comes, and ranks a passage's words by it.

    Words of one stem are one word (Snowball's English stemmer); numbers, words of one or two letters and stop words are
    none. The weight of a word is (1 + ln tf) ln(N / df), twice that if it stands in the title: what is rare in the
    corpus and frequent in the passage comes first, of equals what comes first in the passage.

    Args:
        passages: the whole corpus.
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._stemmer = Stemmer.Stemmer("english")
        self._stems: dict[str, str] = {}
        self._passages = 0
        self._found_in: Counter[str] = Counter()
        for passage in track(passages, "key terms", unit="passages"):
            self._passages += 1
            self._found_in.update({self._stem(word) for word in _words(passage.whole)})

    def of(self, passage: Passage) -> list[KeyTerm]:
        """Return the key terms of a passage of the corpus, the best first."""
        forms: dict[str, Counter[str]] = {}
        for word in _words(passage.whole):
            forms.setdefault(self._stem(word), Counter())[word] += 1
        in_title = {self._stem(word) for word in _words(passage.title)}
        terms = []
        for stem, counts in forms.items():
            rarity = math.log(self._passages / max(1, self._found_in[stem]))
            weight = (1 + math.log(counts.total())) * rarity * (2 if stem in in_title else 1)
            terms.append(KeyTerm(tuple(form for form, _ in counts.most_common()), weight))
        return sorted(terms, key=lambda term: -term.weight)

    def _stem(self, word: str) -> str:
        stem = self._stems.get(word)
        if stem is None:
            stem = self._stems[word] = self._stemmer.stemWord(word)
        return stem


def constraints(terms: list[KeyTerm], each: int, count: int) -> list[str]:
    """Return so many expressions, or as many as there are, of which each asks for ``each`` of the terms.

    The first asks for the best ones; the order is that of `itertools.combinations` over ranks, by their sum.
    """
    # of the first n terms there are n over `each` combinations, and none of the others ranks before all of these
    usable = next((n for n in range(each, len(terms)) if math.comb(n, each) >= count * each), len(terms))
    ranked = sorted(combinations(range(usable), each), key=sum)
    return [" and ".join(terms[rank].constraint for rank in ranks) for ranks in islice(ranked, count)]


def _words(text: str) -> list[str]:
    # not casefold(), which spells other words: strasse for straße
    words = (word.lower() for word in _WORD.findall(text))
    return [word for word in words if len(word) >= _SHORTEST and word not in _STOP_WORDS]
