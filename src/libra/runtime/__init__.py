"""The runtime: balanced attention on the ranks of a sequence pool.

A model calls one function, `attention.libra_attention`, inside `with pool.microbatch(cu_seqlens)`:

    SequencePool (pool)            process groups of P replicas x CP ranks, made once
      |
      | pool.microbatch(cu_seqlens)       every rank gives the sample bounds of its own pack
      v
    Microbatch (microbatch)        finds its plans and runs its layers
      |
      | Planner.submit (planner_thread)   worker 0 plans on a CPU thread; all receive the plan
      | make_device_plan (device_plan)    indices on the device, kernel calls prepared
      v
    libra_attention(q, k, v)       once per layer
      |
      | 1. reach_consensus (consensus)    all ranks accept the call, or all raise the same error
      | 2. Executor.forward (executor), chunk by chunk
      |      dispatch (exchange)   Q, K and V to the workers that compute with them
      |      attend   (kernels)    FlashAttention on local and received rows
      |      return   (exchange)   outputs to the homes of the queries
      v
    out                            equal to attention on one device

`Executor.backward` runs the same pipeline with dO in and dQ, dK and dV out (`kv_grad_reduce` sums
the last two).  `all_to_all` holds the one collective that moves rows, `workspace` the memory that
all layers share, and `failure` names a rank that is lost.
"""
