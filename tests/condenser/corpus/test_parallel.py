"""Work over processes: order, errors, and that no process outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from condenser.corpus.parallel import map_in_order
from condenser.errors import UserError


def make_square() -> Callable[[int], int]:
    return _square


def _square(number: int) -> int:
    if number == 13:
        raise UserError("thirteen", "file:13")
    if number == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02 * (number % 3 == 0))  # later tasks are done first
    return number * number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_tasks_are_not_read_far_ahead(workers: int) -> None:
    read = []

    def tasks() -> Iterator[int]:
        for number in range(12):
            read.append(number)
            yield number

    results = map_in_order(make_square, tasks(), workers)
    assert next(results) == 0
    assert len(read) <= 2 * workers + 1
    assert list(results) == [number * number for number in range(1, 12)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_at_its_place(workers: int) -> None:
    results = map_in_order(make_square, range(10, 20), workers)
    assert [next(results) for _ in range(3)] == [100, 121, 144]
    with pytest.raises(UserError, match="file:13: thirteen"):
        next(results)


def test_a_killed_worker_is_one_line() -> None:
    with pytest.raises(UserError, match="a worker process was killed"):
        list(map_in_order(make_square, [1, 99, 2], 2))


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, time
            from condenser.corpus.parallel import map_in_order

            def make():
                return work

            def work(number):
                print(os.getpid(), flush=True)
                time.sleep(60)

            if __name__ == "__main__":
                list(map_in_order(make, range(2), 2))
            """
        )
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    deadline = time.monotonic() + 20
    while any(_lives(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
