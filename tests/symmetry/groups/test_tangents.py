"""Geometry of continuous groups: start, retract, tangent_gradient, project, the exponential."""

import pytest
import torch
from test_laws import BOTH, GROUPS, SELF_DUAL, Case, assert_same, close, differ

from symmerge.symmetry.groups import GeneralLinear, Orthogonal, OrthogonalFixingOnes, RotaryPairs
from symmerge.symmetry.groups.general_linear import MAX_CONDITION
from symmerge.symmetry.groups.matrices import exponential
from symmerge.symmetry.notation import Role

CONTINUOUS = [name for name in GROUPS if GROUPS[name](6).tangent()]
BATCHES = pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
every = pytest.mark.parametrize("name", CONTINUOUS)


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def step(group, generator, batch=(), size=1.0):
    """A random tangent vector; `size` is about the length of a row."""
    return {
        part: size * normal(generator, *batch, *shape) / max(1, shape[-1]) ** 0.5
        for part, shape in group.tangent().items()
    }


def test_which_groups_are_continuous():
    assert set(GROUPS) - set(CONTINUOUS) == {"trivial", "permutation", "signed", "signs"}


@every
@BATCHES
@pytest.mark.parametrize("size", [0.01, 0.3, 1.5])
def test_steps_stay_in_the_group(name, batch, size):
    group, (element, *_), x, _ = Case(batch=batch).draw(name)
    generator = torch.Generator().manual_seed(1)
    walked = element
    for _ in range(50 if size < 1 else 4):
        walked = group.retract(walked, step(group, generator, batch, size))
    assert group.check_shapes(walked, batch).ok and group.check(walked) == (True, "")
    # control: it went somewhere
    assert differ(group.act(walked, x, Role.WRITES), group.act(element, x, Role.WRITES))
    if "index" in element:
        assert torch.equal(walked["index"], element["index"])


@every
@BATCHES
def test_a_step_back_undoes_a_step(name, batch):
    group, (element, *_), _, _ = Case(batch=batch).draw(name)
    tangent = step(group, torch.Generator().manual_seed(1), batch)
    moved = group.retract(element, tangent)
    assert_same(group.retract(moved, {part: -value for part, value in tangent.items()}), element)
    zero = {part: torch.zeros_like(value) for part, value in tangent.items()}
    assert_same(group.retract(element, zero), element)
    components = [part for part in element if element[part].numel()]
    assert any(differ(moved[part].double(), element[part].double()) for part in components)


@every
def test_steps_multiply_from_the_left(name):
    """The learner relies on it when it composes its steps with the alignment it started from."""
    group, (element, *_), _, _ = Case().draw(name)
    tangent = step(group, torch.Generator().manual_seed(1))
    from_identity = group.retract(group.identity(), tangent)
    assert_same(group.retract(element, tangent), group.compose(from_identity, element))


@every
@BATCHES
def test_start_is_the_identity_and_moves_like_it(name, batch):
    group, _, x, _ = Case(batch=batch).draw(name)
    tangent = step(group, torch.Generator().manual_seed(1), batch, size=0.3)
    start, identity = group.start(batch), group.identity(batch)
    walked, moved = group.retract(start, tangent), group.retract(identity, tangent)
    shared = start.keys() & identity.keys()
    assert walked.keys() == start.keys()
    assert all(torch.equal(start[part], identity[part]) for part in shared)
    assert group.check({**identity, **{part: walked[part] for part in shared}}).ok
    for role in BOTH:
        close(group.act(start, x, role), x)
        close(group.act(walked, x, role), group.act(moved, x, role))
        assert differ(group.act(walked, x, role), x)  # control


def test_a_plain_step_leaves_the_group():
    """Control: the same direction added instead of retracted."""
    for group in (Orthogonal(6), OrthogonalFixingOnes(6)):
        element = group.random(torch.Generator().manual_seed(0))
        turn = step(Orthogonal(6), torch.Generator().manual_seed(1), size=0.3)["turn"]
        added = element["matrix"] + (turn - turn.mT) @ element["matrix"]
        assert not group.check({"matrix": added}).ok


# gradients


def loss_at(group, element, tangent, sides):
    """<G, transformed W>, summed over writers and readers."""
    moved = group.retract(element, tangent)
    return sum(
        (gradient * group.act(moved, weights, role)).sum()
        for role, (gradient, weights) in zip(BOTH, sides, strict=True)
    )


