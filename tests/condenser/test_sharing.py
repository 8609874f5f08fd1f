"""A folder of several writers: they agree on what it is, one publishes it, and a damaged one is taken back."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from condenser import sharing
from condenser.artifacts import Workspace
from condenser.errors import UserError
from condenser.faults import VARIABLE
from condenser.manifest import MANIFEST, load_manifest
from condenser.sharing import SharedWorkspace


def share(folder: Path, **config: Any) -> SharedWorkspace:
    return SharedWorkspace(folder, "vectors", config=config, inputs={"texts": "abc"})


def finished(folder: Path) -> Path:
    with share(folder) as work:
        for name in ("a", "b"):
            (work.path / name).write_text(name * 10)
        work.commit({"count": 2})
    return folder


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_several_write_and_one_publishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with share(tmp_path / "out") as first, share(tmp_path / "out") as second:
        (first.path / "a").write_text("1")
        (second.path / "b").write_text("2")
        assert not first.published() and not second.published()
        second.commit({"count": 2})
        assert first.published() and first.commit({"count": 2}) == tmp_path / "out"
    assert entries(tmp_path) == ["out"] and entries(tmp_path / "out") == ["a", "b", MANIFEST]
    load_manifest(tmp_path / "out", verify=True)
    with share(tmp_path / "out") as late:
        assert late.done
    assert capsys.readouterr().err == f"{tmp_path / 'out'}: up to date\n" and entries(tmp_path) == ["out"]


def test_two_that_publish_at_the_same_moment(tmp_path: Path) -> None:
    with share(tmp_path / "out") as first, share(tmp_path / "out") as second:
        (first.path / "a").write_text("1")
        second.published = lambda: False  # type: ignore[method-assign] - it looked just before
        first.commit({"count": 1})
        del second.published
        second._publish()
        assert second.done
    load_manifest(tmp_path / "out", verify=True)


def test_other_settings_and_other_stages_are_kept_out(tmp_path: Path) -> None:
    """Case R38: who wants the folder to himself is refused while it is shared, and the other way round."""
    with share(tmp_path / "out", k=1) as work:
        with (
            pytest.raises(UserError, match=r"out\.partial: was made with other settings: k: 1 -> 2"),
            share(tmp_path / "out", k=2),
        ):
            pass
        with (
            pytest.raises(UserError, match="another process is writing here"),
            Workspace(tmp_path / "out", "vectors", config={"k": 1}, inputs={"texts": "abc"}),
        ):
            pass
        (work.path / "a").write_text("1")
        work.commit({})
    with (
        Workspace(tmp_path / "alone", "vectors", config={}, inputs={}),
        pytest.raises(UserError, match="another process is writing here"),
        share(tmp_path / "alone"),
    ):
        pass


def test_a_folder_of_unknown_origin_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.doc").touch()
    with (
        pytest.raises(UserError, match=r"out\.partial: holds 'thesis\.doc', which no unfinished run left"),
        share(tmp_path / "out"),
    ):
        pass
    assert (tmp_path / "out.partial" / "thesis.doc").exists()


def test_the_last_to_leave_sweeps_a_folder_in_which_nothing_was_done(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), share(tmp_path / "out"):
        with pytest.raises(KeyError), share(tmp_path / "out"):
            raise KeyError
        assert (tmp_path / "out.partial").exists(), "the other is still at work"
        raise ZeroDivisionError
    assert entries(tmp_path) == []


@pytest.mark.parametrize("change", ["delete", "cut", "flip"])
def test_a_damaged_folder_is_taken_back_and_tells_what_it_held(
    tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case R40."""
    folder = finished(tmp_path / "out")
    described = load_manifest(folder)["files"]
    damaged = folder / "a"
    {
        "delete": damaged.unlink,
        "cut": lambda: damaged.write_text("a"),
        "flip": lambda: damaged.write_text("a" * 9 + "b"),
    }[change]()
    with share(folder) as work:
        assert not work.done and work.withdrawn() == described and not folder.exists()
        assert (work.path / "b").read_text() == "b" * 10
        (work.path / "a").write_text("a" * 10)
        work.commit({"count": 2})
    assert "out/a: " in capsys.readouterr().err and load_manifest(folder, verify=True)["files"] == described
    assert entries(tmp_path) == ["out"] and entries(folder) == ["a", "b", MANIFEST]


