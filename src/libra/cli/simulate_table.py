"""A study on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table

from libra.cli.units import show_seconds
from libra.simulate.results import Study


def print_study(study: Study, console: Console) -> None:
    """Corpus, imbalance against P, candidates, schemes, warnings, and the recommendation last."""
    corpus, spread = study.corpus, study.settings.parallelism
    console.print(
        f"[bold]{corpus.samples:,}[/] samples, {corpus.tokens / 1e9:.2f} G tokens, median "
        f"{corpus.median:,.0f}, longest {corpus.longest:,}; {corpus.windows:,} windows of "
        f"{spread.global_batch} packs of {spread.tokens:,} tokens, "
        f"{corpus.windows_replayed:,} replayed",
        highlight=False,
    )
    if study.pooling:
        console.print(_pooling_table(study))
    console.print(_candidate_table(study))
    console.print(_scheme_table(study))
    for warning in study.warnings:
        console.print(f"[yellow]note[/] {warning}", highlight=False)
    advice = study.recommendation
    console.print(f"\n[bold]{advice.text}[/]", highlight=False)
    if advice.line is not None:
        console.print(f"\n    {advice.line}\n", highlight=False, markup=False, soft_wrap=True)


def _table(title: str, *names: str) -> Table:
    """An empty table; columns with a name are numbers."""
    columns = [Column(name, justify="right" if name else "left") for name in names]
    return Table(*columns, title=title, title_justify="left")


def _pooling_table(study: Study) -> Table:
    names = ("P", "as they come", "at random", "theory", "VRSP", "refined", "bound")
    table = _table("Imbalance between pools, max / mean - 1", *names)
    for row in study.pooling:
        shown = (row.before, row.random, row.theory, row.after_greedy, row.after, row.bound)
        table.add_row(str(row.pool_size), *(f"{each:.4f}" for each in shown))
    return table


def _candidate_table(study: Study) -> Table:
    title = "Candidates: one layer's attention, one pool; step of the whole model"
    balance = ("", "P", "B", "H", "pools", "workers", "GB moved", "between nodes", "sent, worst")
    costs = ("held", "plan", "exposed", "memory", "step", "95%")
    table = _table(title, *balance, *costs)
    for i, row in enumerate(study.candidates):
        best = i == study.recommendation.candidate
        table.add_row(
            "*" if best else "",
            *map(str, (row.pool_size, row.block_size, row.head_shards)),
            f"{row.after:.3f}",
            f"{row.intra_mean:.3f}",
            f"{row.gigabytes:.1f}",
            f"{row.between_nodes_gigabytes:.1f}",
            f"{row.sent_worst_gigabytes:.2f}",
            f"{row.extra_memory_gigabytes:.1f} GB",
            f"{row.plan_milliseconds:.1f} ms",
            f"{row.exposed_share:.1%}",
            f"{row.memory_gigabytes:.1f} GB" + ("" if row.fits else " [red]too much[/]"),
            show_seconds(row.step_seconds),
            f"{row.step_low:.2f}-{row.step_high:.2f}",
            style="bold" if best else None,
        )
    return table


def _scheme_table(study: Study) -> Table:
    title = f"Schemes: step of the slowest pool, mean of {study.corpus.windows_compared} windows"
    table = _table(title, "", "step", "attention", "exposed", "other", "speedup")
    for row in study.schemes:
        # The step, then its three parts.
        parts = (row.step_seconds, row.attention_seconds, row.exposed_seconds, row.other_seconds)
        table.add_row(row.label, *map(show_seconds, parts), f"{row.speedup:.2f}x")
    return table
