"""Is every written tensor the transport of its source? Computed again, in float64, another way.

Random projections along every axis compare all entries of a tensor at the cost of reading it: a
row, a unit or a head that was moved wrongly changes them by more than rounding can. Rows of
embeddings, which few inputs reach, get many more. Some rows are compared entry by entry as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.memory import workers
from symmerge.checkpoints.weights import working
from symmerge.errors import FunctionChanged, SymmetryError
from symmerge.models.alignment import Alignment, Moved
from symmerge.models.model import (
    Model,
    device_of,
)
from symmerge.models.progress import Progress
from symmerge.symmetry.groups.linalg import one_thread, threads_like_this
from symmerge.symmetry.notation import Axes, Product, atoms, size
from symmerge.symmetry.spec import Spec
from symmerge.verification.axis_maps import AxisMap, axis_map
from symmerge.verification.rounding import SPACING

PROJECTIONS, OF_EMBEDDINGS, OF_COLUMNS = 4, 32, 2
ROWS = 16
# In float64 at a time: they stay in a processor's cache; a GPU is told of them one after the other.
ENTRIES = {"cpu": 1 << 17, "cuda": 1 << 25}
# The largest error that counts as rounding: of a projection in standard deviations (there are
# millions), and of products in units of the precision they were computed in. Where that is float64,
# so is this check, and both err. Many projections of a row are also judged together.
DEVIATIONS, TOGETHER = 8.0, 2.0
Maps = Callable[[Product], AxisMap]
COMPUTED = {torch.float32: 64.0, torch.float64: 1024.0}
FEW_TERMS = 1024  # of a sum; the error of longer ones grows with their root


def check_transport(
    written: Model, computed: Model, *, progress: Progress | None = None, device: str = "cpu"
) -> int:
    """Raise unless all tensors are what the model's alignment makes of those before it.

    Also checks that every element is in its group. Returns the number of tensors.
    """
    moved = computed.moved or Moved(Alignment.identity(computed.spec), computed)
    try:
        moved.alignment.check()
    except SymmetryError as error:
        raise _refusal(f"an element is not in its group: {error}") from error
    names = written.weights.names()
    if sorted(names) != sorted(computed.weights.names()):
        raise _refusal("it has other tensors than were to be written")
    maps = lru_cache(maxsize=8)(_maps_on(device, moved.alignment))  # most tensors share one
    there = replace(moved, before=moved.before.placed(device))
    problems = partial(tensor_problem, written.placed(device), there, maps=maps)
    with one_thread(), threads_like_this(workers()) as pool:
        for name, problem in zip(names, pool.map(problems, names), strict=True):
            if problem:
                pool.shutdown(cancel_futures=True)
                raise _refusal(f"{name} is not the transport of its source: {problem}")
            if progress:
                progress(name)
    return len(names)


def _maps_on(device: str, alignment: Alignment) -> Maps:
    place = device_of(device)
    return lambda axis: axis_map(alignment, axis).to(place)


def _refusal(why: str) -> FunctionChanged:
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
        precision, terms = working(self.stored), max(self.rows.terms, self.columns.terms)
        # of a GPU that adds one term after the other 47 eps for 1,024 terms
        growth = max(1.0, terms / FEW_TERMS) ** 0.5
        return COMPUTED[precision] * growth * torch.finfo(precision).eps

    @property
    def smallest(self) -> float:
        """Numbers near zero are rounded to a multiple of it."""
        return torch.finfo(self.stored).smallest_normal * torch.finfo(self.stored).eps


@dataclass(frozen=True)
class _Sketch:
    """Random projections of a tensor onto its rows and its columns: as they are, as expected.

    `row_norms` and `column_norms` are those of the terms that sums are made of: errors grow with
    them.
    """

    row_errors: Float[Tensor, "rows k"]
    column_errors: Float[Tensor, "columns j"]
    row_norms: Float[Tensor, " rows"]
    column_norms: Float[Tensor, " columns"]


@torch.no_grad()
def tensor_problem(written: Model, moved: Moved, name: str, maps: Maps) -> str | None:
    """What is wrong with a written tensor; None if nothing is. `maps` are those of the axes."""
    after, before = written.weights[name], moved.before.weights[name]
    if after.shape != before.shape:
        return f"it is {list(after.shape)}, not {list(before.shape)}"
    spec = moved.alignment.spec
    axes, order = _owners_first(spec, spec.tensors[name])
    after, before = after.permute(order), before.permute(order)
    for position, axis in enumerate(axes):
        for known in _known(moved, axis):  # other rows were filled, not moved
            shape = [-1 if at == position else 1 for at in range(after.ndim)]
            after, before = (x * known.reshape(shape).to(x) for x in (after, before))
    cut = _cut(axes, moved.alignment)
    sides = axes[:cut], axes[cut:]
    rows, columns = (_joined(spec, maps, side).to(after.device) for side in sides)
    shape, stored = (len(rows.factor), len(columns.factor)), written.weights.dtype(name)
    tensor = _Transported(before.reshape(shape), after.reshape(shape), rows, columns, stored)
    return _problem(tensor, name) if after.numel() else None


def _known(moved: Moved, axis: Product) -> Iterator[Tensor]:
    yield from (moved.known[atom.space] for atom in atoms((axis,)) if atom.space in moved.known)


def _owners_first(spec: Spec, axes: Axes) -> tuple[Axes, list[int]]:
    """The axes in an order in which those that move by an index of another (experts) follow it."""
    order: list[int] = []
    for at in range(len(axes)):
        order += [one for one in (at, *_owned(spec, axes, at)) if one not in order]
    return tuple(axes[at] for at in order), order


def _owned(spec: Spec, axes: Axes, owner: int) -> list[int]:
    """The axes whose elements are one for each index of a space on this axis."""
    known = {atom.space for atom in atoms((axes[owner],))}
    return [
        at
        for at, axis in enumerate(axes)
        if at != owner and any(spec.spaces[atom.space].per in known for atom in atoms((axis,)))
    ]


def _cut(axes: Axes, alignment: Alignment) -> int:
    """How many axes are rows: at most one on each side moves, and those that it owns."""
    if axes and (owned := _owned(alignment.spec, axes, 0)):
        return 1 + len(owned)
    moving = [any(atom.space in alignment.elements for atom in atoms((axis,))) for axis in axes]
    return max((at for at, moves in enumerate(moving) if moves and at), default=1)


def _joined(spec: Spec, maps: Maps, axes: Axes) -> AxisMap:
    """One map for several axes, of which at most one moves, or one owns the others."""
    if any(_owned(spec, axes, at) for at in range(len(axes))):
        return maps(Product(tuple(factor for axis in axes for factor in axis.factors)))
    longer = [maps(axis) for axis in axes if size(axis, spec.sizes) != 1]
    if len(longer) == 1:
        return longer[0]
    if not all(one.is_identity for one in longer):  # the window of a convolution stays
        return maps(Product(tuple(factor for axis in axes for factor in axis.factors)))
    return AxisMap.identity(prod(len(one.factor) for one in longer))


def _problem(tensor: _Transported, name: str) -> str | None:
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    sketch = _sketch(tensor, generator)
    if not sketch.row_errors.isfinite().all():
        return "it has entries that are NaN or infinite"
    return (
        _too_far(tensor, sketch.row_errors, sketch.row_norms, "row")
        or _too_far(tensor, sketch.column_errors, sketch.column_norms, "column")
        or _compared(tensor, sketch, generator)
    )


def _sketch(tensor: _Transported, generator: torch.Generator) -> _Sketch:
    """Project a tensor and its transport onto a few vectors of random signs."""
    n, m = tensor.after.shape
    rows, columns = tensor.rows, tensor.columns
    count, place = OF_EMBEDDINGS if rows.is_identity else PROJECTIONS, tensor.after.device
    right = _signs(m, count, generator).to(place)
    left = _signs(n, OF_COLUMNS, generator).to(place)
    actual = _products(tensor.after, right, left)
    expected = _products(
        tensor.before,
        columns.transpose(right),
        rows.transpose(left),
        (
            columns.squared.transpose(right.new_ones(m, 1)),
            rows.squared.transpose(left.new_ones(n, 1)),
        ),
    )
    return _Sketch(
        actual.rows - rows.apply(expected.rows),
        actual.columns - columns.apply(expected.columns),
        rows.squared.apply(expected.row_squares).sqrt()[:, 0],
        columns.squared.apply(expected.column_squares).sqrt()[:, 0],
    )


def _signs(n: int, count: int, generator: torch.Generator) -> Float[Tensor, "n k"]:
    return torch.randint(2, (n, count), generator=generator).double() * 2 - 1


@dataclass(frozen=True)
class _Products:
    """A matrix times vectors, and its squares times others, in float64."""

    rows: Float[Tensor, "n k"]
    columns: Float[Tensor, "m j"]
    row_squares: Float[Tensor, "n 1"]
    column_squares: Float[Tensor, "m 1"]


def _products(
    matrix: Float[Tensor, "n m"],
    right: Float[Tensor, "m k"],
    left: Float[Tensor, "n j"],
    weights: tuple[Float[Tensor, "m 1"], Float[Tensor, "n 1"]] | None = None,
) -> _Products:
    """The products of one matrix, a few rows at a time; those of squares if there are `weights`.

    The vectors are rows: BLAS is several times slower with them as columns.
    """
    (n, m), right, left = matrix.shape, right.mT.contiguous(), left.mT.contiguous()
    along, across = right.new_empty(len(right), n), left.new_zeros(len(left), m)
    row_squares, column_squares = right.new_empty(n), right.new_zeros(m)
    count = max(1, ENTRIES[matrix.device.type] // max(1, m))
    exact, squares = right.new_empty(2, min(count, n), m)
    for at in range(0, n, count):
        rows = slice(at, min(n, at + count))
        chunk = exact[: rows.stop - at].copy_(matrix[rows])
        along[:, rows] = right @ chunk.mT
        across.addmm_(left[:, rows], chunk)
        if weights is not None:
            square = torch.mul(chunk, chunk, out=squares[: len(chunk)])
            row_squares[rows] = square @ weights[0][:, 0]
            column_squares.addmv_(square.mT, weights[1][rows, 0])
    return _Products(along.mT, across.mT, row_squares[:, None], column_squares[:, None])


def _too_far(tensor: _Transported, errors: Tensor, norms: Tensor, what: str) -> str | None:
    rounding = SPACING * torch.finfo(tensor.stored).eps / 12**0.5 + tensor.computed
    unit = norms * rounding + tensor.smallest * (tensor.after.numel() / len(norms)) ** 0.5
    deviations = errors.abs() / unit[:, None]
    apart = deviations.amax(1) > DEVIATIONS
    # Of short rows, all projections are the same few errors; their entries are compared, all.
    if errors.shape[1] == OF_EMBEDDINGS and tensor.after.shape[1] >= OF_EMBEDDINGS:
        apart |= deviations.square().mean(1).sqrt() > TOGETHER
    if not apart.any():
        return None
    return f"{int(apart.sum())} of {len(apart)} {what}s, the first is {int(apart.nonzero()[0])}"


def _compared(tensor: _Transported, sketch: _Sketch, generator: torch.Generator) -> str | None:
    """Compare entries: all of short rows, of others those of some."""
    count, columns = tensor.after.shape
    # An entry's sum is as large as its row, or as its column: units may have scales of their own.
    of_columns = sketch.column_norms / count**0.5
    every = columns < OF_EMBEDDINGS
    places = torch.arange(count) if every else torch.randperm(count, generator=generator)[:ROWS]
    places = places.to(tensor.after.device)
    for block in places.split(max(1, ENTRIES["cpu"] // columns)):
        expected, actual = _rows(tensor, block), tensor.after[block].double()
        size = actual.abs().maximum(expected.abs())
        of_rows = sketch.row_norms[block, None] / columns**0.5
        products = tensor.computed * of_rows.maximum(of_columns)
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
        rows = tensor.rows.rows(places, tensor.before)
    return rows if tensor.columns.is_identity else tensor.columns.apply(rows.mT).mT
