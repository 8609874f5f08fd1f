"""What an index over so many vectors will cost, and which one to build: said before anything is built."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from condenser.errors import UserError
from condenser.manifest import read_manifest
from condenser.talk import clock
from eval.report import Report, Table
from retrieval.faiss_build import available_memory
from retrieval.options import PlanOptions
from retrieval.structures import FEW, Speed, Structure, Task, id_bytes_of_numbers, structures
from retrieval.vectors import Vectors

_SAMPLE = ("medquad", 64)  # passages whose encoding is timed


class Advice(NamedTuple):
    """The index to build, why, and whether it fits into memory."""

    structure: Structure
    why: str
    fits: bool


def plan(options: PlanOptions) -> str:
    """Compare the kinds of index for so many vectors and recommend one; or tune an index that exists.

    Returns:
        A table with the reasons and the next command, or JSON.

    Raises:
        UserError: neither sizes, vectors nor an index given, or more than one of them; what opening them raises.
    """
    given = [name for name in ("passages", "vectors", "tune") if getattr(options, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"--{name}" for name in given) or "none of them"
        raise UserError(f"give one of --passages (with --dim), --vectors and --tune, found {found}")
    for name in ("dim", "memory", "gpu_memory"):
        if options.tune is not None and getattr(options, name) is not None:
            raise UserError(f"--{name} does not go with --tune, which measures an index that is there")
    if options.tune is not None:
        from retrieval.tune import tune

        return tune(options).render("json" if options.json else "text")
    if options.queries is not None:
        raise UserError("--queries goes with --tune", hint="without it nothing is searched")
    encoding = None if options.encoder is None else _time_encoding(options.encoder)
    task = _task(options, encoding)
    speed = Speed.measure(task.dimension)
    return _report(options, task, speed, encoding).render("json" if options.json else "text")


class Encoding(NamedTuple):
    """What an encoder does on this machine."""

    dimension: int
    per_second: float


def _task(options: PlanOptions, encoding: Encoding | None) -> Task:
    if options.vectors is not None:
        if options.dim is not None:
            raise UserError("--dim goes with --passages; the vectors say it themselves", options.vectors)
        vectors = Vectors.load(options.vectors)
        count, dimension = len(vectors.ids), int(vectors.facts["dimension"])
        if not count:
            raise UserError("holds no vectors, expected at least one", vectors.folder)
        id_bytes = sum(len(name.encode()) for name in vectors.ids)
    else:
        if options.dim is None and encoding is None:
            raise UserError("--dim is missing: numbers in each vector")
        count = options.passages or 0
        dimension = options.dim or (encoding.dimension if encoding else 0)
        id_bytes = id_bytes_of_numbers(count)
    return Task(count, dimension, min(options.k, count), options.recall, id_bytes)


def _time_encoding(encoder: str) -> Encoding:
    """Encode a few embedded passages and take the time."""
    from condenser.hub import local_folder
    from retrieval.collections import open_collection
    from retrieval.encoder import Encoder

    loaded = Encoder.load(local_folder(encoder), device="auto")
    collection, count = _SAMPLE
    passages = list(islice(open_collection(collection).passages(), count))
    began = time.perf_counter()
    loaded.encode_passages(passages)
    return Encoding(loaded.dimension, count / (time.perf_counter() - began))


def _report(options: PlanOptions, task: Task, speed: Speed, encoding: Encoding | None) -> Report:
    found = structures(task, speed)
    free = available_memory() if options.memory is None else int(options.memory * 2**30)
    advice = advise(found, task, free, options.searches)
    gpu = _gpu_line(options, task)
    commands = _commands(options, task, advice.structure)
    values: dict[str, Any] = {
        "passages": task.count,
        "dimension": task.dimension,
        "k": task.k,
        "recall": task.recall,
        "searches": options.searches,
        "free_memory": free,
        "processors": os.cpu_count(),
        "speed": dataclasses.asdict(speed),
        "structures": [dataclasses.asdict(one) | {"fits": fits(one, free)} for one in found],
        "recommended": advice.structure.name,
        "why": advice.why,
        "commands": commands,
    }
    room = "" if free is None else f", {_size(free)} of memory free"
    lines: list[str | Table] = [
        f"{task.count:,} vectors of {task.dimension:,} numbers, k {task.k:,}, recall {task.recall:g} of the exact best"
        f"{room}\nbytes are those that are written; times are estimates from a second's measurement on this machine, "
        f"in processor seconds ({os.cpu_count()} processors here)",
        _table(found, free),
        f"recommended: {advice.structure.name}: {advice.why}",
    ]
    if gpu:
        lines.append(gpu)
        values["gpu"] = gpu
    if encoding is not None:
        seconds = task.count / encoding.per_second
        values["encoding"] = {"passages_per_second": encoding.per_second, "seconds": seconds}
        lines.append(
            f"encoding: about {clock(seconds)} here, at {encoding.per_second:,.1f} passages/s "
            f"(measured over {_SAMPLE[1]} passages of {_SAMPLE[0]})"
        )
    lines.append("next:\n" + "\n".join(f"  {command}" for command in commands))
    return Report(values, lines)


def fits(structure: Structure, free: int | None) -> bool:
    """Say whether an index can be built and searched in ``free`` bytes of memory (None: not known, so yes)."""
    return free is None or max(structure.memory, structure.build_memory) <= free


def advise(found: list[Structure], task: Task, free: int | None, searches: int) -> Advice:
    """Choose the structure that reaches the recall in the least time over its life, among those that fit.

    Args:
        found: what there is to choose from.
        task: what is to be searched.
        free: bytes of memory; None is not known.
        searches: queries over the index's life, against which its building time is set.
    """
    able = [one for one in found if one.reach >= task.recall]
    fitting = [one for one in able if fits(one, free)]
    if not fitting:
        return _advise_disk(found, able, task, free)
    exact = [one for one in fitting if one.exact]
    if exact and task.count <= FEW:
        return Advice(
            exact[0],
            f"up to about {FEW:,} vectors exact search is fast enough, about {_milliseconds(exact[0].query_seconds)} a "
            "query here: what an approximate index could save is not worth the hits it loses",
            True,
        )
    best = min(fitting, key=lambda one: _life(one, searches))
    told = f"{clock(_life(best, searches))} of processor time to build it and search {searches:,} queries"
    if best.exact:
        rivals = [one for one in fitting if not one.exact]
        rival = min(rivals, key=lambda one: _life(one, searches), default=None)
        against = f", against {clock(_life(rival, searches))} with {rival.name}" if rival else ""
        return Advice(best, f"it is exact, and takes {told}{against}", True)
    against = f", against {clock(_life(exact[0], searches))} with exact search" if exact else ""
    return Advice(best, f"the cheapest that reaches recall {task.recall:g} and fits: {told}{against}", True)


def _advise_disk(found: list[Structure], able: list[Structure], task: Task, free: int | None) -> Advice:
    """Advise for vectors that no index holds in memory: exact search reads them from the disk in any case."""
    free = free or 0
    flat = min((one for one in able if one.exact), key=lambda one: one.disk)
    if task.ids_in_memory > free:
        ids = _size(task.ids_in_memory)
        return Advice(flat, f"but the ids alone take {ids} of memory: split the passages into several indexes", False)
    why = (
        f"no index that reaches recall {task.recall:g} fits into {_size(free)}; this one is mapped, and its "
        f"{_size(flat.disk)} are read from the disk once for each 1,024 queries"
    )
    lossy = [one for one in found if fits(one, free)]
    if lossy:
        best = max(lossy, key=lambda one: one.reach)
        why += f". In memory fits {best.name}, recall about {best.reach:g}"
    return Advice(flat, why, False)


def _life(structure: Structure, searches: int) -> float:
    return structure.build_seconds + searches * structure.query_seconds


def _table(found: list[Structure], free: int | None) -> Table:
    header = ("index", "recall", "disk", "memory", "to build", "build time", "query, of many", "query, alone", "fits")
    rows = [
        (
            one.name,
            one.recall,
            _size(one.disk),
            _size(one.memory),
            _size(one.build_memory),
            clock(one.build_seconds) if one.build_seconds >= 1 else "<1s",
            _milliseconds(one.query_seconds),
            _milliseconds(one.alone_seconds),
            "yes" if fits(one, free) else "from disk" if one.exact else "no",
        )
        for one in found
    ]
    return Table(header, rows)


def _gpu_line(options: PlanOptions, task: Task) -> str | None:
    """Say whether vectors kept as float16 fit on the GPUs there are, or on one with ``--gpu_memory``."""
    if options.gpu_memory is not None:
        free = [int(options.gpu_memory * 2**30)]
    elif any(Path("/dev").glob("nvidia[0-9]*")):
        import torch

        free = [torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())]
    else:
        return None
    if not free:
        return "GPU: there is one, but torch sees none"
    from retrieval.exact_torch import fits as fit_gpus

    needed = 2 * task.count * task.dimension
    told = f"GPU: exact search over float16 needs {_size(needed)}, {_size(sum(free))} free on {len(free)} GPU: "
    if fit_gpus(needed, free):
        return told + "it fits (condenser search --device cuda --float16)"
    enough = next(number for number in range(2, 1 << 40) if fit_gpus(needed, [min(free)] * number))
    return told + f"it does not fit, and is streamed block by block; {enough:,} such GPUs would hold it"


def _commands(options: PlanOptions, task: Task, structure: Structure) -> list[str]:
    vectors = "VECTORS" if options.vectors is None else shlex.quote(options.vectors)
    commands = []
    stored = "" if options.vectors is None else read_manifest(options.vectors)["facts"].get("dtype", "float32")
    if options.vectors is None or (structure.exact and stored != structure.store):
        encoder = "ENCODER" if options.encoder is None else shlex.quote(options.encoder)
        vectors = "VECTORS"
        commands.append(
            f"condenser encode --encoder {encoder} --collection COLLECTION --store {structure.store} --output {vectors}"
        )
    commands.append(f"condenser index --vectors {vectors} --factory {shlex.quote(structure.factory)} --output INDEX")
    if structure.setting:
        commands.append(f"condenser plan --tune INDEX --queries QUERIES --recall {task.recall:g} --k {task.k}")
    return commands


def _size(size: float) -> str:
    """Format bytes as ``1.4 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms"
