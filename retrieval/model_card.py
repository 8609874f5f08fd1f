"""The model card of a fine-tuned encoder or cross-encoder: what it was made of, how it did on dev, how to load it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from condenser.artifacts import result_config
from condenser.files import atomic_write, read_records
from retrieval.encoder_files import PASSAGE_TOWER, QUERY_TOWER, EncoderConfig
from retrieval.options import FinetuneOptions

if TYPE_CHECKING:
    from retrieval.cross_encoder import PairConfig

_FRONT_MATTER = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [condenser-ir, dense-retrieval]
---"""
_CROSS_FRONT_MATTER = """---
library_name: sentence-transformers
pipeline_tag: text-ranking
tags: [condenser-ir, cross-encoder]
---"""
_POOLED = {
    "cls": "states[:, 0]",
    "mean": "(states * mask).sum(dim=1) / mask.sum(dim=1)",
    "last": "states[torch.arange(len(states)), mask.sum(dim=1).long().squeeze(1) - 1]",
}


_CROSS_LOADING = """\
`condenser rerank --model FOLDER` puts the hits of a run into its order. With sentence-transformers:

    from sentence_transformers import CrossEncoder
    scores = CrossEncoder("FOLDER").predict([("a question", "a passage")])

With transformers alone:

    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("FOLDER")
    model = AutoModelForSequenceClassification.from_pretrained("FOLDER").eval()
    tokens = tokenizer(["a question"], ["a passage"], truncation=True, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**tokens).logits[:, 0]"""


class DevScores(NamedTuple):
    """Dev figures by name, and the step after which they were taken."""

    step: int
    scores: dict[str, float]


def write_model_card(
    folder: Path, options: FinetuneOptions, collections: Sequence[str], config: EncoderConfig, dimension: int
) -> None:
    """Write ``README.md`` into an encoder's folder, beside the ``log.jsonl`` that it takes the dev figures from.

    Args:
        folder: the encoder's folder.
        options: of the run; where things lie does not show.
        collections: the names of what it was trained on.
        config: of the encoder.
        dimension: numbers in a vector.
    """
    parts = [
        f"# Dense retriever trained on {', '.join(collections)}",
        _start(options, config, dimension),
        _training(options, collections),
        _dev(options, best_scores(folder / "log.jsonl")),
        _loading(config),
    ]
    _write(folder, _FRONT_MATTER, parts)


def write_cross_encoder_card(
    folder: Path, options: FinetuneOptions, collections: Sequence[str], config: PairConfig
) -> None:
    """Write ``README.md`` into a cross-encoder's folder; arguments as for `write_model_card`."""
    query = config.query_max_length or config.max_length
    parts = [
        f"# Cross-encoder trained on {', '.join(collections)}",
        "Reads query and passage together and gives one number, higher for better passages; started from "
        f"`{_name(options.encoder)}`. Queries of at most {query} tokens, pairs of at most {config.max_length}, "
        f"passages as `{config.passage_template}`.",
        _training(options, collections),
        _dev(options, best_scores(folder / "log.jsonl")),
        _CROSS_LOADING,
    ]
    _write(folder, _CROSS_FRONT_MATTER, parts)


def _write(folder: Path, front_matter: str, parts: Sequence[str]) -> None:
    last = (
        "`log.jsonl` holds the training log, `manifest.json` every option, the versions and the fingerprints of what "
        "was read."
    )
    with atomic_write(folder / "README.md") as stream:
        stream.write(f"{front_matter}\n" + "\n\n".join([*parts, last]) + "\n")


def best_scores(log: Path) -> DevScores | None:
    """Return the dev figures whose weights were kept: the first ones with the highest first score; None without any."""
    best: DevScores | None = None
    for _, line in read_records(log):
        if "loss" in line:
            continue
        scores = {name: value for name, value in line.items() if name != "step"}
        if best is None or _first(scores) > _first(best.scores):
            best = DevScores(line["step"], scores)
    return best


