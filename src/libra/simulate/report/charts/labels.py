"""Names of the schemes that are compared."""

from __future__ import annotations

from libra.simulate.report.reading import Record, records, words

_LABELS = {
    "ulysses": "Ulysses",
    "wlb": "Variable-token packing",
    "cluster": "Cluster-wide pool",
    "tap": "TAP",
    "tap_vrsp": "TAP + VRSP",
    "libra": "Libra",
    "ideal": "Ideal",
}


def scheme_labels(simulation: Record) -> dict[str, str]:
    """Key to label, in the order in which they are drawn; the simulation's own labels first."""
    own = {
        words(row.get("key")): words(row.get("label"))
        for row in records(simulation.get("schemes"))
        if row.get("key") and row.get("label")
    }
    return {key: own.get(key, label) for key, label in _LABELS.items()} | own
