"""One pool's plan as a picture: load per worker before and after, and the traffic matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import altair as alt
import numpy as np

from libra.cli.plan_report import PlanReport
from libra.cli.units import byte_unit, show_bytes
from libra.plan.plan_pool import PoolPlan
from libra.simulate import chart_theme as theme

_MOST_CELLS: Final = 128
"""Workers of a matrix with a cell for each pair; of more workers, replicas have the cells."""
_DECADES: Final = 3
"""Powers of ten of bytes, below the largest, that the colours tell apart."""
_MOST_NUMBERS: Final = 16
"""Replicas whose number stands at an axis."""
_LOAD_WIDTH: Final = 470
_HEIGHT: Final = 330


def draw_plan(report: PlanReport, path: Path) -> None:
    """Write the picture to `path`, SVG or PNG by its suffix.  OSError where that fails."""
    theme.save_picture(plan_picture(report), path)


def plan_picture(report: PlanReport) -> dict[str, Any]:
    """Both panels as one specification: load on the left and traffic on the right."""
    plan, replicas = report.plan, len(report.origin.pool_packs)
    title = f"One pool of {replicas} replicas × CP {plan.cp_size}, packs of {plan.tokens:,} tokens"
    # A picture of two panels has no width of its own, which the theme's expressions ask for.
    width = alt.param(name="width", value=_LOAD_WIDTH)
    panels = alt.hconcat(_load_panel(report), _traffic_panel(plan), spacing=50, title=title)
    spec = theme.chart_spec(panels.resolve_scale(color="independent").add_params(width))
    # Legends stand inside the panels, whose tops then are level.
    legend = theme.CONFIG["legend"] | {"orient": "top-right"}
    return spec | theme.PICTURE | {"config": theme.CONFIG | {"legend": legend}}


def _load_panel(report: PlanReport) -> Any:
    """Loads over the pool's mean, one step a worker."""
    plan, cp = report.plan, report.plan.cp_size
    # Ulysses is what most have before; where it cannot run, every row is computed where it lies.
    name, before, after = "at home", plan.home_load, plan.load
    if report.ulysses is not None:
        name, before = "Ulysses", report.ulysses.load
    columns = {
        theme.Look(f"before ({name})", theme.ORANGE): before / before.mean(),
        theme.Look(f"after (Libra, {plan.config.placement})", theme.BLUE): after / after.mean(),
    }
    workers = f", {cp} workers each" if cp > 1 else ""
    x = _replicas(alt.X("x:Q", title=f"replica{workers}"), plan)
    y = alt.Y("y:Q", stack=None, title="load of a worker / mean")
    target = 1 + plan.config.tolerance
    # Worker 5 of CP 4 is the second of replica 1: its step reaches from 1.25 to 1.5.
    edges = [worker / cp for worker in range(plan.workers + 1)]
    chart = alt.layer(theme.curves(x, y, edges, columns), theme.level(target))
    peaks = " → ".join(f"{loads.max():.2f}×" for loads in columns.values())
    title = alt.TitleParams(f"Busiest worker / mean: {peaks} (target {target:g})", fontSize=13)
    return chart.properties(width=_LOAD_WIDTH, height=_HEIGHT, title=title)


def _traffic_panel(plan: PoolPlan) -> Any:
    """Forward bytes of every pair of workers, colours on a log scale; pairs without are blank."""
    moved, cp = plan.traffic.sum(axis=0), plan.cp_size
    side, names = 1 / cp, "worker to worker"
    if plan.workers > _MOST_CELLS:
        # Add up the workers of each pair of replicas: [sender, worker, receiver, worker].
        moved = moved.reshape(-1, cp, plan.workers // cp, cp).sum(axis=(1, 3))
        side, names = 1.0, "replica to replica"
    # A pool that moves nothing has no largest cell; a byte takes its place.
    unit = byte_unit(max(int(moved.max()), 1))
    most = max(int(moved.max()), 1) / unit.bytes
    cells = [
        {"x": j * side, "x2": (j + 1) * side, "y": i * side, "y2": (i + 1) * side, "sent": sent}
        for i, j in np.argwhere(moved).tolist()
        for sent in [moved[i, j] / unit.bytes]
    ]
    chart = theme.plot(cells).mark_rect(cornerRadius=0)
    colour = alt.Color("sent:Q", title=f"{unit.name} from {names}")
    ends = [most / 10**_DECADES, most]
    colour = colour.scale(type="log", scheme="viridis", reverse=True, clamp=True, domain=ends)
    return chart.encode(
        x=_replicas(alt.X("x:Q", title="to replica"), plan),
        x2="x2:Q",
        y=_replicas(alt.Y("y:Q", title="from replica"), plan, reverse=True),
        y2="y2:Q",
        color=colour.legend(
            orient="right", format="~g", gradientLength=_HEIGHT - 60, values=theme.log_ticks(*ends)
        ),
    ).properties(
        width=_HEIGHT,
        height=_HEIGHT,
        view=alt.ViewConfig(fill="#f4f4f4"),
        title=alt.TitleParams(f"Bytes sent forward: {show_bytes(int(moved.sum()))}", fontSize=13),
    )


def _replicas(channel: Any, plan: PoolPlan, *, reverse: bool = False) -> Any:
    """The channel with one unit a replica, and the replicas' numbers at their middles."""
    count = plan.workers // plan.cp_size
    # Of 40 replicas every third is numbered: 0, 3, 6 and so on.
    middles = [i + 0.5 for i in range(0, count, -(-count // _MOST_NUMBERS))]
    labels = {"values": middles, "tickCount": count, "labelExpr": "floor(datum.value)"}
    channel = channel.axis(ticks=False, grid=False, **labels)
    return channel.scale(domain=[0, count], nice=False, reverse=reverse)
