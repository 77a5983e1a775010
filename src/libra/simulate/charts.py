"""Every chart of a study, as one declarative specification each.

    Study ──> lengths, packs ──────────────────────────────────> Corpus
          ──> pooling, workers, tradeoff ──────────────────────> Balance
          ──> schemes, microbatches, scaling (two), pipeline ──> Speed

`sections` makes them for the report, `write_plots` as pictures.  Their titles stand here, their
captions and findings in report.html.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Final, Literal

import altair as alt
import numpy as np

from libra.simulate import chart_theme as theme
from libra.simulate.chart_theme import BLUE, GREEN, GREY, OLIVE, ORANGE, PINK, TEAL, Figure, Look
from libra.simulate.formats import count, gigabytes, percent, seconds, short, times
from libra.simulate.results import CandidateResult, ScalePoint, Study

Section = tuple[str, str, tuple[Figure, ...]]
"""Anchor, title and figures of a part of the report."""

_DASHED: Final = (6, 3)
_DOTTED: Final = (2, 3)
_SCHEME_LOOKS: Final = {
    "ulysses": (ORANGE, (1, 0)),
    "wlb": (PINK, _DASHED),
    "cluster": (GREEN, _DASHED),
    "tap": (TEAL, _DASHED),
    "tap_vrsp": (OLIVE, _DASHED),
    "libra": (BLUE, (1, 0)),
    "ideal": (GREY, _DOTTED),
}
"""Colour and dashes of each scheme's curve."""
_GROUPINGS: Final = {
    "before": Look("in the sampler's order", ORANGE),
    "random": Look("random grouping", PINK, _DASHED),
    "theory": Look("theory", OLIVE, _DOTTED),
    "after_greedy": Look("VRSP, greedy", TEAL, _DASHED),
    "after": Look("VRSP, refined", BLUE),
    "bound": Look("lower bound", GREY, _DOTTED),
}
"""Ways to group packs into pools, by their fields of `PoolingPoint`."""
_PARTS: Final = {
    "attention_seconds": Look("attention", BLUE),
    "exposed_seconds": Look("exposed transfers", ORANGE),
    "other_seconds": Look("all other work", GREY),
}
"""Parts of a step, by their fields of `SchemeResult`."""
_POOL_COLOURS: Final = (ORANGE, GREEN, BLUE, PINK, OLIVE, TEAL, GREY)
_POOL_SHAPES: Final = ("square", "diamond", "circle", "triangle-up", "triangle-down", "cross")
"""Marks of the pool sizes; the first follow the last."""
_SCHEDULES: Final = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved"}
_TOKEN_TICKS: Final = (
    "datum.value < 1024 ? format(datum.value, 'd') : datum.value < 1048576 ? "
    "format(datum.value / 1024, '~g') + 'K' : format(datum.value / 1048576, '~g') + 'M'"
)
"""Vega expression that writes 262144 as 256K."""
_JOINED_BINS: Final = 3
"""Bins of an eighth of a doubling of length that the chart shows as one."""
_MOST_BARS: Final = 256
"""Steps of the chart of workers; more workers than these share steps."""
_LEAST_SHARE: Final = 1e-4
"""Smallest imbalance on a logarithmic axis, as a share of the largest."""


def sections(study: Study) -> tuple[Section, ...]:
    """Every figure that has something to show, in the order in which they are read."""
    scaling = (scaling_figure(study, "fixed_batch"), scaling_figure(study, "weak"))
    pipeline = pipeline_figure(study)
    parts = {
        "Corpus": (lengths_figure(study), packs_figure(study)),
        "Balance": (pooling_figure(study), workers_figure(study), tradeoff_figure(study)),
        "Speed": (schemes_figure(study), microbatches_figure(study), *scaling, pipeline),
    }
    return tuple(
        (title.lower(), title, tuple(filter(None, figures))) for title, figures in parts.items()
    )


