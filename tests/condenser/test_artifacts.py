"""Artifacts: old or new, never half; and a folder that was changed afterwards is found out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from condenser import artifacts
from condenser.artifacts import Workspace, refuse_overwriting, result_config
from condenser.errors import UserError
from condenser.manifest import describe_difference, fingerprint, identity, load_manifest
from condenser.options import option, output
from condenser.sharing import SharedWorkspace

ROOT = Path(__file__).parents[2]


def make(folder: Path, content: str = "data", *, resumable: bool = False, **config: Any) -> Path:
    with Workspace(folder, "vectors", config=config, inputs={"encoder": "abc"}, resumable=resumable) as work:
        if not work.done:
            (work.path / "sub").mkdir(exist_ok=True)
            (work.path / "sub" / "a.txt").write_text(content)
            work.commit({"count": 3, "from": Path("x")})
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_finished_folder_carries_what_made_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "new" / "out", k=1, layers=(1, 2))
    assert names(tmp_path) == ["new/out/manifest.json", "new/out/sub/a.txt"]
    manifest = load_manifest(folder, "vectors", verify=True)
    assert manifest["kind"] == "vectors"
    assert manifest["config"] == {"k": 1, "layers": [1, 2]}
    assert manifest["inputs"] == {"encoder": "abc"}
    assert manifest["facts"] == {"count": 3, "from": "x"}
    assert manifest["files"]["sub/a.txt"]["bytes"] == 4
    assert "torch" in manifest["versions"]


def test_up_to_date_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = make(tmp_path / "out", k=1).stat().st_mtime_ns
    with Workspace(tmp_path / "out", "vectors", config={"k": 1}, inputs={"encoder": "abc"}) as work:
        assert work.done
    assert (tmp_path / "out").stat().st_mtime_ns == before
    assert capsys.readouterr().err == f"{tmp_path / 'out'}: up to date\n"
    assert names(tmp_path) == ["out/manifest.json", "out/sub/a.txt"]


def test_other_options_are_refused_with_the_difference(tmp_path: Path) -> None:
    """Case R35, a finished folder."""
    make(tmp_path / "out", k=1, same="s")
    with pytest.raises(UserError, match=r"out: was made with other settings: k: 1 -> 2; new: None -> 'n' \(remove"):
        make(tmp_path / "out", k=2, same="s", new="n")


def test_resume_with_other_options_is_refused_with_the_difference(tmp_path: Path) -> None:
    """Case R35, an unfinished folder."""
    with pytest.raises(KeyboardInterrupt), workspace(tmp_path / "out", k=1) as work:
        (work.path / "shard").write_text("half")
        raise KeyboardInterrupt
    with (
        pytest.raises(UserError, match=r"out\.partial: was made with other settings: k: 1 -> 2"),
        workspace(tmp_path / "out", k=2),
    ):
        pass
    with workspace(tmp_path / "out", k=1) as work:
        assert (work.path / "shard").read_text() == "half"


def workspace(folder: Path, *, resumable: bool = True, **config: Any) -> Workspace:
    return Workspace(folder, "vectors", config=config, inputs={}, resumable=resumable)


def test_failed_stage_leaves_nothing_unless_it_can_go_on(tmp_path: Path) -> None:
    for resumable in (False, True):
        with pytest.raises(ZeroDivisionError), workspace(tmp_path / "out", resumable=resumable) as work:
            (work.path / "a").touch()
            raise ZeroDivisionError
        assert not (tmp_path / "out").exists()
        assert (tmp_path / "out.partial").exists() == resumable


def test_what_a_stage_that_cannot_go_on_left_is_swept(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), workspace(tmp_path / "out") as work:
        (work.path / "deep").mkdir()
        (work.path / "deep/old").touch()
        raise ZeroDivisionError
    make(tmp_path / "out")
    assert names(tmp_path) == ["out/manifest.json", "out/sub/a.txt"]


def test_torn_file_of_a_killed_write_is_swept_on_resume(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), workspace(tmp_path / "out") as work:
        (work.path / "shard.npy.tmp-123").touch()
        (work.path / "shard.npy").touch()
        raise ZeroDivisionError
    with workspace(tmp_path / "out") as work:
        work.commit({})
    assert names(tmp_path / "out") == ["manifest.json", "shard.npy"]


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    load_manifest(tmp_path / "out")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_points_at_appears(tmp_path: Path, there: bool) -> None:
    target = tmp_path / "disk" / "out"
    target.parent.mkdir()
    if there:
        target.mkdir()
    (tmp_path / "out").symlink_to(target)
    make(tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and [entry.name for entry in target.parent.iterdir()] == ["out"]
    make(tmp_path / "out")  # up to date


def test_an_artifact_of_another_kind_is_told_in_few_words(tmp_path: Path) -> None:
    make(tmp_path / "out", k=1)
    with (
        pytest.raises(UserError, match="was made with other settings: kind: vectors -> index "),
        Workspace(tmp_path / "out", "index", config={"factory": "Flat"}, inputs={}),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest.pop("facts"), "manifest.json: fact count is None, expected int"),
        (lambda manifest: manifest.update(facts=[]), "fact count is None, expected int"),
        (lambda manifest: manifest["facts"].update(count="3"), "fact count is '3', expected int"),
        (lambda manifest: manifest["facts"].update(count=True), "fact count is True, expected int"),
    ],
)
def test_facts_that_the_next_stage_goes_by_are_checked(tmp_path: Path, change: Any, message: str) -> None:
    folder = make(tmp_path / "out")
    assert load_manifest(folder, facts={"count": int})["facts"]["count"] == 3
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message):
        load_manifest(folder, facts={"count": int})


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda out: out.touch(), "is a file, expected a folder to write"),
        (
            lambda out: (out.mkdir(), (out / "thesis.doc").touch()),
            "folder is not empty and was not made by this toolkit",
        ),
    ],
)
def test_what_is_not_ours_is_never_overwritten(tmp_path: Path, prepare: Any, message: str) -> None:
    """Case R38."""
    prepare(tmp_path / "out")
    before = names(tmp_path)
    with pytest.raises(UserError, match=message):
        make(tmp_path / "out")
    assert names(tmp_path) == before


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder in which none can be made")
def test_output_where_no_folder_can_be_made() -> None:
    """/proc says that one may write there."""
    with pytest.raises(UserError, match=r"/proc.*: cannot (make|write into) this folder"):
        make(Path("/proc/out"))
    with (
        pytest.raises(UserError, match=r"/proc.*: cannot (make|write into) this folder"),
        SharedWorkspace("/proc/out", "numbers", config={}, inputs={}),
    ):
        pass


@pytest.mark.parametrize("name", [".", "", "/"])
def test_output_without_a_name(name: str) -> None:
    with pytest.raises(UserError, match="cannot become a folder of results"):
        make(Path(name))


KILLED_STAGE = """
    import os, sys
    from condenser import artifacts, files
    from condenser.artifacts import Workspace
    place, output = sys.argv[1:]
    calls = 0
    def die_after(module, name, nth):
        real = getattr(module, name)
        def step(*args, **kwargs):
            global calls
            calls += 1
            if calls > nth:
                os.kill(os.getpid(), 9)
            return real(*args, **kwargs)
        setattr(module, name, step)
    module, name, nth = place.split()
    die_after({"os": os, "artifacts": artifacts}[module], name, int(nth))
    with Workspace(output, "vectors", config={"k": 2}, inputs={}, resumable=True) as work:
        for part in () if work.done else ("one", "two"):
            if not (work.path / part).exists():
                with files.atomic_write(work.path / part) as stream:
                    stream.write(part)
        if not work.done:
            work.commit({"count": 2})
