"""Training lines: one query with its passages, as texts or as ids, in the forms that people have them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from condenser.errors import UserError, sample
from condenser.files import identifier
from eval.sts import FIRST_NAMES, SCORE_NAMES, SECOND_NAMES
from retrieval.formats.negatives import finite
from retrieval.readers import Columns, one_line
from retrieval.records import Passage, Query, ScoredPair
from retrieval.sources import json_suffix, parsed

Fields = dict[str, Any]

QUERY_NAMES = ("query", "question", "anchor")
POSITIVE_NAMES = ("positive", "positives", "pos", "answer")
NEGATIVE_NAMES = ("negative", "negatives", "neg")
SCORES_NAMES = ("scores", "score", "teacher_scores")
_QUERY_IDS = ("query_id", "qid", "question_id", "_id", "id")
_PASSAGE_IDS = ("docid", "passage_id", "psg_id", "_id", "id")
_POSITIVE_SCORES = ("positive_scores", "pos_scores", "positive_score")
_NEGATIVE_SCORES = ("negative_scores", "neg_scores", "negative_score")
_NUMBERED_NEGATIVE = re.compile(r"(?:negative|neg)_\d+")

_COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pairs": (("query", "positive"),),
    "triples": (("query", "positive", "negative"),),
    "scored": (("sentence1", "sentence2", "score"),),
    "msmarco": (("query_id", "passage_id", "query", "candidate"),),
}
_COLUMN_NAMES = frozenset(
    name
    for names in (QUERY_NAMES, POSITIVE_NAMES, NEGATIVE_NAMES, FIRST_NAMES, SECOND_NAMES, SCORE_NAMES)
    for name in names
).union(("query_id", "qid", "passage"), (f"negative_{number}" for number in range(100)))


class TrainingLine(NamedTuple):
    """What one line says.

    Attributes:
        query: None in lines of two sentences and a score.
        positives: ids of passages that answer the query.
        negatives: ids of passages that do not.
        candidates: ids of passages of which the line does not say either.
        passages: the passages whose texts the line holds.
        scores: a teacher's score of some of them, by id.
        pair: the two texts and the score of a line that has just these.
    """

    query: Query | None
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()
    scores: tuple[tuple[str, float], ...] = ()
    pair: ScoredPair | None = None


Parser = Callable[[Any, str], Sequence[TrainingLine]]


def line_parser(format: str, path: Path) -> Parser:
    """Return what turns a line of a training file, or an object in it, and its ``file:line`` into a training line.

    Args:
        format: dpr, tevatron, pairs, triples, scored, or msmarco for its top-1000 lists.
        path: the file, whose suffix tells JSON from tab-separated columns.
    """
    parse = {"dpr": _dpr_line, "tevatron": _tevatron_line, "msmarco": _top1000_line}.get(format, _text_line)
    needed = {"triples": ("a negative", _negative_names), "scored": ("a score", _score_names)}.get(format)

    def checked(fields: Fields, where: str) -> Sequence[TrainingLine]:
        if needed is not None and not needed[1](fields):
            raise UserError(f"no field for {needed[0]}, found {sample(fields, 8) or 'none'}", where)
        return (parse(fields, where),)

    if json_suffix(path) or format in ("dpr", "tevatron", "datasets"):
        return lambda raw, where: checked(parsed(raw, where), where)
    columns = Columns(_COLUMNS[format], frozenset() if format == "msmarco" else _COLUMN_NAMES)

    def split(line: str, where: str) -> Sequence[TrainingLine]:
        fields = columns(line, where)
        return () if fields is None else checked(fields, where)

    return split


def text_id(title: str, text: str) -> str:
    """Return the id of a passage that has none: 16 hexadecimal digits of a hash of its title and text."""
    return blake2b(f"{title}\0{text}".encode(), digest_size=8).hexdigest()


def _dpr_line(fields: Fields, where: str) -> TrainingLine:
    positives, hard, other = (
        _passages(fields[name], name, where) if fields.get(name) else []
        for name in ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
    )
    if "positive_ctxs" not in fields:
        raise _missing("positive_ctxs", fields, where)
    # As in DPR: a question without hard negatives falls back on the others.
    return TrainingLine(
        _query(fields, ("question",), where, strict_answers=True),
        _ids(positives),
        _ids(hard or other),
        passages=(*positives, *hard, *other),
    )


def _tevatron_line(fields: Fields, where: str) -> TrainingLine:
    if isinstance(fields.get("query"), list):
        raise _token_ids("query", where)
    if "positive_document_ids" in fields:
        positives, negatives = (
            tuple(identifier(value, where) for value in _list(fields.get(name), name, where))
            for name in ("positive_document_ids", "negative_document_ids")
        )
        return TrainingLine(_query(fields, ("query_text", "query"), where), positives, negatives)
    if "positive_passages" not in fields:
        raise _missing("positive_passages or positive_document_ids", fields, where)
    given, others = (
        _passages(_list(fields.get(name), name, where), name, where)
        for name in ("positive_passages", "negative_passages")
    )
    return TrainingLine(_query(fields, ("query",), where), _ids(given), _ids(others), passages=(*given, *others))


def _top1000_line(fields: Fields, where: str) -> TrainingLine:
    passage = Passage(identifier(fields["passage_id"], where), "", one_line(fields["candidate"]))
    return TrainingLine(_query(fields, ("query",), where), negatives=(passage.id,), passages=(passage,))


def _text_line(fields: Fields, where: str) -> TrainingLine:
    names = {name.lower(): name for name in fields}
    sentences = [names[found] for known in (FIRST_NAMES, SECOND_NAMES, SCORE_NAMES) if (found := _first(names, known))]
    if len(sentences) == 3:
        first, second = (_text(fields, name, where) for name in sentences[:2])
        return TrainingLine(None, pair=ScoredPair(first, second, finite(fields[sentences[2]], where)))
    query = _query(fields, QUERY_NAMES, where)
    positive = _first(fields, POSITIVE_NAMES)
    if positive is None and "passage" not in fields:
        raise _missing(" or ".join((*POSITIVE_NAMES, "passage")), fields, where)
    positives = _passages(fields[positive], positive, where) if positive else []
    negatives = [
        passage
        for name in _negative_names(fields)
        if fields[name] is not None
        for passage in _passages(fields[name], name, where)
    ]
    candidates = [] if positive else _passages(fields["passage"], "passage", where)
    if not _score_names(fields):  # nobody says how well it fits, so it does
        positives, candidates = positives or candidates, []
    scores = _scores(fields, positives or candidates, negatives, SCORE_NAMES if candidates else (), where)
    pair = None
    if scores and len(positives) + len(candidates) == 1 and not negatives:
        only = (positives or candidates)[0]
        pair = ScoredPair(query.text, only.whole.strip(), scores[0][1])
    passages = (*positives, *negatives, *candidates)
    return TrainingLine(query, _ids(positives), _ids(negatives), _ids(candidates), passages, scores, pair)


def _scores(
    fields: Fields, first: Sequence[Passage], negatives: Sequence[Passage], others: Sequence[str], where: str
) -> tuple[tuple[str, float], ...]:
    """Return the scores of a line's passages: one list for all (maybe called otherwise), or one for each kind."""
    scored: list[tuple[str, float]] = []
    both = _first(fields, (*SCORES_NAMES, *others))
    groups = [(both, [*first, *negatives])] if both and fields[both] is not None else []
    if not groups:
        named = ((_first(fields, _POSITIVE_SCORES), first), (_first(fields, _NEGATIVE_SCORES), negatives))
        groups = [(name, list(passages)) for name, passages in named if name and fields[name] is not None]
    for name, passages in groups:
        values = fields[name] if isinstance(fields[name], list) else [fields[name]]
        if len(values) != len(passages):
            raise UserError(
                f"{name} has {len(values)} numbers for {len(passages)} passages",
                where,
                "one for each positive, then one for each negative",
            )
        scored += [(passage.id, finite(value, where)) for passage, value in zip(passages, values, strict=True)]
    return tuple(scored)


