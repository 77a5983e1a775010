"""The pluggable sampler: every replica's packs, grouped into pools one optimizer step at a time.

    epoch      = packs shuffled by (seed, epoch), cut into windows of GBS packs
    window     = one optimizer step: GA steps x DP replicas, filled row by row by its pools

                 replica 0 .. P-1     replica P .. 2P-1     ..
        GA 0         pool 0                pool 1
        GA 1       pool DP/P              ..

The packs of a window depend on the corpus, seed, epoch and GBS alone, so the samples of an
optimizer step are the same with and without VRSP, and with any number of replicas.  Pools are those
of VRSP, refined by swaps, heaviest first; each of the two can be switched off.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import ArrayLike

from libra.config import check_choice, check_count
from libra.data.lengths import IntArray, workloads
from libra.data.packing import Packs
from libra.data.pools import PackPlacement, PoolOrder, make_pools

_STEP_SETTINGS: Final = ("global_batch", "seed", "shuffle", "drop_last", "corpus")
"""Settings that decide which packs each optimizer step holds."""
_ORDER_SETTINGS: Final = ("pool_size", "placement", "refine", "order")
"""Settings that decide their order inside an optimizer step."""


class PoolSampler:
    """Pack indices of one data-parallel replica: the `sampler=` of a loader with batch size 1.

    `lengths_of_packs`: a `Packs`, or the sample lengths of each pack.  `global_batch` (GBS): packs
    of an optimizer step.  Iteration yields one index per gradient-accumulation step;
    `dropped_packs` and `repeated_packs` count the packs that an incomplete last window drops or
    repeats.

    `refine` swaps packs between VRSP's pools (`libra.refine_pools`) and `order` says which pools
    share a GA index (`libra.order_pools`): `grouped`, `uniform` for pipelines, or `index`.  Plain
    VRSP is `refine=False, order="index"`.  `placement="contiguous"` is the baseline without VRSP,
    packs in sampler order: there the two have no effect and become False and "index".

    A pass that is exhausted moves on to the next epoch; `set_epoch` goes to any.  A worker process
    that prefetches runs ahead of the training loop, so checkpoint the loader's state (or the
    sampler's, if nothing prefetches).  torch's loaders accept any object with `__iter__` and
    `__len__` as a sampler: importing and using this one needs no torch.

    Raises ValueError for an empty corpus, a corpus smaller than GBS, DP that doesn't divide GBS, P
    that doesn't divide DP, a rank out of range, and an unknown placement or order.
    """

    def __init__(
        self,
        lengths_of_packs: Packs | Sequence[ArrayLike],
        *,
        global_batch: int,
        dp_rank: int,
        dp_size: int,
        pool_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        placement: PackPlacement = "vrsp",
        refine: bool = True,
        order: PoolOrder = "grouped",
    ) -> None:
        self.global_batch = check_count("global_batch", global_batch)
        self.dp_size = check_count("dp_size", dp_size)
        self.dp_rank = check_count("dp_rank", dp_rank, least=0)
        self.pool_size = check_count("pool_size", pool_size)
        self.seed = check_count("seed", seed, least=0)
        check_choice("placement", placement, get_args(PackPlacement))
        check_choice("order", order, get_args(PoolOrder))
        self._check_sizes()
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.placement: PackPlacement = placement
        self.refine = bool(refine) and placement == "vrsp"
        self.order: PoolOrder = order if placement == "vrsp" else "index"
        if isinstance(lengths_of_packs, Packs):
            self._workloads = lengths_of_packs.workloads
        else:
            self._workloads = workloads(lengths_of_packs)
        packs = len(self._workloads)
        digest = hashlib.sha256(self._workloads.astype("<i8").tobytes())
        self.corpus = f"{packs} packs, {digest.hexdigest()[:16]}"
        """Fingerprint of the packs' workloads."""
        whole, rest = self._whole_windows(packs)
        self.windows = whole + bool(rest and not drop_last)
        """Optimizer steps of an epoch."""
        self.steps_per_window = self.global_batch // self.dp_size
        """GA: packs of one replica per optimizer step."""
        self.dropped_packs = rest if drop_last else 0
        """Packs of each epoch's order that are in no window."""
        self.repeated_packs = self.global_batch - rest if rest and not drop_last else 0
        """Packs from the start of each epoch's order that fill up its last window."""
        self._epoch = 0
        self._step = 0  # the next step of this epoch to be yielded
        self._resumed = False  # the position was loaded and no pass has begun at it

    def _check_sizes(self) -> None:
        """ValueError unless dp_rank < DP, P divides DP and DP divides GBS."""
        if self.global_batch % self.dp_size:
            raise ValueError(
                f"global_batch={self.global_batch} packs over dp_size={self.dp_size} replicas: "
                "dp_size must divide global_batch"
            )
        if self.dp_size % self.pool_size:
            raise ValueError(
                f"pool_size={self.pool_size} does not divide dp_size={self.dp_size}: "
                "every pool has exactly pool_size replicas"
            )
        if self.dp_rank >= self.dp_size:
            raise ValueError(f"dp_rank={self.dp_rank} is outside [0, dp_size={self.dp_size})")

    def _whole_windows(self, packs: int) -> tuple[int, int]:
        """Whole windows in the corpus and packs left over; warns about the latter.

        Raises ValueError for a corpus of less than one window.
        """
        if not packs:
            raise ValueError("the corpus is empty: lengths_of_packs holds no pack")
        whole, rest = divmod(packs, self.global_batch)
        if not whole:
            raise ValueError(
                f"the corpus has {packs} packs, less than one global_batch={self.global_batch}; "
                "lower global_batch or add data"
            )
        if rest:
            short = self.global_batch - rest
            remedy = (
                f"dropped; drop_last=False fills it up with {short} packs of the epoch's start"
                if self.drop_last
                else f"filled up with {short} packs of the epoch's start; drop_last=True drops it"
            )
            warnings.warn(
                f"{packs} packs are {whole} windows of global_batch={self.global_batch} and {rest} "
                f"packs over: every epoch's incomplete last window is {remedy}",
                stacklevel=3,
            )
        return whole, rest

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is under way, or else of the next one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; a position loaded in that epoch is kept."""
        if check_count("epoch", epoch, least=0) != self._epoch:
            self._epoch, self._step, self._resumed = int(epoch), 0, False

    def __len__(self) -> int:
        """Indices of this replica in a whole epoch."""
        return self.windows * self.steps_per_window

    def __iter__(self) -> Iterator[int]:
        if not self._resumed:
            self._step = 0
        return self._walk(self._epoch, self._step)

    def _walk(self, epoch: int, step: int) -> Iterator[int]:
        # Loaders make iterators and discard them: only one that is advanced uses up a position.
        if epoch != self._epoch:
            epoch, step = self._epoch, 0
        self._resumed = False
        order = self._order(epoch)
        while step < len(self):
            window, row = divmod(step, self.steps_per_window)
            mine = self._window(order, window)[row:, self.dp_rank]
            for pack in mine.tolist():
                step += 1
                self._step = step
                yield pack
        self._epoch, self._step = epoch + 1, 0

    def schedule(self, epoch: int | None = None) -> IntArray:
        """Pack of every step and replica of an epoch, int64 [steps, dp_size].

        None is the current epoch.  At step s, pool p holds schedule()[s, p * P : (p + 1) * P].
        """
        chosen = self._epoch if epoch is None else check_count("epoch", epoch, least=0)
        order = self._order(chosen)
        return np.concatenate([self._window(order, i) for i in range(self.windows)])

    def pool_schedule(self, epoch: int | None = None) -> IntArray:
        """Packs of this replica's own pool at every step of an epoch, int64 [steps, P]."""
        first = self.dp_rank // self.pool_size * self.pool_size
        return self.schedule(epoch)[:, first : first + self.pool_size]

    def _order(self, epoch: int) -> IntArray:
        """The epoch's packs in window order, the last window whole, int64 [windows * GBS]."""
        packs = len(self._workloads)
        if self.shuffle:
            # numpy keeps a bit generator's raw stream across versions, but not its permutations.
            source = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            order = np.argsort(source.random_raw(packs), kind="stable")
        else:
            order = np.arange(packs, dtype=np.int64)
        order = np.concatenate([order, order[: self.repeated_packs]])
        return order[: self.windows * self.global_batch]

    def _window(self, order: IntArray, window: int) -> IntArray:
        """One optimizer step, int64 [GA, dp_size]: its pools, row after row."""
        packs = order[window * self.global_batch : (window + 1) * self.global_batch]
        pools = make_pools(
            self._workloads[packs],
            self.pool_size,
            self.dp_size // self.pool_size,
            placement=self.placement,
            refine=self.refine,
            order=self.order,
        )
        return packs[pools].reshape(self.steps_per_window, self.dp_size)

    def state_dict(self) -> dict[str, Any]:
        """The position, in packs of all replicas, and the settings that it depends on: the same on
        every rank.
        """
        return {
            "epoch": self._epoch,
            "consumed_packs": self._step * self.dp_size,
            "dp_size": self.dp_size,
            **{name: getattr(self, name) for name in (*_STEP_SETTINGS, *_ORDER_SETTINGS)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position, with this or another `dp_size`; the next pass starts there.

        Raises ValueError, naming the setting, where the steps would not be the same: another
        global_batch, seed, shuffle, drop_last or corpus; inside an optimizer step also another
        pool_size, placement, refine or order, another dp_size where order is "uniform" (which
        depends on it), or a position that no step of this dp_size starts at.
        """
        missing = sorted(set(self.state_dict()) - set(state))
        if missing:
            raise ValueError(f"this is no PoolSampler state: it lacks {', '.join(missing)}")
        epoch = check_count("epoch of the state", state["epoch"], least=0)
        consumed = check_count("consumed_packs of the state", state["consumed_packs"], least=0)
        done, whole = consumed % self.global_batch, self.windows * self.global_batch
        again = "steps would not hold the same samples; resume with the same, or start anew"
        same = dict.fromkeys(_STEP_SETTINGS, ("", again))
        if done:  # inside an optimizer step its order must stay too
            where = f" inside an optimizer step ({done} of {self.global_batch} packs done)"
            order = (*_ORDER_SETTINGS, "dp_size") if self.order == "uniform" else _ORDER_SETTINGS
            same |= dict.fromkeys(order, (where, "change it only at the end of an optimizer step"))
        for name, (where, remedy) in same.items():
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state was saved with {name}={state[name]!r}{where}, this sampler has "
                    f"{name}={getattr(self, name)!r}: {remedy}"
                )
        if consumed > whole:
            raise ValueError(f"the state has consumed_packs={consumed}, but an epoch has {whole}")
        if consumed % self.dp_size:
            raise ValueError(
                f"the state lies {done} packs into an optimizer step, where no step of "
                f"dp_size={self.dp_size} starts; choose a dp_size that divides {done}, "
                "or save at the end of an optimizer step"
            )
        self._epoch, self._step, self._resumed = epoch, consumed // self.dp_size, True
