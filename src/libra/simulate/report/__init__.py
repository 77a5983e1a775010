"""A simulation as one HTML file, self-contained, for a screen, a phone or paper."""

from __future__ import annotations

from libra.simulate.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
