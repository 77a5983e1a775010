"""The demo's model, its text and its watches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import corpus
from examples.decoder import (
    Decoder,
    DecoderConfig,
    local_attention,
    rotate,
    rotation,
    sample_positions,
)
from examples.stopwatch import timed
from libra.data.cp_shards import local_positions
from libra.runtime.speed import Stopwatch

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


def test_definitions_join_to_the_file_and_keep_their_decorators() -> None:
    source = (
        b"import os\n\n@cache\n@wraps(f)\ndef one():\n    return 1\n\n"
        b"class Two:\n    x = 1\n\n    @property\n    def three(self): ...\n"
    )
    samples = corpus.definitions(source)
    assert b"".join(samples) == source
    assert [sample.splitlines()[0] for sample in samples] == [
        b"import os",
        b"@cache",
        b"class Two:",
        b"    @property",
    ]


def test_source_without_definitions_is_one_sample_and_no_source_is_none() -> None:
    assert corpus.definitions(b"x = 1\n") == [b"x = 1\n"]
    assert corpus.definitions(b"") == []


def test_the_corpus_is_the_same_every_time_and_follows_its_seed() -> None:
    first, again = (corpus.load(tokens=20_000, longest=2048, seed=3) for _ in range(2))
    other = corpus.load(tokens=20_000, longest=2048, seed=4)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.lengths, again.lengths)
    assert not np.array_equal(first.tokens[:1000], other.tokens[:1000])


def test_the_corpus_is_long_tailed_text_in_samples_that_end() -> None:
    text = corpus.load(tokens=400_000, longest=8192)
    assert text.lengths.sum() == len(text.tokens) >= 400_000
    assert text.lengths.max() <= 8192
    assert np.percentile(text.lengths, 99) > 10 * np.median(text.lengths)
    ends = np.cumsum(text.lengths) - 1
    np.testing.assert_array_equal(np.flatnonzero(text.tokens == corpus.END_OF_SAMPLE), ends)
    assert set(np.unique(text.tokens).tolist()) <= set(range(corpus.VOCAB))
    assert b"return" in text.tokens[text.tokens < 256].astype(np.uint8).tobytes()


def test_a_library_too_small_for_the_run_is_refused_with_both_figures(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_bytes(b"x = 1\n")
    with pytest.raises(ValueError, match="hold 7 tokens but 100 are needed"):
        corpus.load(tokens=100, longest=50, root=tmp_path)


def test_installed_packages_and_tests_are_no_part_of_the_library(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "site-packages/d.py", "a/test/e.py", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert corpus.source_files(tmp_path) == [tmp_path / "a/c.py", tmp_path / "b.py"]


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 10

    def passes(self, seconds: float) -> None:
        self.now += seconds


class SlowSum(torch.autograd.Function):
    """An attention that takes 2 s forward and 3 s backward."""

    @staticmethod
    def forward(ctx, clock, q, k, v):
        ctx.clock = clock
        clock.passes(2)
        return q + k + v

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.passes(3)
        return None, grad, grad, grad


def test_attention_is_timed_forward_and_backward_and_nothing_else() -> None:
    clock = Clock()
    watches = (Stopwatch(clock.perf_counter), Stopwatch(clock.process_time))
    attend = timed(lambda q, k, v: SlowSum.apply(clock, q, k, v), watches)
    x = torch.ones(4, requires_grad=True)
    before = x * 1
    before.register_hook(lambda grad: clock.passes(100))
    after = attend(before * 1, before * 2, before * 3) * 2
    clock.passes(100)
    assert watches[0].total() == 2 and watches[1].total() == pytest.approx(0.2)
    after.register_hook(lambda grad: clock.passes(100))
    after.sum().backward()
    assert watches[0].total() == 3 and watches[1].total() == pytest.approx(0.3)
    assert x.grad.tolist() == [12.0] * 4
