"""Queries and judgements by Pyserini's names for them, as ``pyserini:dl19-passage`` where a file could stand."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from condenser.errors import UserError, first_line, nearest
from condenser.files import existing_file
from eval.runs import Qrels, load_qrels
from retrieval.lucene import INSTALL, start_java
from retrieval.readers import one_line, read_queries
from retrieval.records import Query

PREFIX = "pyserini:"

_NAMES = "search/_base.py"  # in Pyserini's package: what it calls topics and judgements
_CACHE = "~/.cache/anserini/topics-and-qrels"


def find_queries(place: str | Path) -> list[Query]:
    """Read queries from a file, or Pyserini's topics by ``pyserini:NAME``: the titles, in the order of their ids.

    Raises:
        UserError: what `read_queries` raises; no Java or no Pyserini, a name that it does not know, topics that are
            neither in its cache nor to be downloaded, or that have no titles.
    """
    if not str(place).startswith(PREFIX):
        return list(read_queries(existing_file(place)))
    with _named(str(place), "topics") as (pyserini, entry):
        topics = pyserini["JTopicReader"].getTopicsWithStringIds(entry)
    if topics is None:
        raise _absent(str(place), entry)
    titles = {name: topics.get(name).get("title") for name in topics.keySet().toArray()}
    if None in titles.values():
        raise UserError("these topics have no titles, which would be the queries", str(place))
    return [Query(name, one_line(titles[name])) for name in sorted(titles, key=lambda name: (len(name), name))]


def find_qrels(place: str | Path) -> Qrels:
    """Read judgements from a file, or Pyserini's by ``pyserini:NAME``.

    Raises:
        UserError: what `load_qrels` raises; no Java or no Pyserini, a name that it does not know, or judgements that
            are neither in its cache nor to be downloaded.
    """
    if not str(place).startswith(PREFIX):
        return load_qrels(place)
    with _named(str(place), "qrels") as (pyserini, entry):
        file = pyserini["JRelevanceJudgments"].getQrelsPath(pyserini["JPath"].of(entry.path)).toString()
    return load_qrels(file)


@contextmanager
def _named(place: str, kind: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield Pyserini's names and what it has under this one; what Java throws becomes one line."""
    autoclass = start_java(place)
    import pyserini
    from jnius import JavaException

    try:
        # One file alone: the package around it asks for onnxruntime, spaCy and more.
        names = runpy.run_path(str(Path(pyserini.__file__).parent / _NAMES))
    except (ImportError, OSError) as error:
        raise UserError(f"{place}: this Pyserini does not load ({first_line(error)})", hint=INSTALL) from None
    known, name = names[f"{kind}_mapping"], place.removeprefix(PREFIX)
    if name not in known:
        close = nearest(name, known)
        raise UserError(f"Pyserini knows no {kind} {name!r}", hint=f"did you mean {PREFIX}{close}?" if close else None)
    system = autoclass("java.lang.System")
    heard = system.err
    system.setErr(autoclass("java.io.PrintStream")(autoclass("java.io.OutputStream").nullOutputStream()))
    try:
        yield names, known[name]
    except JavaException:
        raise _absent(place, known[name]) from None
    finally:
        system.setErr(heard)


def _absent(place: str, entry: Any) -> UserError:
    return UserError(
        f"{place} is not in Pyserini's cache and cannot be downloaded", hint=f"put {entry.path} into {_CACHE}"
    )