def gradient_at(group, element, sides, swap=False):
    products = [
        gradient @ group.act(element, weights, role).mT
        for role, (gradient, weights) in zip(BOTH, sides, strict=True)
    ]
    return group.tangent_gradient(*(reversed(products) if swap else products))


def sides_of(group, batch):
    generator = torch.Generator().manual_seed(2)
    return [
        [normal(generator, *batch, group.size, columns) for _ in range(2)] for columns in (4, 5)
    ]


@every
@BATCHES
def test_tangent_gradient_is_the_gradient_through_the_action(name, batch):
    group, (element, *_), _, _ = Case(batch=batch).draw(name)
    sides = sides_of(group, batch)
    tangent = {
        part: torch.zeros(*batch, *shape, dtype=torch.float64, requires_grad=True)
        for part, shape in group.tangent().items()
    }
    autograd = torch.autograd.grad(loss_at(group, element, tangent, sides), [*tangent.values()])
    expected = dict(zip(tangent, autograd, strict=True))
    actual, swapped = (gradient_at(group, element, sides, swap=swap) for swap in (False, True))
    assert actual.keys() == tangent.keys()
    for part, gradient in expected.items():
        assert actual[part].shape == tangent[part].shape
        torch.testing.assert_close(actual[part], gradient, rtol=1e-10, atol=1e-10)
    components = {part: gradient for part, gradient in expected.items() if gradient.numel()}
    # control: readers are not writers, unless both transform alike
    apart = any(differ(swapped[part], gradient) for part, gradient in components.items())
    assert apart == (name not in SELF_DUAL)
    assert any(differ(2 * actual[part], gradient) for part, gradient in components.items())


@every
def test_tangent_gradient_predicts_a_small_step(name):
    group, (element, *_), _, _ = Case().draw(name)
    sides, tangent = sides_of(group, ()), step(group, torch.Generator().manual_seed(3))
    before, after = (
        loss_at(group, element, {part: length * v for part, v in tangent.items()}, sides)
        for length in (-1e-5, 1e-5)
    )
    gradient = gradient_at(group, element, sides)
    predicted = sum((gradient[part] * value).sum() for part, value in tangent.items())
    assert (after - before).item() / 2e-5 == pytest.approx(predicted.item(), rel=1e-6)
    assert abs(predicted) > 1e-2


def test_discrete_groups_do_not_move():
    for name in set(GROUPS) - set(CONTINUOUS):
        group, (element, *_), _, _ = Case().draw(name)
        zero = torch.zeros(group.size, group.size)
        assert group.tangent_gradient(zero, zero) == {}
        assert group.retract(element, {}) is element
        assert group.project(element) == (element, 0)


# a matrix and its cached inverse transpose


@BATCHES
def test_a_basis_and_its_dual_stay_inverse_transposes(batch):
    group, generator = GeneralLinear(6), torch.Generator().manual_seed(0)
    element = group.random(generator, batch)
    walked = {**element, "dual": torch.linalg.inv(element["matrix"]).mT}
    for _ in range(30):
        walked = group.retract(walked, step(group, generator, batch, size=0.1))
    assert walked.keys() == {"matrix", "dual"}
    unit = torch.eye(6, dtype=torch.float64).expand(*batch, 6, 6)
    close(walked["matrix"] @ walked["dual"].mT, unit)
    x = normal(generator, *batch, 6, 4)
    for role in BOTH:
        close(group.act(walked, x, role), group.act({"matrix": walked["matrix"]}, x, role))
    # control
    assert differ(walked["matrix"], element["matrix"]) and differ(walked["matrix"], walked["dual"])


def test_a_cached_dual_is_used():
    group, x = GeneralLinear(3), torch.ones(3, 2, dtype=torch.float64)
    wrong = {**group.identity(), "dual": 2 * torch.eye(3, dtype=torch.float64)}
    assert torch.equal(group.act(wrong, x, Role.READS), 2 * x)
    assert torch.equal(group.act(wrong, x, Role.WRITES), x)


# the exponential


@pytest.mark.parametrize("skew", [True, False])
@pytest.mark.parametrize(
    ("norm", "error"), [(1e-3, 1e-13), (1.0, 1e-13), (4.0, 1e-13), (8.0, 1e-12)]
)
def test_the_exponential_is_torchs(norm, error, skew):
    x = normal(torch.Generator().manual_seed(0), 5, 12, 12)
    x = x - x.mT if skew else x
    x = norm * x / torch.linalg.matrix_norm(x, 2)[:, None, None]
    expected = torch.linalg.matrix_exp(x)
    difference = torch.linalg.matrix_norm(exponential(x) - expected, 2)
    assert (difference / torch.linalg.matrix_norm(expected, 2)).max() <= error
    # control: the first order is not enough
    assert torch.linalg.matrix_norm(torch.eye(12) + x - expected, 2).min() > norm**2 / 100


