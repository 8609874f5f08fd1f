"""Workers of one folder: killed anywhere, alone or among others, they end in the bytes of one quiet run."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from condenser.errors import UserError
from condenser.faults import VARIABLE
from condenser.manifest import MANIFEST
from retrieval import encode as encode_module
from retrieval.claims import Claims
from retrieval.encode import encode
from retrieval.encoder import Encoder
from retrieval.options import EncodeOptions
from retrieval.vectors import Vectors

WORDS = "river bank money water fish heart blood cell disease treatment".split()
SHARDS = 8

Start = Callable[..., int]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """OpenMP's threads do not come along into a process made by fork, which would wait for them for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture()
def options(tiny_bert: Path, tmp_path: Path) -> EncodeOptions:
    lines = [json.dumps({"_id": f"p{n}", "text": " ".join((WORDS * 9)[n % 7 : n % 7 + 1 + n % 80])}) for n in range(78)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return EncodeOptions(
        encoder=str(tiny_bert), input=str(tmp_path / "corpus.jsonl"), output=str(tmp_path / "vectors"), shard_size=10
    )


@pytest.fixture()
def straight(options: EncodeOptions, tmp_path: Path) -> dict[str, bytes]:
    """What one worker makes that nobody disturbs."""
    return contents(encode(replace(options, output=str(tmp_path / "straight"))))


@pytest.fixture()
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a worker in a process of its own; a fault is a place to be killed at, stumbles are waits at any line."""
    started: list[int] = []

    def begin(options: EncodeOptions, fault: str | None = None, stumbles: random.Random | None = None) -> int:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                sys.stderr = (tmp_path / "said").open("a")
                os.environ |= {VARIABLE: fault} if fault else {}
                if stumbles:
                    sys.settrace(partial(stumble, stumbles))
                encode(options)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.settrace(None)
                sys.stderr.flush()
                os._exit(status)
        started.append(process)
        return process

    yield begin
    for process in started:  # a failed test leaves none behind
        try:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def stumble(random: random.Random, frame: FrameType, event: str, argument: object) -> Any:
    """Wait up to 30 ms before one line in 20 of the modules in which workers meet; for ``sys.settrace``."""
    if not frame.f_code.co_filename.endswith(("sharing.py", "artifacts.py", "seals.py", "claims.py", "manifest.py")):
        return None
    if event == "line" and random.random() < 0.05:
        time.sleep(0.03 * random.random())
    return partial(stumble, random)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def ended(process: int) -> int:
    """Wait for a worker; return its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def folders_of(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("vectors"))


PLACES = [
    "claim-taken:1",
    "claim-taken:3",
    "vectors-written:2",
    "ids-written:3",
    "shard-sealed:1",
    f"shard-sealed:{SHARDS}",
    f"claim-taken:{SHARDS + 1}",  # that of publishing
    "commit-begun",
    "manifest-written",
    "folder-published",
]


@pytest.mark.parametrize("place", PLACES)
def test_killed_anywhere_and_run_again(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path, place: str
) -> None:
    """Case R40."""
    assert ended(start(options, place)) == -signal.SIGKILL
    assert (tmp_path / "vectors").exists() == (place == "folder-published")
    assert ended(start(options)) == 0
    assert contents(tmp_path / "vectors") == straight and folders_of(tmp_path) == ["vectors"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_random_times_until_it_is_done(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path, seed: int
) -> None:
    delays = random.Random(seed)
    for longest in range(1, 100):  # ever later, however slow the machine
        process = start(options)
        time.sleep(delays.uniform(0, longest / 10))
        os.kill(process, signal.SIGKILL)
        if ended(process) == 0:
            break
    assert contents(tmp_path / "vectors") == straight and folders_of(tmp_path) == ["vectors"]


def test_several_workers_make_what_one_makes(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path
) -> None:
    """Cases B36 and B19: no shard is lost or made twice, and the texts that all of them cut are counted."""
    workers = [start(options) for _ in range(3)]
    assert [ended(worker) for worker in workers] == [0, 0, 0]
    assert contents(tmp_path / "vectors") == straight and folders_of(tmp_path) == ["vectors"]
    vectors = Vectors.load(tmp_path / "vectors")
    assert vectors.ids == [f"p{n}" for n in range(78)]
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    lengths = [len(ids) for ids in Encoder.load(options.encoder).tokenizer(texts)["input_ids"]]
    assert vectors.facts["cut"] == sum(length > 64 for length in lengths) > 0
    said = (tmp_path / "said").read_text()
    assert said.count("encoded 78 passages in 8 shards") == 1, "one of them publishes"
    assert said.count("vectors: finished by another process; ") == 2
    made = [int(number) for number in re.findall(r"(\d+) shards? by this", said)]
    assert sum(made) == 8 or made == [0, 0], said


def test_a_worker_may_come_too_late(
    options: EncodeOptions,
    straight: dict[str, bytes],
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = encode_module._Worker._count_texts

    def count_while_another_does_it_all(worker: encode_module._Worker) -> int | None:
        monkeypatch.undo()
        assert ended(start(options)) == 0
        return count(worker)

    monkeypatch.setattr(encode_module._Worker, "_count_texts", count_while_another_does_it_all)
    assert encode(options) == tmp_path / "vectors"
    assert capsys.readouterr().err.endswith("vectors: finished by another process; 0 shards by this one\n")
    assert contents(tmp_path / "vectors") == straight and folders_of(tmp_path) == ["vectors"]


def test_a_corpus_that_changes_meanwhile_is_found_out(
    options: EncodeOptions, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case R41."""
    write = encode_module.write_shard

    def write_and_change(folder: Path, number: int, *rest: Any) -> None:
        write(folder, number, *rest)
        if number == 7:
            (tmp_path / "corpus.jsonl").write_text((tmp_path / "corpus.jsonl").read_text().replace("river", "bank"))

    monkeypatch.setattr(encode_module, "write_shard", write_and_change)
    with pytest.raises(UserError, match=r"corpus\.jsonl: has changed while it was encoded \(remove .*vectors\.partial"):
        encode(options)
    assert not (tmp_path / "vectors").exists()


def test_the_living_finish_what_the_killed_left(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path
) -> None:
    killed = [start(options, place) for place in ("claim-taken:1", "vectors-written:2", "manifest-written")]
    living = [start(options) for _ in range(2)]
    assert [ended(worker) for worker in living] == [0, 0]
    assert all(ended(worker) in (0, -signal.SIGKILL) for worker in killed)
    assert contents(tmp_path / "vectors") == straight and folders_of(tmp_path) == ["vectors"]


@pytest.mark.parametrize("seed", range(6))
def test_workers_meet_at_any_line(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path, seed: int
) -> None:
    """Each stops for a moment at lines drawn at random, in an empty folder and in a damaged one."""
    folder = tmp_path / "vectors"
    if seed % 2:
        shutil.copytree(tmp_path / "straight", folder)
        spoil(folder / "vectors-00003.npy")
    workers = [start(options, stumbles=random.Random(3 * seed + number)) for number in range(3)]
    assert [ended(worker) for worker in workers] == [0, 0, 0], (tmp_path / "said").read_text()
    assert contents(folder) == straight and folders_of(tmp_path) == ["vectors"]


def test_a_claim_of_a_dead_machine_is_waited_for_and_then_taken(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(start(options, "claim-taken:3")) == -signal.SIGKILL
    claim = tmp_path / "vectors.partial" / ".work" / "shards" / "00002.claim-0"
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"machine": "another"}))
    monkeypatch.setattr(Claims.__init__, "__defaults__", (1.0,))
    began = time.monotonic()
    worker = start(options)
    assert ended(worker) == 0 and time.monotonic() - began > 0.9
    assert contents(tmp_path / "vectors") == straight


def spoil(file: Path) -> None:
    """Change one byte."""
    content = file.read_bytes()
    file.write_bytes(content[:-9] + b"X" + content[-8:])


@pytest.mark.parametrize("place", ["claim-taken:1", "claim-taken:2", "vectors-written", "shard-sealed", "commit-begun"])
def test_killed_while_mending(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path, place: str
) -> None:
    folder = encode(options)
    (folder / "ids-00002.json").unlink()
    spoil(folder / "vectors-00005.npy")
    assert ended(start(options, place)) == -signal.SIGKILL
    assert ended(start(options)) == 0
    assert contents(folder) == straight and folders_of(tmp_path) == ["vectors"]


@pytest.mark.parametrize("damage", ["delete", "cut", "flip", "ids"])
@pytest.mark.parametrize("workers", [1, 2])
def test_in_a_finished_folder_a_damaged_shard_is_made_anew_alone(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path, damage: str, workers: int
) -> None:
    """Case R40."""
    folder = encode(options)
    kept = {file.name: file.stat().st_ino for file in folder.iterdir() if "00003" not in file.name}
    file = folder / ("ids-00003.json" if damage == "ids" else "vectors-00003.npy")
    if damage == "delete":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    else:
        spoil(file)
    assert [ended(worker) for worker in [start(options) for _ in range(workers)]] == [0] * workers
    assert contents(folder) == straight and folders_of(tmp_path) == ["vectors"]
    assert all((folder / name).stat().st_ino == inode for name, inode in kept.items() if name != MANIFEST)
    said = (tmp_path / "said").read_text()
    assert f"{file}: " in said and "1 shard by this process" in said


def test_a_shard_damaged_before_the_end_is_found_by_its_sum(
    options: EncodeOptions, straight: dict[str, bytes], start: Start, tmp_path: Path
) -> None:
    """Case R40: in an unfinished folder, with its size unchanged."""
    assert ended(start(options, "claim-taken:4")) == -signal.SIGKILL
    spoil(tmp_path / "vectors.partial" / "vectors-00001.npy")
    assert ended(start(options)) == 0
    said = (tmp_path / "said").read_text()
    assert "vectors-00001.npy: contents differ from the manifest's sha256; the shard is made anew" in said
    assert contents(tmp_path / "vectors") == straight


@pytest.mark.parametrize("name", ["vectors-00008.npy", "notes.txt", "scales-00001.npy"])
def test_a_stranger_in_an_unfinished_folder_is_named(
    options: EncodeOptions, start: Start, tmp_path: Path, name: str
) -> None:
    assert ended(start(options, "claim-taken:3")) == -signal.SIGKILL
    (tmp_path / "vectors.partial" / name).touch()
    with pytest.raises(UserError, match=rf"vectors\.partial: holds '{name}', which does not belong to these vectors"):
        encode(options)
    (tmp_path / "vectors.partial" / name).unlink()
    encode(options)


@pytest.mark.parametrize("unfinished", [True, False])
def test_another_encoder_or_corpus_is_refused(
    options: EncodeOptions, start: Start, tmp_path: Path, unfinished: bool
) -> None:
    """Case R41."""
    fault = "claim-taken:3" if unfinished else None
    assert ended(start(options, fault)) == (-signal.SIGKILL if unfinished else 0)
    Encoder.load(options.encoder, query_prompt="x ").save(tmp_path / "encoder", card="")
    with pytest.raises(UserError, match=r"vectors(\.partial)?: was made with other settings: encoder_files: '"):
        encode(replace(options, encoder=str(tmp_path / "encoder")))
    with (tmp_path / "corpus.jsonl").open("a") as stream:
        stream.write('{"_id": "new", "text": "river"}\n')
    with pytest.raises(UserError, match=r"vectors(\.partial)?: was made with other settings: texts: '"):
        encode(options)


@pytest.mark.parametrize(
    ("count", "shard_size", "sizes"), [(10, 4, [4, 4, 2]), (10, 10, [10]), (10, 3, [3, 3, 3, 1]), (2, 1, [1, 1])]
)
def test_shards_lose_nothing(
    options: EncodeOptions, tmp_path: Path, count: int, shard_size: int, sizes: list[int]
) -> None:
    """Case B36."""
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()[:count]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    vectors = Vectors.load(encode(replace(options, shard_size=shard_size)))
    assert [len(shard) for shard in vectors.shards] == sizes and vectors.ids == [f"p{n}" for n in range(count)]


@pytest.mark.slow
def test_under_torchrun_all_ranks_share(options: EncodeOptions, straight: dict[str, bytes], tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "retrieval.cli", "encode"]
    words = ["--encoder", options.encoder, "--input", str(options.input), "--shard_size", "10"]
    words += ["--output", options.output, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, *command, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{options.output}\n", "ranks have one result"
    assert contents(tmp_path / "vectors") == straight and folders_of(tmp_path) == ["vectors"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus() -> None:
    """What a worker holds above its model: one shard, and 30 to 60 bytes for each id that must not come twice."""
    script = Path(__file__).parents[2] / "scripts" / "bench_encode_memory.py"
    # oneDNN keeps its last 1,024 compiled products, whatever the corpus; with few of them the rest can be seen.
    environment = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    above = {}
    for passages in (5_000, 25_000):
        command = [sys.executable, str(script), "--passages", str(passages)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        above[passages] = json.loads(done.stdout.splitlines()[-1])["peak_above_mb"]
    assert above[25_000] < 200 and above[25_000] - above[5_000] < 50, above


@pytest.mark.parametrize("store", ["float16", "int8"])
def test_the_type_on_disk_changes_little(options: EncodeOptions, tmp_path: Path, store: str) -> None:
    exact = Vectors.load(encode(options)).matrix()
    kept = Vectors.load(encode(replace(options, store=store, output=str(tmp_path / store)))).matrix()
    cosines = (exact * kept).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(kept, axis=1)
    assert kept.dtype == np.float32 and cosines.min() > 0.9995


def test_shorter_vectors_are_the_first_numbers(options: EncodeOptions, tmp_path: Path) -> None:
    whole = Vectors.load(encode(options))
    short = Vectors.load(encode(replace(options, dim=12, output=str(tmp_path / "short"))))
    np.testing.assert_array_equal(short.matrix(), whole.matrix()[:, :12])
    assert short.facts["dimension"] == 12
