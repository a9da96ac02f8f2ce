"""The gradient along the symmetries: exactly that of autograd through the transport, and for permutations exactly what a permutation changes."""

from functools import cache

import pytest
import torch

import symmerge as sm
from symmerge.alignment import Alignment
from symmerge.matching.slopes import slopes, whole
from symmerge.notation import Role
from symmerge.zoo.small import SMALL, small_model

ROLES = (Role.WRITES, Role.READS, Role.RIDES)
every = pytest.mark.parametrize("name", SMALL)


@cache
def setting(name):
    """A table, B's tensors, where they lie after a random symmetry, and the gradient of a loss by them."""
    model = sm.canonicalize(sm.load(small_model(name, dtype=torch.float64)))
    table, generator = model.spec, torch.Generator().manual_seed(1)
    base = Alignment.random(table, generator)
    weights = {tensor: model.weights[tensor] for tensor in table.tensors}
    moved = {tensor: base.transport(tensor, value) for tensor, value in weights.items()}
    gradients = {tensor: torch.randn(value.shape, generator=generator, dtype=torch.float64) for tensor, value in weights.items()}
    return table, base, weights, moved, gradients


def meets(table, space):
    return {met.piece.tensor for met in table.occurrences(space)}


def continuous(table):
    return [space for space in table.hidden if table.spaces[space].group.tangent()]


def slope_of(table, space, gradients, moved):
    found = slopes(table, [space], gradients, moved)[space]
    return table.spaces[space].group.slope(*(found[role] for role in ROLES))


def through_the_transport(name, space):
    """Autograd of <gradient, moved weights> by one space's tangent, where a random symmetry has put everything."""
    table, base, weights, _, gradients = setting(name)
    group = table.spaces[space].group
    along = {part: torch.zeros(*table.batch(space), *shape, dtype=torch.float64, requires_grad=True) for part, shape in group.tangent().items()}
    alignment = Alignment(table, {**base.elements, space: group.moved(base[space], along)})
    loss = sum((gradients[tensor] * alignment.transport(tensor, weights[tensor])).sum() for tensor in meets(table, space))
    return dict(zip(along, torch.autograd.grad(loss, list(along.values()), materialize_grads=True), strict=True))


@every
def test_slopes_are_autograd_through_the_transport(name):
    table, _, _, moved, gradients = setting(name)
    assert {space.partition(".")[0] for space in continuous(table)} >= {"qk", "vo"}
    for space in continuous(table):
        truth, found = through_the_transport(name, space), slope_of(table, space, gradients, moved)
        assert found.keys() == truth.keys()
        for part, gradient in truth.items():
            if gradient.numel():
                error = (found[part] - gradient).norm() / gradient.norm()
                assert error <= 1e-10, (space, part, error)
                assert gradient.norm() > 1e-3


@every
def test_slopes_of_weights_that_lie_elsewhere_are_others(name):
    """The control: B as it was before the symmetry moved it."""
    table, _, weights, _, gradients = setting(name)
    for space in continuous(table):
        for part, gradient in through_the_transport(name, space).items():
            if gradient.numel():
                assert (slope_of(table, space, gradients, weights)[part] - gradient).norm() > 1e-3 * gradient.norm(), (space, part)


def test_a_tensor_without_gradient_adds_nothing():
    table, _, _, moved, gradients = setting("gpt2")
    tensors = sorted(meets(table, "residual"))
    parts = [slopes(table, ["residual"], {tensor: gradients[tensor]}, moved)["residual"] for tensor in tensors]
    total = slopes(table, ["residual"], gradients, moved)["residual"]
    for role in Role:
        torch.testing.assert_close(sum(part[role] for part in parts), total[role])
    assert all(not value.any() for value in slopes(table, ["residual"], {}, moved)["residual"].values())
    assert whole(parts[0]).any() and not torch.allclose(whole(parts[0]), whole(total))  # the control


