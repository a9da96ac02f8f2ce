"""Ways to combine: hand-made numbers, what chance may change, what is read when, refusals."""

import json
import math
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

import symmerge as sm
from symmerge.checkpoints.weights import MemoryWeights, Weights
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.evaluation.tasks import Task
from symmerge.evaluation.tasks.readouts import ImageReadout
from symmerge.lab.small_models import small_model
from symmerge.merging.combining import (
    METHODS,
    agreeing_mean,
    combine,
    keep_largest,
    keep_random,
    slerp,
)
from symmerge.merging.soups import soup
from symmerge.models.model import load
from symmerge.verification.modules import full_module


@pytest.fixture(scope="module")
def three():
    return [load(small_model("gpt2", seed=seed)) for seed in (0, 1, 2)]


def changed(model, change):
    """The model with every tensor changed."""
    return replace(
        model, weights=MemoryWeights({name: change(model.weights[name]) for name in model.weights})
    )


def largest_difference(a, b):
    return max((a.weights[name] - b.weights[name]).abs().max().item() for name in a.weights)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


# every method, by hand


@pytest.mark.parametrize("method", METHODS)
def test_copies_of_a_model_are_the_model(three, method):
    a, b, _ = three
    count = METHODS[method].max_models or 4
    assert largest_difference(combine([a] * count, method), a) <= 1e-6
    assert largest_difference(combine([a] * (count - 1) + [b], method), a) > 1e-2  # the control


def test_the_mean_is_merges_mean_and_weights_count(three):
    weights = [0.5, 0.3, 0.2]
    expected = sm.mean(three, weights)
    assert largest_difference(combine(three, "mean", weights), expected) == 0
    assert largest_difference(combine(three, "mean"), expected) > 1e-2  # the control
    for name in expected.weights:
        by_hand = sum(
            weight * model.weights[name].double()
            for model, weight in zip(three, weights, strict=True)
        )
        torch.testing.assert_close(expected.weights[name].double(), by_hand, rtol=0, atol=1e-6)


def test_the_arc_keeps_the_norm_and_ends_at_the_models(three):
    a, b, _ = three
    x, y = tensor(3, 0, 0), tensor(0, 3, 0)
    for t in (0.1, 0.5, 0.9):
        found = slerp([x, y], [1 - t, t])
        assert found.norm().item() == pytest.approx(3)
        assert math.atan2(found[1], found[0]) == pytest.approx(
            t * math.pi / 2
        )  # even steps along the arc
        assert torch.lerp(x, y, t).norm().item() < 2.8  # the control: the straight line cuts inside
    assert largest_difference(combine([a, b], "slerp", [1.0, 0.0]), a) <= 1e-6
    assert largest_difference(combine([a, b], "slerp", [0.0, 1.0]), b) <= 1e-6
    assert largest_difference(combine([a, b], "slerp"), combine([a, b])) > 1e-2


@pytest.mark.parametrize(
    ("x", "y"),
    [((1, 0), (2, 0.01)), ((1, 0), (-2, 0.01)), ((0, 0), (0, 0))],
    ids=["parallel", "opposite", "zeros"],
)
def test_nearly_parallel_tensors_are_taken_straight(x, y):
    x, y = tensor(*x), tensor(*y)
    torch.testing.assert_close(slerp([x, y], [0.25, 0.75]), torch.lerp(x, y, 0.75))


def test_ties_by_hand():
    """Trim to half, elect, and the mean of those that agree."""
    differences = [tensor(5, -1, 2, 0.5), tensor(3, 4, -6, 0.1), tensor(-1, 2, -3, 0.2)]
    thinned = [keep_largest(one, 0.5, chance()) for one in differences]
    assert [one.tolist() for one in thinned] == [[5, 0, 2, 0], [0, 4, -6, 0], [0, 2, -3, 0]]
    assert agreeing_mean(thinned, [1 / 3] * 3).tolist() == pytest.approx([5, 3, -4.5, 0])
    assert agreeing_mean(thinned, [0.8, 0.1, 0.1]).tolist() == pytest.approx(
        [5, 3, 2, 0]
    )  # the first model's vote outweighs both
    assert torch.stack(thinned).mean(0).tolist() != pytest.approx([5, 3, -4.5, 0])  # the control
    assert keep_largest(tensor(1, 2), 0.1, chance()).tolist() == [0, 2]  # never nothing
    view = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(
        keep_largest(view, 0.5, chance()), view * (view > 2)
    )  # as tensors that are transposed when read


