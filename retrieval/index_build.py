"""The verb ``index``: a folder of vectors to an index over them."""

from __future__ import annotations

from pathlib import Path

from condenser.artifacts import Workspace, refuse_overwriting, result_config
from condenser.errors import UserError
from condenser.manifest import fingerprint
from condenser.talk import say
from retrieval.exact import longest
from retrieval.faiss_build import Recipe, fill_index, new_index
from retrieval.faiss_index import write_index
from retrieval.index_folder import FLAT, METRIC, link_part, passage_vectors, source_of
from retrieval.options import IndexOptions


def build_index(options: IndexOptions) -> Path:
    """Build an index over a folder of vectors.

    Flat is exact and needs no FAISS: the folder holds the vectors themselves (hard links, where the disk allows)
    and is memory-mapped when searched. Other factory strings are built by FAISS for inner product and trained on a
    seeded sample.

    Returns:
        The finished folder.

    Raises:
        UserError: vectors of queries or none at all, an id that stands twice, a factory string that FAISS does not
            know or that does not suit dimension or count, more memory needed than there is.
    """
    vectors = passage_vectors(options.vectors)
    refuse_overwriting(options.output, vectors.folder)
    flat = options.factory == FLAT
    if flat and options.ef_construction is not None:
        raise UserError("--ef_construction does not apply to a Flat index")
    if options.float16 and options.device == "cpu":
        raise UserError("--float16 is for GPUs, --device is cpu", hint="leave it out, or give --device cuda")
    recipe = Recipe.of(vars(options), options.device)
    faiss_index = None if flat else new_index(recipe, vectors.facts["dimension"], len(vectors.ids), vectors.folder)
    if options.training_size is not None and (faiss_index is None or faiss_index.is_trained):
        raise UserError(f"--training_size does not apply to a {options.factory} index, which is not trained")
    with Workspace(
        options.output, "index", config=result_config(options), inputs={"vectors_files": fingerprint(vectors.folder)}
    ) as workspace:
        if workspace.done:
            return workspace.output
        parts = [
            link_part(vectors, number, workspace.path, number, with_vectors=flat)
            for number in range(len(vectors.shards))
        ]
        if not flat:
            filled = fill_index(faiss_index, recipe, len(vectors.ids), vectors.blocks, vectors.folder)
            write_index(filled, workspace.path / "index-00000.faiss")
        facts = vectors.facts | {
            "factory": options.factory,
            "metric": METRIC,
            "vectors": str(vectors.folder),
            "sources": [source_of(vectors)],
            "parts": parts,
            "faiss": None if flat else "index-00000.faiss",
            "generation": 0,
            "max_norm": longest(vectors.blocks()),
            "seed": options.seed,
            "training_size": options.training_size,
            "ef_construction": options.ef_construction,
            "float16": options.float16,
        }
        output = workspace.commit(facts)
    say(f"indexed {len(vectors.ids):,} vectors of {facts['dimension']} numbers, {options.factory}, {METRIC}")
    return output
