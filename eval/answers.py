"""Open-domain QA: does a retrieved passage contain an answer string? DPR's rules.

Text and answers are brought into Unicode form NFD and cut into tokens; an answer is found where its tokens stand
side by side in the text, case aside. So ``New-York`` (three tokens) is not in ``New York``, accents must agree, and an
answer without any token is in every text. Only the passage's text is searched, not its title.
"""

from __future__ import annotations

import functools
import string
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
import regex

from condenser.errors import UserError, sample
from condenser.files import atomic_write_bytes, identifier
from condenser.talk import warn
from eval.ranks import best_first
from eval.runs import read_json_value

Match = Literal["string", "regex", "kilt"]

# Letters, numbers and marks in a row, or any other single character that is neither a separator nor a control.
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_BETWEEN = "\0"  # a control character: part of no token
_ARTICLES = regex.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def tokenize(text: str) -> list[str]:
    """Cut a text into DPR's tokens, in lower case; the text is taken in the Unicode form that it has."""
    return [token.lower() for token in _TOKEN.findall(text)]


def normalize_answer(text: str) -> str:
    """Lower the case, drop punctuation and English articles, and make every gap one blank (SQuAD's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> bool:
    """Tell whether a reader's prediction is the answer, by SQuAD's rule."""
    return normalize_answer(prediction) == normalize_answer(answer)


def has_answer(answers: Iterable[str], text: str, match: Match = "string") -> bool:
    """Tell whether a text contains one of the answers.

    Args:
        answers: answer strings, or patterns for ``regex``.
        text: a passage's text.
        match: ``string`` compares tokens; ``regex`` searches each pattern, case aside, ``.`` not matching a line end,
            an invalid pattern matching nothing; ``kilt`` looks for the normalised answer anywhere in the normalised
            text, also inside a word.
    """
    return finder(tuple(answers), match)(text)


@functools.lru_cache(maxsize=4096)
def finder(answers: tuple[str, ...], match: Match = "string") -> Callable[[str], bool]:
    """Prepare a question's answers once, and return the function that looks for them in a text."""
    if match == "regex":
        patterns = [pattern for answer in answers if (pattern := _compile(_nfd(answer))) is not None]
        return lambda text: any(pattern.search(_nfd(text)) is not None for pattern in patterns)
    if match == "kilt":
        normalized = [normalize_answer(answer) for answer in answers]
        return lambda text: any(map(normalize_answer(text).__contains__, normalized))
    wanted = [tokenize(_nfd(answer)) for answer in answers]
    return functools.partial(_contains, wanted, [_joined(tokens) for tokens in wanted])


def _contains(wanted: list[list[str]], joined: list[str], text: str) -> bool:
    if text.isascii():
        # Most texts; here lower case does not depend on the neighbours, so a missing word settles it without tokens.
        lowered = text.lower()
        possible = [
            answer for tokens, answer in zip(wanted, joined, strict=True) if all(map(lowered.__contains__, tokens))
        ]
        if not possible:
            return False
        tokens = _TOKEN.findall(lowered)
    else:
        possible, tokens = joined, tokenize(_nfd(text))
    haystack = _joined(tokens)
    return any(answer in haystack for answer in possible)


def _joined(tokens: list[str]) -> str:
    return _BETWEEN + "".join(token + _BETWEEN for token in tokens)


