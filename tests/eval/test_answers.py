from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from condenser.errors import UserError
from eval.answers import (
    Context,
    Question,
    answer_recall,
    exact_match,
    has_answer,
    load_dpr,
    questions_from_run,
    save_dpr,
    tokenize,
)


@pytest.fixture(scope="module")
def reference(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "dpr_answers.json").read_text())


def test_dpr_finds_the_same_answers(reference: dict[str, Any]) -> None:
    assert reference["has_answer"]
    for row in reference["has_answer"]:
        assert has_answer(row["answers"], row["text"], row["match_type"]) == row["has_answer"], row
        assert tokenize(unicodedata.normalize("NFD", row["text"])) == row["text_tokens"], row


def test_tokens_alone(reference: dict[str, Any]) -> None:
    for row in reference["simple_tokenizer"]:
        assert tokenize(row["text"]) == row["words_uncased"]


def test_kilt_and_exact_match(reference: dict[str, Any]) -> None:
    for row in reference["has_answer_kilt"]:
        assert has_answer(row["answers"], row["text"], "kilt") == row["has_answer_kilt"], row
    for prediction, answer, expected in reference["exact_match"]:
        assert exact_match(prediction, answer) == expected


def naive(answers: list[str], text: str) -> bool:
    """Compare token lists place by place, as DPR's own loop does."""
    tokens = tokenize(unicodedata.normalize("NFD", text))
    for answer in answers:
        wanted = tokenize(unicodedata.normalize("NFD", answer))
        if any(tokens[start : start + len(wanted)] == wanted for start in range(len(tokens) - len(wanted) + 1)):
            return True
    return False


# Sigma's lower case depends on its neighbours, the dotted I's is two characters.
ODD_TEXT = st.text(st.sampled_from("ab A.-\0\n_é\u0301\u03a3\u03c3\u03c2\u0130I1"), max_size=12)


@given(answers=st.lists(ODD_TEXT, max_size=3), text=ODD_TEXT)
def test_the_shortcuts_change_nothing(answers: list[str], text: str) -> None:
    assert has_answer(answers, text) == naive(answers, text)


def test_top_k_accuracy_of_dpr(golden: Path) -> None:
    reference = json.loads((golden / "dpr_topk.json").read_text())
    questions = [
        Question(
            "?",
            tuple(answers),
            [Context(name, reference["docs"][name][1], reference["docs"][name][0], "") for name in names],
        )
        for answers, (names, _) in zip(reference["answers"], reference["closest_docs"], strict=True)
    ]
    result = answer_recall(questions, [1, 2, 3, 4])
    assert result.hits == reference["questions_doc_hits"]
    assert list(result.accuracy.values()) == reference["top_k_accuracy"]
    assert [share * len(questions) for share in result.accuracy.values()] == reference["top_k_hits"]


RUN = {"q1": {"d1": 1.0, "d2": 1.0, "d3": 2.0}, "q9": {"d1": 1.0}}
QUERIES = {"q1": ("who?", ("Ann",)), "q2": ("what?", ())}
TEXTS = {"d1": ("t1", "by ann"), "d2": ("t2", "Anna"), "d3": ("ann", "nobody")}


def test_a_run_and_texts_become_questions() -> None:
    questions = questions_from_run(RUN, QUERIES, TEXTS, depth=2)
    assert questions == [
        Question("who?", ("Ann",), [Context("d3", "ann", "nobody", "2.0"), Context("d2", "t2", "Anna", "1.0")]),
        Question("what?", (), []),
    ]
    result = answer_recall(questions_from_run(RUN, QUERIES, TEXTS, depth=3), [2, 3])
    assert result.accuracy == {2: 0.0, 3: 0.5} and result.without_answers == 1


@pytest.mark.parametrize("name", ["result.json", "result.json.gz"])
def test_dpr_results_are_read_as_they_were_written(tmp_path: Path, name: str) -> None:
    questions = questions_from_run(RUN, QUERIES, TEXTS, depth=3)
    save_dpr(tmp_path / name, questions, answer_recall(questions, [1]).hits)
    assert load_dpr(tmp_path / name) == questions
    if name == "result.json":
        first = json.loads((tmp_path / name).read_text())[0]
        assert first["ctxs"][2] == {"id": "d1", "title": "t1", "text": "by ann", "score": "1.0", "has_answer": True}
        assert first["answers"] == ["Ann"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{}", "expected DPR's array of {question, answers, ctxs}"),
        ("[1", "not valid JSON (unexpected end of data)"),
        ('[{"question": "?", "answers": []}]', "expected question, answers and ctxs with text ('ctxs')"),
        (
            '[{"question": "?", "answers": [], "ctxs": [{"id": "1"}]}]',
            "expected question, answers and ctxs with text ('text')",
        ),
        ('[{"question": "?", "answers": 3, "ctxs": []}]', "answers is 3, expected a list of strings"),
        ('[{"question": "?", "answers": "Ann", "ctxs": []}]', "answers is 'Ann', expected a list of strings"),
        (
            '[{"question": "?", "answers": [], "ctxs": [{"id": 1.5, "text": ""}]}]',
            "id is 1.5, expected a string or a whole number",
        ),
        ('[{"question": "?", "answers": [], "ctxs": [{"id": 1, "text": 3}]}]', "text is 3, expected a string"),
        ('[{"question": 3, "answers": [], "ctxs": []}]', "question is 3, expected a string"),
        ('["?"]', "expected question, answers and ctxs with text"),
    ],
)
def test_bad_dpr_results_are_named(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_dpr(path)
    assert line in str(caught.value) and str(caught.value).startswith(str(path))


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="there is no question to measure"):
        answer_recall([])
    with pytest.raises(UserError, match="depth 0 is below 1"):
        answer_recall([Question("?", (), [])], [0])
    with pytest.raises(UserError, match=r"passages retrieved for query 'q1' are not in the corpus: 'd3', 'd1'$"):
        questions_from_run(RUN, QUERIES, {"d2": ("", "")}, depth=3)
    with pytest.raises(UserError, match="run and questions have no query in common: questions 'q2'; in the run 'q1'"):
        questions_from_run({"q1": {}}, {"q2": ("", ())}, {}, depth=3)


def test_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    context = Context("1", "", "text", "")
    answer_recall([Question("?", ("", "x"), [context]), Question("?", ("x",), [context] * 2)], [2])
    assert capsys.readouterr().err == (
        "warning: 1 question has an answer without letters, digits or signs, which every text contains\n"
        "warning: 1 question has fewer than 2 passages: what is there is counted\n"
    )
