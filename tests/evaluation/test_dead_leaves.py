"""Dead leaves, synthetic images for classifiers: their statistics, use and limits."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fixtures import MEAN, STD, checkpoint, run

import symmerge as sm
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.data.dead_leaves import BRIGHTNESS, SPREAD, as_pixels, draw_dead_leaves
from symmerge.lab.training.loop import train
from symmerge.lab.training.recipes import TRAINING, with_changes
from symmerge.matching.learned import LearnedMatching
from symmerge.merging.rescaling import repair
from symmerge.models.alignment import Alignment
from symmerge.verification.modules import full_module

SHAPE = (3, 24, 32)
LEARN = ("--method", "learned", "--samples", 40, "--tries", 1, "--steps", 2)


# the images


def test_the_same_seed_draws_the_same_pictures():
    first, alone = draw_dead_leaves(range(40), SHAPE, seed=1), draw_dead_leaves([37], SHAPE, seed=1)
    assert (
        first.shape == (40, *SHAPE) and first.dtype == np.float32 and (first[37] == alone[0]).all()
    )  # whatever is drawn beside it
    assert (
        not (first[0] == first[1]).any()
        and not (draw_dead_leaves([37], SHAPE, seed=2) == alone).any()
    )  # the controls


def test_scale_and_bytes():
    pictures = draw_dead_leaves(range(400), SHAPE, seed=0)
    assert abs(pictures.mean()) < 0.1 and abs(pictures.std() - 1.1) < 0.1
    pixels = as_pixels(pictures)
    assert (
        pixels.dtype == np.uint8
        and abs(pixels.mean() / 255 - BRIGHTNESS) < 0.05
        and 0.9 * SPREAD < pixels.std() / 255 < 1.1 * SPREAD
    )  # a few are clipped


def test_there_are_edges_and_areas():
    """Most neighbours are alike and some differ much, as in photographs.

    The control: noise with the same spectrum has neither.
    """
    leaves = draw_dead_leaves(range(200), SHAPE, seed=0)
    spectrum = np.sqrt((np.abs(np.fft.fft2(leaves)) ** 2).mean((0, 1)))
    noise = np.fft.ifft2(
        spectrum
        * np.fft.fft2(np.random.default_rng(0).standard_normal(leaves.shape))
        / np.sqrt(24 * 32)
    ).real
    assert noise.std() == pytest.approx(leaves.std(), rel=0.05)
    steps, smooth = (np.diff(pictures).ravel() for pictures in (leaves, noise))
    assert (
        (steps**4).mean() / (steps**2).mean() ** 2
        > 8
        > 4
        > (smooth**4).mean() / (smooth**2).mean() ** 2
    )
    assert np.median(np.abs(steps)) < 0.5 * np.median(np.abs(smooth))


def test_no_size_is_special():
    """Power falls with about the square of the frequency. The control: that of noise is flat."""

    def slope(pictures):
        power = (np.abs(np.fft.rfft(pictures)) ** 2).mean((0, 1, 2))
        at = np.arange(2, 17)
        return np.polyfit(np.log(at), np.log(power[at]), 1)[0]

    leaves = draw_dead_leaves(range(300), (1, 64, 64), seed=0)
    assert (
        -2.4 < slope(leaves) < -1.2
        and abs(slope(np.random.default_rng(0).standard_normal(leaves.shape))) < 0.2
    )


# the task


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    return [checkpoint(root / f"vit-{seed}", "vit", seed=seed) for seed in (0, 1)]


@pytest.fixture
def pair(saved):
    return [sm.load(folder) for folder in saved]


def drawn(models, **options):
    (batch,) = sm.make_task("image", "self", models, **options).batches
    return batch["pixel_values"]


def test_pictures_are_drawn_for_the_models(pair):
    images = drawn(pair, samples=50)
    assert (
        images.shape == (50, 3, 16, 16)
        and torch.equal(images, drawn(pair[:1], samples=50))
        and not torch.equal(images, drawn(pair, samples=50, seed=1))
    )
    task = sm.make_task("image", "self", pair, max_samples=70, seed=4)
    assert task.to_record().to_json() == {
        "name": "image",
        "data": "self",
        "samples": 70,
        "seed": 4,
        "metrics": [],
        "pictures": "dead leaves",
    }
    assert sm.make_task("image", "self", pair).samples == 1000
    # As their image processor normalises, which is not what is drawn for models without one.
    pixels = torch.from_numpy(as_pixels(draw_dead_leaves(range(50), (3, 16, 16), seed=0))) / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (MEAN, STD))
    torch.testing.assert_close(images, (pixels - mean) / std)
    plain = drawn([replace(pair[0], files=())], samples=50)
    assert torch.equal(
        plain, torch.from_numpy(draw_dead_leaves(range(50), (3, 16, 16), seed=0))
    ) and not torch.allclose(plain, images, atol=0.1)


# learning


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Two small models of digits, trained for seconds."""
    folder = tmp_path_factory.mktemp("digits")
    recipe = with_changes(TRAINING["vit-digits"], schedule={"steps": 120, "warmup": 12})
    for seed in (0, 1):
        train(recipe, seed, folder / str(seed), lambda line: None)
    return [sm.load(folder / str(seed)) for seed in (0, 1)]


