"""Of which models is one a merge, and with what shares? Least squares in common coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import nnls

from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.errors import MismatchError
from symmerge.lineage.depth import match_layers
from symmerge.lineage.disguise import Undisguised, canonical, undisguise
from symmerge.lineage.likeness import matrices
from symmerge.lineage.relation import SURE
from symmerge.lineage.results import MergeShares, ParentShare
from symmerge.lineage.units import combined, compare_units
from symmerge.models.progress import Phase, ProgressLike, reporter
from symmerge.symmetry.groups import ScaledPermutation
from symmerge.symmetry.groups.linalg import total
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Spec
from symmerge.symmetry.threads import same_bytes

RIDES = Role.RIDES


@torch.no_grad()
@same_bytes()
def shares(
    model: ModelLike, parents: Sequence[ModelLike], *, progress: ProgressLike = None
) -> MergeShares:
    """The shares of `parents` in `model`, each brought into its coordinates first.

    Preconditions: one table for all, in canonical form. A share says nothing where `related` is
    false: strangers fit a little of everything. Parents that are nearly equal cannot be told apart.
    """
    say = reporter(progress)
    merged, others = open_model(model), [open_model(parent) for parent in parents]
    if len(others) < 2:
        raise MismatchError(f"{merged.where}: shares need two or more candidates")
    reference = canonical(merged)
    pairs: list[Undisguised] = []
    for other in others:
        say(Phase(f"bringing {other.where} into the coordinates of {merged.where}"))
        form = canonical(other)
        if form.spec.fingerprint != reference.spec.fingerprint:
            lines = "; ".join(reference.spec.differences(form.spec)[:3])
            raise MismatchError(
                f"the share of {other.where} in {merged.where} cannot be measured; they differ in:"
                f" {lines}; compare just these two"
            )
        pairs.append(undisguise(reference, form, match_layers(reference, form)))
    values, explained = _fit(pairs)
    return MergeShares(
        merged.where,
        tuple(
            _share(other.where, share, pair, " ".join(sorted([merged.digest(), other.digest()])))
            for other, share, pair in zip(others, values, pairs, strict=True)
        ),
        explained,
    )


def _share(where: str, share: float, pair: Undisguised, key: str) -> ParentShare:
    p = combined(compare_units(pair, key))
    return ParentShare(where, share, p, p < SURE)


def _adds_up(spec: Spec, piece: Piece) -> bool:
    """Whether a mean of canonical matrices is canonical: not where sizes or bases are balanced."""
    return not any(
        spec.spaces[atom.space].per
        or (isinstance(spec.spaces[atom.space].group, ScaledPermutation) and atom.role is not RIDES)
        for atom in piece.atoms
    )


def _fit(pairs: Sequence[Undisguised]) -> tuple[list[float], float]:
    """Non-negative least squares; every matrix counts as if its size in the merge were one."""
    count = len(pairs)
    gram, target, whole = np.zeros((count, count)), np.zeros(count), 0.0
    for row in zip(*map(matrices, pairs), strict=True):
        if not _adds_up(pairs[0].spec, row[0][1]):
            continue
        merged = row[0][2].double()
        sides = [one[3].double() for one in row]
        size = max(total(merged * merged).item(), 1e-30)
        for i, x in enumerate(sides):
            target[i] += total(x * merged).item() / size
            for j, y in enumerate(sides):
                gram[i, j] += total(x * y).item() / size
        whole += 1.0
    root = np.linalg.cholesky(gram + 1e-12 * np.trace(gram) * np.eye(count))
    values, _ = nnls(root.T, np.linalg.solve(root, target))
    left = whole - 2 * values @ target + values @ gram @ values
    total_share = max(values.sum(), 1e-30)
    return [float(value / total_share) for value in values], float(1 - left / whole)
