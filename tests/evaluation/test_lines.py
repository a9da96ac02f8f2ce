"""Curves and planes: right about the models on them, in one pass, the same every time."""

import csv
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import Counted

import symmerge as sm
import symmerge.evaluation.mixture as mixture
from symmerge.errors import MismatchError
from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.lines import (
    Curve,
    LineMethod,
    barrier,
    combine_pairs,
    measure_lines,
    write_curves,
)
from symmerge.evaluation.mixture import Mixture
from symmerge.evaluation.planes import plane, triangle_grid
from symmerge.evaluation.tasks import Task, make_task
from symmerge.evaluation.tasks.readouts import (
    ClassReadout,
    ImageReadout,
    TokenReadout,
    ValueReadout,
)
from symmerge.lab.small_models import small_model
from symmerge.merging.means import average
from symmerge.models.canonical.form import canonicalize
from symmerge.models.interpolation import mean
from symmerge.models.model import load
from symmerge.verification.modules import full_module

SHARED = Path(__file__).parents[3] / "shared"
needs_zoo = pytest.mark.skipif(
    not (SHARED / "zoo" / "score.py").exists(), reason="the trained pairs are not here"
)


def pair(name, **changes):
    return [load(small_model(name, seed=seed, **changes)) for seed in (0, 1)]


def task_for(model, samples=6, seed=0):
    """Random inputs with random labels, three to a batch."""
    generator = torch.Generator().manual_seed(seed)
    if model.spec.task == "image-classification":
        inputs, labels = (
            torch.randn(samples, 3, 16, 16, generator=generator),
            torch.randint(5, (samples,), generator=generator),
        )
        return Task(
            "image",
            "random",
            samples,
            seed,
            ImageReadout(),
            _batches("pixel_values", inputs, labels),
            {},
        )
    tokens = torch.randint(5, 101, (samples, 12), generator=generator)
    if model.spec.task == "text-classification":
        classes = model.spec.sizes["label"]
        labels = torch.randint(3, (samples,), generator=generator)
        return Task(
            "text",
            "random",
            samples,
            seed,
            ClassReadout(classes) if classes > 1 else ValueReadout(),
            _batches("input_ids", tokens, labels),
            {},
        )
    causal = model.spec.task == "causal-lm"
    labels = (
        tokens
        if causal
        else torch.where(torch.rand(tokens.shape, generator=generator) < 0.5, tokens, -100)
    )
    return Task(
        "clm" if causal else "mlm",
        "random",
        samples,
        seed,
        TokenReadout(causal),
        _batches("input_ids", tokens, labels),
        {},
    )


def _batches(name, inputs, labels):
    return [{name: x, "labels": y} for x, y in zip(inputs.split(3), labels.split(3), strict=True)]


def loss(task, model):
    return task.evaluate(full_module(model, torch.float32))


# every point is the model it says


@pytest.mark.parametrize(
    "name",
    [
        "bert",
        "bert-pretraining",
        "bert-classifier",
        "roberta",
        "gpt2",
        "gpt2-untied",
        "vit",
        "llama-mqa",
        "qwen2",
        "neox",
    ],
)
@pytest.mark.parametrize("canonical", [False, True], ids=["as stored", "canonical"])
def test_every_point_is_the_merge_at_that_point(name, canonical):
    """Tied heads, rotary buffers and lazy weights included; the ends are the two models exactly."""
    a, b = map(canonicalize, pair(name)) if canonical else pair(name)
    task = task_for(a)
    curve = barrier(a, b, task, 5)
    assert curve.ts == (0, 0.25, 0.5, 0.75, 1)
    assert curve.points[0] == loss(task, a) and curve.points[-1] == loss(task, b)
    for at in (1, 2):
        assert curve.points[at] == pytest.approx(loss(task, average(a, b, curve.ts[at])), rel=1e-5)
    assert (
        abs(curve.points[0]["loss"] - curve.points[2]["loss"]) > 1e-4
    )  # the control: points differ


