"""Symmetry groups: one final class each, one interface, batched over leading dimensions."""

from symmerge.symmetry.groups.base import Check, Element, Gram, Group, Trivial
from symmerge.symmetry.groups.general_linear import GeneralLinear
from symmerge.symmetry.groups.orthogonal import Orthogonal, OrthogonalFixingOnes
from symmerge.symmetry.groups.permutations import Permutation, SignedPermutation, Signs
from symmerge.symmetry.groups.rotary import RotaryPairs
from symmerge.symmetry.groups.scaled_permutations import ScaledPermutation

__all__ = [
    "Check",
    "Element",
    "GeneralLinear",
    "Gram",
    "Group",
    "Orthogonal",
    "OrthogonalFixingOnes",
    "Permutation",
    "RotaryPairs",
    "ScaledPermutation",
    "SignedPermutation",
    "Signs",
    "Trivial",
]