def _first(scores: dict[str, float]) -> float:
    return next(iter(scores.values()))


def _start(options: FinetuneOptions, config: EncoderConfig, dimension: int) -> str:
    towers = "a tower for queries and one for passages" if config.untied else "one tower for queries and passages"
    projection = f", a projection to {config.projection} numbers" if config.projection else ""
    return (
        f"Bi-encoder, {towers}, started from `{_name(options.encoder)}`: {config.pooling} pooling{projection}, vectors "
        f"of {dimension} numbers, {config.similarity} similarity; queries of at most {config.query_max_length} tokens, "
        f"passages of at most {config.passage_max_length}, as `{config.passage_template}`."
    )


def _training(options: FinetuneOptions, collections: Sequence[str]) -> str:
    named = {"encoder": _name(options.encoder), "collection": list(collections)}
    words = ["condenser", "finetune"]
    for field in dataclasses.fields(options):
        value = named.get(field.name)
        if value is None and field.name in result_config(options):
            value = getattr(options, field.name)
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if value == default:
                continue
        if value is not None:
            words += [f"--{field.name}", *(_word(one) for one in (value if isinstance(value, list) else [value]))]
    return (
        f"Trained on split `{options.split}` of {', '.join(collections)} with the {options.loss} loss, "
        f"{options.batch_size:,} queries a step and {options.negatives:,} hard negatives a query, at a learning rate "
        f"of {options.learning_rate:g}; seed {options.seed}. The command, but for the place of its output:\n\n"
        f"    {' '.join(words)}"
    )


def _dev(options: FinetuneOptions, best: DevScores | None) -> str:
    if best is None:
        return "No dev figures were taken: the weights are those of the last step."
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in best.scores.items())
    pool = ""
    if any(name.startswith("dev_pool") for name in best.scores):
        pool = f" They were taken over a pool of {options.eval_pool:,} passages, so they are higher than test figures."
    if options.cross_encoder:
        run = "BM25" if options.dev_run is None else f"`{Path(options.dev_run).name}`"
        pool = f" They are of the first {options.dev_depth:,} hits of {run}, reranked."
    return (
        f"Figures on split `{options.dev_split}` after step {best.step:,}, whose weights these are.{pool}\n\n"
        f"| figure | value |\n|---|---|\n{rows}"
    )


def _loading(config: EncoderConfig) -> str:
    loading = """\
With sentence-transformers:

    from sentence_transformers import SentenceTransformer
    model = SentenceTransformer("FOLDER")
    scores = model.encode_query(["a question"]) @ model.encode_document(["a passage"]).T
"""
    if config.projection:
        return f"{loading}\nAutoModel opens the transformer, without the projection behind it."
    folder = f"FOLDER/{PASSAGE_TOWER}" if config.untied else "FOLDER"
    other = f"; queries go through `FOLDER/{QUERY_TOWER}`" if config.untied else ""
    prompts = f", after {config.passage_prompt!r}" if config.passage_prompt else ""
    normalized = "\n    vectors = torch.nn.functional.normalize(vectors, dim=1)" if config.normalize else ""
    return f"""{loading}
With transformers alone, passages{prompts}{other}:

    import torch
    from transformers import AutoModel, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("{folder}")
    model = AutoModel.from_pretrained("{folder}", add_pooling_layer=False).eval()
    texts = [{config.passage_prompt + "a passage"!r}]
    tokens = tokenizer(texts, truncation=True, max_length={config.passage_max_length}, padding=True, \
return_tensors="pt")
    with torch.no_grad():
        states, mask = model(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
    vectors = {_POOLED[config.pooling]}{normalized}"""


def _name(encoder: str) -> str:
    """Return what an encoder is called: the last part of a folder's path, or the whole hub name."""
    return Path(encoder).resolve().name if Path(encoder).is_dir() else encoder


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))