def test_the_exponential_is_inexact_for_large_matrices():
    x = normal(torch.Generator().manual_seed(0), 12, 12)
    x = 100 * (x - x.mT) / torch.linalg.matrix_norm(x - x.mT, 2)
    assert (exponential(x) - torch.linalg.matrix_exp(x)).abs().max() > 1e-3


def test_the_exponential_of_zero_and_of_no_coordinates():
    assert torch.equal(exponential(torch.zeros(2, 3, 3)), torch.eye(3).expand(2, 3, 3))
    assert exponential(torch.zeros(4, 0, 0)).shape == (4, 0, 0)
    assert exponential(torch.zeros(2, 2, dtype=torch.float64)).dtype == torch.float64


# projection


@pytest.mark.parametrize(
    "group", [Orthogonal(6), OrthogonalFixingOnes(6)], ids=lambda group: group.name
)
@BATCHES
def test_a_nearly_orthogonal_matrix_is_projected(group, batch):
    generator = torch.Generator().manual_seed(0)
    good = group.random(generator, batch)
    wrong = {"matrix": good["matrix"] + 1e-3 * normal(generator, *batch, 6, 6)}
    assert not group.check(wrong).ok and group.check(good).ok
    projected, changed = group.project(wrong)
    assert group.check(projected) == (True, "") and changed == 0
    assert (projected["matrix"] - good["matrix"]).abs().max() < 5e-3
    close(group.project(good)[0]["matrix"], good["matrix"])
    mirror = torch.eye(6, dtype=torch.float64)[[1, 0, 2, 3, 4, 5]]  # fixes the ones vector
    for side in (wrong["matrix"], wrong["matrix"] @ mirror):
        determinant = torch.linalg.det(group.project({"matrix": side})[0]["matrix"])
        close(determinant, torch.linalg.det(side).sign())  # no reflection becomes a rotation


def stretched(condition, batch=()):
    """A basis with this condition number: one of its directions nearly vanishes."""
    matrix = GeneralLinear(6).random(torch.Generator().manual_seed(0), batch)["matrix"]
    u, values, vh = torch.linalg.svd(matrix)
    values = torch.cat([values[..., :-1], values[..., :1] / condition], -1)
    return (u * values[..., None, :]) @ vh


def condition(matrix):
    values = torch.linalg.svdvals(matrix)
    return values[..., 0] / values[..., -1]


def test_small_singular_values_are_raised_and_counted():
    group = GeneralLinear(6)
    good, bad = stretched(1e3), stretched(1e7)
    element = {"matrix": torch.stack([good, bad, 1e-3 * good, 1e5 * bad])}
    projected, changed = group.project(element)
    before, after = element["matrix"], projected["matrix"]
    assert changed == 2
    assert torch.equal(after[::2], before[::2])  # good ones are left alone
    assert condition(after)[1::2].tolist() == pytest.approx([MAX_CONDITION] * 2, rel=1e-6)
    distance = (after - before).flatten(-2).norm(dim=-1) / torch.linalg.matrix_norm(before, 2)
    assert distance.max() <= 1.001 / MAX_CONDITION  # no more than it takes
    assert condition(before)[1::2].min() > 1e6  # control
    assert group.project({"matrix": good})[1] == 0 and group.project({"matrix": bad})[1] == 1
    assert group.project(group.random(torch.Generator().manual_seed(0), (5,)))[1] == 0


def test_unrotated_coordinates_are_projected_too():
    group = RotaryPairs(10, 4)
    pair = group.random(torch.Generator().manual_seed(0), (2,))["pair"]
    rest = torch.stack([stretched(10), stretched(1e7)])
    projected, changed = group.project({"pair": pair, "rest": rest})
    assert changed == 1 and torch.equal(projected["pair"], pair)
    assert condition(projected["rest"]).max() <= 1.001 * MAX_CONDITION
    all_rotary = RotaryPairs(4, 4)
    assert all_rotary.project(all_rotary.identity((2,)))[1] == 0  # nothing to project
