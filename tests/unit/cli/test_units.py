"""Bytes and durations as people read them."""

from __future__ import annotations

from libra.cli.units import byte_unit, show_bytes, show_seconds


def test_bytes_and_seconds_read_well() -> None:
    assert [show_bytes(n) for n in (0, 999, 1_000, 41_560_264_704)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "41.56 GB",
    ]
    unit = byte_unit(354_175_270_912)
    assert [unit.show(n) for n in (354_175_270_912, 12_000_000, 0)] == ["354.2", "0.0", "0"]
    assert [show_seconds(s) for s in (2e-5, 0.00784, 1.5, 1234.5)] == [
        "20 µs",
        "7.84 ms",
        "1.5 s",
        "1,234 s",
    ]
