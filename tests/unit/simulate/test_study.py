"""A study of a small corpus, from lengths to a recommendation."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest

from libra.simulate import Study, StudyConfig, StudyOptions, run_study, study_json
from libra.simulate.results import Candidate
from tests.unit.simulate.small_cluster import make_setting
from tests.unit.simulate.study_example import study_example

STAGES = {"reading the corpus", "replaying candidates", "comparing schemes", "scaling"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StudyConfig:
    source = tmp_path_factory.mktemp("study") / "lengths.npy"
    lengths = np.random.default_rng(0).lognormal(5.5, 1.3, 800).astype(np.int64) + 1
    np.save(source, np.append(np.minimum(lengths, 8192), 9000))
    return StudyConfig(
        source=str(source),
        options=StudyOptions(windows=4, compared_windows=2, scale_to=8, workers=1),
        setting=make_setting(heads=(8, 4, 128), tokens=8192, global_batch=8, dp=4),
        candidates=[Candidate(2, 1024, 1), Candidate(4, 1024, 1)],
    )


@pytest.fixture(scope="module")
def stages() -> list[str]:
    return []


@pytest.fixture(scope="module")
def study(config: StudyConfig, stages: list[str]) -> Study:
    return run_study(config, lambda stage, done, total: stages.append(stage))


def test_every_part_is_there_and_every_stage_is_reported(study: Study, stages: list[str]) -> None:
    assert set(stages) == STAGES
    assert study.corpus.dropped_samples == 1
    assert study.corpus.windows_replayed == min(4, study.corpus.windows)
    assert [point.pool_size for point in study.pooling] == [1, 2, 4]
    assert [each.pool_size for each in study.candidates] == [2, 4]
    assert len(study.workers.before) == len(study.workers.after) > 0
    counts = study.microbatches.counts
    assert sum(counts["ulysses"]) == sum(counts["libra"]) == 2 * 8
    assert {each.schedule for each in study.pipeline} == {"gpipe", "1f1b", "interleaved"}


def test_the_compared_windows_take_libra_from_the_replay(study: Study) -> None:
    """Scaling predicts Libra anew where pools differ, and finds the same throughput here."""
    libra = next(each for each in study.schemes if each.key == "libra")
    assert libra.step_seconds > 0
    point = next(each for each in study.scaling.fixed_batch if each.dp == 4)
    assert point.efficiency["ideal"] == 1 >= point.efficiency["libra"]


def test_figures_are_plain_numbers(study: Study) -> None:
    plain = study_json(study)
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == {each.name for each in fields(Study)}


def test_json_has_null_for_what_is_no_number() -> None:
    packs = replace(study_example().packs, cv=math.nan, heaviest=math.inf)
    plain = study_json(replace(study_example(), packs=packs))
    assert plain["packs"]["cv"] is plain["packs"]["heaviest"] is None
    assert isinstance(plain["packs"]["quantiles"], list)


@pytest.mark.parametrize(
    "options, message",
    [
        (StudyOptions(windows=-1), "windows is -1; it must be an integer >= 0"),
        (StudyOptions(windows=1), "windows is 1; a sample has at least 2"),
        (StudyOptions(compared_windows=0), "compared_windows is 0"),
        (StudyOptions(memory_cap=math.inf), "memory_cap is inf"),
        (StudyOptions(buffer=5), "buffer=5 is for packing='best-fit' only"),
    ],
)
def test_options_that_cannot_be_are_refused(options: StudyOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.check()
