"""The steps of a ring: every causal pair once, and no hop that brings rows which no rank reads."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import libra
from libra.baselines.ring_steps import ring_steps
from tests.distributed.test_attention import draw_bounds


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_causal_pair_is_attended_once(data: st.DataObject) -> None:
    tokens, ranks = data.draw(st.sampled_from([24, 37, 64])), data.draw(st.integers(1, 5))
    shards = data.draw(st.sampled_from(["contiguous", "zigzag"]))
    bounds = np.array(draw_bounds(data, tokens))
    found = np.zeros((tokens, tokens), dtype=int)
    for rank in range(ranks):
        steps = ring_steps(bounds, tokens, ranks, rank, shards)
        mine = libra.local_positions(tokens, ranks, rank, shards)
        for step, reads in enumerate(steps.reads):
            source = steps.source(step)
            block = libra.local_positions(tokens, ranks, source, shards)
            for q, rows, k, keys in zip(
                reads.q_start, reads.q_len, reads.k_start, reads.k_len, strict=True
            ):
                if step:
                    assert steps.first[source] <= k and k + keys <= steps.stop[source]
                    assert step <= steps.last[source]
                for row in range(rows):
                    seen = keys if step else keys - rows + row + 1
                    found[mine[q + row], block[k : k + seen]] += 1
    sample = np.searchsorted(bounds, np.arange(tokens), side="right")
    real = np.arange(tokens) < bounds[-1]
    wanted = np.tril(sample[:, None] == sample) & real[:, None] & real
    assert (found == wanted).all()
