"""Elements of RotaryPairs commute with rotary positions; other matrices do not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_laws import close, differ, every_role, laws

from symmerge.symmetry.groups import Orthogonal, RotaryPairs
from symmerge.symmetry.notation import Role


def rope(size: int, rotary: int, layout: str, angles: list[float]) -> torch.Tensor:
    """The rotation of one position, written out pair by pair."""
    matrix = torch.eye(size, dtype=torch.float64)
    for j, angle in enumerate(angles):
        a, b = (j, j + rotary // 2) if layout == "halves" else (2 * j, 2 * j + 1)
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[b, a] = math.sin(angle)
        matrix[a, b] = -math.sin(angle)
    return matrix


LAYOUTS = pytest.mark.parametrize("layout", ["halves", "interleaved"])


@LAYOUTS
@every_role
@laws
@given(
    pairs=st.integers(1, 4),
    rest=st.integers(0, 3),
    seed=st.integers(0, 2**31),
    angles=st.lists(st.floats(-4, 4), min_size=4, max_size=4),
)
def test_rotary_elements_commute_with_positions(layout, role, pairs, rest, seed, angles):
    group = RotaryPairs(2 * pairs + rest, 2 * pairs, layout)
    generator = torch.Generator().manual_seed(seed)
    turn = rope(group.size, group.rotary, layout, angles[:pairs])
    g = group.random(generator)
    x = torch.randn(group.size, 3, generator=generator, dtype=torch.float64)
    close(group.act(g, turn @ x, role), turn @ group.act(g, x, role))


@LAYOUTS
@pytest.mark.parametrize("other", ["rotation", "layout", "swap", "mix"])
def test_others_do_not_commute_with_positions(layout, other):
    """A rotation, pairs of the other layout, swapped pairs, a basis that mixes rotated ones."""
    generator = torch.Generator().manual_seed(0)
    turn = rope(6, 4, layout, [0.3, 1.1])
    wrong = RotaryPairs(6, 4, "interleaved" if layout == "halves" else "halves")
    fewer = RotaryPairs(6, 2, layout)
    swap = [1, 0, 3, 2, 4, 5] if layout == "halves" else [2, 3, 0, 1, 4, 5]
    unit = torch.eye(6, dtype=torch.float64)
    matrix = {
        "rotation": lambda: Orthogonal(6).random(generator)["matrix"],
        "layout": lambda: wrong.act(wrong.random(generator), unit, Role.WRITES),
        "swap": lambda: unit[swap],
        "mix": lambda: fewer.act(fewer.random(generator), unit, Role.WRITES),
    }[other]()
    assert differ(matrix @ turn, turn @ matrix)
