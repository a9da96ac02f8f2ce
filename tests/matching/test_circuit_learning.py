"""Learned matching with attention averaged as circuits: the mean, its gradient, what is found."""

import pytest
import torch

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.evaluation.lines import LineMethod, by_circuits, measure_lines
from symmerge.lab.small_models import small_model
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.learning.data import load_data
from symmerge.models.alignment import Alignment, apply
from symmerge.models.model import load
from symmerge.verification.inputs import samples
from symmerge.verification.modules import logits_of


@pytest.fixture(scope="module")
def pair():
    models = (sm.load(small_model("gpt2", seed=seed, n_layer=1)) for seed in (0, 1))
    return [sm.canonicalize(model).cached() for model in models]


@pytest.fixture(scope="module")
def task(pair):
    return sm.make_task("clm", "self", pair, samples=16)


def solver(task, **changes):
    options = {"data": task, "start": "identity", "steps": 12, "batch_size": 8, "lr": 1e-2}
    return LearnedMatching(**{**options, "attention": "circuits", **changes})


def segment_of(pair, task):
    options = solver(task)
    identity = Alignment.identity(pair[0].spec)
    learner = options._learner(*pair, identity, load_data(options, pair, print))
    return learner, learner.objective.segment


def answers(module, sample):
    logits = module(**sample.inputs).logits
    return (logits - logits.mean(-1, keepdim=True)).flatten(0, 1).detach()


def apart(x, y):
    return ((x - y).norm() / x.norm()).item()


@pytest.mark.parametrize("t", [0.25, 0.5])
def test_the_mean_has_the_mean_of_the_circuits(pair, task, t):
    _, segment = segment_of(pair, task)
    sample = samples(pair[0], 0)[0]
    merged = sm.average(*pair, t, attention="circuits")
    expected = logits_of(merged, sample)["logits"]
    expected = expected - expected.mean(-1, keepdim=True)
    segment.place(t)
    assert apart(expected, answers(segment.mean.module, sample)) <= 1e-5
    segment.circuits = None  # the control: products of shares
    segment.place(t)
    assert apart(expected, answers(segment.mean.module, sample)) > 1e-3


def test_the_gradient_is_that_of_the_mean_of_the_circuits(pair, task):
    learner, segment = segment_of(pair, task)
    batches, moved = [learner.data.train[0]], segment.member.moved.flat
    segment.place(0.3)
    segment.backward(batches)
    gradient = segment.mean.gradient.flat.clone()
    segment.member.move = lambda: None  # the weights are moved here
    direction = gradient / gradient.norm()
    before, losses = moved.clone(), []
    for step in (1e-2, -1e-2):
        moved.copy_(before + step * direction)
        segment.place()
        with torch.no_grad():
            losses.append(segment.mean.loss(batches))
    slope = (losses[0] - losses[1]) / 2e-2
    assert slope == pytest.approx(gradient.norm().item(), rel=0.02)
    factors = segment.circuits.at(segment.t)
    assert abs((gradient / factors).norm() / gradient.norm() - 1) > 0.05  # the control


def test_learning_lowers_the_barrier_of_circuits_and_keeps_the_function(pair, task):
    a, b = pair
    solution = solver(task, permutations=False).solve(a, b)
    moved = apply(solution.alignment, b)
    assert sm.verify(b, moved).same
    assert solution.objective[-1] < solution.objective[0]
    turned = Alignment.random(b.spec, torch.Generator().manual_seed(0)).elements
    inside = {name: turned[name] for name in turned if name.startswith(("qk", "vo"))}
    other = apply(Alignment(b.spec, {**Alignment.identity(b.spec).elements, **inside}), moved)
    stock = [LineMethod(str(at), "", a, end) for at, end in enumerate((b, moved, other))]
    lines = [*stock, *(by_circuits(line, a) for line in stock)]
    record = measure_lines(a, b, lines, task, points=3)
    _, factors, factors_turned, before, after, after_turned = (
        method.points[1].metrics["loss"] for method in record.methods
    )
    assert after < before
    assert after_turned == pytest.approx(after, abs=1e-5)  # circuits need no common basis
    assert abs(factors_turned - factors) > 1e-3  # factors do: the control


def test_rotary_circuits_are_refused(task):
    a, b = (load(small_model("llama", seed=seed)) for seed in (0, 1))
    with pytest.raises(MismatchError, match="turn with their positions"):
        solver(None).solve(a, b)
