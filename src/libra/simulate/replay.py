"""Replaying a corpus: the run time's own placement and planner over its windows, by candidate.

    windows ──> VRSP, refinement, order ──> plan_pool for every pool ──> figures
                 once a candidate            libra.plan, as in training

One window of one candidate is one task.  Tasks run here or in processes, in any order, and give the
same figures; a journal keeps them, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Final

from libra.config import HeadShape, PoolConfig
from libra.data.lengths import check_count
from libra.data.packing import Packs
from libra.data.pools import PackPlacement, PoolOrder
from libra.plan.head_groups import cut_heads
from libra.plan.place_ulysses import check_ulysses
from libra.plan.plan_pool import head_shards
from libra.plan.pool_plan import PoolPlan
from libra.simulate.figures import Candidate, CandidateFigures, WindowFigures, summarise
from libra.simulate.journal import Journal
from libra.simulate.sample import WindowSample, every_window
from libra.simulate.window import WindowTask, replay_window

__all__ = ["Candidate", "CandidateFigures", "replay"]

Measure = Callable[[PoolPlan], Mapping[str, float]]
Progress = Callable[[int, int | None], None]

_WAITING: Final = 4
"""Tasks handed out per process: none idles, and few windows are held."""


def replay(
    windows: Iterable[Packs],
    candidates: Sequence[Candidate],
    *,
    cp_size: int,
    heads: HeadShape,
    config: PoolConfig | None = None,
    dp_size: int | None = None,
    pack_placement: PackPlacement = "vrsp",
    refine: bool = True,
    order: PoolOrder = "grouped",
    sample: WindowSample | None = None,
    measure: Measure | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    journal: Path | None = None,
) -> list[CandidateFigures]:
    """Replay every candidate over all windows, or those of `sample`; figures in candidate order.

    `windows` gives the GBS packs of each optimizer step, as `WindowReader` does, and is read once;
    no more than a few are held.  `config` has the settings that candidates don't; `pack_placement`,
    `refine` and `order` are `PoolSampler`'s.  `dp_size` None runs a window as one
    gradient-accumulation index.  Nodes follow `config.ranks_per_node`.

    `measure` is called with every plan and adds figures of its own to those of the pool; its names
    must not be taken.  With several `workers` it is sent to other processes: a module's function or
    an instance of a module's class, with a `repr` that tells its settings.  These processes import
    the main script again, so a script keeps its work under `if __name__ == "__main__"`.

    `progress` is called with the tasks done and those in all (None while their number is unknown).
    `journal` is a file of JSON lines, made where it doesn't exist; what it has is not done again.

    Raises ValueError for a candidate that doesn't fit, naming it, for no candidate or window, a
    sample of windows that don't exist, and a journal of other settings or another corpus.
    """
    settings = config if config is not None else PoolConfig()
    chosen = _check_candidates(candidates, cp_size, heads, settings, dp_size)
    check_count("workers", workers)
    common: dict[str, Any] = {
        "cp_size": cp_size,
        "heads": heads,
        "dp_size": dp_size,
        "placement": pack_placement,
        "refine": refine,
        "order": order,
        "measure": measure,
    }

    def tasks() -> Iterator[WindowTask]:
        for index, packs in _wanted(windows, sample):
            for candidate, _ in chosen:
                _check_window(len(packs), candidate, dp_size)
            for candidate, full in chosen:
                yield WindowTask(
                    window=index,
                    tokens=packs.tokens,
                    lengths=packs.lengths,
                    offsets=packs.offsets,
                    candidate=candidate,
                    config=full,
                    **common,
                )

    found: dict[tuple[Candidate, int], WindowFigures] = {}
    total = _total(windows, sample, len(chosen))
    record = None if journal is None else Journal(journal, _identity(settings, common))
    try:
        for task, figures in _run(tasks(), workers, record):
            found[task.candidate, task.window] = figures
            if progress is not None:
                progress(len(found), total)
    finally:
        if record is not None:
            record.close()
    seen = sorted({window for _, window in found})
    if not seen:
        raise ValueError("there is no window: the corpus is smaller than one global batch")
    used = every_window(len(seen)) if sample is None else sample
    if seen != used.windows.tolist():
        missing = sorted(set(used.windows.tolist()) - set(seen))
        raise ValueError(f"the sample wants window {missing[0]}, which the corpus does not have")
    return [
        summarise(candidate, [found[candidate, window] for window in seen], used)
        for candidate, _ in chosen
    ]


def _run(
    tasks: Iterator[WindowTask], workers: int, record: Journal | None
) -> Iterator[tuple[WindowTask, WindowFigures]]:
    """Figures of every task, in the order in which they are known."""
    if workers == 1:
        for task in tasks:
            known = record.find(task) if record is not None else None
            yield task, known if known is not None else _kept(task, replay_window(task), record)
        return
    # Forked processes would inherit locks of threads that they don't have.
    executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    running: dict[Future[WindowFigures], WindowTask] = {}
    try:
        for task in tasks:
            known = record.find(task) if record is not None else None
            if known is not None:
                yield task, known
                continue
            running[executor.submit(replay_window, task)] = task
            while len(running) >= _WAITING * workers:
                yield from _finished(running, record)
        while running:
            yield from _finished(running, record)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _finished(
    running: dict[Future[WindowFigures], WindowTask], record: Journal | None
) -> Iterator[tuple[WindowTask, WindowFigures]]:
    """Wait for at least one task; all that are done."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        task = running.pop(future)
        try:
            figures = future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process of the replay died, for want of memory perhaps; use fewer workers, and "
                "a journal to keep what is done"
            ) from error
        yield task, _kept(task, figures, record)


