"""The gradient of a loss along the symmetries.

Moving an element slightly, by D, changes the moved weights W to W + D W wherever its space occurs.
So the gradient by D is the gradient by W times W', summed over the tensors that have the space:
the cross Gram matrix of matching, with the gradient in place of A. Autograd never enters the
transport, so a step costs little more than a forward and a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from symmerge.matching.learning.bundles import Bundle, TensorBlock
from symmerge.models.alignment import lay
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Spec

RoleGradients = dict[Role, Tensor]
"""The gradient of a space, [*batch, n, n], by the role in which tensors have it."""
Product = tuple[int, Tensor, Tensor]
"""(index of its first space in the bundle, gradient, weights)."""


def space_gradients(
    spec: Spec, spaces: Iterable[str], gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> dict[str, RoleGradients]:
    """For each space and role: the sum of gradients times moved weights transposed."""
    return {space: _space_gradient(spec, space, gradients, moved) for space in spaces}


def _space_gradient(
    spec: Spec, space: str, gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> RoleGradients:
    n, batch, per = spec.sizes[space], spec.batch(space), spec.spaces[space].per
    like = next(iter(moved.values()))
    totals = {role: like.new_zeros(*(batch or (1,)), n, n) for role in Role}
    for met in spec.occurrences(space):
        name = met.piece.tensor
        if name not in gradients:
            continue
        outer = None if per is None else next(met.piece.positions(per))
        gradient, weights = (
            lay(met.piece.view(side[name]), met.position, outer)[0] for side in (gradients, moved)
        )
        totals[met.role].baddbmm_(gradient, weights.mT)
    return {role: total.reshape(*batch, n, n) for role, total in totals.items()}


def over_roles(gradients: RoleGradients) -> Tensor:
    """The sum over roles, for groups that act the same in every role."""
    return gradients[Role.WRITES] + gradients[Role.READS] + gradients[Role.RIDES]


def bundled_gradients(
    bundles: Iterable[Bundle], gradients: TensorBlock, moved: TensorBlock
) -> dict[Bundle, RoleGradients]:
    """The gradients of all spaces of a bundle, [spaces, *batch, n, n]; riding axes have none."""
    products: dict[tuple[Bundle, Role], list[Product]] = {
        (bundle, role): [] for bundle in bundles for role in Role if role is not Role.RIDES
    }
    for stack in moved.stacks:
        for meetings, views in stack.views(gradients.stacks[stack], moved.stacks[stack]):
            for met in meetings:
                gradient, weights = (met.lay(view)[0] for view in views)
                products[met.bundle, met.role].append((met.first, gradient, weights))
    totals: dict[Bundle, RoleGradients] = {}
    for (bundle, role), terms in products.items():
        totals.setdefault(bundle, {})[role] = _sum_of_products(bundle, terms, moved.flat)
    return totals


def _sum_of_products(bundle: Bundle, terms: list[Product], like: Tensor) -> Tensor:
    """Add products in place; for one space shared by all layers, sum over layers at the end."""
    spaces, n = len(bundle.names), bundle.group.size
    layers = max([spaces, *(first + len(gradient) for first, gradient, _ in terms)])
    total = like.new_zeros(layers, *bundle.batch, n, n)
    for first, gradient, weights in terms:
        total[first : first + len(gradient)].flatten(0, -3).baddbmm_(
            gradient.flatten(0, -3), weights.flatten(0, -3).mT
        )
    return total if layers == spaces else total.sum(0, keepdim=True)
