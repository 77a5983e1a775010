"""The baselines that Libra is measured against, behind the same interface.

    ring   sample bounds --> RingMicrobatch --> ring_attention(q, k, v, microbatch=...) --> out
    wlb    packs of a window --> WlbSampler --> packs of similar cost, each run under Ulysses

Call `ring.ring_attention` for ring attention, and sample with `wlb.WlbSampler` for WLB-LLM style
training.  A cluster-wide pool needs no code here: it is `PoolConfig(pool_size=DP)` with packs in
sampler order.
"""
