"""A collection's passages as an index for exact search, encoded on the way there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from condenser.hub import local_folder
from condenser.talk import say
from retrieval.option_types import Device, Precision
from retrieval.options import EncodeOptions

if TYPE_CHECKING:
    from retrieval.index import Index


def index_of_corpus(
    collection: str,
    encoder: str,
    work: Path,
    *,
    device: Device = "auto",
    dtype: Precision = "auto",
    batch_tokens: int | None = None,
    skip_bad: bool = False,
) -> Index:
    """Encode a corpus into ``work``/vectors, where a killed run goes on, and open it for exact search.

    Args:
        collection: whose passages, as `open_collection` takes it.
        encoder: folder or hub name, of queries and passages.
        work: where the vectors stay, for the next run with this encoder.
        device: where to compute.
        dtype: in which type, see `retrieval.precision.set_precision`; queries stay in float32.
        batch_tokens: tokens per batch; default: what suits the device.
        skip_bad: pass over lines that cannot be read.

    Returns:
        The index, which takes queries as texts.

    Raises:
        UserError: what `retrieval.encode.encode` and `Encoder.load` raise.
    """
    # Imported here, because mistakes in options should show before torch is loaded.
    from retrieval.encode import encode
    from retrieval.encoder import Encoder
    from retrieval.index import Index

    say(f"vectors of the passages go to {work}, and stay there")
    vectors = encode(
        EncodeOptions(
            encoder=encoder,
            collection=collection,
            output=str(work / "vectors"),
            device=device,
            dtype=dtype,
            batch_tokens=batch_tokens,
            skip_bad=skip_bad,
        )
    )
    opened = Encoder.load(local_folder(encoder), device=device)
    return Index.load(vectors, encoder=opened, device=opened.device.type)
