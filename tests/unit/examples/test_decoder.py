"""The demo's model: positions, attention per sample, and learning."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from examples.decoder import (
    Decoder,
    DecoderConfig,
    local_attention,
    rotate,
    rotation,
    sample_positions,
)
from libra.data.cp_shards import local_positions

CU_SEQLENS = [0, 7, 8, 19, 32]
SMALL = DecoderConfig(vocab=50, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_width=48)


def small_decoder(attend, **changes) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(**{name: getattr(SMALL, name) for name in SMALL.__slots__} | changes)
    return Decoder(config, attend).double()


def some_tokens(count: int = CU_SEQLENS[-1]) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, (count,), generator=torch.Generator().manual_seed(1))


def test_positions_restart_at_each_sample() -> None:
    assert sample_positions([0, 3, 4, 8], np.arange(8)).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_positions_do_not_care_about_empty_samples() -> None:
    assert sample_positions([0, 3, 3, 5], np.arange(5)).tolist() == [0, 1, 2, 0, 1]


def test_a_shard_knows_the_positions_of_its_own_tokens() -> None:
    zigzag = local_positions(8, 2, 0, "zigzag")
    assert zigzag.tolist() == [0, 1, 6, 7]
    assert sample_positions([0, 5, 8], zigzag).tolist() == [0, 1, 1, 2]


def test_rotation_makes_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def score(q_at: int, k_at: int) -> torch.Tensor:
        at = [rotation(torch.tensor([p]), 8, 10_000.0) for p in (q_at, k_at)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.isclose(score(9, 4), score(9, 5))


def test_a_pack_gives_each_sample_the_logits_it_has_alone() -> None:
    tokens = some_tokens()
    positions = torch.from_numpy(sample_positions(CU_SEQLENS, np.arange(len(tokens))))
    packed = small_decoder(local_attention(CU_SEQLENS))(tokens, positions)
    for start, stop in pairwise(CU_SEQLENS):
        alone = small_decoder(local_attention([0, stop - start]))
        expected = alone(tokens[start:stop], torch.arange(stop - start))
        torch.testing.assert_close(packed[start:stop], expected)


def test_tokens_may_stand_in_any_order_when_attend_knows_it() -> None:
    tokens = some_tokens()
    shards = [local_positions(len(tokens), 2, rank, "zigzag") for rank in range(2)]
    order = torch.from_numpy(np.concatenate(shards))
    back = torch.argsort(order)
    in_order = local_attention(CU_SEQLENS)

    def attend(q, k, v):
        return in_order(q[back], k[back], v[back])[order]

    positions = torch.from_numpy(sample_positions(CU_SEQLENS, np.arange(len(tokens))))
    expected = small_decoder(in_order)(tokens, positions)
    shuffled = small_decoder(attend)(tokens[order], positions[order])
    torch.testing.assert_close(shuffled[back], expected)


def test_attend_gets_rows_heads_and_width_with_fewer_key_heads() -> None:
    seen = []

    def attend(q, k, v):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return torch.zeros_like(q)

    small_decoder(attend)(some_tokens(5), torch.arange(5))
    assert seen == [((5, 4, 8), (5, 2, 8), (5, 2, 8))] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_by_choice(tied: bool) -> None:
    decoder = small_decoder(local_attention([0, 4]), tied_embeddings=tied)
    assert (decoder.head.weight is decoder.embed.weight) is tied


def test_the_decoder_learns() -> None:
    tokens = some_tokens(16)
    decoder = small_decoder(local_attention([0, 16]))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        logits = decoder(tokens, torch.arange(16))
        loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(SMALL.vocab), rel=0.1)
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("changes", [{"heads": 6, "kv_heads": 4}, {"head_dim": 7}])
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="DecoderConfig"):
        DecoderConfig(vocab=50, **changes)
