"""Moving continuously: steps stay in the group, their gradient is that of the action, the exponential is torch's, and what went wrong is mended."""

import pytest
import torch
from test_laws import BOTH, GROUPS, SELF_DUAL, Case, close, differ, same

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
    """A random direction; `size` is how long a row of it is, about."""
    return {
        part: size * normal(generator, *batch, *shape) / max(1, shape[-1]) ** 0.5
        for part, shape in group.tangent().items()
    }


def test_what_can_move_continuously():
    assert set(GROUPS) - set(CONTINUOUS) == {"trivial", "permutation", "signed"}


@every
@BATCHES
@pytest.mark.parametrize("size", [0.01, 0.3, 1.5])
def test_steps_stay_in_the_group(name, batch, size):
    """Fifty of them, one after the other."""
    group, (element, *_), x, _ = Case(batch=batch).draw(name)
    generator = torch.Generator().manual_seed(1)
    walked = element
    for _ in range(50 if size < 1 else 4):
        walked = group.retract(walked, step(group, generator, batch, size))
    assert group.check_shapes(walked, batch).ok and group.check(walked) == (True, "")
    assert differ(
        group.act(walked, x, Role.WRITES), group.act(element, x, Role.WRITES)
    )  # the control: it went somewhere
    if "index" in element:
        assert torch.equal(walked["index"], element["index"])


@every
@BATCHES
def test_a_step_back_undoes_a_step(name, batch):
    group, (element, *_), _, _ = Case(batch=batch).draw(name)
    there = step(group, torch.Generator().manual_seed(1), batch)
    away = group.retract(element, there)
    same(group.retract(away, {part: -value for part, value in there.items()}), element)
    same(
        group.retract(element, {part: torch.zeros_like(value) for part, value in there.items()}),
        element,
    )
    assert any(
        differ(away[part].double(), element[part].double())
        for part in element
        if element[part].numel()
    )


@every
def test_steps_move_from_the_left(name):
    """What is learned since is composed with where it started: the order in which the learner folds."""
    group, (element, *_), _, _ = Case().draw(name)
    there = step(group, torch.Generator().manual_seed(1))
    same(
        group.retract(element, there),
        group.compose(group.retract(group.identity(), there), element),
    )


@every
@BATCHES
def test_a_walk_begins_where_nothing_moves(name, batch):
    """And goes where elements go that carry all their parts, and nothing besides."""
    group, _, x, _ = Case(batch=batch).draw(name)
    there = step(group, torch.Generator().manual_seed(1), batch, size=0.3)
    still, full = group.start(batch), group.identity(batch)
    walked, moved = group.retract(still, there), group.retract(full, there)
    assert walked.keys() == still.keys() and all(
        torch.equal(still[part], full[part]) for part in still.keys() & full.keys()
    )
    assert group.check({**full, **{part: walked[part] for part in walked.keys() & full.keys()}}).ok
    for role in BOTH:
        close(group.act(still, x, role), x)
        close(group.act(walked, x, role), group.act(moved, x, role))
        assert differ(group.act(walked, x, role), x)  # the control


def test_a_plain_step_leaves_the_group():
    """The control: the same direction added instead of followed."""
    for group in (Orthogonal(6), OrthogonalFixingOnes(6)):
        element = group.random(torch.Generator().manual_seed(0))
        turn = step(Orthogonal(6), torch.Generator().manual_seed(1), size=0.3)["turn"]
        assert not group.check(
            {"matrix": element["matrix"] + (turn - turn.mT) @ element["matrix"]}
        ).ok


# slopes


def pulled(group, element, along, sides):
    """The loss <G, W moved> over writers and readers."""
    moved = group.retract(element, along)
    return sum(
        (gradient * group.act(moved, weights, role)).sum()
        for role, (gradient, weights) in zip(BOTH, sides, strict=True)
    )


def slope_of(group, element, sides, swap=False):
    found = [
        gradient @ group.act(element, weights, role).mT
        for role, (gradient, weights) in zip(BOTH, sides, strict=True)
    ]
    return group.tangent_gradient(*(reversed(found) if swap else found))


def sides_of(group, batch):
    generator = torch.Generator().manual_seed(2)
    return [
        [normal(generator, *batch, group.size, columns) for _ in range(2)] for columns in (4, 5)
    ]