def _kept(task: WindowTask, figures: WindowFigures, record: Journal | None) -> WindowFigures:
    if record is not None:
        record.add(task, figures)
    return figures


def _check_candidates(
    candidates: Sequence[Candidate],
    cp_size: int,
    heads: HeadShape,
    config: PoolConfig,
    dp_size: int | None,
) -> list[tuple[Candidate, PoolConfig]]:
    """Candidates with their whole configurations; ValueError for one that can't be planned."""
    check_count("cp_size", cp_size)
    if dp_size is not None:
        check_count("dp_size", dp_size)
    if not candidates:
        raise ValueError("there is no candidate to replay")
    checked: dict[Candidate, PoolConfig] = {}
    for candidate in candidates:
        if candidate in checked:
            raise ValueError(f"candidate {candidate} is given twice")
        try:
            full = config.replace(**dataclasses.asdict(candidate))
            if full.placement == "ulysses":
                check_ulysses(heads, cp_size)
            cut_heads(heads, head_shards(full, cp_size), full.chunks)
            if dp_size is not None and dp_size % candidate.pool_size:
                raise ValueError(f"P does not divide dp_size={dp_size}")
        except ValueError as error:
            raise ValueError(f"candidate {candidate}: {error}") from error
        checked[candidate] = full
    return list(checked.items())


def _check_window(packs: int, candidate: Candidate, dp_size: int | None) -> None:
    """ValueError where a window can't be cut as a candidate wants it."""
    if packs % candidate.pool_size:
        raise ValueError(
            f"candidate {candidate}: a window has {packs} packs (the global batch), and "
            f"P={candidate.pool_size} does not divide them"
        )
    if dp_size is not None and packs % dp_size:
        raise ValueError(
            f"dp_size={dp_size} does not divide the {packs} packs of a window (the global batch)"
        )


def _wanted(windows: Iterable[Packs], sample: WindowSample | None) -> Iterator[tuple[int, Packs]]:
    """The windows to replay with their numbers; reads no further than the last of them."""
    if sample is None:
        yield from enumerate(windows)
        return
    left = set(sample.windows.tolist())
    for index, packs in enumerate(windows):
        if index in left:
            left.remove(index)
            yield index, packs
        if not left:
            return


def _total(windows: Iterable[Packs], sample: WindowSample | None, candidates: int) -> int | None:
    """Tasks in all, where they can be counted."""
    if sample is not None:
        return len(sample.windows) * candidates
    return len(windows) * candidates if isinstance(windows, Sized) else None


def _identity(config: PoolConfig, common: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but candidate and window that figures depend on, as JSON has it."""
    settings = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in ("pool_size", "block_size", "head_shards")
    }
    measure = common["measure"]
    plain = getattr(measure, "__qualname__", None)  # the repr of a function has its address
    named = None if measure is None else f"{measure.__module__}.{plain}" if plain else repr(measure)
    return {
        **{name: value for name, value in common.items() if name != "measure"},
        "heads": dataclasses.asdict(common["heads"]),
        "config": {name: repr(value) for name, value in settings.items()},
        "measure": named,
    }
