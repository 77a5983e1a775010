"""From the sample lengths of a pool to what each of its workers sends, receives and computes.

Call `libra.plan.plan_pool.plan_pool`: lengths and configuration in, a `PoolPlan` out.

    cu_seqlens of P packs, PoolConfig, HeadShape
          |
          v
      geometry        samples, the fragments of workers, blocks
          |
          v
      place_surplus | place_paper | place_ulysses       which worker computes which tile
          |
          v
      PoolPlan ------------------------------------> traffic, memory     pairs and bytes of all
          |                                          traffic_bound       workers, forward and
          |  kv_fetch       rows that workers need                       backward
          |  kv_multicast   which of them are passed on
          |  to_buffer --> one worker plans, all receive --> from_buffer
          v
      make_rank_plan(plan, worker)
          all_to_all         rows to send and receive, chunk by chunk
          attention_calls    kernel segments, grouped into calls
          |
          v
      RankPlan, which `libra.runtime` prepares for a device and executes in every layer

A plan follows from lengths and configuration alone, so one plan serves all layers of a microbatch.
This package decides and never imports torch; the runtime executes and never decides.
"""