def test_both_barriers():
    """By hand: they differ where the ends do."""
    losses = (1.0, 3.5, 5.0)
    curve = Curve((0.0, 0.5, 1.0), tuple({"loss": value} for value in losses), {})
    assert curve.barrier_mean == 5 - 3 and curve.barrier_linear == 3.5 - 3
    falling = Curve((0.0, 0.25, 1.0), ({"loss": 4.0}, {"loss": 4.5}, {"loss": 0.0}), {})
    assert falling.barrier_mean == 2.5 and falling.barrier_linear == 1.5


def test_a_model_and_itself_have_no_barrier():
    a, b = pair("gpt2")
    task = task_for(a)
    same = barrier(a, a, task, 4)
    assert same.barrier_mean == same.barrier_linear == 0 and same.ensemble == pytest.approx(
        same.points[0], abs=1e-6
    )
    other = barrier(a, b, task, 4)
    assert abs(other.points[1]["loss"] - other.points[0]["loss"]) > 1e-2


# the ensemble


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "bert-classifier"])
def test_the_ensemble_is_the_mean_of_probabilities(name):
    a, b = pair(name)
    task = task_for(a)
    total = count = 0
    for batch in task.batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        chances = (
            sum(full_module(model, torch.float32)(**inputs).logits.softmax(-1) for model in (a, b))
            / 2
        )
        labels = batch["labels"]
        if name == "gpt2":
            chances, labels = chances[:, :-1], labels[:, 1:]
        kept = labels != -100
        total -= chances[kept].gather(-1, labels[kept][:, None]).log().sum().item()
        count += int(kept.sum())
    assert barrier(a, b, task, 2).ensemble["loss"] == pytest.approx(total / count, abs=1e-5)


def test_the_ensemble_of_values_is_their_mean():
    a, b = pair("bert-classifier", num_labels=1)
    task = task_for(a)
    errors = []
    for batch in task.batches:
        outputs = [
            full_module(model, torch.float32)(input_ids=batch["input_ids"]).logits[:, 0]
            for model in (a, b)
        ]
        errors += ((outputs[0] + outputs[1]) / 2 - batch["labels"]).square().tolist()
    assert barrier(a, b, task, 2).ensemble["loss"] == pytest.approx(np.mean(errors), abs=1e-5)


# one pass, three copies


def test_the_data_are_read_once():
    a, b = pair("gpt2")
    batches = Counted(task_for(a).batches)
    ticks = []
    barrier(a, b, replace(task_for(a), batches=batches), 7, progress=ticks.append)
    assert batches.fetched == len(batches) == 2 and len(ticks) == 2 * 7


def test_several_batches_at_once_give_the_same_numbers(monkeypatch):
    """As on a GPU: rows of one length together, never with others, and the last ones, too."""
    a, b = pair("gpt2")
    task = task_for(a, samples=14)
    lengths = (9, 9, 9, 5, 5)
    task, seen = (
        replace(
            task,
            batches=[
                {name: tensor[:, :n] for name, tensor in batch.items()}
                for batch, n in zip(task.batches, lengths, strict=True)
            ],
        ),
        [],
    )
    alone = barrier(a, b, task, 3)
    predict = TokenReadout.predict
    monkeypatch.setattr(
        TokenReadout,
        "predict",
        lambda self, module, batch: (
            seen.append(tuple(batch["input_ids"].shape)) or predict(self, module, batch)
        ),
    )
    for most, shapes in (
        (2, [(6, 9), (3, 9), (5, 5)]),
        (8, [(9, 9), (5, 5)]),
        (1, [(3, 9), (3, 5), (2, 5)]),
    ):
        monkeypatch.setattr(mixture, "JOINED_BATCHES", {"cpu": most})
        together = barrier(a, b, task, 3)
        assert list(dict.fromkeys(seen)) == shapes and sum(rows for rows, _ in seen) == 3 * 14
        assert [point["loss"] for point in together.points] == pytest.approx(
            [point["loss"] for point in alone.points], rel=1e-6
        )
        seen.clear()


