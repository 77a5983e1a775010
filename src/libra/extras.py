"""Optional packages: the one way to import them, and the one message where they are missing."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Final

_INSTALLED_BY: Final = {
    "torch": "libra-attention[runtime]",
    "pyarrow": "libra-attention[corpus]",
    "altair": "libra-attention[report]",
    "jinja2": "libra-attention[report]",
    "vl_convert": "libra-attention[report]",
}
"""The argument of `pip install` that brings a package; its own name where it is not listed."""


class MissingPackageError(ImportError, ValueError):
    """An optional package is not installed.

    An ImportError for programs that try an import; a ValueError like any other request that cannot
    be served, so commands report it in one line.
    """


def check_installed(package: str, purpose: str) -> None:
    """MissingPackageError, naming what to install, unless `package` is installed; imports nothing.

    `purpose` starts the message, as in "the demo" or a file's name.
    """
    if find_spec(package) is None:
        argument = _INSTALLED_BY.get(package, package)
        raise MissingPackageError(
            f"{purpose} needs {package}, which is not installed: pip install '{argument}'"
        )


def require(module: str, purpose: str) -> Any:
    """The optional `module`, imported; MissingPackageError where its package is not installed."""
    check_installed(module.split(".")[0], purpose)
    return importlib.import_module(module)
