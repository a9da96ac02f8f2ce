"""A module of the user's own is matched and measured with the user's data."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

import symmerge as sm
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks.base import split
from symmerge.matching.learning.data import load_data
from symmerge.symmetry.groups import GeneralLinear, ScaledPermutation
from symmerge.verification.modules import full_module

CLASSES, STEPS = 4, 60


class Units(nn.Module):
    """A stream with norms, and two hidden layers beside it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, CLASSES)
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(16, 24) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(24, 16) for _ in range(2))

    def forward(self, x, scale=None):
        x = self.embed(x if scale is None else x * scale)
        for norm, up, down in zip(self.norm, self.up, self.down, strict=False):
            x = x + down(up(norm(x)).relu())
        return self.head(self.norm[2](x))


def points(seed, count=256):
    """Points, and which corner of a square they are in."""
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] * x[:, 2] > 0).long()


@cache
def pair():
    """Two trained seeds, and the table of their class."""
    x, y = points(0)
    modules = []
    for seed in range(2):
        torch.manual_seed(seed)
        module = Units()
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        modules.append(module.eval())
    derivation = sm.derive(modules[0], x[:3])
    return derivation, modules, [derivation.load(module) for module in modules]


def data(seed=0, **changes):
    x, y = points(seed)
    batches = list(zip(x.split(32), y.split(32), strict=True))
    return pair()[0].task(batches, **{"loss": functional.cross_entropy, **changes})


def loss_of(model):
    x, y = points(1)
    with torch.no_grad():
        return functional.cross_entropy(pair()[0].module(model)(x), y).item()


def align(task, **changes):
    """B aligned to A by what is learned from a task, in a few steps from the weights."""
    how = {"steps": 40, "batch_size": 32, "start": sm.WeightMatching(tries=1), **changes}
    return sm.align(*pair()[2], sm.LearnedMatching(data=task, **how))


def test_what_is_learned_from_own_data_beats_the_average_and_weights():
    derivation, modules, models = pair()
    aligned = align(data())
    x, _ = points(1)
    assert torch.allclose(derivation.module(aligned.aligned)(x), modules[1](x), atol=1e-3)
    plain, weights = (loss_of(sm.merge(models, method=method)) for method in ("none", "weights"))
    merged = loss_of(sm.merge(aligned))
    assert merged < 0.8 * plain and merged < weights - 0.01
    # Control: labels that say nothing teach nothing.
    (x, y), loss = points(0), functional.cross_entropy
    wrong = derivation.task([(x, y.roll(1))], loss=loss)
    assert loss_of(sm.merge(align(wrong))) > merged + 0.05


@pytest.mark.parametrize("method", ["activations", "learned"])
def test_merge_and_align_take_own_data_by_the_name_of_a_method(method):
    models, task = pair()[2], data()
    how = {"steps": 10, "start_from": "weights"} if method == "learned" else {"tries": 1}
    options = sm.AlignOptions(method=method, data=task, **how)
    aligned = sm.align(*models, options)
    assert aligned.solution.settings["data"]["data"] == "batches for Units"
    plain, merged = (loss_of(sm.merge(models, method=one)) for one in ("none", options))
    assert merged < plain
    assert merged == pytest.approx(loss_of(sm.merge(aligned)), rel=1e-3)


def test_activations_are_scored_by_the_users_loss():
    task = data()
    calls = []

    def counted(answer, targets):
        calls.append(len(targets))
        return functional.cross_entropy(answer, targets)

    matching = sm.ActivationMatching(data=data(loss=counted), tries=2)
    aligned = sm.align(*pair()[2], matching)
    assert len(aligned.solution.trials) == 2 and sum(calls) >= 2 * task.samples // 4
    best = min(trial.score for trial in aligned.solution.trials)
    held_out = split(task, 0.25)[1]
    module = full_module(sm.merge(aligned), torch.float32)
    assert held_out.evaluate(module)["loss"] == pytest.approx(best, rel=1e-3)


def test_without_a_loss_the_parents_teach():
    x, _ = points(0)
    task = pair()[0].task(x.split(32))
    assert task.metrics == () and task.samples == len(x)
    assert load_data(sm.LearnedMatching(data=task), pair()[2], print).train.target == "parents"
    assert load_data(sm.LearnedMatching(data=data()), pair()[2], print).train.target == "labels"
    plain = loss_of(sm.merge(pair()[2], method="none"))
    assert loss_of(sm.merge(align(task))) < plain
    with pytest.raises(DataError, match=r"no targets.*loss="):
        sm.barrier(*pair()[2], task, 3)
    with pytest.raises(DataError, match=r"no targets.*loss="):
        sm.LearnedMatching(data=task, target="labels")


