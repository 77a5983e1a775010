"""Kernel tables in files: they come back as they were, and errors name the key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from libra.cost import KernelTable, read_kernel_table
from libra.cost.table_file import write_kernel_table
from tests.unit.cost.small_table import table


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize("rate", [None, 3.5e14])
def test_a_table_comes_back_from_its_file_as_it_was(
    tmp_path: Path, suffix: str, rate: float | None
) -> None:
    made = table(source='a "quoted" ünit', matmul_flops=rate, call_seconds=1e-5)
    file = tmp_path / f"kernels{suffix}"
    write_kernel_table(made, file)
    back = read_kernel_table(file)
    for field in dataclasses.fields(KernelTable):
        assert np.array_equal(getattr(back, field.name), getattr(made, field.name)), field.name
    again = tmp_path / f"again{suffix}"
    write_kernel_table(back, again)
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"foward": []}, r"unknown key 'foward' \(did you mean 'forward'\?\) in the kernel table"),
        ({"version": 2}, "version 2; this libra reads version 1"),
        ({"format": "else"}, "not a kernel table"),
        ({"heads": None}, "heads holds object; it must hold numbers"),
        ({"q_len": [1, "x"]}, "must hold numbers"),
        ({"forward": [[1], [1, 2]]}, "forward cannot be read as numbers"),
        ({"peak_flops": "fast"}, "peak_flops is 'fast'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_key(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    file = tmp_path / "kernels.json"
    write_kernel_table(table(), file)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as error:
        read_kernel_table(file)
    assert "kernels.json" in str(error.value)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    for name, text, message in (
        ("none.json", None, "cannot read"),
        ("broken.json", "{", "cannot read"),
        ("broken.toml", "[", "cannot read"),
        ("list.json", "[]", "not a kernel table"),
        ("table.npy", "", "a .json or .toml file"),
        ("less.json", '{"format": "libra-kernel-table", "version": 1}', "lacks source, peak"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_kernel_table(tmp_path / name)