def test_ties_of_models_are_ties_of_their_differences(three):
    a, b, c = three
    found = combine(three, "ties", [0.2, 0.5, 0.3], base=a, density=0.25)
    same = combine(three, "ties", [0.2, 0.5, 0.3], density=0.25)
    elsewhere = combine(three, "ties", [0.2, 0.5, 0.3], base=c, density=0.25)
    for name in found.weights:
        x = a.weights[name]
        expected = x + agreeing_mean(
            [keep_largest(other.weights[name] - x, 0.25, chance()) for other in (b, c)], [0.5, 0.3]
        )
        torch.testing.assert_close(found.weights[name], expected)
    assert largest_difference(found, same) == 0  # the first is the base unless another is given
    assert largest_difference(found, elsewhere) > 1e-2
    reopened = replace(a)
    assert (
        largest_difference(
            found, combine([reopened, b, c], "ties", [0.2, 0.5, 0.3], base=a, density=0.25)
        )
        == 0
    )  # zeros do not vote
    assert (
        largest_difference(combine([a, b], "ties", density=1.0), b) <= 1e-6
    )  # what the docstring warns of


def test_dare_drops_by_density_and_keeps_the_mean():
    difference = torch.linspace(-1, 2, 2000, dtype=torch.float64)
    draws = torch.stack([keep_random(difference, 0.3, chance(seed)) for seed in range(400)])
    assert (draws != 0).double().mean().item() == pytest.approx(0.3, abs=0.005)
    torch.testing.assert_close(draws[draws != 0], (difference / 0.3).expand_as(draws)[draws != 0])
    error = draws.mean(0) - difference
    spread = (difference.square() * (1 / 0.3 - 1) / 400).sqrt()
    assert (error.abs() <= 5 * spread).all()
    assert (
        (0.3 * draws).mean(0) - difference
    ).abs().max() > 0.5  # the control: without growing, the mean shrinks
    assert torch.equal(keep_random(difference, 1.0, chance()), difference)


def test_dare_of_models_is_their_mean_on_average(three):
    weights, name = [0.5, 0.3, 0.2], "transformer.h.0.mlp.c_fc.weight"
    expected = sm.mean(three, weights)
    assert largest_difference(combine(three, "dare", weights, density=1.0), expected) <= 1e-6
    draws = torch.stack(
        [
            combine(three, "dare", weights, density=0.5, seed=seed).weights[name]
            for seed in range(200)
        ]
    )
    error = (draws.mean(0) - expected.weights[name]).square().mean().sqrt().item()
    assert error == pytest.approx(
        (draws.var(0).mean().item() / 200) ** 0.5, rel=0.05
    )  # chance, and nothing else
    assert (
        draws.mean(0) - sm.mean(three).weights[name]
    ).square().mean().sqrt().item() > 5 * error  # the control
    one = combine([*three[:2]], "dare", density=0.25)
    assert (one.weights[name] != three[0].weights[name]).double().mean().item() == pytest.approx(
        0.25, abs=0.02
    )


# chance and reading


@pytest.mark.parametrize("method", ["dare", "dare_ties"])
def test_chance_goes_by_seed_and_not_by_the_order_of_reading(three, method):
    first, again, other = (combine(three, method, seed=seed) for seed in (3, 3, 4))
    names = list(first.weights)
    forwards = {name: first.weights[name] for name in names}
    backwards = {name: again.weights[name] for name in reversed(names)}
    assert all(torch.equal(forwards[name], backwards[name]) for name in names)
    assert all(torch.equal(forwards[name], first.weights[name]) for name in names)  # reading twice
    assert largest_difference(first, other) > 1e-2  # the control
    x, y = (
        forwards[f"transformer.h.{layer}.mlp.c_fc.weight"]
        == three[0].weights[f"transformer.h.{layer}.mlp.c_fc.weight"]
        for layer in (0, 1)
    )
    assert not torch.equal(x, y)  # tensors of one shape have chances of their own


