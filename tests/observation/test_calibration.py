"""Calibration: held-out samples are disjoint from those that give statistics."""

from functools import cache

import pytest
import torch

import symmerge as sm
from symmerge.errors import DataError
from symmerge.evaluation.tasks import make_task
from symmerge.evaluation.tasks.base import split
from symmerge.lab.small_models import small_model
from symmerge.observation.calibration import calibrate


@cache
def canonical(name, seed=0):
    return sm.canonicalize(sm.load(small_model(name, seed=seed, dtype=torch.float64)))


def test_a_split_is_disjoint_and_whole():
    task = make_task(
        "clm", "self", [sm.load(small_model("gpt2", seed=seed)) for seed in (0, 1)], samples=21
    )
    first, second = split(task, 0.25)

    def rows(part):
        return [tuple(row.tolist()) for batch in part.batches for row in batch["input_ids"]]

    assert (first.samples, second.samples) == (15, 6) == (len(rows(first)), len(rows(second)))
    assert sorted(rows(first) + rows(second)) == sorted(rows(task))
    assert len(second.batches) >= 1 and not set(rows(first)) & set(rows(second))
    for share, count in ((0.25, 3), (0.9, 21)):
        small = make_task("clm", "self", [sm.load(small_model("gpt2"))], samples=count)
        message = f"{count} samples of self cannot be split with a share of {share:g}"
        with pytest.raises(DataError, match=message):
            split(small, share)


def test_what_is_scored_on_is_not_in_the_statistics():
    models = tuple(canonical("gpt2", seed) for seed in (0, 1))
    task = make_task("clm", "self", models, samples=16)
    probe = calibrate(models, task, held_out=0.25)
    tokens = sum(batch.inputs["input_ids"].numel() for batch in probe.batches)
    assert (
        probe.scored
        and tokens == 4 * 62
        and probe.observation.samples == 12 * 62
        and len(probe.targets) == tokens
    )
    unscored = calibrate(models, task, held_out=0.0)
    assert not unscored.scored and unscored.observation.samples == 16 * 62
