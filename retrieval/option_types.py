"""Kinds of values that options of several verbs take."""

from __future__ import annotations

from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "float16", "bfloat16"]
Split = str
Format = Literal[
    "auto", "beir", "msmarco", "dpr", "tevatron", "pyserini", "pairs", "triples", "scored", "datasets", "ir_datasets"
]
