"""The drawings of docs/concepts.md, made from real plans.

    python docs/figures/draw.py

Needs Altair and vl-convert (the extra `report`).  Lengths are those of tests/data/lengths-code.npy.
docs/figures/pool-256k.svg is made by `libra plan tests/data/lengths-code.npy --plot` instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

import libra
from libra.data.pools import contiguous_pools

FIGURES = Path(__file__).resolve().parent
LENGTHS = FIGURES.parents[1] / "tests" / "data" / "lengths-code.npy"
# Okabe and Ito's palette: told apart with every kind of colour vision.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]


def main() -> None:
    """Draw every figure."""
    packs = libra.pack_sequential(np.load(LENGTHS), tokens=262144, longer="drop")
    save(draw_pools(packs), "pools.svg")
    save(draw_placement(), "placement.svg")
    save(draw_pipeline(), "pipeliner.svg")


def save(chart: Any, name: str) -> None:
    """Write a chart as SVG, in one style."""
    sizes = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    chart.configure(
        background="white",
        padding=10,
        font="DejaVu Sans, sans-serif",
        view=alt.ViewConfig(stroke=None),
        title=alt.TitleConfig(fontSize=14, anchor="start", offset=10),
        axis=alt.AxisConfig(gridColor="#eeeeee", **sizes),
        legend=alt.LegendConfig(orient="bottom", **sizes),
    ).save(FIGURES / name)


def draw_pools(packs: libra.Packs) -> Any:
    """Packs of one window, stacked by pool: in the sampler's order, and as VRSP places them."""
    weights = packs.workloads[:64].astype(float)
    weights /= weights.sum() / 8  # so that a mean pool is 1
    orders = {
        "In the order of the corpus": contiguous_pools(64, 8),
        "Placed by VRSP and refined": libra.refine_pools(weights, libra.place_packs(weights, 8)),
    }
    charts = []
    for title, pools in orders.items():
        loads = weights[pools].sum(axis=1)
        rows = [
            {"pool": str(pool), "load": float(weights[pack]), "rank": rank}
            for pool, members in enumerate(pools)
            for rank, pack in enumerate(sorted(members, key=lambda pack: -weights[pack]))
        ]
        bars = (
            alt.Chart(alt.Data(values=rows))
            .mark_bar(stroke="white", strokeWidth=0.7)
            .encode(
                x=alt.X("pool:N", title="pool of 8 packs", axis=alt.Axis(labelAngle=0)),
                y=alt.Y(
                    "load:Q",
                    title="attention load / mean pool",
                    scale=alt.Scale(domain=[0, 2]),
                ),
                order=alt.Order("rank:Q"),
                color=alt.Color(
                    "rank:O",
                    title="pack, by weight",
                    legend=None,
                    scale=alt.Scale(range=blues(8)),
                ),
            )
            .properties(width=300, height=220)
        )
        mean = (
            alt.Chart(alt.Data(values=[{"y": 1.0}]))
            .mark_rule(color="#D55E00", strokeDash=[5, 3])
            .encode(y="y:Q")
        )
        heading = f"{title}: heaviest {loads.max():.2f}"
        charts.append((bars + mean).properties(title=heading))
    return alt.hconcat(*charts, spacing=40)


def blues(count: int) -> list[str]:
    """Shades from dark, for the heaviest pack, to light."""
    return [f"hsl(205, 75%, {int(30 + 58 * i / (count - 1))}%)" for i in range(count)]


