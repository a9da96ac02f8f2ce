"""The gradient along symmetries is that of autograd, and what a permutation changes."""

from functools import cache

import pytest
import torch

import symmerge as sm
from symmerge.lab.small_models import SMALL, small_model
from symmerge.matching.learning.bundles import TensorBlock, bundle_spaces, stack_tensors
from symmerge.matching.learning.gradients import bundled_gradients, over_roles, space_gradients
from symmerge.models.alignment import Alignment
from symmerge.symmetry.groups import Signs
from symmerge.symmetry.notation import Role

BOTH = (Role.WRITES, Role.READS)
every = pytest.mark.parametrize("name", SMALL)


@cache
def setting(name):
    """A table, B's tensors before and after a random symmetry, and a gradient by them."""
    model = sm.canonicalize(sm.load(small_model(name, dtype=torch.float64)))
    table, generator = model.spec, torch.Generator().manual_seed(1)
    base = Alignment.random(table, generator)
    weights = {tensor: model.weights[tensor] for tensor in table.tensors}
    moved = {tensor: base.transport(tensor, value) for tensor, value in weights.items()}
    gradients = {
        tensor: torch.randn(value.shape, generator=generator, dtype=torch.float64)
        for tensor, value in weights.items()
    }
    return table, base, weights, moved, gradients


def meets(table, space):
    return {met.piece.tensor for met in table.occurrences(space)}


def continuous(table):
    return [space for space in table.hidden if table.spaces[space].group.tangent()]


def tangent_gradient(table, space, gradients, moved):
    found = space_gradients(table, [space], gradients, moved)[space]
    return table.spaces[space].group.tangent_gradient(*(found[role] for role in BOTH))


def through_the_transport(name, space):
    """Autograd of <gradient, moved weights> by one space's tangent, after a random symmetry."""
    table, base, weights, _, gradients = setting(name)
    group = table.spaces[space].group
    along = {
        part: torch.zeros(*table.batch(space), *shape, dtype=torch.float64, requires_grad=True)
        for part, shape in group.tangent().items()
    }
    alignment = Alignment(table, {**base.elements, space: group.retract(base[space], along)})
    loss = sum(
        (gradients[tensor] * alignment.transport(tensor, weights[tensor])).sum()
        for tensor in meets(table, space)
    )
    return dict(
        zip(
            along,
            torch.autograd.grad(loss, list(along.values()), materialize_grads=True),
            strict=True,
        )
    )


@every
def test_gradients_are_autograd_through_the_transport(name):
    table, _, _, moved, gradients = setting(name)
    queries = next(space for space in table.spaces if space.startswith("qk."))
    discrete = isinstance(table.spaces[queries].group, Signs)
    moving = {space.partition(".")[0] for space in continuous(table)}
    assert moving >= ({"vo"} if discrete else {"qk", "vo"})
    for space in continuous(table):
        truth, found = (
            through_the_transport(name, space),
            tangent_gradient(table, space, gradients, moved),
        )
        assert found.keys() == truth.keys()
        for part, gradient in truth.items():
            if gradient.numel():
                error = (found[part] - gradient).norm() / gradient.norm()
                assert error <= 1e-10, (space, part, error)
                assert gradient.norm() > 1e-3


@every
def test_gradients_of_weights_that_lie_elsewhere_are_others(name):
    """The control: B as it was before the symmetry moved it."""
    table, _, weights, _, gradients = setting(name)
    for space in continuous(table):
        for part, gradient in through_the_transport(name, space).items():
            if gradient.numel():
                assert (
                    tangent_gradient(table, space, gradients, weights)[part] - gradient
                ).norm() > 1e-3 * gradient.norm(), (space, part)


def test_a_tensor_without_gradient_adds_nothing():
    table, _, _, moved, gradients = setting("gpt2")
    tensors = sorted(meets(table, "residual"))
    parts = [
        space_gradients(table, ["residual"], {tensor: gradients[tensor]}, moved)["residual"]
        for tensor in tensors
    ]
    total = space_gradients(table, ["residual"], gradients, moved)["residual"]
    for role in Role:
        torch.testing.assert_close(sum(part[role] for part in parts), total[role])
    assert all(
        not value.any()
        for value in space_gradients(table, ["residual"], {}, moved)["residual"].values()
    )
    assert over_roles(parts[0]).any() and not torch.allclose(
        over_roles(parts[0]), over_roles(total)
    )  # the control


