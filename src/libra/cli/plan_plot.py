"""One pool's plan as a picture: load per worker before and after, and who sends how much to whom.

matplotlib is the extra `plot`.  Figures are drawn on objects of their own, without pyplot and its
global state, and come out the same byte for byte each time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from libra.cli.plan_report import PlanReport
from libra.cli.units import byte_unit, show_bytes
from libra.data.pools import imbalance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every kind of colour vision, and in grey.
_BEFORE = "#E69F00"
_AFTER = "#0072B2"
_INK = "#222222"
_TARGET = "#D55E00"
_FAINT = "#B5B5B5"
_NOTHING = "#F4F4F4"
_MOST_BARS = 128
"""Workers drawn as a bar each; more of them make one area."""
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same picture everywhere
    "font.size": 12.0,
    "axes.titlesize": 13.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12.0,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "libra",
}
_MOST_NUMBERS = 16
_DECADES = 3.0
"""Of bytes, below the largest, that the colour scale tells apart."""


def draw_plan(figures: PlanReport, path: Path) -> None:
    """Write the picture to `path`, .svg or .png by its suffix.

    Raises ValueError where matplotlib is missing, and OSError where `path` cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "a plot needs matplotlib, which is not installed; install the extra `plot`: "
            "pip install 'libra-attention[plot]'"
        ) from error
    with matplotlib.rc_context(_STYLE):
        figure = plan_figure(figures)
        figure.savefig(
            path,
            dpi=200,
            facecolor="white",
            metadata={"Date": None} if path.suffix == ".svg" else None,
        )


def plan_figure(figures: PlanReport) -> Figure:
    """Both panels, load on the left and traffic on the right."""
    from matplotlib.figure import Figure

    plan = figures
    figure = Figure(figsize=(11.5, 5.2))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12, wspace=0.04)
    load, traffic = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
    replicas = plan.workers // plan.cp_size
    figure.suptitle(
        f"One pool of {replicas} replicas × CP {plan.cp_size}, packs of {plan.tokens:,} tokens",
        x=0.012,
        ha="left",
        fontsize=14.5,
        fontweight="bold",
    )
    _draw_load(load, figures)
    _draw_traffic(traffic, figures)
    return figure


def _draw_load(ax: Axes, figures: PlanReport) -> None:
    """Loads in means of the pool, one step a worker."""
    plan, workers = figures, figures.per_worker
    name, before = "at home", workers.home_load
    if figures.ulysses is not None:
        name, before = "Ulysses", figures.ulysses.load
    edges = np.arange(plan.workers + 1, dtype=np.float64) - np.float64(0.5)
    steps, after = _relative(before), _relative(workers.load)
    target = 1 + plan.config.tolerance
    handles = [
        _draw_bars(ax, steps, edges, color=_BEFORE, label=f"before ({name})"),
        _draw_bars(ax, after, edges, color=_AFTER, label=f"after (Libra, {plan.config.placement})"),
        ax.axhline(target, color=_TARGET, linewidth=1.2, linestyle=(0, (5, 2))),
        ax.axhline(1, color=_INK, linewidth=0.9),
    ]
    handles[2].set_label(f"target, {target:g}")
    handles[3].set_label("mean")
    ax.stairs(steps, edges, baseline=None, color=_BEFORE, linewidth=1.8)  # over lower bars too
    ax.set_title(
        f"Attention load: imbalance {imbalance(before):.2f} → {plan.imbalance.planned:.2f}"
    )
    ax.set_ylabel("load of a worker / mean")
    highest = np.maximum(steps, after)
    below_legend = max(highest[len(highest) // 2 :].max(), target)
    ax.set_ylim(0, max(1.04 * highest.max(), 1.5 * below_legend))
    ax.set_xlim(edges[0], edges[-1])
    _number_replicas(ax.xaxis, figures)
    ax.set_xlabel(f"replica, {plan.cp_size} workers each" if plan.cp_size > 1 else "replica")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(handles=handles, frameon=False, loc="upper right")


def _draw_bars(
    ax: Axes, heights: NDArray[np.float64], edges: NDArray[np.float64], *, color: str, label: str
) -> Any:
    """Draw loads and return what stands for them in the legend."""
    if len(heights) <= _MOST_BARS:
        return ax.bar(np.arange(len(heights)), heights, width=0.84, color=color, label=label)
    return ax.stairs(heights, edges, fill=True, color=color, label=label)


def _draw_traffic(ax: Axes, figures: PlanReport) -> None:
    """Forward bytes of every worker pair, on a log scale; pairs that exchange nothing are grey."""
    from matplotlib.colors import LogNorm

    plan = figures
    moved = np.sum(list(plan.traffic.values()), axis=0)
    most = max(int(moved.max()), 1)
    shown = np.ma.masked_equal(moved, 0)
    ax.set_facecolor(_NOTHING)
    image = ax.imshow(
        shown,
        norm=LogNorm(vmin=most / 10**_DECADES, vmax=most),
        cmap="viridis_r",  # even steps of lightness; dark is much
        interpolation="nearest",
    )
    ax.set_title(f"Bytes sent forward: {show_bytes(int(moved.sum()))} in all")
    ax.set_xlabel("to replica")
    ax.set_ylabel("from replica")
    for axis, line in ((ax.xaxis, ax.axvline), (ax.yaxis, ax.axhline)):
        _number_replicas(axis, figures)
        for edge in np.arange(plan.cp_size, plan.workers, plan.cp_size) - 0.5:
            line(edge, color=_FAINT, linewidth=0.7)
    unit = byte_unit(most)
    bar = ax.figure.colorbar(image, ax=ax, extend="min", shrink=0.9, pad=0.02)
    bar.set_label(f"{unit.name} from worker to worker (blank: none)")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value / unit.bytes:g}")


def _number_replicas(axis: Axis, figures: PlanReport) -> None:
    """Ticks where replicas meet, their numbers in between."""
    cp, workers = figures.cp_size, figures.workers
    replicas = np.arange(0, workers // cp, -(-workers // cp // _MOST_NUMBERS))
    axis.set_ticks(np.arange(0, workers + 1, cp) - 0.5, labels=[])
    axis.set_ticks(replicas * cp + (cp - 1) / 2, labels=map(str, replicas), minor=True)
    axis.set_tick_params(which="minor", length=0, pad=5)


def _relative(load: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(load / load.mean(), dtype=np.float64)
