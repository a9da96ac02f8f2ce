"""Is every written tensor the transport of its source? Computed again, in float64, another way.

Random projections along every axis compare all entries of a tensor at the cost of reading it: a
row, a unit or a head that was moved wrongly changes them by more than rounding can. Embeddings are
compared entry by entry as well, of all other tensors a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import prod
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.weights import is_finite, working
from symmerge.errors import FunctionChanged, SymmetryError
from symmerge.models.alignment import Alignment, Moved
from symmerge.models.model import Model, Progress
from symmerge.symmetry.notation import Axes, Product, atoms, size
from symmerge.symmetry.spec import Spec
from symmerge.verification.axis_maps import AxisMap, axis_map
from symmerge.verification.rounding import SPACING

PROJECTIONS, ROWS = 4, 8
ENTRIES = 1 << 22  # in float64 at a time
# The largest error that counts as rounding: of a projection in standard deviations (there are
# millions), and of products in units of the precision they were computed in. Where that is float64,
# so is this check, and both err.
DEVIATIONS = 8.0
Maps = Callable[[Product], AxisMap]
COMPUTED = {torch.float32: 16.0, torch.float64: 1024.0}


def check_transport(written: Model, computed: Model, *, progress: Progress | None = None) -> int:
    """Raise unless all tensors are what the model's alignment makes of those before it.

    Also checks that every element is in its group. Returns the number of tensors.
    """
    moved = computed.moved or Moved(Alignment.identity(computed.spec), computed)
    try:
        moved.alignment.check()
    except SymmetryError as error:
        raise _refusal(written, f"an element is not in its group: {error}") from error
    names = written.weights.names()
    if sorted(names) != sorted(computed.weights.names()):
        raise _refusal(written, "it has other tensors than were to be written")
    maps = lru_cache(maxsize=8)(partial(axis_map, moved.alignment))  # most tensors share one
    for name in names:
        if problem := tensor_problem(written, moved, name, maps):
            raise _refusal(written, f"{name} is not the transport of its source: {problem}")
        if progress:
            progress(name)
    return len(names)


def _refusal(written: Model, why: str) -> FunctionChanged:
    return FunctionChanged(
        f"refused: {why}; nothing was written. This is a bug or a fault of the disk or memory:"
        " try again, and report it if it happens twice"
    )


@dataclass(frozen=True)
class _Transported:
    """One tensor as a matrix before and after, the maps of its axes, and its stored precision."""

    before: Float[Tensor, "rows columns"]
    after: Float[Tensor, "rows columns"]
    rows: AxisMap
    columns: AxisMap
    stored: torch.dtype

    @property
    def computed(self) -> float:
        """Relative error of the products, before what they gave was rounded."""
        precision = working(self.stored)
        return COMPUTED[precision] * torch.finfo(precision).eps

    @property
    def smallest(self) -> float:
        """Numbers near zero are rounded to a multiple of it."""
        return torch.finfo(self.stored).smallest_normal * torch.finfo(self.stored).eps

    @property
    def transposed(self) -> _Transported:
        return replace(
            self,
            before=self.before.mT,
            after=self.after.mT,
            rows=self.columns,
            columns=self.rows,
        )

    @cached_property
    def spread(self) -> Float[Tensor, " rows"]:
        """The norm of each row, from the terms of its sums: errors grow with them."""
        ones = torch.ones(self.before.shape[1], 1).double()
        squares = _product(self.before, self.columns.squared.transpose(ones), square=True)
        return self.rows.squared.apply(squares).sqrt()[:, 0]


def tensor_problem(written: Model, moved: Moved, name: str, maps: Maps) -> str | None:
    """What is wrong with a written tensor; None if nothing is. `maps` are those of the axes."""
    after, before = written.weights[name], moved.before.weights[name]
    if after.shape != before.shape:
        return f"it is {list(after.shape)}, not {list(before.shape)}"
    if not is_finite(after):
        return "it has entries that are NaN or infinite"
    spec = moved.alignment.spec
    axes = spec.tensors[name]
    for position, axis in enumerate(axes):
        for known in _known(moved, axis):  # other rows were filled, not moved
            shape = [-1 if at == position else 1 for at in range(after.ndim)]
            after, before = (x * known.reshape(shape).to(x) for x in (after, before))
    cut = _cut(axes, moved.alignment)
    rows, columns = (_joined(spec, maps, side) for side in (axes[:cut], axes[cut:]))
    shape, stored = (len(rows.factor), len(columns.factor)), written.weights.dtype(name)
    tensor = _Transported(before.reshape(shape), after.reshape(shape), rows, columns, stored)
    return _problem(tensor, name) if after.numel() else None


def _known(moved: Moved, axis: Product) -> Iterator[Tensor]:
    yield from (moved.known[atom.space] for atom in atoms((axis,)) if atom.space in moved.known)


def _cut(axes: Axes, alignment: Alignment) -> int:
    """How many axes are rows: at most one on each side moves."""
    moving = [any(atom.space in alignment.elements for atom in atoms((axis,))) for axis in axes]
    return 1 if not any(moving[1:]) else moving.index(True, 1)


def _joined(spec: Spec, maps: Maps, axes: Axes) -> AxisMap:
    """One map for several axes, of which at most one moves, and then it is alone."""
    longer = [maps(axis) for axis in axes if size(axis, spec.sizes) != 1]
    if len(longer) == 1:
        return longer[0]
    assert all(one.is_identity for one in longer)
    return AxisMap.identity(prod(len(one.factor) for one in longer))


def _problem(tensor: _Transported, name: str) -> str | None:
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return (
        _projected(tensor, "row", generator)
        or _projected(tensor.transposed, "column", generator)
        or _compared(tensor, generator)
    )


def _projected(tensor: _Transported, what: str, generator: torch.Generator) -> str | None:
    """Compare all rows, projected onto a few vectors of random signs."""
    columns = tensor.after.shape[1]
    signs = torch.randint(2, (columns, PROJECTIONS), generator=generator).double() * 2 - 1
    actual = _product(tensor.after, signs)
    expected = tensor.rows.apply(_product(tensor.before, tensor.columns.transpose(signs)))
    rounding = SPACING * torch.finfo(tensor.stored).eps / 12**0.5 + tensor.computed
    unit = tensor.spread * rounding + tensor.smallest * columns**0.5
    apart = ((actual - expected).abs().amax(1) / unit) > DEVIATIONS
    if not apart.any():
        return None
    return f"{int(apart.sum())} of {len(apart)} {what}s, the first is {int(apart.nonzero()[0])}"


def _product(
    matrix: Float[Tensor, "n m"], vectors: Float[Tensor, "m k"], *, square: bool = False
) -> Float[Tensor, "n k"]:
    """matrix @ vectors in float64, part by part along the axis that is stored outside."""
    across = matrix.stride(0) < matrix.stride(1)
    stored = matrix.mT if across else matrix
    rows = max(1, ENTRIES // max(1, stored.shape[1]))
    chunks = (chunk.double() for chunk in stored.split(rows))
    chunks = (chunk.square() for chunk in chunks) if square else chunks
    if not across:
        return torch.cat([chunk @ vectors for chunk in chunks])
    pairs = zip(chunks, vectors.split(rows), strict=True)
    return sum((chunk.mT @ part for chunk, part in pairs), start=torch.zeros(()))


def _compared(tensor: _Transported, generator: torch.Generator) -> str | None:
    """Compare entries: all rows of an embedding or a vector, some of other tensors."""
    count, columns = tensor.after.shape
    every = tensor.rows.is_identity or columns == 1
    places = torch.arange(count) if every else torch.randperm(count, generator=generator)[:ROWS]
    for block in places.split(max(1, ENTRIES // columns)):
        expected, actual = _rows(tensor, block), tensor.after[block].double()
        size = actual.abs().maximum(expected.abs())
        products = tensor.computed * tensor.spread[block, None] / columns**0.5
        allowed = 0.501 * torch.finfo(tensor.stored).eps * size + products + tensor.smallest
        wrong = ((actual - expected).abs() > allowed).any(1)
        if wrong.any():
            first = int(block[wrong.nonzero()[0, 0]])
            return f"entries of {int(wrong.sum())} of {len(block)} rows, the first is {first}"
    return None


def _rows(tensor: _Transported, places: Tensor) -> Float[Tensor, "rows columns"]:
    """Some rows of the tensor, transported."""
    if tensor.rows.is_identity:
        rows = tensor.before[places].double()
    else:
        rows = tensor.rows.rows(places, tensor.before.double())
    return rows if tensor.columns.is_identity else tensor.columns.apply(rows.mT).mT