def test_what_is_learned_from_discs_holds_for_digits(digits):
    """The midpoint of two models improves on unseen data. The control: random alignments do not.

    Digits of 8 x 8 pixels are no photographs: noise teaches as much there. What discs gain over
    noise on CIFAR-10 is in docs/log.md, "Images without data".
    """
    task = sm.make_task("image", "digits", digits)
    a, b = (sm.canonicalize(model) for model in digits)
    synthetic = sm.make_task("image", "self", digits, samples=600)
    learned = LearnedMatching(data=synthetic, start="identity", steps=30).solve(a, b).alignment
    anywhere = Alignment.random(b.spec, torch.Generator().manual_seed(0))
    before, after, control = (
        sm.barrier(a, moved, task, 3).points[1]["loss"]
        for moved in (b, sm.apply(learned, b), sm.apply(anywhere, b))
    )
    assert after < min(before, control) - 0.1


def test_no_data_is_the_task_that_is_called_self(pair, monkeypatch):
    monkeypatch.setattr("symmerge.matching.learning.data.SELF_SAMPLES", {"image": 40})
    said, solutions = [], []
    for data in (
        None,
        sm.make_task("image", "self", pair, samples=40),
        sm.make_task("image", "self", pair, samples=40, seed=1),
    ):
        start = Alignment.identity(sm.canonicalize(pair[0]).spec)
        solutions.append(
            sm.align(
                *pair, LearnedMatching(data=data, start=start, steps=2), progress=said.append
            ).solution
        )
    first, same, other = (solution.objective for solution in solutions)
    assert first == same != other
    assert said.count("generating inputs to learn from: dead leaves are drawn") == 1


def test_align_merge_and_barrier_need_no_data(saved, tmp_path):
    run("align", *saved, "--out", tmp_path / "aligned", *LEARN)
    solution = json.loads((tmp_path / "aligned" / "solution.json").read_text())
    assert solution["settings"]["data"] == {
        "name": "image",
        "data": "self",
        "samples": 40,
        "seed": 0,
        "metrics": [],
        "pictures": "dead leaves",
    }
    assert sm.verify(sm.load(saved[1]), sm.load(tmp_path / "aligned" / "aligned")).same
    run("merge", *saved, "--out", tmp_path / "merged", *LEARN)
    assert "all steps done" in (tmp_path / "merged" / "symmerge.json").read_text()
    np.savez(tmp_path / "real.npz", x=np.zeros((8, 3, 16, 16), np.float32), y=np.arange(8) % 5)
    options = (
        "--task",
        "image",
        "--data",
        tmp_path / "real.npz",
        "--points",
        3,
        "--steps",
        2,
        "--calibration-samples",
        40,
    )
    run("barrier", *saved, "--out", tmp_path / "curve", "--method", "none,learned", *options)
    record = json.loads((tmp_path / "curve" / "curve.json").read_text())
    assert [method["name"] for method in record["methods"]] == ["none", "learned"]


def test_activations_are_seen_on_them_when_asked(saved, tmp_path):
    command = ("align", *saved, "--out", tmp_path / "out", "--method", "activations")
    run(*command, "--data", "self", "--samples", 40, "--tries", 1)
    assert (
        json.loads((tmp_path / "out" / "solution.json").read_text())["settings"]["data"]["pictures"]
        == "dead leaves"
    )
    assert (
        "or self, which needs no data: synthetic images"
        in run(*command, "--overwrite", expect=2).stderr
    )  # the control: not unless asked


# what needs labels


def test_without_labels_there_is_no_loss(pair):
    synthetic, real = (
        sm.make_task("image", "self", pair, samples=40),
        "have no labels, .* give labelled data",
    )
    wrong = {
        "barrier": lambda: sm.barrier(*pair, synthetic, 3),
        "repair": lambda: repair(sm.average(*pair), pair, synthetic),
        "evaluate": lambda: synthetic.evaluate(full_module(pair[0], torch.float32)),
        "labels": lambda: LearnedMatching(data=synthetic, target="labels"),
        "labels, no data": lambda: sm.align(*pair, LearnedMatching(target="labels")),
    }
    for name, use in wrong.items():
        with pytest.raises(DataError, match=real):
            use()
            pytest.fail(name)
    LearnedMatching(data=synthetic)  # the control


REFUSED = {
    "measured": ("barrier", ("--task", "image", "--data", "self"), "have no labels"),
    "target": ("align", (*LEARN, "--target", "labels"), "have no labels"),
    "a recipe that learns labels": (
        "align",
        ("--recipe", "learned-permutations"),
        "have no labels",
    ),
    "repair": ("merge", ("--repair", "norms", "--calibration", "self"), "have no labels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_labels_are_refused_in_one_line(saved, tmp_path, case):
    verb, options, said = REFUSED[case]
    result = run(verb, *saved, "--out", tmp_path / "out", *options, expect=2)
    assert said in result.stderr and not (tmp_path / "out").exists()


def test_nobody_writes_for_classifiers_of_texts(tmp_path):
    a = sm.load(checkpoint(tmp_path / "a", "bert-classifier"))
    with pytest.raises(
        MismatchError,
        match="no inputs can be generated for the task text, only for mlm, clm, seq2seq, image",
    ):
        sm.make_task("text", "self", [a])
