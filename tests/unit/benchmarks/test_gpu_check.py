"""The GPU check: refused and skipped as it says, and the same checks on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.correctness import LIMITS, cases, check_kernel
from benchmarks.gpu.stopwatch import Stopwatch
from benchmarks.gpu_check import SEGMENTS, Args, main, problems
from libra.cost.kernel_table import read_kernel_table
from libra.runtime.kernels.cpu import CpuKernel, Task
from libra.runtime.kernels.interface import Buffers, Grads, Prepared

CPU = torch.device("cpu")


class Forgetful(CpuKernel):
    """A kernel whose dK lacks what it should."""

    def backward(
        self, prepared: Prepared[Task], buffers: Buffers, grads: Grads, scale: float
    ) -> None:
        CpuKernel.backward(self, prepared, buffers, grads, scale)
        grads.dk.mul_(0.9)


class Overflowing(CpuKernel):
    """A kernel that writes a row too many."""

    def forward(self, prepared: Prepared[Task], buffers: Buffers, scale: float) -> None:
        CpuKernel.forward(self, prepared, buffers, scale)
        buffers.out[-1] = 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_ends_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("skipped: no CUDA device") and said.count("\n") == 1


def test_settings_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match=r"json or \.toml"):
        Args(table=Path("kernels.txt"))
    with pytest.raises(ValueError, match="--worlds"):
        Args(worlds=(1,))


def test_a_right_kernel_is_right_on_every_case() -> None:
    for case in cases(small=True):
        errors = check_kernel(CpuKernel(), case, CPU, torch.float32)
        assert max(errors.values()) < LIMITS[torch.float32], case.name


@pytest.mark.parametrize("kernel, wrong", [(Forgetful(), "dk"), (Overflowing(), "out")])
def test_a_wrong_kernel_is_found_out(kernel: CpuKernel, wrong: str) -> None:
    for case in cases(small=True):
        errors = check_kernel(kernel, case, CPU, torch.float32)
        assert [name for name, error in errors.items() if error > 1e-4] == [wrong], case.name


def test_a_stopwatch_counts_nested_parts_once() -> None:
    clock = Stopwatch()
    inner = clock.wrap("inner", lambda: sum(range(100_000)))
    outer = clock.wrap("outer", lambda: [inner() for _ in range(3)])
    outer()
    assert clock.calls == {"inner": 3, "outer": 1}
    assert 0 < clock.own["outer"] < clock.own["inner"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_on_a_cpu_it_checks_everything_and_writes_a_table_that_the_simulator_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, table = tmp_path / "check.json", tmp_path / "kernels.json"
    command = f"--device cpu --repeats 1 --json {figures} --table {table}"
    assert main(command.split()) == 0, capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert found["wrong"] == [] == problems(found)
    assert {row["kernel"] for row in found["kernels"]} == {"cpu"}
    assert [ranks["world"] for ranks in found["ranks"]] == [2]
    assert all(row["moved_bytes"] > 0 for row in found["ranks"][0]["outputs"])
    assert [row["segments"] for row in found["overhead"]] == list(SEGMENTS)
    assert read_kernel_table(table).source.startswith("libra calibrate: CPU")
    said = capsys.readouterr().out
    for word in ("kernel cpu", "2 ranks", "planner", "layer of 512 segments", "blocks of 512"):
        assert word in said


def test_what_is_wrong_is_told_in_words() -> None:
    found = {
        "device": "cpu",
        "kernels": [
            {"kernel": "a", "dtype": "d", "case": "c", "raised": "RuntimeError: no"},
            {"kernel": "b", "dtype": "d", "case": "c", "errors": {"out": 1.0}, "limit": 0.1},
            {"kernel": "b", "dtype": "d", "case": "n", "errors": {"out": float("nan")}, "limit": 1},
        ],
        "ranks": [
            {"world": 2, "failed": "exit codes [1, 0]", "logs": ["no such thing"]},
            {"world": 4, "outputs": [{"chunks": 4, "errors": {"out": 0.5}}]},
        ],
    }
    told = problems(found)
    assert len(told) == 5
    assert "RuntimeError: no" in told[0] and "no such thing" in told[3] and "M 4" in told[4]
