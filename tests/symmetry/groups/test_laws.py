"""One law suite over every group. Broken elements and wrong roles must fail it."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symmerge.errors import SymmetryError
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
    Signs,
    Trivial,
)
from symmerge.symmetry.notation import Role

pytestmark = pytest.mark.quick

GROUPS = {
    "trivial": Trivial,
    "permutation": Permutation,
    "signed": SignedPermutation,
    "signs": Signs,
    "scaled-positive": ScaledPermutation,
    "scaled": partial(ScaledPermutation, positive=False),
    "orthogonal": Orthogonal,
    "orthogonal-ones": OrthogonalFixingOnes,
    "linear": GeneralLinear,
    "rotary-halves": lambda n: RotaryPairs(2 * n, 2 * n),
    "rotary-interleaved": lambda n: RotaryPairs(2 * n, 2 * n, "interleaved"),
    "rotary-partial": lambda n: RotaryPairs(2 * n + 3, 2 * n),
    "rotary-partial-interleaved": lambda n: RotaryPairs(2 * n + 2, 2 * n, "interleaved"),
}
MONOMIAL = ["trivial", "permutation", "signed", "signs", "scaled-positive", "scaled"]
DENSE = [name for name in GROUPS if name not in MONOMIAL]
MOVING = [name for name in GROUPS if name != "trivial"]
COMMUTATIVE = ["trivial", "signs", "rotary-halves", "rotary-interleaved"]
# readers transform as writers do
SELF_DUAL = ["trivial", "permutation", "signed", "signs", "orthogonal", "orthogonal-ones"]
BOTH = (Role.WRITES, Role.READS)

close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def differ(x: torch.Tensor, y: torch.Tensor) -> bool:
    return (x - y).abs().max().item() > 1e-3


@dataclass(frozen=True)
class Case:
    """A size, batch dimensions and a seed; `draw` makes elements and coordinates from them."""

    n: int = 6
    batch: tuple[int, ...] = ()
    seed: int = 0

    def draw(self, name: str) -> tuple[Group, list, torch.Tensor, torch.Tensor]:
        group, generator = GROUPS[name](self.n), torch.Generator().manual_seed(self.seed)
        elements = [group.random(generator, self.batch) for _ in range(3)]
        x, y = (
            torch.randn(*self.batch, group.size, columns, generator=generator, dtype=torch.float64)
            for columns in (4, 5)
        )
        return group, elements, x, y


cases = st.builds(
    Case, n=st.integers(1, 6), batch=st.sampled_from([(), (3,), (2, 3)]), seed=st.integers(0, 2**31)
)
laws = settings(max_examples=12, deadline=None)
every = pytest.mark.parametrize("name", GROUPS)
every_role = pytest.mark.parametrize("role", BOTH)


def assert_same(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        close(actual[name], expected[name])


@every
@every_role
@laws
@given(case=cases)
def test_identity_and_inverse(name, role, case):
    group, (g, *_), x, _ = case.draw(name)
    close(group.act(group.identity(case.batch), x, role), x)
    close(group.act(group.inverse(g), group.act(g, x, role), role), x)
    close(group.act(g, group.act(group.inverse(g), x, role), role), x)
    assert_same(group.compose(g, group.inverse(g)), group.identity(case.batch))


@pytest.mark.parametrize("name", MOVING)
@every_role
def test_an_element_without_its_inverse_changes_coordinates(name, role):
    group, (g, h, _), x, _ = Case().draw(name)
    assert differ(group.act(g, x, role), x)
    assert differ(group.act(group.inverse(h), group.act(g, x, role), role), x)


@every
@every_role
@laws
@given(case=cases)
def test_composition_acts_inner_first(name, role, case):
    group, (f, g, h), x, _ = case.draw(name)
    close(group.act(group.compose(g, h), x, role), group.act(g, group.act(h, x, role), role))
    assert_same(group.compose(group.compose(f, g), h), group.compose(f, group.compose(g, h)))


@pytest.mark.parametrize("name", [name for name in GROUPS if name not in COMMUTATIVE])
@every_role
def test_the_order_of_composition_matters(name, role):
    group, (g, h, _), x, _ = Case().draw(name)
    swapped = group.act(group.compose(h, g), x, role)
    assert differ(swapped, group.act(g, group.act(h, x, role), role))


@every
@laws
@given(case=cases)
def test_what_readers_see_is_unchanged(name, case):
    group, (g, *_), x, y = case.draw(name)
    close(group.act(g, x, Role.WRITES).mT @ group.act(g, y, Role.READS), x.mT @ y)


@pytest.mark.parametrize("name", MOVING)
def test_readers_must_transform_in_their_own_role(name):
    group, (g, *_), x, y = Case().draw(name)
    moved = group.act(g, x, Role.WRITES).mT
    assert differ(moved @ y, x.mT @ y)
    assert differ(moved @ group.act(g, y, Role.WRITES), x.mT @ y) == (name not in SELF_DUAL)


@every
@every_role
@laws
@given(case=cases)
def test_the_action_is_linear_in_every_layout_and_precision(name, role, case):
    group, (g, *_), x, y = case.draw(name)
    act = partial(group.act, g, role=role)
    y = y[..., : x.shape[-1]]
    close(act(x=2.5 * x + y), 2.5 * act(x=x) + act(x=y))
    close(act(x=x.mT.contiguous().mT), act(x=x))
    single = act(x=x.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), act(x=x), rtol=1e-5, atol=1e-5)


@every
@laws
@given(case=cases)
def test_random_elements_belong(name, case):
    group, (f, g, _), _, _ = case.draw(name)
    for element in (f, group.compose(f, g), group.inverse(f), group.identity(case.batch)):
        assert group.check(element) == group.check_shapes(element, case.batch) == (True, "")
    assert_same(case.draw(name)[1][0], f)


@pytest.mark.parametrize("name", MOVING)
def test_other_seeds_and_draws_give_other_elements(name):
    group, (f, g, _), x, _ = Case().draw(name)
    other = Case(seed=1).draw(name)[1][0]
    assert differ(group.act(f, x, Role.WRITES), group.act(g, x, Role.WRITES))
    assert differ(group.act(f, x, Role.WRITES), group.act(other, x, Role.WRITES))


@pytest.mark.parametrize("name", MOVING)
def test_wrong_components_are_refused(name):
    group, (g, *_), _, _ = Case().draw(name)
    part = next(iter(g))
    refused = {
        "expects": [
            {},
            {**g, "extra": g[part]},
            GROUPS[name](5).identity(),
            group.identity((2,)),
        ],
        "not finite": [
            {**g, part: value} for value in [g[part] * math.nan] if g[part].is_floating_point()
        ],
    }
    for reason, elements in refused.items():
        for element in elements:
            verdict = group.check_shapes(element)
            assert not verdict.ok and reason in verdict.reason


# axes that ride along: gains and gates


@pytest.mark.parametrize("name", MONOMIAL)
@laws
@given(case=cases)
def test_gains_follow_the_permutation_only(name, case):
    group, (g, *_), x, _ = case.draw(name)
    matrix = group.act(g, torch.eye(group.size).double().expand(*case.batch, -1, -1), Role.WRITES)
    close(group.act(g, x, Role.RIDES), (matrix != 0).double() @ x)


@pytest.mark.parametrize("name", ["signed", "signs", "scaled-positive", "scaled"])
def test_gains_do_not_transform_as_writers_do(name):
    group, (g, *_), x, _ = Case().draw(name)
    assert differ(group.act(g, x, Role.RIDES), group.act(g, x, Role.WRITES))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_only_constant_gains_ride_along_a_rotation(name, batch):
    group, (g, *_), x, _ = Case(batch=batch).draw(name)
    constant = x[..., :1, :].expand_as(x)
    assert group.act(g, constant, Role.RIDES).equal(constant)
    with pytest.raises(SymmetryError, match="canonicalize"):
        group.act(g, x, Role.RIDES)


# what is no element

nan, t = math.nan, torch.tensor
BROKEN = [
    (Trivial(2), {"index": t([0, 1])}, "expects"),
    (Permutation(3), {"index": t([0, 0, 1])}, "not a permutation"),
    (Permutation(3), {"index": t([0, 1, 3])}, "not a permutation"),
    (Permutation(3), {"index": t([-1, 0, 1])}, "not a permutation"),
    (SignedPermutation(2), {"index": t([1, 1]), "sign": t([1.0, -1.0])}, "not a permutation"),
    (SignedPermutation(2), {"index": t([1, 0]), "sign": t([1.0, 0.5])}, "neither 1 nor -1"),
    (SignedPermutation(2), {"index": t([1, 0]), "sign": t([1.0, nan])}, "neither 1 nor -1"),
    (ScaledPermutation(2), {"index": t([1, 1]), "scale": t([1.0, 2.0])}, "not a permutation"),
    (ScaledPermutation(2), {"index": t([1, 0]), "scale": t([1.0, 0.0])}, "zero"),
    (ScaledPermutation(2), {"index": t([1, 0]), "scale": t([1.0, nan])}, "not finite"),
    (ScaledPermutation(2), {"index": t([1, 0]), "scale": t([1.0, -2.0])}, "negative"),
    (ScaledPermutation(2, positive=False), {"index": t([1, 0]), "scale": t([-1.0, 0.0])}, "zero"),
    (Orthogonal(2), {"matrix": t([[1.0, 0.1], [0.0, 1.0]])}, "not orthogonal"),
    (Orthogonal(2), {"matrix": t([[1.0, nan], [0.0, 1.0]])}, "not orthogonal"),
    (OrthogonalFixingOnes(2), {"matrix": t([[0.0, -1.0], [1.0, 0.0]])}, "moves the ones vector"),
    (OrthogonalFixingOnes(2), {"matrix": t([[1.1, -0.1], [0.0, 1.0]])}, "not orthogonal"),
    (OrthogonalFixingOnes(2), {"matrix": t([[nan, 1.0], [1.0, 0.0]])}, "not orthogonal"),
    (GeneralLinear(2), {"matrix": t([[1.0, 2.0], [2.0, 4.0]]).double()}, "singular"),
    (GeneralLinear(2), {"matrix": torch.zeros(2, 2)}, "singular"),
    (GeneralLinear(2), {"matrix": t([[1.0, nan], [0.0, 1.0]])}, "not finite"),
    (Signs(2), {"sign": t([1.0, 0.5])}, "neither 1 nor -1"),
    (Signs(2), {"sign": t([0.0, nan])}, "neither 1 nor -1"),
    (RotaryPairs(2, 2), {"pair": t([[0.0, 0.0]]), "rest": torch.zeros(0, 0)}, "zero"),
    (RotaryPairs(2, 2), {"pair": t([[1.0, nan]]), "rest": torch.zeros(0, 0)}, "not finite"),
    (RotaryPairs(3, 2), {"pair": t([[1.0, 0.0]]), "rest": torch.zeros(1, 1)}, "singular"),
]


@pytest.mark.parametrize(
    ("group", "element", "reason"),
    BROKEN,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_elements_are_refused(group, element, reason):
    good = group.identity()
    batch = {p: torch.stack([good[p].to(value), value]) for p, value in element.items() if good}
    assert group.check(good).ok
    for broken in (element, batch or element):  # one bad element spoils a batch
        verdict = group.check(broken)
        assert not verdict.ok and reason in verdict.reason


def test_gated_units_may_change_sign():
    element = {"index": t([1, 0]), "scale": t([1.0, -2.0])}
    assert ScaledPermutation(2, positive=False).check(element).ok


# retraction


@pytest.mark.parametrize("batch", [(), (3,)])
@every
def test_retraction(name, batch):
    """Zero changes nothing, every step stays in the group, gradients flow through the action."""
    group, generator = GROUPS[name](6), torch.Generator().manual_seed(0)
    element = group.random(generator, batch)
    shapes = {part: (*batch, *shape) for part, shape in group.tangent().items()}
    zero = {part: torch.zeros(shape, dtype=torch.float64) for part, shape in shapes.items()}
    assert_same(group.retract(element, zero), element)
    tangent = {
        part: (0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for part, shape in shapes.items()
    }
    moved = group.retract(element, tangent)
    verdict = group.check({part: value.detach() for part, value in moved.items()})
    assert verdict.ok, verdict.reason
    assert bool(shapes) == (group.dimension > 0)
    if not shapes:
        return
    x = torch.randn(*batch, group.size, 4, generator=generator, dtype=torch.float64)
    # control: it does move
    assert differ(group.act(moved, x, Role.WRITES).detach(), group.act(element, x, Role.WRITES))
    sum((group.act(moved, x, role) * x.cos()).sum() for role in BOTH).backward()
    gradients = [vector.grad for vector in tangent.values() if vector.numel()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().max() > 1e-6 for gradient in gradients)
