"""What importing costs: planning never needs torch, and the package itself next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "libra"
# What moves tensors or trains; all the rest plans, and runs where torch is not installed.
RUNTIME = ("runtime", "baselines", "bench", "integrations", "cli")


def planning_files() -> list[Path]:
    return sorted(
        file
        for file in SOURCE.rglob("*.py")
        if not str(file.relative_to(SOURCE)).startswith(RUNTIME)
    )


def module_name(file: Path) -> str:
    parts = ("libra", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(program: str) -> str:
    """What `program` prints in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_planning_half_does_not_import_torch() -> None:
    names = [module_name(file) for file in planning_files()]
    assert {"libra", "libra.plan"} <= set(names)
    guilty = run_python(
        f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""
    )
    assert guilty == ""


def test_no_planning_file_imports_torch_even_inside_a_function() -> None:
    guilty = []
    for file in planning_files():
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == "torch" for name in names):
                guilty.append(f"{file.relative_to(SOURCE)}:{node.lineno}")
    assert guilty == []


def test_placing_packs_and_planning_a_pool_need_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import libra
libra.place_packs([9, 1, 4, 4], 2)
config = libra.PoolConfig(pool_size=2, block_size=8, head_shards=1, chunks=1)
heads = libra.HeadShape(q=2, kv=1, dim=8)
plan = libra.plan_pool([[0, 32], [0, 8, 16, 32]], cp_size=1, config=config, heads=heads)
print(plan.load.sum())
"""
    pairs = sum(length * (length + 1) // 2 for length in (32, 8, 8, 16))
    assert run_python(program) == str(2 * pairs)


def test_importing_libra_takes_less_than_three_tenths_of_a_second() -> None:
    program = """
import time
begin = time.perf_counter()
import libra
print(time.perf_counter() - begin)
"""
    assert min(float(run_python(program)) for _ in range(5)) < 0.3


@pytest.mark.parametrize("slow", ["numba", "torch", "tyro", "rich"])
def test_importing_libra_does_not_import_what_is_slow(slow: str) -> None:
    assert run_python(f"import sys, libra; print({slow!r} in sys.modules)") == "False"
