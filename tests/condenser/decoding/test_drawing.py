"""The verb that shows a constraint."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrieval.cli import main

TABLE = """\
3 states, start in 0; 3 classes of tokens

class  tokens  such as
A      85      ' the' ' and' ' what' ' who' ...
B      1       ' treat'
C      47      's' 'ing' 'ed' 'er' ...

state  to end  A  B  C
0      1       0  1  0
1*     0       2  2  0
2*     0       2  2  2

accepts, among others:
  'treat'
  'treat the'
"""

PICTURE = """\
digraph {
  rankdir=LR
  node [shape=circle]
  start [shape=point label=""]
  start -> 0
  3 [shape=doublecircle]
  0 -> 1 [label="' the'"]
  0 -> 2 [label="' t' 't'"]
  1 -> 3 [label="' ?'"]
  2 -> 4 [label="'h'"]
  4 -> 1 [label="'e'"]
}
"""


def show(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["lm", "automaton", *words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_table_and_texts(tiny_bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = show(capsys, "words:treat", "--tokenizer", str(tiny_bert), "--samples", "2")
    assert status == 0
    assert out == TABLE


def test_picture(tiny_bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = show(capsys, r"regex:the \?", "--tokenizer", str(tiny_bert), "--dot")
    assert status == 0
    assert out == PICTURE


def test_what_cannot_be_shown_is_said(tiny_bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for expression, message in (
        ("words:fever and not any:fever", "accepts no text at all"),
        ("fever", "the constraint: character 1: found 'fever'"),
    ):
        status, out, error = show(capsys, expression, "--tokenizer", str(tiny_bert))
        assert status == 2 and not out
        assert message in error and len(error.splitlines()) == 1