class Counting(Weights):
    """Counts how often each tensor is read."""

    def __init__(self, base):
        self.base, self.reads = base, Counter()

    def names(self):
        return self.base.names()

    def shape(self, name):
        return self.base.shape(name)

    def dtype(self, name):
        return self.base.dtype(name)

    def __getitem__(self, name):
        self.reads[name] += 1
        return self.base[name]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_until_it_is_needed(three, method):
    models = [
        replace(model, weights=Counting(model.weights))
        for model in three[: METHODS[method].max_models]
    ]
    combined = combine(models, method)
    assert all(not model.weights.reads for model in models)
    name = list(combined.weights)[3]
    _ = combined.weights[name]
    assert all(
        model.weights.reads == {name: 1} for model in models
    )  # the control, and no tensor twice


def test_stored_precision_stays():
    models = [
        load(small_model("gpt2", seed=seed, dtype=dtype))
        for seed, dtype in ((0, torch.float32), (1, torch.float64), (2, torch.float64))
    ]
    for method, base in (
        ("mean", None),
        ("ties", None),
        ("dare", None),
        ("dare", models[0]),
        ("dare", models[1]),
    ):
        for order in (models, models[::-1]):
            combined = combine(order, method, base=base)
            assert {combined.weights[name].dtype for name in combined.weights} == {order[0].dtype}


# weights, records, refusals


def test_weights_are_normalised_and_said_to_be(three):
    with pytest.warns(SymmergeWarning, match=r"sum to 4, not 1: scaled to 0.5, 0.25, 0.25"):
        found = combine(three, "mean", [2.0, 1.0, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = combine(three, "mean", [0.5, 0.25, 0.25])
        combine(three, "mean", [1 / 3] * 3)
    assert largest_difference(found, exact) == 0
    assert largest_difference(found, combine(three)) > 1e-2  # the control
    assert found.history[-1].details["weights"] == [0.5, 0.25, 0.25]


def test_the_card_says_how(three, tmp_path):
    combined = combine(
        three, "dare", [0.5, 0.3, 0.2], density=0.25, seed=7, evidence={"barrier": 0.1}
    )
    sm.save(combined, tmp_path / "m")
    step = json.loads((tmp_path / "m" / "symmerge.json").read_text())["steps"][-1]
    assert (step["step"], step["method"], step["weights"], step["density"], step["seed"]) == (
        "merge",
        "dare",
        [0.5, 0.3, 0.2],
        0.25,
        7,
    )
    assert step["base"] == {"where": three[0].where, "sha256": three[0].digest()}
    assert [parent["sha256"] for parent in step["parents"]] == [model.digest() for model in three]
    card = (tmp_path / "m" / "README.md").read_text()
    assert (
        "dare of 0.5 x" in card
        and "density 0.25, seed 7" in card
        and "- barrier: 0.1" in card
        and three[2].digest()[:16] in card
    )
    assert "density" not in combine(three).history[-1].details  # the control: only what was used


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": [0.5, 0.5]}, "3 models but 2 weights: give one"),
        ({"weights": [1.5, -0.25, -0.25]}, "-0.25 for .*: a weight is a number, 0 or larger"),
        ({"weights": [math.nan, 0.5, 0.5]}, "nan for"),
        ({"weights": [0.0, 0.0, 0.0]}, "all weights are 0"),
        ({"method": "median"}, "method median: choose one of mean, slerp, ties, dare"),
        ({"method": "slerp"}, "slerp takes 2; combine 2 at a time, or all by mean"),
        ({"method": "ties", "density": 0.0}, "density 0:"),
        ({"method": "dare", "density": 1.5}, "density 1.5:"),
    ],
)
def test_what_cannot_be_is_refused(three, options, said):
    with pytest.raises(MismatchError, match=said):
        combine(three, **options)