def _nfd(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFD", text)


def _compile(pattern: str) -> Any:
    try:
        return regex.compile(pattern, flags=regex.IGNORECASE | regex.UNICODE | regex.MULTILINE)
    except regex.error:
        return None


class Context(NamedTuple):
    """One retrieved passage."""

    id: str
    title: str
    text: str
    score: str


class Question(NamedTuple):
    """One question with its answers and its passages, best first."""

    question: str
    answers: tuple[str, ...]
    contexts: list[Context]


class AnswerRecall(NamedTuple):
    """Which passages hold an answer, and what that means for the top k.

    ``hits`` has one list per question, a flag per passage; ``accuracy`` maps k to the share of questions with a hit
    among the first k passages.
    """

    hits: list[list[bool]]
    accuracy: dict[int, float]
    match: Match
    without_answers: int


def answer_recall(
    questions: Sequence[Question], depths: Sequence[int] = (1, 5, 20, 100), match: Match = "string"
) -> AnswerRecall:
    """Measure top-k accuracy.

    Questions without answers stay in the mean as misses and are counted.

    Raises:
        UserError: no question at all, or a depth below 1.
    """
    if not questions:
        raise UserError("there is no question to measure")
    if min(depths) < 1:
        raise UserError(f"depth {min(depths)} is below 1")
    hits = []
    for question in questions:
        found = finder(question.answers, match)
        hits.append([found(context.text) for context in question.contexts])
    first = np.array([flags.index(True) if True in flags else np.inf for flags in hits])
    blank = sum(any(not tokenize(_nfd(answer)) for answer in question.answers) for question in questions)
    if blank and match == "string":
        verb = "question has" if blank == 1 else "questions have"
        warn(f"{blank:,} {verb} an answer without letters, digits or signs, which every text contains")
    shallow = sum(len(question.contexts) < max(depths) for question in questions)
    if shallow:
        verb = "question has" if shallow == 1 else "questions have"
        warn(f"{shallow:,} {verb} fewer than {max(depths)} passages: what is there is counted")
    return AnswerRecall(
        hits=hits,
        accuracy={depth: float(np.mean(first < depth)) for depth in depths},
        match=match,
        without_answers=sum(not question.answers for question in questions),
    )


def questions_from_run(
    run: Mapping[str, Mapping[str, float]],
    queries: Mapping[str, tuple[str, tuple[str, ...]]],
    texts: Mapping[str, tuple[str, str]],
    depth: int,
) -> list[Question]:
    """Join a run with the texts of queries and passages.

    Args:
        run: query id -> passage id -> score.
        queries: query id -> (question, answers); those that the run lacks have no passages.
        texts: passage id -> (title, text).
        depth: passages kept per question.

    Raises:
        UserError: no query in common, or a retrieved passage that the corpus lacks.
    """
    if not any(query_id in run for query_id in queries):
        raise UserError(
            f"run and questions have no query in common: questions {sample(queries)}; in the run {sample(run)}"
        )
    questions = []
    for query_id, (text, answers) in queries.items():
        hits = run.get(query_id, {})
        ranked = best_first(hits)[:depth]
        absent = [name for name in ranked if name not in texts]
        if absent:
            raise UserError(f"passages retrieved for query {query_id!r} are not in the corpus: {sample(absent)}")
        contexts = [Context(name, *texts[name], str(np.float32(hits[name]))) for name in ranked]
        questions.append(Question(text, answers, contexts))
    return questions


def load_dpr(path: str | Path) -> list[Question]:
    """Read DPR's result json: an array of {question, answers, ctxs: [{id, title, text, score}]}, ``.gz`` too.

    Raises:
        UserError: not such an array; the number of the entry is named.
    """
    entries = read_json_value(path)
    if not isinstance(entries, list):
        raise UserError("expected DPR's array of {question, answers, ctxs}", path)
    return [_question(entry, f"{path}: entry {number}") for number, entry in enumerate(entries, start=1)]


def _question(entry: Any, where: str) -> Question:
    try:
        answers, contexts = entry["answers"], [_context(context, where) for context in entry["ctxs"]]
        question = entry["question"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"expected question, answers and ctxs with text ({error})", where) from None
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"answers is {answers!r}, expected a list of strings", where)
    if not isinstance(question, str):
        raise UserError(f"question is {question!r}, expected a string", where)
    return Question(question, tuple(answers), contexts)


def _context(context: dict[str, Any], where: str) -> Context:
    text = context["text"]
    if not isinstance(text, str):
        raise UserError(f"text is {text!r}, expected a string", where)
    name = identifier(context.get("id", context.get("passage_id")), where)
    return Context(name, context.get("title") or "", text, str(context.get("score", "")))


def save_dpr(path: str | Path, questions: Sequence[Question], hits: Sequence[Sequence[bool]]) -> None:
    """Write DPR's result json, each passage marked ``has_answer``; whole or not at all, ``.gz`` too."""
    entries = [
        {
            "question": question.question,
            "answers": list(question.answers),
            "ctxs": [
                {**context._asdict(), "has_answer": hit} for context, hit in zip(question.contexts, flags, strict=True)
            ],
        }
        for question, flags in zip(questions, hits, strict=True)
    ]
    packed = orjson.dumps(entries, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    with atomic_write_bytes(path) as stream:
        if Path(path).suffix == ".gz":
            import gzip

            packed = gzip.compress(packed, mtime=0)
        stream.write(packed)