def draw_placement() -> Any:
    """Who computes which rows and heads of the heaviest pack in a pool of four replicas."""
    heads = libra.HeadShape(q=16, kv=8, dim=64)
    config = libra.PoolConfig(pool_size=4, chunks=1)
    light = [0, 900, 1400, 2600, 3100, 4096]
    plan = libra.plan_pool([[0, 4096], light, light, light], cp_size=1, config=config, heads=heads)
    geometry, columns = plan.geometry, plan.shards
    tiles = []
    for tile, worker in enumerate(plan.assignment):
        block, column = divmod(tile, columns)
        start, stop = int(geometry.block_start[block]), int(geometry.block_stop[block])
        if start < 4096:  # the first pack
            tiles.append(
                {"x": column, "x2": column + 1, "y": start, "y2": stop, "worker": str(worker)}
            )
    colour = alt.Color(
        "worker:N",
        title="computed by worker",
        scale=alt.Scale(domain=list("0123"), range=["#D9D9D9", *COLOURS[:3]]),
    )
    picture = (
        alt.Chart(alt.Data(values=tiles))
        .mark_rect(stroke="white", strokeWidth=1)
        .encode(
            x=alt.X(
                "x:Q",
                title="key/value head",
                scale=alt.Scale(domain=[0, columns]),
                axis=alt.Axis(grid=False, values=list(range(columns + 1))),
            ),
            x2="x2:Q",
            y=alt.Y(
                "y:Q",
                title="row of the sample",
                scale=alt.Scale(domain=[0, 4096]),
                axis=alt.Axis(grid=False, format="d", values=list(range(0, 4097, 512))),
            ),
            y2="y2:Q",
            color=colour,
        )
        .properties(width=300, height=260, title="The sample of 4096 tokens on worker 0")
    )
    rows = [
        {"when": when, "worker": str(worker), "load": float(load / plan.load.mean())}
        for when, loads in (("before", plan.home_load), ("after", plan.load))
        for worker, load in enumerate(loads)
    ]
    loads = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            x=alt.X("worker:N", title="worker", axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("when:N", sort=["before", "after"]),
            y=alt.Y("load:Q", title="load / mean"),
            color=alt.Color(
                "when:N",
                title=None,
                sort=["before", "after"],
                scale=alt.Scale(domain=["before", "after"], range=[COLOURS[1], COLOURS[0]]),
            ),
        )
        .properties(width=280, height=260, title="Load of each worker")
    )
    return alt.hconcat(picture, loads, spacing=40).resolve_scale(color="independent")


def draw_pipeline() -> Any:
    """A schematic of transfers and compute with one chunk and with four (no plan, equal times)."""
    charts = []
    for chunks in (1, 4):
        dispatch, compute, back = 4 / chunks, 8 / chunks, 2 / chunks
        bars, sent, computed, returned = [], 0.0, 0.0, 0.0
        for chunk in range(chunks):
            bars.append(bar("dispatch Q, K, V", chunk, sent, sent + dispatch))
            sent += dispatch
            start = max(sent, computed)
            computed = start + compute
            bars.append(bar("attention", chunk, start, computed))
            start = max(computed, returned)
            returned = start + back
            bars.append(bar("return of outputs", chunk, start, returned))
        charts.append(pipeline_chart(bars, chunks, returned))
    return alt.vconcat(*charts, spacing=20)


def bar(row: str, chunk: int, start: float, stop: float) -> dict[str, Any]:
    """One piece of work in time."""
    return {"row": row, "chunk": str(chunk), "start": start, "stop": stop}


def pipeline_chart(bars: list[dict[str, Any]], chunks: int, end: float) -> Any:
    """Three rows, dispatch, attention and return, one bar a chunk."""
    order = ["dispatch Q, K, V", "attention", "return of outputs"]
    axis = alt.Axis(labels=False, ticks=False, grid=False, domain=False)
    base = alt.Chart(alt.Data(values=bars)).encode(
        x=alt.X("start:Q", title=None, scale=alt.Scale(domain=[0, 14]), axis=axis),
        y=alt.Y("row:N", title=None, sort=order, axis=alt.Axis(ticks=False, domain=False)),
    )
    rects = base.mark_bar(height=22, stroke="white").encode(
        x2="stop:Q",
        color=alt.Color(
            "row:N",
            legend=None,
            scale=alt.Scale(domain=order, range=[COLOURS[1], COLOURS[0], COLOURS[2]]),
        ),
    )
    middle = alt.Chart(
        alt.Data(values=[b | {"middle": (b["start"] + b["stop"]) / 2} for b in bars])
    )
    text = middle.mark_text(color="white", fontSize=11).encode(
        x=alt.X("middle:Q"), y=alt.Y("row:N", sort=order), text="chunk:N"
    )
    name = "One chunk, no overlap" if chunks == 1 else "Four chunks"
    return (rects + text).properties(
        width=620, height=90, title=f"{name}; the layer ends at {end:g}"
    )


if __name__ == "__main__":
    main()
