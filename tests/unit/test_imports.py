"""Imports: packages in one order, no circles, no torch in planning, and little cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "libra"

ORDER = (
    "config",
    "extras",
    "data",
    "corpus",
    "plan",
    "cost",
    "runtime",
    "baselines",
    "simulate",
    "integrations",
    "bench",
    "cli",
)
"""A package imports only itself and those before it; libra/__init__.py may import all."""
PLANNING = ("config", "extras", "data", "corpus", "plan", "cost", "simulate")
"""Packages that never import torch: they run where it is not installed."""


def module_name(file: Path) -> str:
    parts = ("libra", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """The first part of a module's name below libra; "" for libra itself."""
    return module.partition(".")[2].partition(".")[0]


@cache
def modules() -> dict[str, list[tuple[int, str]]]:
    """Line and name of every import of every module: in functions and under TYPE_CHECKING too."""
    files = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}

    def imports(file: Path) -> Iterator[tuple[int, str]]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file} imports relatively"
                base = node.module or ""
                for alias in node.names:
                    child = f"{base}.{alias.name}"
                    yield node.lineno, child if child in files else base

    return {name: list(imports(file)) for name, file in files.items()}


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package_of(name) for name in modules()} - {""} <= set(ORDER)


def test_no_package_imports_one_above_it() -> None:
    upward = [
        f"{name}:{line} imports {imported}"
        for name, imports in modules().items()
        for line, imported in imports
        if package_of(name) and imported.partition(".")[0] == "libra"
        if imported == "libra" or ORDER.index(package_of(imported)) > ORDER.index(package_of(name))
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        name: {imported for _, imported in imports if imported in modules()}
        for name, imports in modules().items()
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_planning_never_imports_torch_even_inside_a_function() -> None:
    guilty = [
        f"{name}:{line}"
        for name, imports in modules().items()
        if package_of(name) in PLANNING
        for line, imported in imports
        if imported.partition(".")[0] == "torch"
    ]
    assert guilty == []


def run_python(program: str) -> str:
    """What `program` prints in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_placing_packs_planning_a_pool_and_importing_all_of_planning_need_no_torch() -> None:
    names = [name for name in modules() if package_of(name) in PLANNING]
    assert "libra.plan.plan_pool" in names
    program = f"""
import importlib, sys
sys.modules["torch"] = None  # as if it were not installed
for name in {names}:
    importlib.import_module(name)
import libra
libra.PoolSampler([[4]] * 4, global_batch=4, dp_rank=0, dp_size=2, pool_size=2).schedule()
libra.place_packs([9, 1, 4, 4], 2)
config = libra.PoolConfig(pool_size=2, block_size=8, head_shards=1, chunks=1)
heads = libra.HeadShape(q=2, kv=1, dim=8)
plan = libra.plan_pool([[0, 32], [0, 8, 16, 32]], cp_size=1, config=config, heads=heads)
print(plan.load.sum())
"""
    pairs = sum(length * (length + 1) // 2 for length in (32, 8, 8, 16))
    assert run_python(program) == str(2 * pairs)


def test_importing_libra_takes_less_than_three_tenths_of_a_second_and_nothing_slow() -> None:
    program = """
import sys, time
begin = time.perf_counter()
import libra
print(time.perf_counter() - begin)
print(*{"numba", "torch", "tyro", "rich", "pyarrow"} & set(sys.modules))
"""
    found = [run_python(program).partition("\n") for _ in range(3)]
    assert min(float(seconds) for seconds, _, _ in found) < 0.3
    assert {slow for _, _, slow in found} == {""}
