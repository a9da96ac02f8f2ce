"""Spaces and tables that several kinds of models share: attention, feed-forward, streams."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from symmerge.families.base import Reading
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    Permutation,
    ScaledPermutation,
    SignedPermutation,
    Trivial,
)
from symmerge.symmetry.spec import Space


def visible(**sizes: int) -> tuple[Space, ...]:
    """Spaces that are visible from outside."""
    return tuple(Space(name, Trivial(size)) for name, size in sizes.items())


def rotary_size(config: Any, head_size: int) -> int:
    """How many coordinates of a head rotate with the position: whole pairs, rounded up."""
    rotary = int(head_size * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return rotary + rotary % 2


def attention(
    *, heads: int, queries: int = 1, qk: Group, vo: Group, ordered: bool = False
) -> tuple[Space, ...]:
    """The spaces of an attention layer: `heads` key-value heads with `queries` query heads each.

    Heads that are `ordered` differ in something that no tensor holds.
    """
    places = Trivial if ordered else Permutation
    # Rotary positions rotate a bias with the position: only unrotated coordinates can translate.
    return (
        Space("head.{i}", places(heads)),
        Space("query.{i}", places(queries), per="head.{i}"),
        Space("qk.{i}", qk, per="head.{i}", translation="drops"),
        Space("vo.{i}", vo, per="head.{i}", translation="passes"),
    )


ACTIVATIONS = frozenset(
    (
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast"),
        *("gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh"),
        *("hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu"),
        *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"),
    )
)
"""Activations that act on every unit alike; those with weights of their own are not among them."""


def feed_forward(activation: str, n: int) -> Group:
    """The group of a plain hidden layer: what commutes with its activation."""
    if activation in ("relu", "leaky_relu"):
        return ScaledPermutation(n, positive=True)
    if activation == "tanh":
        return SignedPermutation(n)
    if activation == "linear":
        return GeneralLinear(n)
    return Permutation(n)


def gated(n: int) -> Group:
    """The group of a gated hidden layer: the up branch is linear, so units may scale."""
    return ScaledPermutation(n, positive=False)


def regrouped(reading: Reading, **groups: Group) -> Reading:
    """The same with other groups for some spaces."""
    return replace(
        reading,
        spaces=tuple(
            replace(space, group=groups.get(space.name, space.group)) for space in reading.spaces
        ),
    )


def normed_writers(reading: Reading) -> Reading:
    """For blocks that write through an RMSNorm: its gain lies between the norm and the stream.

    It follows the order of the stream and no sign; there is no mean to subtract.
    """
    stream = next(space for space in reading.spaces if space.name == "residual")
    return regrouped(reading, residual=SignedPermutation(stream.group.size))


def without_positions(reading: Reading, layers: Iterable[int], size: int) -> Reading:
    """For layers without rotary positions: queries and keys may change their basis at will."""
    free = GeneralLinear(size)
    spaces = [Space(f"qk.{i}", free, per=f"head.{i}", translation="drops") for i in layers]
    return replace(reading, spaces=(*reading.spaces, *spaces))  # the last of a name holds


def factorised(table: str) -> str:
    """A table whose embeddings, and their norm, are in a space of their own."""
    lines = table.splitlines()
    return "\n".join(
        re.sub(r"\bresidual\b", "embedding", line) if ".embeddings." in line else line
        for line in lines
    )