def write_plots(study: Study, folder: Path) -> list[Path]:
    """Write `<figure>.svg` and `<figure>.png` of every figure into `folder`, which is made.

    Returns the files.  OSError where a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in (figure for _, _, figures in sections(study) for figure in figures):
        paths = [folder / f"{figure.key}{suffix}" for suffix in (".svg", ".png")]
        theme.save_picture(figure.picture, *paths)
        written += paths
    return written


def lengths_figure(study: Study) -> Figure | None:
    """Lengths of the samples, and the lengths that the attention's cost comes from."""
    bins = study.corpus.histogram
    if not sum(bins.tokens):
        return None
    # Bins are joined: [0, 1, 2], [3, 4, 5] and so on.
    starts = range(0, len(bins.samples), _JOINED_BINS)
    edges = [*(bins.edges[start] for start in starts), bins.edges[-1]]
    columns = {
        Look("samples", GREEN): bins.samples,
        Look("tokens", ORANGE): bins.tokens,
        Look("attention cost", BLUE): bins.squares,
    }
    shares = {look: np.add.reduceat(each, starts) / sum(each) for look, each in columns.items()}
    # Shares per doubling: bins of unequal width then have comparable heights.
    heights = {look: (share / np.diff(np.log2(edges))).tolist() for look, share in shares.items()}
    names = [f"{low:,} to {max(high - 1, low):,}" for low, high in pairwise(edges)]
    table = theme.number_table("length, tokens", names, shares, percent)
    x = alt.X("x:Q", title="sample length, tokens").axis(labelExpr=_TOKEN_TICKS)
    x = x.scale(type="log", base=2, domain=[edges[0], edges[-1]], nice=False)
    y = alt.Y("y:Q", stack=None, title="share per doubling of length").axis(format="~%")
    return theme.curve_figure("lengths", "Sample lengths", x, y, edges, heights, table)


def packs_figure(study: Study) -> Figure:
    """Attention of packs that all hold the same number of tokens."""
    values = study.packs.quantiles
    # Quantile i of n stands for the packs from share i / n up to (i + 1) / n.
    columns = {Look("workload / mean", ORANGE): values}
    names = [f"{i}%" for i in range(len(values))]
    table = theme.number_table("packs up to here", names, columns, times)
    x = alt.X("x:Q", title="packs up to here, lightest first").axis(format="%")
    y = alt.Y("y:Q", title="workload / mean")
    edges = [i / len(values) for i in range(len(values) + 1)]
    return theme.curve_figure(
        "packs", "Workload of a pack", x, y, edges, columns, table, theme.level(1)
    )


def pooling_figure(study: Study) -> Figure | None:
    """Imbalance between pools against their size."""
    if not study.pooling:
        return None
    columns = {
        look: [max(getattr(point, field), 0.0) for point in study.pooling]
        for field, look in _GROUPINGS.items()
    }
    sizes = [point.pool_size for point in study.pooling]
    table = theme.number_table("P", map(count, sizes), columns, percent)
    most = max(map(max, columns.values())) or 1.0
    # A perfect balance has no logarithm: zeros are drawn at the lower edge.
    ends = [most * _LEAST_SHARE, 1.3 * most]
    x = theme.doublings("replicas in a pool, P", sizes)
    y = alt.Y("y:Q", title="heaviest pool / mean, − 1").axis(**theme.log_percent_axis(*ends))
    y = y.scale(type="log", domain=ends, clamp=True, nice=False)
    return theme.curve_figure("pooling", "Imbalance between pools", x, y, sizes, columns, table)