@pytest.mark.parametrize("name", ["gpt2", "bert", "gpt2-untied", "llama-mqa"])
def test_three_copies_of_the_weights(name):
    """Two models and their mean: tied tensors count once, and moving along takes no memory."""
    a, b = pair(name)
    mixture = Mixture([a, b])
    module = mixture.at((0.5, 0.5))
    before = {parameter.data_ptr(): parameter.nbytes for parameter in module.parameters()}
    assert sum(before.values()) == a.bytes
    assert (
        mixture.at((0.25, 0.75)) is module
        and {parameter.data_ptr(): parameter.nbytes for parameter in module.parameters()} == before
    )


# results


@pytest.fixture(scope="module")
def record():
    a, b = pair("gpt2")
    methods = [
        LineMethod("none", "plain average", a, b),
        LineMethod(
            "canonical",
            "canonical forms",
            canonicalize(a),
            canonicalize(b),
            {"seed": 0},
            (2.0, 1.0),
        ),
    ]
    return lambda: measure_lines(a, b, methods, task_for(a), points=3)


def test_the_same_command_gives_the_same_files(record, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_curves(record(), tmp_path / name)
    for file in ("curve.json", "curve.csv"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_what_the_files_hold(record, tmp_path):
    write_curves(record(), tmp_path)
    found = json.loads((tmp_path / "curve.json").read_text())
    assert (
        found["schema"] == "symmerge.curve/1"
        and found["task"]["metrics"] == ["loss", "perplexity"]
        and found["task"]["samples"] == 6
    )
    assert (
        set(found["models"]["a"]) == {"where", "architecture", "parameters", "sha256"}
        and found["models"]["a"]["architecture"] == "GPT2LMHeadModel"
    )
    assert found["models"]["a"]["parameters"] == sum(
        parameter.numel() for parameter in small_model("gpt2").parameters()
    )
    plain, other = found["methods"]
    assert set(plain) == {
        "name",
        "label",
        "points",
        "barrier_mean",
        "barrier_linear",
        "settings",
        "objective",
    }
    assert other["settings"] == {"seed": 0} and other["objective"] == [2, 1]
    losses = [point["loss"] for point in plain["points"]]
    assert plain["barrier_mean"] == max(losses) - (losses[0] + losses[-1]) / 2
    assert set(found["ensemble"]) == {"loss", "perplexity"} and "python" in found["versions"]
    rows = list(csv.DictReader((tmp_path / "curve.csv").open()))
    assert [(row["method"], row["t"]) for row in rows] == [
        (name, t) for name in ("none", "canonical") for t in ("0.0", "0.5", "1.0")
    ] + [("ensemble", "")]
    assert [float(row["loss"]) for row in rows[:3]] == losses and float(
        rows[-1]["perplexity"]
    ) == found["ensemble"]["perplexity"]


def test_several_pairs(record):
    pairs = [with_barrier(record(), barrier_mean) for barrier_mean in (1.0, 2.0, 6.0)]
    combined = combine_pairs(pairs)
    assert combined.pairs == tuple(pairs) and set(combined.summary) == {"none", "canonical"}
    assert combined.to_json()["schema"] == "symmerge.curves/1"
    plain = combined.summary["none"]
    error = np.std([1, 2, 6], ddof=1) / math.sqrt(3)
    for estimate in (plain.barrier_mean, plain.points[1].metrics["loss"]):
        assert estimate.mean == 3 and estimate.error == pytest.approx(error)
    assert combined.summary["canonical"].barrier_linear.error == 0
    assert combine_pairs(pairs[:1]).summary["none"].barrier_mean == Estimate(1.0, None)
    # a pair that overflowed does not take the others with it
    pairs[0] = with_barrier(pairs[0], math.inf)
    overflow = combine_pairs(pairs).summary["none"].barrier_mean
    assert overflow.mean == math.inf and math.isnan(overflow.error)
    with pytest.raises(MismatchError, match="same task, methods and points"):
        combine_pairs([pairs[0], replace(pairs[1], methods=pairs[1].methods[:1])])


def with_barrier(curves, barrier_mean):
    """The first method with another barrier, and with that loss at its midpoint."""
    first, *others = curves.methods
    start, midpoint, end = first.points
    midpoint = replace(midpoint, metrics={**midpoint.metrics, "loss": barrier_mean})
    changed = replace(first, barrier_mean=barrier_mean, points=(start, midpoint, end))
    return replace(curves, methods=(changed, *others))


# planes


def test_the_grid():
    inside, around = triangle_grid(4), triangle_grid(4, 0.25)
    assert (
        len(inside) == 15
        and all(min(place) >= 0 for place in inside)
        and len(around) == 36
        and min(map(min, around)) == -0.25
    )
    assert all(sum(place) == pytest.approx(1) for place in around) and set(inside) < set(around)


def test_a_plane_meets_its_models_and_their_lines():
    models = [load(small_model("gpt2", seed=seed)) for seed in range(3)]
    task = task_for(models[0])
    found = plane(models, task, steps=2, margin=0.5)
    at = dict(zip(found.places, found.points, strict=True))
    assert [at[place] for place in ((1, 0, 0), (0, 1, 0), (0, 0, 1))] == [
        loss(task, model) for model in models
    ]
    assert at[(0.5, 0, 0.5)] == pytest.approx(
        barrier(models[0], models[2], task, 3).points[1], abs=1e-5
    )
    assert at[(1.5, -0.5, 0)] == pytest.approx(loss(task, mean(models, [1.5, -0.5, 0.0])), abs=1e-5)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        apart = sum(
            (models[i].weights[name] - models[j].weights[name]).square().sum().item()
            for name in models[0].weights
        )
        assert math.dist(found.corners[i], found.corners[j]) == pytest.approx(
            math.sqrt(apart), rel=1e-4
        )
    record = json.loads(json.dumps(found.to_file(task).to_json()))
    assert (
        record["schema"] == "symmerge.plane/1"
        and record["points"][0]["weights"] == list(found.places[0])
        and set(found.ensemble) == set(task.metrics)
    )


# bad input


@pytest.mark.parametrize("points", [1, 0, -3])
def test_too_few_points(points):
    a, b = pair("gpt2")
    with pytest.raises(MismatchError, match=f"points {points}.*at least two"):
        barrier(a, b, task_for(a), points)
    assert len(barrier(a, b, task_for(a), 2).points) == 2


def test_models_without_a_line_between_them():
    a, b = load(small_model("gpt2")), load(small_model("gpt2", n_inner=64))
    with pytest.raises(MismatchError, match=r"joined by a line.*ff\.0 .*96.*64"):
        barrier(a, b, task_for(a))
    with pytest.raises(MismatchError, match="2 models: a plane"):
        plane([a, a], task_for(a))
    with pytest.raises(MismatchError, match="at least one step"):
        triangle_grid(0)


def test_a_loss_that_is_no_number():
    a, b = pair("gpt2-untied")
    huge = {name: a.weights[name] * (1e30 if name == "lm_head.weight" else 1) for name in a.weights}
    broken = replace(a, weights=type(a.source.base)(huge))
    with pytest.raises(MismatchError, match="overflows"):
        barrier(broken, b, task_for(a), 2)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "no CUDA devices here; use cpu"),
        ("abacus", "cpu or cuda"),
        ("meta", "cpu or cuda"),
    ],
)
def test_devices_that_are_not_there(device, words):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    a, b = pair("gpt2")
    with pytest.raises(MismatchError, match=words):
        barrier(a, b, task_for(a), device=device)


