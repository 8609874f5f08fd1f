"""Lucene's own BM25 through Pyserini's jar: the engine that published baselines were made with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from condenser.errors import UserError, first_line
from condenser.talk import say, track
from retrieval.records import Hit, Passage

INSTALL = "pip install --no-deps pyserini==0.22.1 pyjnius; Java 17 or newer, such as openjdk-17-jre-headless"
_ERRORS_ONLY = "org.apache.logging.log4j.simple.SimpleLoggerContextFactory"


class LuceneIndex:
    """A folder that Lucene's indexer wrote, with Anserini's English analyzer: Porter stemmer, Lucene's stop words.

    Anserini rounds scores to four digits and lowers those that tie by a millionth each, so that its order of ids,
    which is ascending, holds in any reader of the run.

    Args:
        folder: where Lucene's files are.
        facts: how it was made and is searched: ``k1``, ``b``, ``fields``.

    Raises:
        UserError: no Java or no Pyserini, or a folder that Lucene does not open.
    """

    def __init__(self, folder: str | Path, facts: dict[str, Any]) -> None:
        self.facts = facts
        autoclass = start_java("--engine lucene")
        from jnius import JavaException

        try:
            self._searcher = autoclass("io.anserini.search.SimpleSearcher")(str(folder))
        except JavaException as error:
            raise UserError(f"is no index that Lucene opens ({first_line(error)})", folder, "build it anew") from None
        self._searcher.set_bm25(facts["k1"], facts["b"])

    def __len__(self) -> int:
        return int(self._searcher.get_total_num_docs())

    def search(self, queries: Iterable[str], k: int) -> list[list[Hit]]:
        """Return each query's k best passages; a passage that shares no word with the query is no hit."""
        return [[Hit(hit.docid, hit.score) for hit in self._searcher.search(text, k)] for text in queries]


def write_lucene(passages: Iterable[Passage], folder: str | Path, searched: Callable[[Passage], str]) -> None:
    """Index passages with Lucene, in their order, into a folder.

    Args:
        passages: what is searched; ids must be unique.
        folder: where Lucene's files go; it is made if need be.
        searched: what of a passage is searched.

    Raises:
        UserError: no Java or no Pyserini.
    """
    autoclass = start_java("--engine lucene")
    indexer = autoclass("io.anserini.index.SimpleIndexer")(str(folder))
    document = autoclass("io.anserini.collection.JsonCollection$Document")
    empty = 0
    for passage in track(passages, "lucene index", unit="passages"):
        text = searched(passage)
        if text.strip():
            indexer.addJsonDocument(document.fromFields(passage.id, text))
        else:
            empty += 1  # Anserini takes none of these
    indexer.close()
    (Path(folder) / "write.lock").unlink(missing_ok=True)
    if empty:
        say(f"lucene: {empty:,} passages without text were passed over")


def start_java(what: str) -> Callable[[str], Any]:
    """Start the virtual machine once; return what finds a class by name. What Java prints goes to stderr.

    Args:
        what: how messages call that which needs it.

    Raises:
        UserError: no Java, one that does not start, or no Pyserini.
    """
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise UserError(f"{what} needs Java, and there is none here", hint=INSTALL)
    try:
        import jnius_config

        if not jnius_config.vm_running:
            # Ctrl-C and SIGTERM stay Python's; what is logged are errors.
            jnius_config.add_options("-Xrs", f"-Dlog4j2.loggerContextFactory={_ERRORS_ONLY}")
        from pyserini.pyclass import autoclass
    except ImportError as error:
        raise UserError(f"{what} needs {error.name}, which is not installed", hint=INSTALL) from None
    except (RuntimeError, OSError) as error:
        raise UserError(f"{what}: Java does not start: {first_line(error).strip()}", hint=INSTALL) from None
    system = autoclass("java.lang.System")
    system.setOut(system.err)
    found: Callable[[str], Any] = autoclass
    return found