@every
@BATCHES
def test_the_slope_is_the_gradient_through_the_action(name, batch):
    group, (element, *_), _, _ = Case(batch=batch).draw(name)
    sides = sides_of(group, batch)
    along = {
        part: torch.zeros(*batch, *shape, dtype=torch.float64, requires_grad=True)
        for part, shape in group.tangent().items()
    }
    truth = dict(
        zip(
            along,
            torch.autograd.grad(pulled(group, element, along, sides), list(along.values())),
            strict=True,
        )
    )
    found, swapped = slope_of(group, element, sides), slope_of(group, element, sides, swap=True)
    assert found.keys() == along.keys()
    for part, gradient in truth.items():
        assert found[part].shape == along[part].shape
        torch.testing.assert_close(found[part], gradient, rtol=1e-10, atol=1e-10)
    apart = {
        part
        for part, gradient in truth.items()
        if gradient.numel() and differ(swapped[part], gradient)
    }
    assert bool(apart) == (
        name not in SELF_DUAL
    )  # the control: readers are no writers, unless they move alike
    assert any(
        differ(2 * found[part], gradient) for part, gradient in truth.items() if gradient.numel()
    )


@every
def test_the_slope_is_what_a_small_step_changes(name):
    group, (element, *_), _, _ = Case().draw(name)
    sides, there = sides_of(group, ()), step(group, torch.Generator().manual_seed(3))
    before, after = (
        pulled(group, element, {part: sign * 1e-5 * value for part, value in there.items()}, sides)
        for sign in (-1, 1)
    )
    predicted = sum(
        (slope_of(group, element, sides)[part] * value).sum() for part, value in there.items()
    )
    assert (after - before).item() / 2e-5 == pytest.approx(predicted.item(), rel=1e-6) and abs(
        predicted
    ) > 1e-2


def test_discrete_groups_have_no_slope():
    for name in set(GROUPS) - set(CONTINUOUS):
        group, (element, *_), _, _ = Case().draw(name)
        zero = torch.zeros(group.size, group.size)
        assert (
            group.tangent_gradient(zero, zero) == {}
            and group.retract(element, {}) is element
            and group.project(element) == (element, 0)
        )


# the pair of a matrix and its inverse transpose


@BATCHES
def test_a_basis_and_its_dual_stay_inverse_transposes(batch):
    group, generator = GeneralLinear(6), torch.Generator().manual_seed(0)
    element = group.random(generator, batch)
    walked = {**element, "dual": torch.linalg.inv(element["matrix"]).mT}
    for _ in range(30):
        walked = group.retract(walked, step(group, generator, batch, size=0.1))
    assert walked.keys() == {"matrix", "dual"}
    close(
        walked["matrix"] @ walked["dual"].mT, torch.eye(6, dtype=torch.float64).expand(*batch, 6, 6)
    )
    x = normal(generator, *batch, 6, 4)
    for role in BOTH:
        close(group.act(walked, x, role), group.act({"matrix": walked["matrix"]}, x, role))
    assert differ(walked["matrix"], element["matrix"]) and differ(
        walked["matrix"], walked["dual"]
    )  # the control


def test_a_dual_that_is_given_is_the_one_used():
    group, x = GeneralLinear(3), torch.ones(3, 2, dtype=torch.float64)
    wrong = {**group.identity(), "dual": 2 * torch.eye(3, dtype=torch.float64)}
    assert torch.equal(group.act(wrong, x, Role.READS), 2 * x) and torch.equal(
        group.act(wrong, x, Role.WRITES), x
    )


# the exponential


@pytest.mark.parametrize("skew", [True, False])
@pytest.mark.parametrize(
    ("norm", "error"), [(1e-3, 1e-13), (1.0, 1e-13), (4.0, 1e-13), (8.0, 1e-12)]
)
def test_the_exponential_is_torchs(norm, error, skew):
    x = normal(torch.Generator().manual_seed(0), 5, 12, 12)
    x = x - x.mT if skew else x
    x = norm * x / torch.linalg.matrix_norm(x, 2)[:, None, None]
    truth = torch.linalg.matrix_exp(x)
    assert (
        torch.linalg.matrix_norm(exponential(x) - truth, 2) / torch.linalg.matrix_norm(truth, 2)
    ).max() <= error
    assert (
        torch.linalg.matrix_norm(torch.eye(12) + x - truth, 2).min() > norm**2 / 100
    )  # the control: the first order is not enough


