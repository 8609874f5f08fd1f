"""Claims: one holder at a time, and none that is dead."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from condenser.faults import VARIABLE
from retrieval.claims import Claims

LAPSE_S = 120.0


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    return tmp_path / "shards"


def claim_from_elsewhere(folder: Path, part: str, age_s: float) -> Path:
    """Leave the claim of a worker on another machine, last renewed so long ago."""
    file = folder / f"{part}.claim-0"
    file.write_text(
        json.dumps({"part": part, "host": "elsewhere", "pid": os.getpid(), "machine": "another", "birth": "1"})
    )
    os.utime(file, (time.time() - age_s,) * 2)
    return file


def test_a_claim_has_one_holder(folder: Path) -> None:
    with Claims(folder) as first, Claims(folder) as second:
        assert first.take("00003") and first.holds("00003")
        assert not second.take("00003") and not second.is_free("00003") and not second.holds("00003")
        assert second.take("00004")
        first.release("00003")
        assert second.is_free("00003") and second.take("00003")
    assert not list(folder.iterdir()), "who leaves takes his claims along"


def test_a_claim_says_who_holds_it(folder: Path) -> None:
    with Claims(folder) as claims:
        claims.take("00003")
        said = json.loads((folder / "00003.claim-0").read_text())
    assert (said["part"], said["pid"], said["host"]) == ("00003", os.getpid(), os.uname().nodename)


@pytest.mark.parametrize("links", [True, False])
def test_a_claim_appears_with_its_content_and_once(folder: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def link(source: Path, target: Path) -> None:
        assert json.loads(source.read_text())["part"] == "00003"
        raise OSError(errno.ENOTSUP, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", link)
    with Claims(folder) as first, Claims(folder) as second:
        assert first.take("00003")
        monkeypatch.setattr(Claims, "_newest", lambda self, part: -1)  # both looked before either claimed
        assert not second.take("00003")
        assert [entry.name for entry in folder.iterdir()] == ["00003.claim-0"]
        assert json.loads((folder / "00003.claim-0").read_text())["pid"] == os.getpid()


def test_of_many_at_once_one_gets_it(folder: Path) -> None:
    for part in map(str, range(20)):
        claim_from_elsewhere(folder, part, age_s=2 * LAPSE_S)
    won: list[str] = []
    start = threading.Barrier(8)

    def grab() -> None:
        claims = Claims(folder)
        start.wait()
        won.extend(part for part in map(str, range(20)) if claims.take(part))

    threads = [threading.Thread(target=grab) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won, key=int) == [str(n) for n in range(20)]


def test_the_claim_of_a_killed_process_lapses_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "claim-taken")
    process = os.fork()
    if process == 0:
        Claims(folder).take("00003")
        os._exit(0)  # never reached
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    monkeypatch.delenv(VARIABLE)
    with Claims(folder) as claims:
        assert claims.take("00003"), "dead, though its parent has not yet asked for it"
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        claims.release("00003")
        assert claims.take("00003") and [file.name for file in folder.glob("*.claim-*")] == ["00003.claim-0"]


def test_a_process_of_the_same_number_is_another(folder: Path) -> None:
    with Claims(folder) as claims:
        claims.take("00003")
        file = folder / "00003.claim-0"
        said = json.loads(file.read_text())
        assert not claims.is_free("00003")
        file.write_text(json.dumps(said | {"birth": "12"}))
        assert claims.is_free("00003")


@pytest.mark.parametrize(("age_s", "free"), [(0.9 * LAPSE_S, False), (1.1 * LAPSE_S, True)])
@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_a_claim_from_another_machine_lapses_with_time(
    folder: Path, age_s: float, free: bool, content: str | None
) -> None:
    """So does one whose holder died between making the file and writing into it."""
    file = claim_from_elsewhere(folder, "00003", age_s)
    if content is not None:
        file.write_text(content)
        os.utime(file, (time.time() - age_s,) * 2)
    with Claims(folder, LAPSE_S) as claims:
        assert claims.is_free("00003") == claims.take("00003") == free


def test_a_holder_that_slept_too_long_has_lost_its_claim(folder: Path) -> None:
    with Claims(folder, LAPSE_S) as sleeper, Claims(folder, LAPSE_S) as other:
        assert sleeper.take("00003")
        claim_from_elsewhere(folder, "00003", age_s=2 * LAPSE_S)  # as a machine that stood still is seen by others
        assert other.take("00003")
        assert not sleeper.holds("00003") and other.holds("00003")
        sleeper.release("00003")
        assert other.holds("00003")
        other.release("00003")
        assert not list(folder.glob("*.claim-*"))


def test_a_living_holder_renews_its_claim(folder: Path) -> None:
    with Claims(folder, lapse_s=0.06) as claims:
        claims.take("00003")
        file = folder / "00003.claim-0"
        os.utime(file, (0, 0))
        deadline = time.monotonic() + 10
        while file.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert time.time() - file.stat().st_mtime < 60