@pytest.mark.parametrize("place", ["manifest-withdrawn", "folder-withdrawn"])
def test_killed_while_taking_a_folder_back(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished(tmp_path / "out")
    (folder / "a").unlink()
    monkeypatch.setenv(VARIABLE, place)
    process = os.fork()
    if process == 0:
        with share(folder):
            os._exit(0)  # never reached
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(UserError, match="was made with other settings"), share(folder, k=2):
        pass
    with share(folder) as work:
        assert set(work.withdrawn()) == {"a", "b"}
        (work.path / "a").write_text("a" * 10)
        work.commit({"count": 2})
    load_manifest(folder, verify=True)


def test_a_folder_in_the_way_of_mending_is_named(tmp_path: Path) -> None:
    folder = finished(tmp_path / "out")
    (folder / "a").unlink()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "x").touch()
    with pytest.raises(UserError, match=r"out\.partial: stands in the way of"), share(folder):
        pass


def test_a_manifest_that_points_outside_is_no_damage_to_mend(tmp_path: Path) -> None:
    """Case R23."""
    folder = finished(tmp_path / "out")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["../secret"] = {"bytes": 1, "sha256": "0"}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="lies outside the folder"), share(folder):
        pass


def test_one_who_comes_while_another_takes_a_damaged_folder_back_begins_no_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw the damage; the other has renamed the manifest and not yet the folder."""
    (finished(tmp_path / "out") / "a").unlink()
    first_half = share(tmp_path / "out")
    halves = iter([lambda: _withdraw_the_manifest(tmp_path / "out"), first_half._move_back])
    monkeypatch.setattr(SharedWorkspace, "_withdraw", lambda self: next(halves)())
    with share(tmp_path / "out") as work:
        assert not (tmp_path / "out").exists()
        assert work.withdrawn().keys() == {"a", "b"} and (work.path / "b").read_text() == "b" * 10


@pytest.mark.parametrize("until", ["manifest-withdrawn", "folder-withdrawn", "published-again"])
def test_one_who_compares_a_folder_that_another_takes_back_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: str
) -> None:
    folder = finished(tmp_path / "out")
    compare = sharing.damaged_files

    def withdraw_and_compare(*arguments: Any, **options: Any) -> dict[str, UserError]:
        monkeypatch.setattr(sharing, "damaged_files", compare)
        _withdraw_the_manifest(folder)
        if until != "manifest-withdrawn":
            share(folder)._move_back()
        if until == "published-again":
            finished(folder)
        found = compare(*arguments, **options)
        if until != "published-again":
            raise FileNotFoundError(errno.ENOENT, "moved between the look and the reading")
        return found

    monkeypatch.setattr(sharing, "damaged_files", withdraw_and_compare)
    with share(folder) as work:
        assert work.done if until == "published-again" else work.withdrawn().keys() == {"a", "b"}
    assert entries(tmp_path) == ["out" if until == "published-again" else "out.partial"]


def test_a_fault_that_stays_when_looked_at_again_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*arguments: Any, **options: Any) -> dict[str, UserError]:
        raise PermissionError(errno.EACCES, "Permission denied")

    finished(tmp_path / "out")
    monkeypatch.setattr(sharing, "damaged_files", unreadable)
    with pytest.raises(PermissionError), share(tmp_path / "out"):
        pass


def test_what_a_late_worker_makes_after_the_end_is_swept(tmp_path: Path) -> None:
    with share(tmp_path / "out") as first, share(tmp_path / "out") as late:
        (first.path / "a").touch()
        first.commit({"count": 1})
        (late.scratch / "shards").mkdir(parents=True)  # where one who came later had just put the folder again
        assert late.published()
    assert entries(tmp_path) == ["out"]


def _withdraw_the_manifest(folder: Path) -> None:
    (folder / ".work").mkdir()
    (folder / MANIFEST).rename(folder / ".work" / "withdrawn.json")


def test_a_lock_that_was_just_put_there_is_no_hindrance_and_a_refusal_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, tried = os.rename, []

    def with_a_lock_in_the_way(source: Any, target: Any) -> None:
        if Path(target).suffix == ".partial" and not tried:
            tried.append(1)
            (Path(target) / ".work").mkdir(parents=True)
            (Path(target) / ".work" / "lock").touch()
        rename(source, target)

    def refused(source: Any, target: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name, renaming in (("in-passing", with_a_lock_in_the_way), ("refused", refused)):
        folder = finished(tmp_path / name)
        _withdraw_the_manifest(folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", renaming)
            if renaming is refused:
                with pytest.raises(UserError, match="stands in the way"):
                    share(folder)._move_back()
                continue
            share(folder)._move_back()
        assert tried and not folder.exists() and (tmp_path / f"{name}.partial" / "a").is_file()
