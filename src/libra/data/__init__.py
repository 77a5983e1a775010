"""From sample lengths to the packs of every optimizer step, grouped into pools of equal load.

    lengths of samples
      |  packing.py     pack_sequential, pack_best_fit: packs of L tokens
      v
    Packs
      |  sampler.py     PoolSampler: shuffles packs, cuts them into windows of one optimizer step
      v
    window of GBS packs
      |  pools.py       make_pools: VRSP, then refinement by swaps, then the order of pools
      v
    pools of P packs, in the order in which the replicas train on them
      |  cp_shards.py   local_positions, local_labels: rows of a pack that a CP rank holds
      v
    tokens and labels of one rank

`PoolSampler` does all of it for a training loop; `pools.make_pools` is the one function that groups
a window's packs, for sampler, simulator and benchmark alike.  lengths.py checks what users pass
in and computes workloads.  No file here imports torch, and numba is imported on the first call that
needs it.
"""

from __future__ import annotations
