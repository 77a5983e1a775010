"""How unequal packs of equal length are in what their attention costs."""

from __future__ import annotations

from libra.simulate.report.chart import Axis, Heading, Note, Series, Table, XYChart
from libra.simulate.report.reading import Record, known, number, numbers, record
from libra.simulate.report.spelling import digits, percent, shown, times


def packs_chart(simulation: Record) -> XYChart:
    packs = record(simulation.get("packs"))
    quantiles = numbers(packs.get("quantiles"))
    last = max(len(quantiles) - 1, 1)
    places = tuple(i / last for i in range(len(quantiles)))
    heaviest = max(known(quantiles), default=None)
    notes: tuple[Note, ...] = ()
    if heaviest is not None and quantiles[-1] is not None and heaviest > 0:
        notes = (Note(x=1.0, y=heaviest, text=f"heaviest of all: {times(heaviest)} the mean"),)
    return XYChart(
        heading=Heading(
            key="packs",
            title="Workload of a pack",
            finding=_finding(packs, places, quantiles),
            caption=(
                "Packs sorted from the lightest to the heaviest. All hold the same number of "
                "tokens; the height is what their causal attention costs, over the mean of all. "
                "A flat line at 1 would need no balancing."
            ),
            empty="The simulation holds no workloads of packs.",
        ),
        x=Axis(
            label="packs up to here, %",
            spell=lambda share: f"{100 * share:.0f}",
            ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
            low=0.0,
            high=1.0,
        ),
        y=Axis(label="workload over the mean", switch=True),
        series=(
            Series(
                look="before",
                label="workload",
                kind="line",
                x=places,
                y=tuple(quantiles),
                filled=True,
            ),
            Series(look="mean", label="mean", kind="rule", y=(1.0,)),
        ),
        table=Table(
            headings=("packs up to here", "workload over the mean"),
            rows=tuple(
                (percent(place), shown(value, digits))
                for place, value in zip(places, quantiles, strict=True)
            ),
        ),
        anchors=places,
        notes=notes,
    )


def _finding(packs: Record, places: tuple[float, ...], quantiles: list[float | None]) -> str:
    said = []
    heaviest, cv = number(packs.get("heaviest")), number(packs.get("cv"))
    if heaviest is not None:
        spread = f" (coefficient of variation {cv:.2f})" if cv is not None else ""
        said.append(f"A window's heaviest pack weighs {digits(heaviest)} mean packs{spread}.")
    light = [
        place
        for place, value in zip(places, quantiles, strict=True)
        if value is not None and value < 1
    ]
    if light:
        said.append(f"{percent(max(light))} of the packs are lighter than the mean.")
    return " ".join(said)
