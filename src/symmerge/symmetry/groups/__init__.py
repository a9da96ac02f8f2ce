"""Symmetry groups: one final class each, all with the same seven verbs, all batched over leading dimensions."""

from symmerge.symmetry.groups.base import Check, Element, Gram, Group, Trivial
from symmerge.symmetry.groups.dense import GeneralLinear, Orthogonal, OrthogonalFixingOnes
from symmerge.symmetry.groups.monomial import Permutation, ScaledPermutation, SignedPermutation
from symmerge.symmetry.groups.rotary import RotaryPairs

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
    "Trivial",
]
