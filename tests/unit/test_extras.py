"""Optional packages that are missing are named, with the command that installs them."""

from __future__ import annotations

import sys

import pytest

import libra
from libra.extras import MissingPackageError, check_installed, require


@pytest.mark.parametrize(
    ("package", "argument"),
    [
        ("torch", "libra-attention[runtime]"),
        ("pyarrow", "libra-attention[corpus]"),
        ("jinja2", "libra-attention[report]"),
        ("altair", "libra-attention[report]"),
        ("tokenizers", "tokenizers"),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(
    package: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as error:
        require(package, "a report")
    assert str(error.value) == (
        f"a report needs {package}, which is not installed: pip install '{argument}'"
    )
    assert isinstance(error.value, ImportError) and isinstance(error.value, ValueError)


def test_an_installed_package_is_imported_with_its_submodule() -> None:
    assert require("json.decoder", "this test").JSONDecoder is not None
    check_installed("json", "this test")


@pytest.mark.parametrize("name", ["SequencePool", "libra_attention", "Microbatch"])
def test_the_runtime_without_torch_names_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(vars(libra), name, raising=False)
    with pytest.raises(ImportError, match=rf"libra.{name} needs torch.*libra-attention\[runtime\]"):
        getattr(libra, name)
