"""Published tables: the figures of their papers, and times that grow with the work."""

from __future__ import annotations

import numpy as np
import pytest

from libra.cost import CLUSTERS, published_table
from libra.cost.kernel_table import segment_flops


@pytest.mark.parametrize(
    "length, tflops", [(512, 292), (1024, 423), (2048, 521), (4096, 579), (16_384, 616)]
)
def test_the_h100_table_runs_causal_attention_as_fast_as_was_published(
    length: int, tflops: float
) -> None:
    made = published_table(CLUSTERS["h100"])
    flops = segment_flops(length, length, 16, 128, 128, direction="forward")
    seconds = made.seconds(length, length, 16, direction="forward")
    assert flops / seconds / 1e12 == pytest.approx(tflops)


def test_published_tables_reach_the_best_that_is_reported_and_no_more() -> None:
    for name, forward, backward in (("a100", 0.73, 0.63), ("h100", 648 / 989, 561 / 989)):
        made = published_table(CLUSTERS[name])
        assert made.forward.max() == pytest.approx(forward, abs=0.001)
        assert made.backward.max() == pytest.approx(backward, abs=0.001)
    assert published_table(CLUSTERS["b200"]).forward.max() == pytest.approx(0.71, abs=0.001)


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_longer_segments_take_no_less_time_but_for_interpolation(name: str, direction) -> None:
    made = published_table(CLUSTERS[name])
    lengths = np.unique(np.geomspace(1, 1 << 20, 300).astype(np.int64))
    square = made.seconds(lengths, lengths, 1, direction=direction)
    assert (np.diff(square) >= -0.02 * square[1:]).all()
    for q in (1, 100, 700, 5000):
        keys = lengths[lengths >= q]
        beside = made.seconds(q, keys, 1, direction=direction)
        assert (np.diff(beside) >= -0.02 * beside[1:]).all()