def test_the_exponential_has_its_limits():
    x = normal(torch.Generator().manual_seed(0), 12, 12)
    x = 100 * (x - x.mT) / torch.linalg.matrix_norm(x - x.mT, 2)
    assert (exponential(x) - torch.linalg.matrix_exp(x)).abs().max() > 1e-3


def test_the_exponential_of_nothing_and_of_no_coordinates():
    assert torch.equal(exponential(torch.zeros(2, 3, 3)), torch.eye(3).expand(2, 3, 3))
    assert exponential(torch.zeros(4, 0, 0)).shape == (4, 0, 0)
    assert exponential(torch.zeros(2, 2, dtype=torch.float64)).dtype == torch.float64


# mending


@pytest.mark.parametrize(
    "group", [Orthogonal(6), OrthogonalFixingOnes(6)], ids=lambda group: group.name
)
@BATCHES
def test_a_rotation_that_is_slightly_off_is_put_right(group, batch):
    generator = torch.Generator().manual_seed(0)
    good = group.random(generator, batch)
    wrong = {"matrix": good["matrix"] + 1e-3 * normal(generator, *batch, 6, 6)}
    assert not group.check(wrong).ok and group.check(good).ok
    mended, changed = group.project(wrong)
    assert group.check(mended) == (True, "") and changed == 0
    assert (mended["matrix"] - good["matrix"]).abs().max() < 5e-3
    close(group.project(good)[0]["matrix"], good["matrix"])
    mirror = torch.eye(6, dtype=torch.float64)[
        [1, 0, 2, 3, 4, 5]
    ]  # a reflection that fixes the ones vector
    for side in (wrong["matrix"], wrong["matrix"] @ mirror):
        close(
            torch.linalg.det(group.project({"matrix": side})[0]["matrix"]),
            torch.linalg.det(side).sign(),
        )  # no reflection becomes a rotation


def stretched(condition, batch=()):
    """A basis with this condition number: one of its directions nearly vanishes."""
    matrix = GeneralLinear(6).random(torch.Generator().manual_seed(0), batch)["matrix"]
    u, values, vh = torch.linalg.svd(matrix)
    values = torch.cat([values[..., :-1], values[..., :1] / condition], -1)
    return (u * values[..., None, :]) @ vh


def condition(matrix):
    values = torch.linalg.svdvals(matrix)
    return values[..., 0] / values[..., -1]


def test_singular_values_that_are_too_small_are_raised_and_counted():
    group = GeneralLinear(6)
    good, bad = stretched(1e3), stretched(1e7)
    element = {"matrix": torch.stack([good, bad, 1e-3 * good, 1e5 * bad])}
    mended, changed = group.project(element)
    assert changed == 2
    assert torch.equal(mended["matrix"][::2], element["matrix"][::2])  # good ones are left alone
    assert condition(mended["matrix"])[1::2].tolist() == pytest.approx(
        [MAX_CONDITION] * 2, rel=1e-6
    )
    moved = (mended["matrix"] - element["matrix"]).flatten(-2).norm(
        dim=-1
    ) / torch.linalg.matrix_norm(element["matrix"], 2)
    assert moved.max() <= 1.001 / MAX_CONDITION  # no more than it takes
    assert condition(element["matrix"])[1::2].min() > 1e6  # the control
    assert group.project({"matrix": good})[1] == 0 and group.project({"matrix": bad})[1] == 1
    assert group.project(group.random(torch.Generator().manual_seed(0), (5,)))[1] == 0


def test_what_positions_do_not_touch_is_mended_too():
    group = RotaryPairs(10, 4)
    pair = group.random(torch.Generator().manual_seed(0), (2,))["pair"]
    mended, changed = group.project(
        {"pair": pair, "rest": torch.stack([stretched(10), stretched(1e7)])}
    )
    assert (
        changed == 1
        and torch.equal(mended["pair"], pair)
        and condition(mended["rest"]).max() <= 1.001 * MAX_CONDITION
    )
    whole = RotaryPairs(4, 4)
    assert whole.project(whole.identity((2,)))[1] == 0  # nothing there to mend