def test_barrier_and_evaluate_measure_the_users_loss():
    models, task = pair()[2], data(1)
    curve = sm.barrier(*models, task, 3)
    ends, middle = [loss_of(model) for model in models], loss_of(sm.mean(models))
    measured = [point["loss"] for point in curve.points]
    assert measured == pytest.approx([ends[0], middle, ends[1]], rel=1e-4)
    assert curve.barrier_mean == pytest.approx(max(*ends, middle) - sum(ends) / 2, rel=1e-3)
    table = sm.evaluate(models, task)
    assert [one.metrics["loss"] for one in table.models] == pytest.approx(ends, rel=1e-4)
    derivation, (a, b), (x, y) = pair()[0], pair()[1], points(1)
    ensemble = functional.cross_entropy((a(x) + b(x)) / 2, y).item()
    assert table.ensemble is not None
    assert table.ensemble["loss"] == pytest.approx(ensemble, rel=1e-4)
    # The loss of unequal batches is that of all rows.
    odd = derivation.task([(x[:50], y[:50]), (x[50:], y[50:])], loss=functional.cross_entropy)
    assert sm.evaluate(models[0], odd).models[0].metrics["loss"] == pytest.approx(ends[0], rel=1e-4)


def test_inputs_have_names_or_places():
    derivation, (a, _), (x, y) = pair()[0], pair()[1], points(1)
    scale = torch.full((len(x), 1), 0.5, dtype=torch.float64)
    for inputs in ((x, scale), {"x": x, "scale": scale}):
        task = derivation.task([(inputs, y)], loss=functional.cross_entropy)
        found = sm.evaluate(pair()[2][0], task).models[0].metrics["loss"]
        assert found == pytest.approx(functional.cross_entropy(a(x / 2), y).item(), rel=1e-4)


X, Y = points(0, 8)
BAD = {
    "no batches": ([], {}, "no batches"),
    "read before": (iter(()), {}, "no batches"),
    "no rows": ([(X[:0], Y[:0])], {}, "no rows"),
    "not a pair": ([X], {}, r"not a pair.*\(inputs, targets\)"),
    "pairs without a loss": ([(X, Y)], {"loss": None}, "need loss="),
    "rows differ": ([(X, Y[:3])], {}, "must count the same samples"),
    "shapes differ": ([(X, Y), (X[:, :5], Y)], {}, "batches 0 and 1 differ in 0"),
    "no tensor": ([(X, "labels")], {}, "labels is not a tensor"),
    "targets among inputs": ([({"x": X, "labels": Y}, Y)], {}, "leave it out"),
    "wrong shape": ([(X[:, :5], Y)], {}, r"cannot run the inputs 0 \[2, 5\]"),
    "wrong argument": ([({"y": X}, Y)], {}, "cannot run the inputs y"),
    "wrong targets": ([(X, Y.float()[:, None])], {}, "loss cannot compare answers"),
    "a loss per row": (
        [(X, Y)],
        {"loss": lambda a, y: functional.cross_entropy(a, y, reduction="none")},
        r"is \[2\]: give one that returns a single number",
    ),
    "a number": ([(X, Y)], {"loss": lambda a, y: 0.5}, "is float: give one"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_with_a_remedy(case):
    batches, changes, message = BAD[case]
    with pytest.raises(DataError, match=message):
        pair()[0].task(batches, **{"loss": functional.cross_entropy, **changes})


def test_a_loss_without_a_gradient_teaches_nothing():
    task = data(1, loss=lambda answer, y: (answer.argmax(1) != y).float().mean())
    assert 0 < sm.evaluate(pair()[2][0], task).models[0].metrics["loss"] < 1
    with pytest.raises(DataError, match=r"no gradient.*target='parents'"):
        align(task)
    assert align(task, target="parents", steps=2).solution.learned["target"] == "parents"


def test_data_that_is_no_task_is_refused_with_a_remedy():
    models = pair()[2]
    with pytest.raises(MismatchError, match=r"derivation\.task"):
        sm.merge(models, method="learned", data="digits")
    with pytest.raises(MismatchError, match=r"derivation\.task"):
        sm.merge(models, method="activations")
    with pytest.raises(MismatchError, match="a module of your own"):
        sm.align(*models, sm.LearnedMatching())
    with pytest.raises(MismatchError, match=r"derivation\.task"):
        sm.evaluate(models)


class Chain(nn.Module):
    """Layers one after the other: every matrix meets two spaces with scales; a free stream."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((5, 9), (9, 7), (7, 8)))
        self.embed, self.beside, self.head = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        x = self.embed(x)
        return self.head(x + self.beside(x))


@torch.no_grad()
def test_spaces_that_share_a_matrix_are_balanced_and_matched_exactly():
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    a, b = Chain().eval(), Chain().eval()
    derivation = sm.derive(a, x)
    models = [derivation.load(module) for module in (a, b)]
    groups = {name: type(space.group) for name, space in derivation.spec.hidden.items()}
    assert [*groups.values()].count(ScaledPermutation) == 3 and GeneralLinear in groups.values()
    assert torch.allclose(derivation.module(sm.canonicalize(models[1]))(x), b(x), atol=1e-4)
    aligned = sm.align(*models, "weights")
    assert torch.allclose(derivation.module(aligned.aligned)(x), b(x), atol=1e-4)
    assert aligned.after < aligned.before
