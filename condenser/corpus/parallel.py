"""Work shared out over processes, its results in order: the same whatever their number."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from condenser.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

_work: Callable[[Any], Any]  # a worker process's own


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(
    make_work: Callable[[], Callable[[Task], Result]], tasks: Iterable[Task], workers: int
) -> Iterator[Result]:
    """Yield the results of tasks in the tasks' order.

    A few tasks per worker are read ahead, so that memory does not grow with their number.

    Args:
        make_work: makes what is called with each task, once in each process.
        tasks: what is to be done.
        workers: processes. With 1, two threads of this one take turns: for work that spends most of
            its time outside Python, on all processors.

    Raises:
        UserError: a worker was killed; or what the work raises, at its place in the order.
    """
    pool, work = _start(make_work, workers)
    with pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(work, task))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError("a worker process was killed", hint="if memory ran out, lower --workers") from None
        finally:
            for future in waiting:
                future.cancel()


def _start(
    make_work: Callable[[], Callable[[Task], Result]], workers: int
) -> tuple[Executor, Callable[[Task], Result]]:
    if workers == 1:
        return ThreadPoolExecutor(2), make_work()
    # Not fork: threads of the tokenizer may be running.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(make_work,)), _run


def _begin(make_work: Callable[[], Callable[[Any], Any]]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one thread
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = make_work()
    gc.freeze()


def _end_with_parent() -> None:
    """Leave no worker behind when the parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(task: Any) -> Any:
    return _work(task)
