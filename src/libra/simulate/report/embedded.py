"""The simulation inside the page, and what guards the page from what the simulation holds."""

from __future__ import annotations

import base64
import hashlib
import json

from libra.simulate.report.reading import Record


def embed_json(simulation: Record) -> str:
    """JSON that may stand inside a `<script type="application/json">`.

    `<`, `>` and `&` are escaped, so no text can end the element or open a comment in it; NaN and
    infinities, which JSON has no word for, become null; what JSON cannot hold becomes text.
    """
    said = json.dumps(_plain(simulation), ensure_ascii=True, separators=(",", ":"), default=str)
    return said.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def source_of(content: str) -> str:
    """An inline script or style as a Content-Security-Policy names it."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