def test_one_gradient_per_space_asked_for():
    table, _, _, moved, gradients = setting("llama")
    found = space_gradients(table, ["query.0", "ff.1"], gradients, moved)
    assert found.keys() == {"query.0", "ff.1"}
    n, heads = table.sizes["query.0"], table.batch("query.0")
    assert all(
        value.shape == (*heads, n, n) and value.dtype == torch.float64
        for value in found["query.0"].values()
    )


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
    return sum(
        (gradients[tensor] * (alignment.transport(tensor, moved[tensor]) - moved[tensor])).sum()
        for tensor in tensors
    ).item()


def predicted(total, index):
    return (
        (total.gather(-1, index[..., None]).squeeze(-1) - total.diagonal(dim1=-2, dim2=-1))
        .sum()
        .item()
    )


def swaps(n, batch):
    """Two places change, at the first index of a batch."""
    for i, j in {(0, 1), (0, n - 1), (n // 2, n - 1)}:
        if i != j:
            index = torch.arange(n).expand(*batch, n).clone()
            index.view(-1, n)[0, [i, j]] = torch.tensor([j, i])
            yield index


@every
def test_a_permutation_changes_the_loss_as_its_gradient_says(name):
    """Exactly, for swaps and for any other permutation: the loss is linear."""
    table, _, _, moved, gradients = setting(name)
    generator = torch.Generator().manual_seed(2)
    discrete = [
        space
        for space in table.hidden
        if "index" in table.spaces[space].group.shapes() and table.sizes[space] > 1
    ]
    assert {space.partition(".")[0] for space in discrete} >= {"ff"}
    for space in discrete:
        tensors, n, batch = once(table, space), table.sizes[space], table.batch(space)
        total = over_roles(
            space_gradients(
                table, [space], {tensor: gradients[tensor] for tensor in tensors}, moved
            )[space]
        )
        anywhere = torch.rand(*batch, n, generator=generator).argsort(-1)
        round_about = torch.arange(n).roll(1).expand(*batch, n)
        for index in (*swaps(n, batch), round_about, anywhere):
            true, guess = (
                change(table, space, index, gradients, moved, tensors),
                predicted(total, index),
            )
            assert guess == pytest.approx(true, rel=1e-9, abs=1e-9), space
        if n > 2:
            backwards = predicted(total, round_about.argsort(-1))
            assert (
                abs(backwards - change(table, space, round_about, gradients, moved, tensors)) > 1e-3
            )  # the control: rows are not columns


def test_gains_and_gates_count_for_permutations():
    """What rides along moves with its unit: without it, the change would be predicted wrongly."""
    table, _, _, moved, gradients = setting("llama")
    found, index = (
        space_gradients(table, ["ff.0"], gradients, moved)["ff.0"],
        next(swaps(table.sizes["ff.0"], ())),
    )
    true = change(table, "ff.0", index, gradients, moved, meets(table, "ff.0"))
    assert predicted(over_roles(found), index) == pytest.approx(true, rel=1e-9)
    assert (
        abs(
            predicted(over_roles({**found, Role.RIDES: torch.zeros_like(found[Role.RIDES])}), index)
            - true
        )
        > 1e-3
    )


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_tensor_that_meets_a_space_twice_counts_on_both_sides(name):
    """<G, (1 + D) W (1 + D)'> has the gradient G W' + G' W by D."""
    table, _, _, moved, gradients = setting(name)
    (tensor,) = meets(table, "residual") - once(table, "residual")
    total = over_roles(
        space_gradients(table, ["residual"], {tensor: gradients[tensor]}, moved)["residual"]
    )
    g, w = gradients[tensor], moved[tensor]
    torch.testing.assert_close(total, g @ w.mT + g.mT @ w)
    assert not torch.allclose(total, g @ w.mT)  # the control


# all layers at once


def blocks(stacked, *sides):
    """Tensors by name, each in its place in a block of memory."""
    found = []
    for side in sides:
        block = TensorBlock(stacked, torch.device("cpu"))
        for name, tensor in block.tensors.items():
            tensor.copy_(side[name])
        found.append(block)
    return found


@every
def test_every_tensor_is_in_one_stack_and_every_space_that_moves_in_one_bundle(name):
    table, *_ = setting(name)
    bundled = bundle_spaces(table, table.hidden)
    stacked = stack_tensors(table, bundled)
    assert sorted(tensor for stack in stacked for tensor in stack.names) == sorted(table.tensors)
    assert sorted(space for bundle in bundled for space in bundle.names) == sorted(
        continuous(table)
    )
    heights = {stack.names[0]: len(stack.names) for stack in stacked if stack.moves}
    assert (
        max(heights.values()) >= 2 and len(stacked) < len(table.tensors) / 1.5
    )  # two layers, and what is there once


@every
def test_a_block_is_one_piece_of_memory(name):
    table, _, weights, *_ = setting(name)
    (block,) = blocks(stack_tensors(table, bundle_spaces(table, table.hidden)), weights)
    assert block.tensors.keys() == weights.keys()
    block.flat.mul_(2)
    for tensor, value in block.tensors.items():
        torch.testing.assert_close(value, 2 * weights[tensor].float())
        assert value.is_contiguous()
    assert all(
        value.data_ptr() % 64 == block.flat.data_ptr() % 64 for value in block.stacks.values()
    )


@every
def test_a_stack_moves_as_its_tensors_do_one_by_one(name):
    table, _, weights, *_ = setting(name)
    generator, bundled, elements = (
        torch.Generator().manual_seed(3),
        bundle_spaces(table, table.hidden),
        {},
    )
    for bundle in bundled:
        batch = (len(bundle.names), *bundle.batch)
        along = {
            part: 0.1 * torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)
            for part, shape in bundle.group.tangent().items()
        }
        elements[bundle] = {
            part: value.float()
            for part, value in bundle.group.retract(bundle.group.start(batch), along).items()
        }
    source, target = blocks(stack_tensors(table, bundled), weights, weights)
    for stack in source.stacks:
        stack.transport(elements, source.stacks[stack], target.stacks[stack])
    still = Alignment.identity(table)
    walked = {
        space: {**still[space], **{part: value[at] for part, value in elements[bundle].items()}}
        for bundle in bundled
        for at, space in enumerate(bundle.names)
    }
    riders = {
        tensor
        for tensor, cut in table.pieces.items()
        if all(atom.role is Role.RIDES for piece in cut for atom in piece.atoms)
    }
    alignment, apart = Alignment(table, walked), 0
    for tensor, found in target.tensors.items():
        before = weights[tensor].float()
        expected = before if tensor in riders else alignment.transport(tensor, before)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        apart += not torch.allclose(found, before, atol=1e-3)
    # The control: queries, keys, values and their readers in two layers; fused, they are six.
    assert apart >= (6 if name == "gpt2-features" else 8)


@every
def test_gradients_of_a_bundle_are_those_of_its_spaces(name):
    table, _, _, moved, gradients = setting(name)
    bundled = bundle_spaces(table, table.hidden)
    found = bundled_gradients(bundled, *blocks(stack_tensors(table, bundled), gradients, moved))
    for bundle in bundled:
        expected = space_gradients(table, bundle.names, gradients, moved)
        for role in BOTH:
            each = torch.stack([expected[space][role] for space in bundle.names])
            assert (found[bundle][role] - each).norm() <= 1e-5 * each.norm()
            met = [met.role for space in bundle.names for met in table.occurrences(space)]
            assert (each.norm() > 1e-3) == (role in met)
            assert bundle.alone or not torch.allclose(
                found[bundle][role].roll(1, 0).double(), each, rtol=1e-2
            )  # the control: the next layer's


def test_spaces_that_are_left_out_do_not_move():
    table, _, _, moved, gradients = setting("gpt2")
    some = bundle_spaces(table, ["qk.1"])
    assert [bundle.names for bundle in some] == [("qk.1",)]
    stacked = stack_tensors(table, some)
    assert {tensor for stack in stacked if stack.moves for tensor in stack.names} == meets(
        table, "qk.1"
    )
    found = bundled_gradients(some, *blocks(stacked, gradients, moved))[some[0]]
    torch.testing.assert_close(
        found[Role.READS][0].double(),
        space_gradients(table, ["qk.1"], gradients, moved)["qk.1"][Role.READS],
        rtol=1e-4,
        atol=1e-4,
    )