def test_one_slope_per_space_asked_for():
    table, _, _, moved, gradients = setting("llama")
    found = slopes(table, ["query.0", "ff.1"], gradients, moved)
    assert found.keys() == {"query.0", "ff.1"}
    n, heads = table.sizes["query.0"], table.batch("query.0")
    assert all(value.shape == (*heads, n, n) and value.dtype == torch.float64 for value in found["query.0"].values())


# permutations


def permuted(table, space, index):
    still = table.spaces[space].group.identity(table.batch(space))
    return Alignment(table, {space: {**still, "index": index}})


def once(table, space):
    """The tensors that meet a space once: their loss is linear in the permutation."""
    count = {}
    for met in table.occurrences(space):
        count[met.piece] = count.get(met.piece, 0) + 1
    twice = {piece.tensor for piece, times in count.items() if times > 1}
    return meets(table, space) - twice


def change(table, space, index, gradients, moved, tensors):
    """What a permutation does to the loss <gradient, moved weights>."""
    alignment = permuted(table, space, index)
    return sum((gradients[tensor] * (alignment.transport(tensor, moved[tensor]) - moved[tensor])).sum() for tensor in tensors).item()


def predicted(slope, index):
    return (slope.gather(-1, index[..., None]).squeeze(-1) - slope.diagonal(dim1=-2, dim2=-1)).sum().item()


def swaps(n, batch):
    """Two places change, at the first index of a batch."""
    for i, j in {(0, 1), (0, n - 1), (n // 2, n - 1)}:
        if i != j:
            index = torch.arange(n).expand(*batch, n).clone()
            index.view(-1, n)[0, [i, j]] = torch.tensor([j, i])
            yield index


@every
def test_a_permutation_changes_the_loss_as_its_slope_says(name):
    """Exactly, for swaps and for any other permutation: the loss is linear."""
    table, _, _, moved, gradients = setting(name)
    generator = torch.Generator().manual_seed(2)
    discrete = [space for space in table.hidden if "index" in table.spaces[space].group.shapes() and table.sizes[space] > 1]
    assert {space.partition(".")[0] for space in discrete} >= {"ff"}
    for space in discrete:
        tensors, n, batch = once(table, space), table.sizes[space], table.batch(space)
        slope = whole(slopes(table, [space], {tensor: gradients[tensor] for tensor in tensors}, moved)[space])
        anywhere = torch.rand(*batch, n, generator=generator).argsort(-1)
        round_about = torch.arange(n).roll(1).expand(*batch, n)
        for index in (*swaps(n, batch), round_about, anywhere):
            true, guess = change(table, space, index, gradients, moved, tensors), predicted(slope, index)
            assert guess == pytest.approx(true, rel=1e-9, abs=1e-9), space
        if n > 2:
            backwards = predicted(slope, round_about.argsort(-1))
            assert abs(backwards - change(table, space, round_about, gradients, moved, tensors)) > 1e-3  # the control: rows are not columns


def test_gains_and_gates_count_for_permutations():
    """What rides along moves with its unit: without it, the change would be predicted wrongly."""
    table, _, _, moved, gradients = setting("llama")
    found, index = slopes(table, ["ff.0"], gradients, moved)["ff.0"], next(swaps(table.sizes["ff.0"], ()))
    true = change(table, "ff.0", index, gradients, moved, meets(table, "ff.0"))
    assert predicted(whole(found), index) == pytest.approx(true, rel=1e-9)
    assert abs(predicted(whole({**found, Role.RIDES: torch.zeros_like(found[Role.RIDES])}), index) - true) > 1e-3


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_tensor_that_meets_a_space_twice_counts_on_both_sides(name):
    """<G, (1 + D) W (1 + D)'> has the gradient G W' + G' W by D."""
    table, _, _, moved, gradients = setting(name)
    (tensor,) = meets(table, "residual") - once(table, "residual")
    slope = whole(slopes(table, ["residual"], {tensor: gradients[tensor]}, moved)["residual"])
    g, w = gradients[tensor], moved[tensor]
    torch.testing.assert_close(slope, g @ w.mT + g.mT @ w)
    assert not torch.allclose(slope, g @ w.mT)  # the control