"""


STEPS = {"os fsync": 11, "os replace": 4, "os unlink": 6, "os rename": 1}


@pytest.mark.parametrize("place", [f"{call} {done}" for call, count in STEPS.items() for done in range(count)])
def test_kill_at_any_step_leaves_old_or_new(tmp_path: Path, place: str) -> None:
    """Case R33: after kill -9 the output is absent or whole, and the same command ends in the same folder."""
    stage = [sys.executable, "-c", textwrap.dedent(KILLED_STAGE)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([*stage, place, str(tmp_path / "out")], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    if (tmp_path / "out").exists():
        load_manifest(tmp_path / "out", verify=True)
    subprocess.run([*stage, "os fsync 999", str(tmp_path / "out")], env=environment, check=True)
    assert load_manifest(tmp_path / "out", verify=True)["facts"] == {"count": 2}
    assert [name for name in names(tmp_path) if name.startswith("out/") and ".work" not in name] == [
        "out/manifest.json",
        "out/one",
        "out/two",
    ]


def test_commit_killed_before_the_rename_is_finished_without_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(draft: Path, final: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), workspace(tmp_path / "out", k=1) as work:
        (work.path / "a").touch()
        patch.setattr(artifacts, "publish_folder", stop)
        work.commit({})
    with workspace(tmp_path / "out", k=1) as work:
        assert work.done
    assert names(tmp_path) == ["out/a", "out/manifest.json"]


def test_lock_of_another_process(tmp_path: Path) -> None:
    """Case R38: the second process is told who is writing, and disturbs nothing."""
    script = """
        import sys
        from condenser.artifacts import Workspace
        with Workspace(sys.argv[1], "vectors", config={}, inputs={}) as work:
            (work.path / "a").touch()
            print("ready", flush=True)
            sys.stdin.read()
            work.commit({})
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(
            UserError, match=rf"out\.partial: another process is writing here \(process {other.pid} on "
        ):
            make(tmp_path / "out")
        other.stdin.close()
        assert other.wait(timeout=60) == 0
    load_manifest(tmp_path / "out", verify=True)
    assert names(tmp_path) == ["out/a", "out/manifest.json"]


