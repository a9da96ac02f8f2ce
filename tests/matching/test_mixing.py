"""Images mixed with one another, which say more of the parents than the images themselves."""

import pytest
import torch

import symmerge as sm
from symmerge.evaluation.tasks.base import LazyBatches
from symmerge.lab.small_models import small_model
from symmerge.matching.learning.data import load_data
from symmerge.matching.learning.mixing import LEAST, TIMES, mixed
from symmerge.matching.learning.options import DataOptions


def vits():
    return [sm.load(small_model("vit", seed=seed)) for seed in (0, 1)]


def images(count=20):
    return sm.make_task("image", "self", vits(), samples=count)


def test_every_image_is_mixed_with_another():
    count = 20

    def collate(samples):  # image k is 1 in pixel k alone
        return {"pixel_values": torch.eye(count)[list(samples)][:, None, None, :]}

    plain = LazyBatches((tuple(range(count)),), collate)
    batches = list(mixed(plain, 6, seed=0))
    assert [len(batch["pixel_values"]) for batch in batches] == [6] * 3 * TIMES
    for image in torch.cat([batch["pixel_values"] for batch in batches]).flatten(1):
        assert (image > 0).sum() == 2 and image.max() >= LEAST
        assert image.sum() == pytest.approx(1)
    again, other = (next(iter(mixed(plain, 6, seed))) for seed in (0, 1))
    assert torch.equal(batches[0]["pixel_values"], again["pixel_values"])
    assert not torch.equal(batches[0]["pixel_values"], other["pixel_values"])


def test_given_images_are_mixed_unless_told_otherwise():
    models = vits()
    task = sm.make_task("image", "self", models, samples=20)
    changes = {"usual": {}, "plain": {"mixed": False}}
    data = {
        name: load_data(DataOptions(data=task, batch_size=5, **change), models, print).train
        for name, change in changes.items()
    }
    assert {name: len(each) for name, each in data.items()} == {"usual": 9, "plain": 3}
    everything = torch.cat([batch["pixel_values"] for batch in task.batches])
    there = {
        name: any(torch.equal(each[0].inputs["pixel_values"][0], image) for image in everything)
        for name, each in data.items()
    }
    assert there == {"usual": False, "plain": True}
    text = [sm.load(small_model("gpt2", seed=seed)) for seed in (0, 1)]  # nothing else is mixed
    words = sm.make_task("clm", "self", text, samples=20, length=8)
    assert len(load_data(DataOptions(data=words, batch_size=5), text, print).train) == 3
