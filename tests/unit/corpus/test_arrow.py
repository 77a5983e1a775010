"""Lengths from Parquet, Arrow and Hugging Face datasets on disk."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra.corpus import CorpusError, load_lengths, read_lengths
from libra.extras import MissingPackageError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
LENGTHS = [5, 1, 900, 3, 3, 70, 2]


def table(lengths: list[int] = LENGTHS) -> Any:
    ids = [list(range(n)) for n in lengths]
    return pa.table(
        {
            "id": list(map(str, range(len(lengths)))),
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "large": pa.array(ids, pa.large_list(pa.int16())),
            "pair": pa.array([[1, 2]] * len(lengths), pa.list_(pa.int8(), 2)),
            "length": pa.array(lengths, pa.uint32()),
            "text": [" ".join("a" * n) for n in lengths],
            "flag": [True] * len(lengths),
        }
    )


def write(path: Path, data: Any, kind: str) -> Path:
    """`data` as Parquet, an Arrow file or an Arrow stream, in several batches."""
    if kind == "parquet":
        pq.write_table(data, path, row_group_size=3)
        return path
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "zipped" else None)
    new = pa.ipc.new_file if kind == "zipped" else new
    with new(path, data.schema, options=options) as writer:
        writer.write_table(data, max_chunksize=3)
    return path


kinds = pytest.mark.parametrize("kind", ["parquet", "file", "stream", "zipped"])


@kinds
@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_lengths_are_a_column_or_the_sizes_of_lists(tmp_path: Path, kind: str, chunk: int) -> None:
    path = write(tmp_path / "corpus", table(), kind)
    for column, expected in [
        (None, LENGTHS),
        ("input_ids", LENGTHS),
        ("large", LENGTHS),
        ("pair", [2] * len(LENGTHS)),
    ]:
        chunks = list(read_lengths(path, column=column, chunk=chunk))
        assert all(c.dtype == np.int64 and 1 <= len(c) <= chunk for c in chunks)
        assert np.concatenate(chunks).tolist() == expected
    assert load_lengths(path, tokenizer=str.split).tolist() == LENGTHS


@kinds
@pytest.mark.parametrize(
    ("column", "values", "message", "row"),
    [
        ("length", [5, 4, 3, 2, 0], "row 4: 0 is no length", 4),
        ("length", [5, 4, -3, 2, 1], "row 2: -3 is no length", 2),
        ("length", [5, 4, 3, None, 1], "row 3: 'length' is null", 3),
        ("length", [5.0, 4.0, float("nan")], "row 2: nan .* is no integer", 2),
        ("length", [5.0, 4.0], "row 0: 5.0 .* is no integer", 0),
        ("length", ["5", "4"], "holds text in 'length'; give a tokenizer", None),
        ("length", [True], "holds bool in 'length'", None),
        ("input_ids", [[1], [1], [1], []], "row 3: 0 is no length", 3),
        ("input_ids", [[1], [1], [1], None], "row 3: 'input_ids' is null", 3),
        ("words", [5], "none of the usual columns", None),
    ],
)
def test_rows_that_hold_no_length_are_refused(
    tmp_path: Path, kind: str, column: str, values: list[Any], message: str, row: int | None
) -> None:
    path = write(tmp_path / "corpus", pa.table({column: values}), kind)
    with pytest.raises(CorpusError, match=message) as error:
        load_lengths(path)
    assert (error.value.file, error.value.row) == (str(path), row)


@kinds
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, kind: str) -> None:
    whole = write(tmp_path / "whole", table(), kind).read_bytes()
    suffix = ".parquet" if kind == "parquet" else ".arrow"
    path = tmp_path / f"corpus{suffix}"
    for end in [*range(0, len(whole), 97), len(whole) - 8, len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(CorpusError, match="corpus"):
            load_lengths(path)


@kinds
def test_an_empty_table_holds_no_sample(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "corpus", table([]), kind)
    with pytest.raises(CorpusError, match="holds no sample length"):
        load_lengths(path)


def test_token_values_of_an_arrow_file_are_never_copied(tmp_path: Path) -> None:
    big = pa.table({"input_ids": pa.array([np.zeros(1 << 17, dtype=np.int64)] * 32)})
    path = write(tmp_path / "big.arrow", big, "file")
    del big
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    assert load_lengths(path).tolist() == [1 << 17] * 32
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_parquet_lists_are_decoded_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra.corpus.arrow._BATCH_BYTES", 1 << 22)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 2**31, 1 << 14) for _ in range(400)]  # 52 MB in one row group
    path = tmp_path / "big.parquet"
    pq.write_table(pa.table({"input_ids": pa.array(rows)}), path, compression="none")
    del rows
    pool = pa.default_memory_pool()
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_lengths(path):
        most = max(most, pool.bytes_allocated() - before)
    assert most < 16 << 20


def save_dataset(folder: Path, data: Any, shards: int = 2, **state: Any) -> Path:
    """A folder as `Dataset.save_to_disk` leaves it."""
    folder.mkdir()
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    bounds = np.linspace(0, len(data), shards + 1).astype(int).tolist()
    for name, first, stop in zip(names, bounds[:-1], bounds[1:], strict=True):
        write(folder / name, data.slice(first, stop - first), "stream")
    listed = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", **state}
    (folder / "state.json").write_text(json.dumps(listed))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "ds", table(), shards=3)
    (folder / "data-old.arrow").write_bytes(b"not listed, so no part of it")
    assert load_lengths(folder).tolist() == LENGTHS
    assert load_lengths(folder / "state.json", column="large").tolist() == LENGTHS
    assert load_lengths(folder, format="huggingface").tolist() == LENGTHS


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_rows_of_a_saved_selection_are_followed(tmp_path: Path, key: str) -> None:
    rows = [6, 2, 2, 0]
    folder = save_dataset(tmp_path / "ds", table(), **{key: [{"filename": "indices.arrow"}]})
    indices = pa.table({"indices": pa.array(rows, pa.uint64())})
    write(folder / "indices.arrow", indices, "stream")
    chunks = list(read_lengths(folder, chunk=3))
    assert np.concatenate(chunks).tolist() == [LENGTHS[row] for row in rows]
    wrong = pa.table({"indices": pa.array([0, 7], pa.uint64())})
    write(folder / "indices.arrow", wrong, "stream")
    with pytest.raises(CorpusError, match=r"indices.arrow, row 1: names row 7 of a table of 7"):
        load_lengths(folder)
    (folder / "indices.arrow").unlink()
    with pytest.raises(CorpusError, match="indices"):
        load_lengths(folder)


def test_a_dataset_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "ds", table())
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(CorpusError, match=r"data-00001-of-00002.arrow cannot be read"):
        load_lengths(folder)
    (folder / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(CorpusError, match="lists no data file"):
        load_lengths(folder)
    (folder / "state.json").write_text('{"_data_files": [7]}')
    with pytest.raises(CorpusError, match="no list of file names"):
        load_lengths(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(CorpusError, match="is no JSON"):
        load_lengths(folder)


def test_of_a_dictionary_of_datasets_one_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    save_dataset(tmp_path / "train", table())
    with pytest.raises(CorpusError, match="holds the splits train, test; name one, as in"):
        load_lengths(tmp_path)
    assert load_lengths(tmp_path / "train").tolist() == LENGTHS


@pytest.mark.parametrize("name", ["corpus.parquet", "corpus.arrow"])
def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"PAR1")
    for module in ("pyarrow", "pyarrow.parquet", "pyarrow.ipc"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=r"pip install 'libra-attention\[corpus\]'"):
        load_lengths(tmp_path / name)