def test_flipped_byte_is_found_by_verify(tmp_path: Path) -> None:
    """Case R27: same size, other contents."""
    folder = make(tmp_path / "out")
    (folder / "sub/a.txt").write_text("dbta")
    load_manifest(folder)
    with pytest.raises(UserError, match=r"sub/a\.txt: contents differ from the manifest's sha256"):
        load_manifest(folder, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "sub/a.txt").write_text("dat"), r"sub/a\.txt: has 3 bytes, the manifest says 4"),
        (lambda folder: (folder / "sub/a.txt").unlink(), r"sub/a\.txt: file listed in the manifest is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), r"no manifest\.json here; expected a vectors folder"),
        (lambda folder: edit(folder, schema=99), "manifest has schema 99, this release reads 1"),
        (lambda folder: edit(folder, kind="index"), "is an index folder; expected a vectors folder"),
        (lambda folder: edit(folder, files=None), "lacks the fingerprint, or files"),
        (lambda folder: edit(folder, files={"a": {"bytes": "4"}}), "lacks the fingerprint, or files"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json:1: not valid JSON"),
    ],
)
def test_damaged_folder_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    """Cases R27 and R40."""
    change(make(tmp_path / "out"))
    with pytest.raises(UserError, match=message):
        load_manifest(tmp_path / "out", "vectors")


def edit(folder: Path, **values: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | values))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/../../secret", "link", "a\0b"])
def test_manifest_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    """Case R23: parent folders, absolute names and symbolic links."""
    folder = make(tmp_path / "out")
    (tmp_path / "secret").write_text("data")
    (folder / "link").symlink_to(tmp_path / "secret")
    edit(folder, files={name: {"bytes": 4, "sha256": "0"}})
    with pytest.raises(UserError, match=r"manifest\.json: manifest lists .*, which lies outside the folder"):
        load_manifest(folder)


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run.trec").touch()
    (tmp_path / "link.trec").symlink_to("run.trec")
    (tmp_path / "plain").mkdir()
    folder = make(tmp_path / "vectors")
    with pytest.raises(UserError, match=r"link\.trec: is read, and would be written over"):
        refuse_overwriting(tmp_path / "link.trec", None, tmp_path / "gone", tmp_path / "run.trec")
    for name in ("", "manifest.json", "new/index"):
        with pytest.raises(UserError, match=r"lies in .*vectors, which is read"):
            refuse_overwriting(folder / name, folder)
    refuse_overwriting(tmp_path / "plain/run.trec", tmp_path / "plain", tmp_path / "run.trec")


def test_a_pipe_has_no_fingerprint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is neither a file nor a folder, and a pipe is read once only"):
        fingerprint(tmp_path / "pipe")


def test_fingerprint(tmp_path: Path) -> None:
    """It follows the bytes, not the place, the time or the options; hidden files do not count."""
    first, second = make(tmp_path / "a", k=1), make(tmp_path / "b", k=2)
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(make(tmp_path / "c", "other")) != fingerprint(first)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "x").write_text("1")
    before = fingerprint(plain)
    (plain / ".cache").mkdir()
    (plain / ".cache/y").touch()
    assert fingerprint(plain) == before
    (plain / "x").rename(plain / "z")
    assert fingerprint(plain) != before
    with pytest.raises(UserError, match="no such file or folder"):
        fingerprint(tmp_path / "nowhere")
    assert identity("bert-base-uncased") == "bert-base-uncased"
    assert identity(first) == fingerprint(first)


def test_describe_difference() -> None:
    old = {"kind": "a", "config": {"k": 1, "gone": 2}, "inputs": {"encoder": "x"}}
    new = {"kind": "a", "config": {"k": 1, "seed": 3}, "inputs": {"encoder": "y"}}
    assert describe_difference(old, old) == []
    assert describe_difference(old, new) == ["gone: 2 -> None", "seed: None -> 3", "encoder: 'x' -> 'y'"]
    assert describe_difference(old, new | {"kind": "b"}) == ["kind: a -> b"]


def test_result_config_leaves_out_what_cannot_change_the_result() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Options:
        k: int = option(3, "hits")
        log_every: int = option(10, "steps", shapes_result=False)
        output: str = output("folder")

    assert result_config(Options(output="x")) == {"k": 3}