def _query(fields: Fields, names: Sequence[str], where: str, *, strict_answers: bool = False) -> Query:
    name = _first(fields, names)
    if name is None:
        raise _missing(" or ".join(names), fields, where)
    text = _text(fields, name, where)
    id_name = next((known for known in _QUERY_IDS if fields.get(known) is not None), None)
    answers = fields.get("answers") or ()
    if not isinstance(answers, (list, tuple)) or not all(isinstance(answer, str) for answer in answers):
        if strict_answers:
            raise UserError(f"answers is {answers!r}, expected a list of strings", where)
        answers = ()
    return Query(identifier(fields[id_name], where) if id_name else text_id("", text), text, tuple(answers))


def _passages(value: object, name: str, where: str) -> list[Passage]:
    """Return the passages of a field: a text, an object with a text, or a list of these."""
    passages = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            text = one_line(item)
            passages.append(Passage(text_id("", text), "", text))
        elif isinstance(item, dict):
            key = _first(item, ("text", "contents"))
            if key is None:
                raise UserError(f"{name} holds an object without text, found {sample(item, 6) or 'nothing'}", where)
            text = _text(item, key, where)
            title = "" if item.get("title") is None else _text(item, "title", where)
            known = next((known for known in _PASSAGE_IDS if item.get(known) is not None), None)
            passages.append(Passage(identifier(item[known], where) if known else text_id(title, text), title, text))
        elif isinstance(item, (int, float, list)) and not isinstance(item, bool):
            raise _token_ids(name, where)
        else:
            raise UserError(f"{name} holds {item!r}, expected a text or an object with one", where)
    return passages


def _text(fields: Fields, name: str, where: str) -> str:
    value = fields[name]
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        raise _token_ids(name, where)
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r}, expected a string", where)
    return one_line(value)


def _list(value: object, name: str, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"{name} is {value!r}, expected a list", where)
    return value


def _ids(passages: Sequence[Passage]) -> tuple[str, ...]:
    return tuple(passage.id for passage in passages)


def _negative_names(fields: Fields) -> list[str]:
    return [name for name in fields if name in NEGATIVE_NAMES or _NUMBERED_NEGATIVE.fullmatch(name)]


def _score_names(fields: Fields) -> list[str]:
    known = {*SCORES_NAMES, *SCORE_NAMES, *_POSITIVE_SCORES, *_NEGATIVE_SCORES}
    return [name for name in fields if name.lower() in known]


def _first(fields: Any, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in fields), None)


def _missing(names: str, fields: Fields, where: str) -> UserError:
    return UserError(f"expected a field {names}, found {sample(fields, 8) or 'none'}", where)


def _token_ids(name: str, where: str) -> UserError:
    return UserError(
        f"{name} holds token ids, expected text", where, "pre-tokenised files fit one tokenizer: give the raw texts"
    )