def test_models_that_do_not_belong_together_are_refused(three):
    wide = load(small_model("gpt2", seed=3, n_inner=64))
    with pytest.raises(MismatchError, match=r"cannot be merged; they differ in: ff\.0"):
        combine([*three, wide])
    with pytest.raises(MismatchError, match=r"they differ in: ff\.0"):
        combine(three, "ties", base=wide)
    with pytest.raises(
        MismatchError, match="mean does not use differences from a base; leave it out or use ties"
    ):
        combine(three, base=three[0])
    with pytest.raises(MismatchError, match="1 models: there is nothing to combine"):
        combine(three[:1])
    with pytest.raises(MismatchError, match="0 models: there is nothing"):
        combine([])


# soup


@pytest.fixture(scope="module")
def noisy():
    """A model, its own answers as a task, three noisy copies, and one that learnt otherwise."""
    module = small_model("vit")
    pixels = torch.randn(96, 3, 16, 16, generator=chance())
    with torch.no_grad():  # sure of its answers, and of all of them alike: so noise does harm
        module.classifier.bias -= module(pixel_values=pixels).logits.mean(0)
        module.classifier.weight *= 20
        module.classifier.bias *= 20
        labels = module(pixel_values=pixels).logits.argmax(-1)
    truth = load(module)
    batches = [
        {"pixel_values": x, "labels": y}
        for x, y in zip(pixels.split(32), labels.split(32), strict=True)
    ]
    noise = chance(1)
    good = [
        changed(
            truth, lambda x: x + 0.3 * x.std(correction=0) * torch.randn(x.shape, generator=noise)
        )
        for _ in range(3)
    ]
    broken = changed(
        truth, lambda x: 3 * x.std(correction=0) * torch.randn(x.shape, generator=noise)
    )
    return good, broken, Task("image", "its own answers", 96, 0, ImageReadout(), batches, {})


def loss(task, model):
    return task.evaluate(full_module(model, torch.float32))["loss"]


def test_a_soup_leaves_out_what_spoils_it(noisy, tmp_path):
    good, broken, task = noisy
    models, said = [broken, *good], []
    made, tried = soup(models, task, progress=said.append)
    assert [row["model"] for row in tried if not row["kept"]] == [0]
    assert [row["own_loss"] for row in tried] == sorted(row["own_loss"] for row in tried)
    assert largest_difference(made, sm.mean(good)) == 0
    assert loss(task, made) == pytest.approx(tried[-2]["loss"], rel=1e-5)
    assert loss(task, made) < min(loss(task, model) for model in good)
    assert loss(task, sm.mean(models)) > loss(task, made)  # the control: the plain mean takes all
    assert len(said) == 7 and said[-1].endswith("left out")
    step = made.history[-1]
    assert step.details["tried"] == tried and step.details["task"]["samples"] == 96
    assert len(step.parents) == 3
    sm.save(made, tmp_path / "soup")
    card = (tmp_path / "soup" / "README.md").read_text()
    assert (
        "greedy soup of 3 of 4 models" in card
        and card.count(", kept") == 3
        and card.count("left out") == 1
    )
    assert soup(models, task)[1] == tried


def test_a_soup_of_one_is_that_model_and_overflow_is_no_loss(noisy):
    good, broken, task = noisy
    boundless = changed(broken, lambda x: x * 1e30)
    made, tried = soup([boundless, good[0], broken], task)
    assert [row["model"] for row in tried if row["kept"]] == [1]
    assert largest_difference(made, good[0]) == 0 and len(made.history[-1].parents) == 1
    assert tried[-1]["own_loss"] is None and json.dumps(tried, allow_nan=False)
    with pytest.raises(MismatchError, match="no model has a finite loss"):
        soup([boundless, boundless], task)
    with pytest.raises(MismatchError, match="1 model: a soup"):
        soup(good[:1], task)
    with pytest.raises(MismatchError, match="they differ in"):
        soup([good[0], load(small_model("vit", intermediate_size=64))], task)