def workers_figure(study: Study) -> Figure:
    """Loads of the workers of one pool, before and after tiles move."""
    before, after = study.workers.before, study.workers.after
    each = -(-len(after) // _MOST_BARS)
    starts = range(0, len(after), each)
    # Where neighbours share a step, it is as high as the heaviest of them.
    columns = {
        Look("before, Ulysses", ORANGE): [max(before[i : i + each]) for i in starts],
        Look("after, Libra", BLUE): [max(after[i : i + each]) for i in starts],
    }
    names = [str(i) if each == 1 else f"{i} to {min(i + each, len(after)) - 1}" for i in starts]
    table = theme.number_table("worker", names, columns, lambda load: f"{times(load)} the mean")
    # Each step has its worker's number in its middle: worker 0 from -0.5 to 0.5.
    edges = [*(i - 0.5 for i in starts), len(after) - 0.5]
    x = alt.X("x:Q", title="worker").axis(format="d", tickMinStep=1)
    x = x.scale(domain=[edges[0], edges[-1]], nice=False)
    y = alt.Y("y:Q", title="load / mean", stack=None)
    return theme.curve_figure(
        "workers", "Load of each worker", x, y, edges, columns, table, theme.level(1)
    )


def overall_imbalance(row: CandidateResult) -> float:
    """Imbalance of all workers: between pools and inside a pool, multiplied."""
    return max((1 + row.after) * (1 + row.intra_mean) - 1, 0.0)


def tradeoff_figure(study: Study) -> Figure:
    """Balance of every candidate, and its cost in traffic."""
    best, candidates = study.recommendation.candidate, study.candidates
    heights = [overall_imbalance(row) for row in candidates]
    headings = ("candidate", "traffic of a pool", "imbalance", "step", "memory")
    rows = tuple(
        (
            f"{row} (recommended)" if i == best else str(row),
            gigabytes(row.gigabytes),
            *(percent(heights[i]), seconds(row.step_seconds)),
            "fits" if row.fits else "over the cap",
        )
        for i, row in enumerate(candidates)
    )
    points = [
        {"series": f"P = {row.pool_size}", "x": row.gigabytes, "y": height, "fits": row.fits}
        for row, height in zip(candidates, heights, strict=True)
    ]
    names = [f"P = {size}" for size in sorted({row.pool_size for row in candidates})]
    x = alt.X("x:Q", title="traffic of a pool, one layer forward, GB").scale(zero=True)
    y = alt.Y("y:Q", title="imbalance of all workers")
    # A logarithmic axis where candidates are orders of magnitude apart.
    if min(heights) > 0 and max(heights) > 10 * min(heights):
        y = y.axis(**theme.log_percent_axis(min(heights) / 2, 2 * max(heights)))
        y = y.scale(type="log", padding=30, nice=False)
    else:
        y = y.axis(format="~%").scale(padding=30, zero=True)
    marks = theme.with_tooltips(headings, rows, points).mark_point(size=110, strokeWidth=2)
    marks = theme.coloured(marks, map(Look, names, cycle(_POOL_COLOURS))).encode(
        x=x,
        y=y,
        shape=alt.Shape("series:N").scale(domain=names, range=_POOL_SHAPES),
        fill=alt.Fill("series:N").scale(domain=names, range=_POOL_COLOURS),
        fillOpacity=alt.when("datum.fits").then(alt.value(0.8)).otherwise(alt.value(0.0)),
    )
    # The ring and its word stand apart from the marks, so that no legend names them.
    chosen = theme.plot([points[best]] if best is not None else []).encode(x="x:Q", y="y:Q")
    ring = chosen.mark_point(size=420, color=GREY, strokeWidth=1.5)
    text = chosen.mark_text(text="recommended", dy=-20, fontWeight="bold")
    chart = alt.layer(ring, text, marks.add_params(theme.zoom("x", "y"))).properties(height=270)
    return Figure("tradeoff", "Balance against traffic", headings, rows, chart)


def schemes_figure(study: Study) -> Figure:
    """A step's time in each scheme, and its parts."""
    headings = ("scheme", "step", *(look.label for look in _PARTS.values()), "speedup")
    headings += ("slowest index, one layer", "mean index, one layer")
    rows = tuple(
        (
            *(row.label, seconds(row.step_seconds)),
            *(seconds(getattr(row, field)) for field in _PARTS),
            *(times(row.speedup), seconds(row.worst_index), seconds(row.mean_index)),
        )
        for row in study.schemes
    )
    bars = [
        {"row": i, "series": look.label, "order": order, "x": max(getattr(row, field), 0.0)}
        for i, row in enumerate(study.schemes)
        for order, (field, look) in enumerate(_PARTS.items())
    ]
    notes = [{"row": i, "text": f"{row[0]}: {row[1]}, {row[5]}"} for i, row in enumerate(rows)]
    y = alt.Y("row:O", axis=None).scale(paddingInner=0, paddingOuter=0)
    x = alt.X("x:Q", title="seconds of a step").axis(grid=True)
    # Names stand above their bars: they need no margin, and a narrow screen leaves the bars room.
    parts = theme.plot(bars).mark_bar(size=16, yOffset=9).encode(x=x, y=y, order="order:Q")
    texts = theme.plot(notes).mark_text(align="left", yOffset=-9)
    texts = texts.encode(x=alt.datum(0), y=y, text="text:N")
    places = theme.with_tooltips(headings, rows, notes).mark_rect(color=GREY)
    chart = alt.layer(theme.coloured(parts, _PARTS.values()), texts, theme.hover(places, y=y))
    chart = chart.properties(height=44 * len(rows))
    return Figure("schemes", "One step, scheme by scheme", headings, rows, chart)


def _scheme_looks(study: Study, keys: Iterable[str]) -> dict[str, Look]:
    """Looks of the schemes that are among `keys`, in the order of the study."""
    labels = {row.key: row.label for row in study.schemes if row.key in keys}
    return {key: Look(label, *_SCHEME_LOOKS[key]) for key, label in labels.items()}


def microbatches_figure(study: Study) -> Figure:
    """Attention time of microbatches: pipelines and synchronisation wait for the slowest."""
    counts, edges = study.microbatches.counts, list(study.microbatches.edges)
    columns = {
        look: [each / (sum(counts[key]) or 1) for each in counts[key]]
        for key, look in _scheme_looks(study, counts).items()
    }
    names = [f"{seconds(low)} to {seconds(high)}" for low, high in pairwise(edges)]
    table = theme.number_table("attention time, one layer", names, columns, percent)
    # One unit for the axis; the table writes each time in its own.
    scale, unit = (1.0, "s") if edges[-1] >= 1 else (1e3, "ms")
    edges = [scale * edge for edge in edges]
    x = alt.X("x:Q", title=f"attention in one layer, forward and backward, {unit}")
    x = x.scale(domain=[edges[0], edges[-1]], nice=False)
    y = alt.Y("y:Q", stack=None, title="share of the microbatches").axis(format="~%")
    title = "Attention time of a microbatch, one layer"
    return theme.curve_figure("microbatches", title, x, y, edges, columns, table)


def scaling_figure(study: Study, way: Literal["fixed_batch", "weak"]) -> Figure | None:
    """Predicted throughput against the number of replicas."""
    points: tuple[ScalePoint, ...] = getattr(study.scaling, way)
    if not points:
        return None
    # A scheme may lack a point: its curve has a gap there.
    looks = _scheme_looks(study, {key for point in points for key in point.tokens_per_second})
    columns = {
        look: [point.tokens_per_second.get(key, np.nan) / point.gpus for point in points]
        for key, look in looks.items()
    }
    headings = ("DP", "GPUs", *(f"{look.label}, tokens/s" for look in looks.values()))
    rows = tuple(
        (count(point.dp), count(point.gpus), *(_rate(point, key) for key in looks))
        for point in points
    )
    sizes = [point.dp for point in points]
    x = theme.doublings("data-parallel replicas, DP", sizes)
    y = alt.Y("y:Q", title="tokens per second and GPU").axis(format="~s")
    title = "Strong scaling, fixed batch" if way == "fixed_batch" else "Weak scaling"
    key = f"scaling-{way.replace('_', '-')}"
    return theme.curve_figure(key, title, x, y, sizes, columns, (headings, rows))


def _rate(point: ScalePoint, scheme: str) -> str:
    """Throughput and efficiency as text."""
    if scheme not in point.tokens_per_second:
        return "–"
    return f"{short(point.tokens_per_second[scheme])} ({percent(point.efficiency[scheme])})"


def pipeline_figure(study: Study) -> Figure | None:
    """Idle time of the stages of a pipeline; None for a job without a pipeline."""
    if study.settings.parallelism.pp == 1 or not study.pipeline:
        return None
    looks = _scheme_looks(study, study.pipeline[0].bubble)
    names = [f"{_SCHEDULES[r.schedule]}, {r.stages} × {r.microbatches}" for r in study.pipeline]
    columns = {look: [r.bubble[key] for r in study.pipeline] for key, look in looks.items()}
    headings, rows = theme.number_table("stages × microbatches", names, columns, percent)
    # A dot for each scheme, and a line from the first to the last of a schedule.
    dots = [
        {"y": name, "x": share, "series": look.label}
        for look, column in columns.items()
        for name, share in zip(names, column, strict=True)
    ]
    y = alt.Y("y:N", sort=None, title=None)
    x = alt.X("x:Q", title="idle share of the stages' time").axis(format="~%", grid=True)
    marks = theme.plot(dots).mark_point(size=130, filled=True).encode(x=x.scale(zero=True), y=y)
    spans = theme.plot(dots).mark_rule(color=GREY).encode(x="min(x):Q", x2="max(x):Q", y=y)
    places = theme.with_tooltips(headings, rows, [{"y": name} for name in names])
    over = theme.hover(places.mark_rect(color=GREY), y=y)
    chart = alt.layer(spans, theme.coloured(marks, columns, symbolType="circle"), over)
    chart = chart.properties(height=34 * len(rows) + 10)
    return Figure("pipeline", "Pipeline bubbles", headings, rows, chart)
