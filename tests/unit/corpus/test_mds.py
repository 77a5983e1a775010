"""Lengths from MDS, written here as its own writer lays it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.corpus import CorpusError, load_lengths, read_lengths

# Around the sizes at which the shape of an array takes one more byte.
LENGTHS = [1, 5, 255, 256, 300, 65535, 65536, 3]
FIXED = {"int": 8, "uint32": 4, "int64": 8}
Row = dict[str, bytes]


def array_bytes(length: int, dtype: str, *, typed: bool = False, axes: int = 1) -> bytes:
    """An array as MDS keeps it: its type where that varies, its axes, its shape, its values."""
    codes = {"uint8": 8, "uint16": 16, "int32": 33, "int64": 65}
    width = 1 if length < 256 else 2 if length < 65536 else 4
    head = bytes([codes[dtype]]) if typed else b""
    head += bytes([axes << 2 | (width.bit_length() - 1)])
    shape = np.array([length, 1][:axes], dtype=f"<u{width}")
    return head + shape.tobytes() + bytes(length * np.dtype(dtype).itemsize)


def write(folder: Path, encodings: dict[str, str], rows: list[Row], per_shard: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    names = sorted(encodings)
    sizes = [FIXED.get(encodings[name]) for name in names]
    shards = []
    for number, first in enumerate(range(0, len(rows), per_shard)):
        samples = []
        for row in rows[first : first + per_shard]:
            open_sizes = [len(row[n]) for n, size in zip(names, sizes, strict=True) if not size]
            samples.append(
                np.array(open_sizes, "<u4").tobytes() + b"".join(row[name] for name in names)
            )
        about = b'{"any": "description"}'
        offsets = np.cumsum([0, *map(len, samples)]) + 4 * (len(samples) + 2) + len(about)
        content = b"".join(
            [np.uint32(len(samples)).tobytes(), offsets.astype("<u4").tobytes(), about, *samples]
        )
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(content)
        shards.append(
            {
                "column_encodings": [encodings[name] for name in names],
                "column_names": names,
                "column_sizes": sizes,
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def arrays(dtype: str = "int32", **how: Any) -> list[Row]:
    return [{"tokens": array_bytes(n, dtype, **how)} for n in LENGTHS]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_tokens_of_arrays_are_counted_from_the_offsets(tmp_path: Path, dtype: str) -> None:
    folder = write(tmp_path / "mds", {"tokens": f"ndarray:{dtype}"}, arrays(dtype))
    assert load_lengths(folder).tolist() == LENGTHS
    chunks = list(read_lengths(folder / "index.json", chunk=2))
    assert max(map(len, chunks)) == 2
    assert np.concatenate(chunks).tolist() == LENGTHS


def test_columns_beside_the_tokens_change_nothing(tmp_path: Path) -> None:
    rows = [
        row | {"a": bytes(i), "length": np.uint32(i + 1).tobytes(), "z": b"z" * (i % 3)}
        for i, row in enumerate(arrays())
    ]
    encodings = {"tokens": "ndarray:int32", "a": "bytes", "length": "uint32", "z": "str"}
    folder = write(tmp_path / "mds", encodings, rows)
    assert load_lengths(folder).tolist() == list(range(1, len(rows) + 1))
    assert load_lengths(folder, column="tokens").tolist() == LENGTHS


def test_arrays_of_varying_type_say_it_themselves(tmp_path: Path) -> None:
    rows = [
        {"tokens": array_bytes(n, ["uint16", "int64"][i % 2], typed=True), "id": bytes(8)}
        for i, n in enumerate(LENGTHS)
    ]
    folder = write(tmp_path / "mds", {"tokens": "ndarray", "id": "int"}, rows)
    assert load_lengths(folder).tolist() == LENGTHS


def test_bytes_need_the_type_of_their_tokens(tmp_path: Path) -> None:
    rows = [{"tokens": bytes(8 * n), "name": b"x"} for n in LENGTHS]
    folder = write(tmp_path / "mds", {"tokens": "bytes", "name": "str"}, rows)
    with pytest.raises(CorpusError, match="say the type of the tokens, as in column='tokens:int64"):
        load_lengths(folder)
    assert load_lengths(folder, column="tokens:int64").tolist() == LENGTHS
    assert load_lengths(folder, column="tokens:uint16").tolist() == [4 * n for n in LENGTHS]
    with pytest.raises(CorpusError, match="tokens of type 'int7'"):
        load_lengths(folder, column="tokens:int7")


def test_lengths_and_texts_are_read_too(tmp_path: Path) -> None:
    rows = [
        {
            "length": np.int64(n).tobytes(),
            "digits": str(n).encode(),
            "text": "é ".encode() * (n % 9 + 1),
            "same": bytes(64),
        }
        for n in LENGTHS
    ]
    encodings = {"length": "int", "digits": "str_int", "text": "str", "same": "ndarray:int32:16"}
    FIXED["ndarray:int32:16"] = 64
    folder = write(tmp_path / "mds", encodings, rows)
    assert load_lengths(folder).tolist() == LENGTHS
    assert load_lengths(folder, column="digits").tolist() == LENGTHS
    assert load_lengths(folder, column="same").tolist() == [16] * len(LENGTHS)
    assert load_lengths(folder, tokenizer=str.split).tolist() == [n % 9 + 1 for n in LENGTHS]
    with pytest.raises(CorpusError, match="holds text in 'text'; give a tokenizer"):
        load_lengths(folder, column="text")


def test_a_folder_of_no_shards_holds_no_sample(tmp_path: Path) -> None:
    folder = write(tmp_path / "mds", {"tokens": "ndarray:int32"}, [])
    with pytest.raises(CorpusError, match="holds no sample length"):
        load_lengths(folder)


@pytest.mark.parametrize(
    ("encodings", "row", "message"),
    [
        ({"length": "int"}, {"length": np.int64(0).tobytes()}, "row 1: 0 is no length"),
        ({"length": "int"}, {"length": np.int64(-3).tobytes()}, "row 1: -3 is no length"),
        ({"length": "str_int"}, {"length": b"nan"}, "holds no str_int in 'length'"),
        ({"length": "float32"}, {"length": bytes(4)}, "holds float32 in 'length'"),
        ({"length": "pkl"}, {"length": b"x"}, "holds pkl in 'length'; it must hold"),
        (
            {"tokens": "ndarray:int32"},
            {"tokens": array_bytes(3, "int32")[:-1]},
            "row 1: 'tokens' has 11 bytes, no whole number of 4-byte tokens",
        ),
        ({"words": "int"}, {"words": bytes(8)}, "none of the usual columns"),
    ],
)
def test_samples_that_hold_no_length_are_refused(
    tmp_path: Path, encodings: dict[str, str], row: Row, message: str
) -> None:
    good = {"length": np.int64(5).tobytes(), "tokens": array_bytes(5, "int32"), "words": bytes(8)}
    if encodings.get("length") in ("str_int", "pkl", "float32"):
        good["length"] = b"5555"
    (name,) = encodings
    folder = write(tmp_path / "mds", encodings, [{name: good[name]}, row])
    with pytest.raises(CorpusError, match=message):
        load_lengths(folder)


def test_arrays_of_two_axes_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "mds", {"tokens": "ndarray:int32"}, arrays(axes=2))
    with pytest.raises(CorpusError, match="holds arrays of 2 axes"):
        load_lengths(folder)


def test_shards_that_are_not_as_the_index_says_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "mds", {"tokens": "ndarray:int32"}, arrays())
    shard = folder / "shard.00001.mds"
    whole = shard.read_bytes()

    def refuse(message: str, content: bytes) -> None:
        shard.write_bytes(content)
        with pytest.raises(CorpusError, match=message):
            load_lengths(folder)

    refuse(r"shard.00001.mds has \d+ bytes; the index says \d+: it is cut short", whole[:-1])
    refuse("holds 9 samples; the index says 3", np.uint32(9).tobytes() + whole[4:])
    refuse("offsets that don't ascend", whole[:8] + bytes(4) + whole[12:])
    shard.unlink()
    with pytest.raises(CorpusError, match=r"shard.00001.mds cannot be read"):
        load_lengths(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "jsonl"}, "lists shards of format 'jsonl', not mds"),
        ({"column_sizes": [4]}, "is damaged|cut short"),
        ({"raw_data": None}, "shard 0: is not described as an MDS shard"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path / "mds", {"tokens": "ndarray:int32"}, arrays())
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= change
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(CorpusError, match=message):
        load_lengths(folder)


def test_compressed_shards_and_other_versions_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "mds", {"tokens": "ndarray:int32"}, arrays())
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["zip_data"] = {"basename": "shard.00001.mds.zstd", "bytes": 1}
    (folder / "index.json").write_text(json.dumps(index))
    assert load_lengths(folder).tolist() == LENGTHS  # decompressed already
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(CorpusError, match=r"shard.00001.mds.zstd is compressed; decompress it"):
        load_lengths(folder)
    (folder / "index.json").write_text('{"version": 1}')
    with pytest.raises(CorpusError, match="has version 1 of MDS, not 2"):
        load_lengths(folder)