# names


def test_the_public_names():
    a, b = pair("gpt2")
    task = task_for(a)
    curve = sm.barrier(a, b, task, points=3)
    assert isinstance(curve, sm.Curve) and curve == barrier(a, b, task, 3) != sm.barrier(
        a, a, task, points=3
    )
    assert (
        sm.plane is plane
        and sm.make_task is make_task
        and all(hasattr(sm, name) for name in sm.__all__)
    )


# the independent yardstick


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Trained pairs, unpacked as they are asked for."""
    root = tmp_path_factory.mktemp("zoo")
    loaded = importlib.util.spec_from_file_location("unpack", SHARED / "zoo" / "unpack.py")
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)

    def unpack(name):
        for seed in (0, 1):
            module.unpack(SHARED / "zoo" / f"{name}-s{seed}.safetensors", root / f"{name}-s{seed}")
        return [root / f"{name}-s{seed}" for seed in (0, 1)]

    return unpack


def score(folders, samples):
    command = [
        sys.executable,
        str(SHARED / "zoo" / "score.py"),
        *map(str, folders),
        "--samples",
        str(samples),
        "--points",
        "3",
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def normalised_images(path):
    """The test images of the yardstick, which has decoded them before."""
    with np.load(Path(tempfile.gettempdir()) / "symmerge-cifar10-test.npz") as file:
        images = file["x"].transpose(0, 3, 1, 2).astype(np.float32) / 255
        mean, std = (
            np.float32(values).reshape(3, 1, 1)
            for values in ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
        )
        np.savez(path, x=(images - mean) / std, y=file["y"])
    return path


@needs_zoo
@pytest.mark.parametrize(
    ("name", "task", "samples"),
    [("bert", "mlm", 8), ("gpt2", "clm", 4), ("llama", "clm", 4), ("vit", "image", 50)],
)
def test_agreement_with_the_yardstick(zoo, tmp_path, name, task, samples):
    """The same samples, masks and numbers as a program that imports nothing of ours."""
    folders = zoo(name)
    wanted = score(folders, samples)
    data = str(
        normalised_images(tmp_path / "images.npz")
        if task == "image"
        else SHARED / "data" / "books_valid.txt.xz"
    )
    a, b = map(load, folders)
    found = barrier(a, b, make_task(task, data, [a, b], samples=samples), 3)
    assert [point["loss"] for point in found.points] == pytest.approx(wanted["losses"], abs=1e-3)
    assert (
        found.barrier_mean == pytest.approx(wanted["barrier_mean"], abs=1e-3)
        and found.barrier_mean > 1
    )
    assert found.barrier_linear == pytest.approx(wanted["barrier_linear"], abs=1e-3)


def test_barriers_of_what_is_no_symmetry_are_over_the_parents():
    """A method that ruins its end must not look better for it."""
    a, b, other = (
        sm.load(small_model("gpt2", seed=seed, dtype=torch.float32)) for seed in (0, 1, 2)
    )
    task = sm.make_task("clm", "self", [a, b], samples=4)
    wrong = LineMethod("wrong", "wrong", a, other, exact=False)
    plain = LineMethod("none", "plain average", a, b)
    alone, beside = (
        measure_lines(a, b, methods, task, points=3).methods[0]
        for methods in ([wrong], [wrong, plain])
    )
    own = measure_lines(a, b, [LineMethod("wrong", "wrong", a, other)], task, points=3).methods[0]
    ends = [task.evaluate(full_module(model, torch.float32))["loss"] for model in (a, b)]
    worst = max(point.metrics["loss"] for point in alone.points)
    for line in (alone, beside):
        assert line.over == pytest.approx(ends, abs=1e-5)
        assert line.barrier_mean == pytest.approx(worst - sum(ends) / 2, abs=1e-5)
    # the control: over its own ends it is another number
    assert own.over is None and abs(own.barrier_mean - alone.barrier_mean) > 1e-6
    assert "over" not in own.to_json()
