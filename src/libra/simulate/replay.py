"""Replaying a corpus: the runtime's own placement and planner over its windows, by candidate.

    windows ──> VRSP, refinement, order ──> plan_pool for every pool ──> figures
                 once a candidate            libra.plan, as in training

One window of one candidate is one task.  Tasks run here or in processes, in any order, and give the
same figures; a journal keeps them, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from libra.config import check_count
from libra.data.packing import Packs
from libra.plan.plan_pool import cut_pool_heads
from libra.simulate.journal import Journal
from libra.simulate.predict import Setting
from libra.simulate.replay_window import LIBRA, WindowReplay, WindowTask, replay_window
from libra.simulate.results import Candidate
from libra.simulate.sample import Estimate, WindowSample, estimate

_WAITING: Final = 4
"""Tasks submitted per process: no process idles, and few windows are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReplay:
    """One candidate on the corpus."""

    candidate: Candidate
    windows: tuple[WindowReplay, ...]
    """Each window that was replayed, in corpus order."""
    estimates: Mapping[str, Estimate]
    """Every figure of windows and pools by its name: means over windows, and over the pools of a
    window where they are a pool's; `most` is over all pools.
    """


def replay(
    windows: Iterable[Packs],
    candidates: Sequence[Candidate],
    setting: Setting,
    sample: WindowSample,
    *,
    workers: int = 1,
    progress: Callable[[int, int], object] = lambda done, total: None,
    journal: Path | None = None,
) -> list[CandidateReplay]:
    """Replay every candidate over the windows of `sample`; results in candidate order.

    `windows` gives the GBS packs of each optimizer step, as `WindowReader` does, and is read once;
    no more than a few are held.  `setting.config` has the settings that candidates don't.

    Several `workers` are processes.  They import the main script again, so a script keeps its work
    under `if __name__ == "__main__"`.

    `progress` is called with the tasks done and those in all.  `journal` is a file of JSON lines,
    made where it doesn't exist; what it has is not done again.

    Raises ValueError for a candidate that doesn't fit, naming it, for no candidate, a sample of
    windows that don't exist, and a journal of other settings or another corpus.
    """
    # Step 1: refuse candidates before any window is read.
    check_candidates(candidates, setting)
    check_count("workers", workers)
    # Step 2: replay the tasks, or take them from the journal.
    total = len(sample.windows) * len(candidates)
    tasks = _make_tasks(windows, candidates, setting, sample)
    found: dict[tuple[Candidate, int], WindowReplay] = {}
    # Without a file the journal writes to the null device, and finds nothing in it.
    with closing(Journal(journal or Path(os.devnull), _identity(setting))) as record:
        for task, result in _run(tasks, workers, record):
            record.add(task, result)
            found[task.candidate, task.window] = result
            progress(len(found), total)
    # Step 3: the figures of each candidate, windows in corpus order.
    replays = []
    for candidate in candidates:
        chosen = tuple(found[candidate, number] for number in sample.windows.tolist())
        estimates = estimate_figures(chosen, sample)
        replays.append(CandidateReplay(candidate=candidate, windows=chosen, estimates=estimates))
    return replays


def _make_tasks(
    windows: Iterable[Packs],
    candidates: Sequence[Candidate],
    setting: Setting,
    sample: WindowSample,
) -> Iterator[WindowTask]:
    """One task for each window and candidate, windows in corpus order.

    Reads no further than the last window of the sample.
    """
    batch, left = setting.parallelism.global_batch, set(sample.windows.tolist())
    for index, packs in enumerate(islice(windows, max(left) + 1)):
        if index not in left:
            continue
        left.remove(index)
        if len(packs) != batch:
            raise ValueError(
                f"window {index} has {len(packs)} packs; they must be as many as "
                f"global_batch={batch}"
            )
        for candidate in candidates:
            yield WindowTask(window=index, packs=packs, candidate=candidate, setting=setting)
    if left:
        raise ValueError(f"the sample wants window {min(left)}, which the corpus does not have")


def _run(
    tasks: Iterable[WindowTask], workers: int, record: Journal
) -> Iterator[tuple[WindowTask, WindowReplay]]:
    """Results of every task, in the order in which they are known; those of the journal at once."""
    executor = None
    if workers > 1:
        # Forked processes would inherit locks of threads that they don't have.
        executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    running: dict[Future[WindowReplay], WindowTask] = {}
    try:
        for task in tasks:
            # Tasks are made as they are needed, so only a few windows are held.
            known = record.find(task)
            if known is not None:
                yield task, known
            elif executor is None:
                yield task, replay_window(task)
            else:
                running[executor.submit(replay_window, task)] = task
                while len(running) >= _WAITING * workers:
                    yield from _finished(running)
        while running:
            yield from _finished(running)
    finally:
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)


def _finished(
    running: dict[Future[WindowReplay], WindowTask],
) -> Iterator[tuple[WindowTask, WindowReplay]]:
    """Wait for at least one task; remove all that are done, and yield their results."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        try:
            yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process of the replay died, for want of memory perhaps; use fewer workers, and "
                "a journal to keep what is done"
            ) from error


def estimate_figures(windows: Sequence[WindowReplay], sample: WindowSample) -> dict[str, Estimate]:
    """Estimates of every figure from the windows of `sample`, in the same order."""
    # A window has one value of its own figures and one a pool of the others.
    columns = [each.figures() for each in windows]
    found = {}
    for name in columns[0]:
        means = np.array([np.mean(each[name]) for each in columns])
        most = max(max(each[name]) for each in columns)
        found[name] = dataclasses.replace(estimate(means, sample), most=most)
    return found


def check_candidates(candidates: Sequence[Candidate], setting: Setting) -> None:
    """ValueError for a candidate that can't be planned, or is given twice."""
    spread = setting.parallelism
    if not candidates:
        raise ValueError("there is no candidate to replay")
    if len(set(candidates)) < len(candidates):
        twice = next(each for each in candidates if candidates.count(each) > 1)
        raise ValueError(f"candidate {twice} is given twice")
    for candidate in candidates:
        try:
            config = candidate.config(setting.config)
            cut_pool_heads(setting.heads, config, spread.cp)
            if spread.dp % candidate.pool_size:
                raise ValueError(f"P={candidate.pool_size} does not divide dp={spread.dp}")
        except ValueError as error:
            raise ValueError(f"candidate {candidate}: {error}") from error


def _identity(setting: Setting) -> dict[str, Any]:
    """Everything but candidate and window that figures depend on, as JSON has it."""
    return {
        "cp_size": setting.parallelism.cp,
        "dp_size": setting.parallelism.dp,
        "heads": dataclasses.asdict(setting.heads),
        "placement": LIBRA.pack_placement,
        "refine": LIBRA.refine,
        "order": LIBRA.order,
        "config": {
            name: repr(value)
            for name, value in dataclasses.asdict(setting.config).items()
            if name not in ("pool_size", "block_size", "head_shards")
        },
        "time": repr(setting.time),
    }
