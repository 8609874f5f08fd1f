"""What a stage says: to stderr only, rarely, and with the time left."""

from __future__ import annotations

import pytest

from condenser import talk
from condenser.talk import Meter, clock, say, track, warn


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands until the test moves it."""
    time = [100.0]
    monkeypatch.setattr(talk.time, "monotonic", lambda: time[0])
    return time


def test_stdout_stays_free(capsys: pytest.CaptureFixture[str]) -> None:
    say("one")
    warn("two")
    assert capsys.readouterr() == ("", "one\nwarning: two\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m"), (-1, "0s")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_log_file_gets_a_plain_line_now_and_then(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Meter("encode", 4000, "passages") as meter:
        for _ in range(20):
            now[0] += 1
            meter.advance(100, note="loss 2.5")
    assert capsys.readouterr().err == "encode: 1,500 of 4,000 passages, 100.0 passages/s, 25s left, loss 2.5\n"


def test_rate_of_a_resumed_stage_counts_only_what_it_did_itself(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    meter = Meter("pretrain", 100, "steps", start=70)
    now[0] += 20
    meter.advance(10)
    assert capsys.readouterr().err == "pretrain: 80 of 100 steps, 0.5 steps/s, 40s left\n"


def test_unknown_total_and_quiet(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    meters = [Meter("read", unit="lines"), Meter("read", unit="lines", quiet=True)]
    now[0] += 20
    for meter in meters:
        meter.advance(10)
    assert capsys.readouterr().err == "read: 10 lines, 0.5 lines/s\n"


def test_terminal_line_is_redrawn_and_wiped(
    now: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(talk.sys.stderr, "isatty", lambda: True, raising=False)
    with Meter("index", 10, "vectors") as meter:
        meter.advance(1)
        now[0] += 1
        meter.advance(4)
    assert capsys.readouterr().err == "\r\x1b[Kindex: 5 of 10 vectors, 5.0 vectors/s, 1s left\r\x1b[K"


def test_track_yields_everything_in_order() -> None:
    assert list(track(iter("abc"), "letters", 3)) == ["a", "b", "c"]
