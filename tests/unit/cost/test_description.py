"""Description files: presets, overrides, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra.cost import CLUSTERS, MODELS, describe

WHOLE = """
[cluster]
preset = "H100"
between_nodes = 25e9
ranks_per_node = 4

[model]
preset = "qwen3-8b"

[parallelism]
dp = 16
cp = 8
global_batch = 128
tokens = 262144
schedule = "gpipe"
"""


def read(tmp_path: Path, text: str):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return describe(str(file))


def test_a_file_starts_from_presets_and_overrides_them(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    assert found.parallelism is not None
    assert found.cluster.between_nodes == 25e9 and found.cluster.ranks_per_node == 4
    assert found.cluster.peak_flops == CLUSTERS["h100"].peak_flops
    assert found.model == MODELS["qwen3-8b"]
    assert found.parallelism.microbatches == 8 and found.parallelism.schedule == "gpipe"


def test_sections_but_the_cluster_may_be_missing(tmp_path: Path) -> None:
    found = read(tmp_path, '[cluster]\npreset = "h100"')
    assert found.model is None and found.parallelism is None


def test_a_cluster_is_named_by_its_preset_or_by_its_file(tmp_path: Path) -> None:
    assert describe("H100").cluster == CLUSTERS["h100"]
    read(tmp_path, WHOLE)
    assert describe(str(tmp_path / "cluster.toml")).cluster.ranks_per_node == 4
    with pytest.raises(ValueError, match="cluster has no preset 'h900'"):
        describe("h900")


def test_a_cluster_may_be_given_without_a_preset_whole_numbers_for_rates(tmp_path: Path) -> None:
    lines = ("peak_flops", "memory_bytes", "memory_bandwidth", "within_node", "between_nodes")
    text = '[cluster]\nname = "mine"\n' + "".join(f"{name} = 1000\n" for name in lines)
    cluster = read(tmp_path, text).cluster
    assert cluster.peak_flops == 1000.0


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '[cluster]\npreset = "h100"\nbetween_node = 1.0',
            r"unknown key 'between_node' \(did you mean 'between_nodes'\?\) in \[cluster\]",
        ),
        ("[parallelism]\nglobal_bach = 8", r"did you mean 'global_batch'"),
        ("[clusters]\nx = 1", r"'clusters' \(did you mean 'cluster'\?\)"),
        ("peak_flops = 1.0", r"unknown key 'peak_flops' in the file, outside any section"),
        ("cluster = 1", r"cluster is 1; it must be a section"),
        ('[cluster]\npreset = "h900"', r"\[cluster\] has no preset 'h900'; there are a100, h100"),
        ("[cluster]\npreset = 100", r"no preset 100"),
        (
            '[cluster]\npreset = "h100"\nranks_per_node = 8.0',
            "ranks_per_node is 8.0; it must be an integer",
        ),
        (
            '[cluster]\npreset = "h100"\nranks_per_node = true',
            "ranks_per_node is True; it must be an integer",
        ),
        ('[cluster]\npreset = "h100"\npeak_flops = "fast"', "'fast'; it must be a finite number"),
        ('[cluster]\npreset = "h100"\npeak_flops = -1', "peak_flops is -1"),
        ('[cluster]\npreset = "h100"\npeak_flops = nan', "peak_flops is nan"),
        ('[cluster]\npreset = "h100"\nmatmul_fraction = 1.5', "at most 1"),
        ('[cluster]\npreset = "h100"\nattention_figures = "flash"', "choose one of 'flash-2'"),
        ('[cluster]\nname = "x"\npeak_flops = 1.0', "lacks memory_bytes, memory_bandwidth"),
        ("[parallelism]\ndp = 2", r"lacks cp, global_batch, tokens; give every one$"),
        ('[parallelism]\npreset = "x"', "unknown key 'preset'"),
        ('[model]\npreset = "qwen3-8b"\ntied_embeddings = 1', "it must be true or false"),
        ("[cluster", "cannot read"),
        ('[model]\npreset = "qwen3-8b"', r"there is no \[cluster\] section"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, text)
    assert "cluster.toml" in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.toml"):
        describe(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ("dp = 3", "dp 3 does not divide global_batch 128"),
        ("cp = 3", "cp 3 does not divide tokens"),
        ("ep = 3", "ep 3 does not divide cp x dp 128"),
        ('virtual_stages = 2\nschedule = "1f1b"', "set schedule='interleaved'"),
        ('pp = 3\nschedule = "interleaved"', "pp 3 does not divide the 8 microbatches"),
        ("gradient_overlap = 1.5", "at most 1"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(
    tmp_path: Path, changes: str, message: str
) -> None:
    base = {"dp": "16", "cp": "8", "global_batch": "128", "tokens": "262144"}
    given = base | dict(line.split(" = ") for line in changes.splitlines())
    text = '[cluster]\npreset = "h100"\n[parallelism]\n' + "\n".join(
        f"{key} = {value}" for key, value in given.items()
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)
