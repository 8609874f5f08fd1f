"""Commands in a row: each is said, passed over when what it makes is there already, and can be printed to be typed."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from condenser.faults import fault_point
from condenser.files import read_json, write_json
from condenser.manifest import identity, plain
from condenser.options import option_name
from condenser.talk import clock, say
from retrieval.collections import open_collection
from retrieval.verbs import VERBS, load

# Verbs that make a file: no manifest says what it was made from.
_MAKE_FILES = ("bm25", "search", "mine", "rerank", "fuse", "queries score")
_SOURCES = ("index", "encoder", "model", "run", "runs", "cross_encoder", "queries", "writer", "electric")


@dataclass(frozen=True)
class Stage:
    """One command: a verb and its options, among them the file or folder that it makes."""

    verb: str
    options: Any

    @property
    def made(self) -> Path:
        """The file or folder that the command makes."""
        return Path(self.options.output)


def run_stages(stages: Sequence[Stage]) -> None:
    """Run commands in order; those whose result is there already, from the same sources, do nothing."""
    began = time.monotonic()
    for number, stage in enumerate(stages, start=1):
        say(f"[{number}/{len(stages)}] condenser {stage.verb} -> {stage.made}")
        was_there = stage.made.exists()
        _run(stage)
        if not was_there:
            _release_memory()
        fault_point("stage-done")
    say(f"{len(stages)} stages in {clock(time.monotonic() - began)}")


def _run(stage: Stage) -> None:
    """Run a stage, unless it made a file from the same sources before (folders see to that themselves)."""
    if stage.verb not in _MAKE_FILES:
        load(VERBS[stage.verb].function)(stage.options)
        return
    stamp = stage.made.with_suffix(".stamp.json")
    wanted = {"verb": stage.verb, "options": plain(dataclasses.asdict(stage.options))}
    if getattr(stage.options, "collection", None) is not None:
        wanted["collection"] = open_collection(stage.options.collection).fingerprint()
    for name in _SOURCES:
        if sources := getattr(stage.options, name, None):
            wanted[name] = list(map(identity, sources if isinstance(sources, list) else [sources]))
    if stage.made.is_file() and stamp.is_file() and read_json(stamp) == wanted:
        say(f"{stage.made}: up to date")
        return
    result = load(VERBS[stage.verb].function)(stage.options)
    if not isinstance(result, Path):
        say(str(result))
    write_json(stamp, wanted)


def _release_memory() -> None:
    """Give a stage's memory back before the next begins: glibc keeps freed blocks, and the peaks would add up."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def command_line(stage: Stage) -> str:
    """Return the command that runs a stage, with the options that differ from their defaults."""
    positional = VERBS[stage.verb].positional
    words = ["condenser", *stage.verb.split()]
    for field in dataclasses.fields(stage.options):
        value = getattr(stage.options, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value == default:
            continue
        values = value if isinstance(value, list) else [value]
        words += [] if field.name in positional else [f"--{option_name(field.name)}"]
        words += ["null" if one is None else str(one).lower() if isinstance(one, bool) else str(one) for one in values]
    return shlex.join(words)
