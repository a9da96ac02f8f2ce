"""How far apart the weights of two models are."""

from __future__ import annotations

from symmerge.models.model import Model
from symmerge.symmetry.groups.linalg import total


def distance(a: Model, b: Model) -> float:
    """|A - B| / sqrt(|A| |B|) of the weights: 0 for equal, about 1.4 for unrelated models."""
    apart, sizes = 0.0, [0.0, 0.0]
    for name in a.weights:
        x, y = a.weights[name], b.weights[name]
        apart += total((x - y).square()).item()
        sizes = [
            size + total(side.square()).item() for size, side in zip(sizes, (x, y), strict=True)
        ]
    return (apart / max((sizes[0] * sizes[1]) ** 0.5, 1e-30)) ** 0.5


def distances_by_space(a: Model, b: Model) -> dict[str, float]:
    """The same by space: over the tensors that meet each hidden space, layers together."""
    squares: dict[str, list[float]] = {}
    for name in a.weights:
        x, y = a.weights[name], b.weights[name]
        spaces = {
            atom.space.partition(".")[0]
            for piece in a.spec.pieces[name]
            for atom in piece.atoms
            if atom.space in a.spec.hidden
        }
        for space in spaces:
            row = squares.setdefault(space, [0.0, 0.0, 0.0])
            for at, value in enumerate(((x - y), x, y)):
                row[at] += total(value.square()).item()
    return {
        space: (row[0] / max((row[1] * row[2]) ** 0.5, 1e-30)) ** 0.5
        for space, row in squares.items()
    }
