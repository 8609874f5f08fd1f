"""Measure the recurrent language model: against a grammar's entropy, and beside a Kneser-Ney bigram on real text.

    python scripts/lm_study.py grammar --work DIR     # a minute and a half of one core
    python scripts/lm_study.py medquad --work DIR     # about 20 minutes of one core

What is done in DIR stays, and a study that was stopped goes on there. The last line is JSON, log-probabilities in nats:

- ``grammar``: ``entropy`` per token of the texts that the grammar writes, ``true_nll`` and ``lm_nll`` per token of the
  same held-out texts by the grammar itself and by the model, ``above_entropy`` how far the model is above the first.
- ``medquad``: perplexities of every 20th passage of the embedded collection, by a model and by a bigram that were
  trained on the others, in the same WordPieces.

``train_cpu_s`` is what training took in this run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from condenser.corpus.spans import build_spans
from condenser.corpus.streams import read_token_documents, stored_documents, text_frame
from condenser.corpus.tokens import TokenStore
from condenser.lm import load_lm, measure, train_lm
from condenser.lm_options import LmTrainOptions
from condenser.options import SpansOptions
from scripts.held_out import hold_out
from scripts.kneser_ney import KneserNeyBigram

CLOSERS = {"if": "then", "either": "or", "though": "still"}
NOUNS = "cat dog king queen nurse river fever heart bird lamp".split()
VERBS = "see hear find follow like fear".split()
ADJECTIVES = "old young red calm loud".split()
ADVERBS = "often never now".split()
GRAMMAR_TEXTS = 120_000
MEDQUAD_STEPS = 6000


class State(NamedTuple):
    """How far a text has come: which of two clauses, what comes next in it, and what it must remember."""

    clause: int
    place: str
    opener: str
    plural: bool


class Choice(NamedTuple):
    """One word that may come next; None ends the text."""

    probability: float
    word: str | None
    then: State | None


START = State(1, "opener", "", False)


def choices(state: State) -> Iterator[Choice]:
    """Yield what may come next in a text: OPENER CLAUSE CLOSER CLAUSE.

    A clause is "the ADJECTIVE* NOUN ADVERB* VERB", verbs agreeing with the noun in number over the adverbs; the
    closer answers the opener over a whole clause. Each word leads to one state, so the text tells its states.
    """
    if state.place == "opener":
        for opener in CLOSERS:
            yield Choice(1 / len(CLOSERS), opener, state._replace(opener=opener, place="the"))
    elif state.place == "the":
        yield Choice(1.0, "the", state._replace(place="noun"))
    elif state.place == "noun":
        for share, word in _by_rank(ADJECTIVES):
            yield Choice(0.3 * share, word, state)
        for share, word in _by_rank(NOUNS):
            yield Choice(0.4 * share, word, state._replace(place="verb", plural=False))
            yield Choice(0.3 * share, f"{word}s", state._replace(place="verb", plural=True))
    elif state.place == "verb":
        for share, word in _by_rank(ADVERBS):
            yield Choice(0.4 * share, word, state)
        after = state._replace(place="closer" if state.clause == 1 else "end", plural=False)
        for share, word in _by_rank(VERBS):
            yield Choice(0.6 * share, word if state.plural else f"{word}s", after)
    elif state.place == "closer":
        yield Choice(1.0, CLOSERS[state.opener], State(2, "the", "", False))
    else:
        yield Choice(1.0, None, None)


def _by_rank(words: list[str]) -> Iterator[tuple[float, str]]:
    """Yield words with shares that fall as one over the rank."""
    total = sum(1 / rank for rank in range(1, len(words) + 1))
    yield from ((1 / rank / total, word) for rank, word in enumerate(words, 1))


def entropy_per_token() -> float:
    """Return the entropy of a text in nats over its mean length, the end counted as a token.

    A text's entropy is that of its choices, each weighted by how often its state is passed on the way:
    v = e_start + P^T v.
    """
    states = [START]
    for state in states:
        states += {one.then: None for one in choices(state) if one.then not in (None, *states)}  # type: ignore[misc]
    moves = np.zeros((len(states), len(states)))
    surprise = np.zeros(len(states))
    for row, state in enumerate(states):
        for one in choices(state):
            surprise[row] -= one.probability * math.log(one.probability)
            if one.then is not None:
                moves[row, states.index(one.then)] += one.probability
    visits = np.linalg.solve(np.eye(len(states)) - moves.T, np.eye(len(states))[0])
    return float(visits @ surprise / visits.sum())


def write_text(draw: random.Random) -> tuple[list[str], float]:
    """Draw a text; return its words and its negative log-probability in nats, that of its end included."""
    words: list[str] = []
    nll, state = 0.0, START
    while True:
        options = list(choices(state))
        (chosen,) = draw.choices(options, [one.probability for one in options])
        nll -= math.log(chosen.probability)
        if chosen.word is None or chosen.then is None:
            return words, nll
        words.append(chosen.word)
        state = chosen.then


def grammar(work: Path, texts: int = GRAMMAR_TEXTS, steps: int = 2000) -> dict[str, float]:
    """Train on texts of the grammar and measure on others."""
    train, held_out = work / "train.txt", work / "held-out.txt"
    draw = random.Random(1)
    train.write_text("".join(" ".join(write_text(draw)[0]) + "\n" for _ in range(texts)))
    drawn = [write_text(draw) for _ in range(texts // 20)]
    held_out.write_text("".join(" ".join(words) + "\n" for words, _ in drawn))
    options = LmTrainOptions(
        data=_spans(work, train, train_words=1000),
        embedding_size=32,
        hidden_size=64,
        dropout=0.0,
        tied=False,
        max_steps=steps,
        batch_size=32,
        chunk=32,
        learning_rate=1e-2,
        output=str(work / "lm"),
    )
    spent = _train(options)
    nll, tokens, _ = _measured(options, held_out)
    entropy = entropy_per_token()
    return {
        "entropy": entropy,
        "true_nll": sum(nll for _, nll in drawn) / sum(len(words) + 1 for words, _ in drawn),
        "lm_nll": nll / tokens,
        "above_entropy": nll / tokens / entropy - 1,
        "train_cpu_s": spent,
    }


def medquad(work: Path, steps: int = MEDQUAD_STEPS) -> dict[str, float]:
    """Train on medquad's passages but for every 20th, and measure on these."""
    train, held_out = hold_out("medquad", work)
    options = LmTrainOptions(
        data=_spans(work, train, train_tokenizer=8000),
        embedding_size=128,
        hidden_size=384,
        dropout=0.0,
        max_steps=steps,
        batch_size=16,
        chunk=64,
        learning_rate=4e-3,
        output=str(work / "lm"),
    )
    spent = _train(options)
    nll, tokens, words = _measured(options, held_out)
    _, tokenizer = load_lm(options.output)
    bigram = KneserNeyBigram(stored_documents(TokenStore(options.data)), text_frame(tokenizer), len(tokenizer))
    bigram_nll = bigram.nll(read_token_documents([held_out], tokenizer))
    return {
        "held_out_tokens": tokens,
        "held_out_words": words,
        "lm_perplexity": math.exp(nll / tokens),
        "lm_perplexity_per_word": math.exp(nll / words),
        "kneser_ney_perplexity": math.exp(bigram_nll / tokens),
        "kneser_ney_perplexity_per_word": math.exp(bigram_nll / words),
        "train_cpu_s": spent,
    }


def _spans(work: Path, text: Path, **vocabulary: int) -> str:
    return str(build_spans(SpansOptions(input=[str(text)], min_tokens=1, output=str(work / "spans"), **vocabulary)))


def _train(options: LmTrainOptions) -> float:
    started = time.process_time()
    train_lm(options)
    return time.process_time() - started


def _measured(options: LmTrainOptions, held_out: Path) -> tuple[float, int, int]:
    """Return the negative log-probability of held-out texts, their tokens and their words."""
    model, tokenizer = load_lm(options.output)
    return measure(model, read_token_documents([held_out], tokenizer), text_frame(tokenizer))


def main() -> None:
    """Run one study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = {"grammar": grammar, "medquad": medquad}
    parser.add_argument("study", choices=studies)
    parser.add_argument("--work", type=Path, required=True, help="folder to work in")
    given = parser.parse_args()
    work = given.work / given.study
    work.mkdir(parents=True, exist_ok=True)
    print(json.dumps(studies[given.study](work)))


if __name__ == "__main__":
    main()
