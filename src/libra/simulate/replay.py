"""Replaying a corpus: the runtime's own placement and planner over its windows, by candidate.

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
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from libra.data.lengths import check_count
from libra.data.packing import Packs
from libra.plan.head_groups import cut_heads
from libra.plan.place_ulysses import check_ulysses
from libra.plan.plan_pool import head_shards
from libra.simulate.journal import Journal
from libra.simulate.predict import Setting
from libra.simulate.replay_window import (
    WINDOW_FIGURES,
    Candidate,
    WindowReplay,
    WindowTask,
    replay_window,
)
from libra.simulate.sample import Estimate, WindowSample, estimate, every_window
from libra.simulate.schemes import SCHEMES, Scheme

Progress = Callable[[int, int | None], None]
Found = dict[Candidate, dict[int, WindowReplay]]

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
    *,
    scheme: Scheme = SCHEMES["libra"],
    sample: WindowSample | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    journal: Path | None = None,
) -> list[CandidateReplay]:
    """Replay every candidate over all windows, or those of `sample`; results in candidate order.

    `windows` gives the GBS packs of each optimizer step, as `WindowReader` does, and is read once;
    no more than a few are held.  `setting.config` has the settings that candidates don't, and
    `scheme` groups packs into pools.

    Several `workers` are processes.  They import the main script again, so a script keeps its work
    under `if __name__ == "__main__"`.

    `progress` is called with the tasks done and those in all (None while their number is unknown).
    `journal` is a file of JSON lines, made where it doesn't exist; what it has is not done again.

    Raises ValueError for a candidate that doesn't fit, naming it, for no candidate or window, a
    sample of windows that don't exist, and a journal of other settings or another corpus.
    """
    _check_candidates(candidates, setting)
    check_count("workers", workers)
    total = _count_tasks(windows, sample, len(candidates))
    tasks = _make_tasks(windows, candidates, setting, scheme, sample)
    found: Found = {candidate: {} for candidate in candidates}
    done = 0
    with ExitStack() as stack:
        record = None
        if journal is not None:
            record = stack.enter_context(closing(Journal(journal, _identity(setting, scheme))))
        for task, result in _run(tasks, workers, record):
            found[task.candidate][task.window] = result
            done += 1
            if progress is not None:
                progress(done, total)
    return _summarise(found, sample)


def _make_tasks(
    windows: Iterable[Packs],
    candidates: Sequence[Candidate],
    setting: Setting,
    scheme: Scheme,
    sample: WindowSample | None,
) -> Iterator[WindowTask]:
    """One task for each window and candidate, windows in corpus order."""
    for index, packs in _wanted(windows, sample):
        if len(packs) != setting.parallelism.global_batch:
            raise ValueError(
                f"window {index} has {len(packs)} packs; they must be as many as "
                f"global_batch={setting.parallelism.global_batch}"
            )
        for candidate in candidates:
            yield WindowTask(
                window=index, packs=packs, candidate=candidate, setting=setting, scheme=scheme
            )


def _run(
    tasks: Iterator[WindowTask], workers: int, record: Journal | None
) -> Iterator[tuple[WindowTask, WindowReplay]]:
    """Results of every task, in the order in which they are known; the journal keeps new ones."""
    executor = None
    if workers > 1:
        # Forked processes would inherit locks of threads that they don't have.
        executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    running: dict[Future[WindowReplay], WindowTask] = {}
    try:
        for task in tasks:
            known = None if record is None else record.find(task)
            if known is not None:
                yield task, known
            elif executor is None:
                yield _noted(record, task, replay_window(task))
            else:
                running[executor.submit(replay_window, task)] = task
                while len(running) >= _WAITING * workers:
                    yield from _finished(running, record)
        while running:
            yield from _finished(running, record)
    finally:
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)


def _finished(
    running: dict[Future[WindowReplay], WindowTask], record: Journal | None
) -> Iterator[tuple[WindowTask, WindowReplay]]:
    """Wait for at least one task; remove all that are done, and yield their results."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        try:
            yield _noted(record, running.pop(future), future.result())
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process of the replay died, for want of memory perhaps; use fewer workers, and "
                "a journal to keep what is done"
            ) from error


def _noted(
    record: Journal | None, task: WindowTask, result: WindowReplay
) -> tuple[WindowTask, WindowReplay]:
    if record is not None:
        record.add(task, result)
    return task, result


def _summarise(found: Found, sample: WindowSample | None) -> list[CandidateReplay]:
    """Estimates for the corpus from the windows of every candidate, which are the same."""
    seen = sorted(next(iter(found.values())))
    if not seen:
        raise ValueError("there is no window: the corpus is smaller than one global batch")
    used = every_window(len(seen)) if sample is None else sample
    if seen != used.windows.tolist():
        missing = sorted(set(used.windows.tolist()) - set(seen))
        raise ValueError(f"the sample wants window {missing[0]}, which the corpus does not have")
    replays = []
    for candidate, results in found.items():
        windows = tuple(results[number] for number in seen)
        estimates = estimate_figures(windows, used)
        replays.append(CandidateReplay(candidate=candidate, windows=windows, estimates=estimates))
    return replays


def estimate_figures(windows: Sequence[WindowReplay], sample: WindowSample) -> dict[str, Estimate]:
    """Estimates of every figure from the windows of `sample`, in the same order."""
    found = {
        name: estimate(np.array([getattr(each, name) for each in windows]), sample)
        for name in WINDOW_FIGURES
    }
    columns = [each.pool_values() for each in windows]
    for name in columns[0]:
        means = np.array([np.mean(each[name]) for each in columns])
        most = max(max(each[name]) for each in columns)
        found[name] = dataclasses.replace(estimate(means, sample), most=most)
    return found


def _check_candidates(candidates: Sequence[Candidate], setting: Setting) -> None:
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
            if config.placement == "ulysses":
                check_ulysses(setting.heads, spread.cp)
            cut_heads(setting.heads, head_shards(config, spread.cp), config.chunks)
            if spread.dp % candidate.pool_size:
                raise ValueError(f"P does not divide dp={spread.dp}")
        except ValueError as error:
            raise ValueError(f"candidate {candidate}: {error}") from error


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


def _count_tasks(
    windows: Iterable[Packs], sample: WindowSample | None, candidates: int
) -> int | None:
    """Tasks in all; None where windows cannot be counted before they are read."""
    if sample is not None:
        return len(sample.windows) * candidates
    return len(windows) * candidates if isinstance(windows, Sized) else None


def _identity(setting: Setting, scheme: Scheme) -> dict[str, Any]:
    """Everything but candidate and window that figures depend on, as JSON has it."""
    return {
        "cp_size": setting.parallelism.cp,
        "dp_size": setting.parallelism.dp,
        "heads": dataclasses.asdict(setting.heads),
        "placement": scheme.pack_placement,
        "refine": scheme.refine,
        "order": scheme.order,
        "config": {
            name: repr(value)
            for name, value in dataclasses.asdict(setting.config).items()
            if name not in ("pool_size", "block_size", "head_shards")
        },
        "time": repr(setting.time),
    }
