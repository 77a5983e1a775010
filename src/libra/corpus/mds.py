"""MosaicML's MDS: shards that `index.json` lists.  Shard, little-endian, as its writer lays it out:

samples u32 | offsets u32 [samples + 1] | description | sample 0 | sample 1 ...
sample: size u32 of each column of no fixed size | the columns' bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libra.corpus.errors import CorpusError, IntArray, check_rows
from libra.corpus.huggingface import read_json
from libra.corpus.mds_columns import MdsColumn, Shard, column_lengths, find_column
from libra.corpus.request import Request

INDEX: Final = "index.json"


def read_mds(folder: Path, request: Request) -> Iterator[IntArray]:
    """Chunks, one a shard, of a length column or of the token counts of a token column.

    Where the token column is the only one of no fixed size, counts come from the offsets alone.
    Raises CorpusError for shards that are missing, compressed, or not of the size and number of
    samples that the index says.
    """
    index = read_json(folder / INDEX)
    shards = index.get("shards")
    if index.get("version") != 2 or not isinstance(shards, list):
        raise CorpusError(folder / INDEX, f"has version {index.get('version')!r} of MDS, not 2")
    for number, entry in enumerate(shards):
        try:
            column, path, size, samples = _described(folder, entry, request)
        except (TypeError, KeyError, AttributeError) as error:
            problem = f"is not described as an MDS shard ({error!r})"
            raise CorpusError(folder / INDEX, problem, number, "shard") from error
        shard = _open_shard(path, size, samples)
        yield check_rows(column_lengths(shard, column, request.tokenizer), path)


def _described(
    folder: Path, entry: dict[str, Any], request: Request
) -> tuple[MdsColumn, Path, int, int]:
    if entry["format"] != "mds":
        raise CorpusError(folder / INDEX, f"lists shards of format {entry['format']!r}, not mds")
    path = folder / entry["raw_data"]["basename"]
    if entry.get("zip_data") and not path.exists():
        packed = entry["zip_data"]["basename"]
        raise CorpusError(folder / packed, f"is compressed; decompress it to {path.name} first")
    column = find_column(
        names=entry["column_names"],
        encodings=entry["column_encodings"],
        sizes=entry["column_sizes"],
        request=request,
        file=folder / INDEX,
    )
    return column, path, int(entry["raw_data"]["bytes"]), int(entry["samples"])


def _open_shard(path: Path, size: int, samples: int) -> Shard:
    try:
        there = path.stat().st_size
        if there != size:
            raise CorpusError(path, f"has {there} bytes; the index says {size}: it is cut short")
        if there < 4 * (samples + 2):
            raise CorpusError(path, f"is too small for the {samples} samples of the index")
        data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise CorpusError(path, f"cannot be read: {error.strerror or error}") from error
    head = np.array(data[: 4 * (samples + 2)]).view("<u4").astype(np.int64)
    offsets = head[1:]
    if head[0] != samples:
        raise CorpusError(path, f"holds {head[0]} samples; the index says {samples}")
    if offsets[0] < len(head) * 4 or offsets[-1] != size or (np.diff(offsets) < 0).any():
        raise CorpusError(path, "has sample offsets that don't ascend to its end: it is damaged")
    return Shard(path=path, data=data, offsets=offsets)
