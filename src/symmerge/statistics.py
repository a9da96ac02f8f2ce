"""Second moments of what flows through two models on the same inputs, gathered in one streaming pass.

Only the block between the two models is kept (with means, variances, and B's own moments inside heads): memory does not depend on how much
data there is. From the moments, `Statistics.activations` makes as many samples as there are coordinates which have these very moments, so that
a solver that matches samples matches statistics too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symmerge.activations import CENTRED, SCALED, Activations, Score, watch
from symmerge.errors import DataError, MismatchError
from symmerge.notation import Atom, Product, atoms, parse
from symmerge.spec import Spec, text
from symmerge.tensorfile import read_tensors, write_tensors

FORMAT = "symmerge.statistics/1"
PARTS = ("count", "sum_a", "sum_b", "square_a", "square_b", "cross", "inside")


@dataclass
class Moments:
    """Sums over samples for one axis: of both models' coordinates and their squares, of the products between the models, and of the products
    of B's coordinates inside each of its heads (`inside`; a plain axis has none)."""

    axis: Product
    count: Float[Tensor, ""]
    sum_a: Float[Tensor, " a"]
    sum_b: Float[Tensor, " b"]
    square_a: Float[Tensor, " a"]
    square_b: Float[Tensor, " b"]
    cross: Float[Tensor, "a b"]
    inside: Float[Tensor, "heads n n"]

    def add_(self, other: Moments) -> None:
        for part in PARTS:
            getattr(self, part).add_(getattr(other, part).to(self.cross.device))

    @property
    def constant(self) -> int:
        """How many coordinates of either model never changed: nothing can be said of them."""
        return sum(int((_variance(total, square, self.count) <= 0).sum()) for total, square in ((self.sum_a, self.square_a), (self.sum_b, self.square_b)))


def _variance(total: Tensor, square: Tensor, count: Tensor) -> Tensor:
    """Rounding leaves a constant coordinate a tiny variance of either sign; it is none."""
    mean = total / count
    variance = square / count - mean.square()
    return torch.where(variance <= 1e-10 * (square / count), 0.0, variance)


@dataclass(frozen=True)
class Statistics:
    """The moments of every activation of a pair, by name. `header` says of which models (in which form) and which inputs."""

    moments: dict[str, Moments]
    header: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Tokens (or patches) seen."""
        return max((int(found.count) for found in self.moments.values()), default=0)

    def __add__(self, other: Statistics) -> Statistics:
        """Of more inputs. Both must be of the same pair in the same form."""
        _comparable(self.header, other.header)
        total = {name: replace(found, **{part: getattr(found, part).clone() for part in PARTS}) for name, found in self.moments.items()}
        for name, found in other.moments.items():
            total[name].add_(found)
        inputs = [*self.header.get("inputs", []), *other.header.get("inputs", [])]
        return Statistics(total, {**self.header, "inputs": inputs})

    def save(self, path: Path) -> None:
        axes = {name: text((found.axis,)) for name, found in self.moments.items()}
        header = {"format": FORMAT, "header": json.dumps(dict(self.header)), "axes": json.dumps(axes)}
        write_tensors(path, {f"{name}/{part}": getattr(found, part).cpu() for name, found in self.moments.items() for part in PARTS}, header)

    @staticmethod
    def load(path: Path) -> Statistics:
        header, tensors = read_tensors(path, FORMAT, "make it again with symmerge statistics")
        axes = {name: parse(axis)[0] for name, axis in json.loads(header["axes"]).items()}
        moments = {name: Moments(axis, *(tensors[f"{name}/{part}"] for part in PARTS)) for name, axis in axes.items()}
        return Statistics(moments, json.loads(header["header"]))

    def check(self, header: Mapping[str, Any]) -> None:
        """Refuse statistics of another pair, or of the same pair in another form."""
        _comparable(self.header, header)

    def activations(self, score: Score = "product") -> tuple[Activations, Activations]:
        """Samples with these moments, made one at a time as they are asked for."""
        axes = {name: found.axis for name, found in self.moments.items()}
        return Activations(axes, _Samples(self.moments, score, 0)), Activations(axes, _Samples(self.moments, score, 1))


def _comparable(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key in ("a", "b", "spec", "steps"):
        if mine.get(key) != theirs.get(key):
            raise MismatchError(f"statistics of other models, or of another form of them ({key} differs): gather them again for this pair")


@dataclass(frozen=True)
class _Samples(Mapping[str, Tensor]):
    """One model's samples. B's are a root of its second moments, A's what then gives the right products between the two."""

    moments: Mapping[str, Moments]
    score: Score
    side: int

    def __getitem__(self, name: str) -> Tensor:
        return samples(self.moments[name], self.score)[self.side]

    def __iter__(self) -> Iterator[str]:
        return iter(self.moments)

    def __len__(self) -> int:
        return len(self.moments)


def samples(found: Moments, score: Score) -> tuple[Float[Tensor, "a b"], Float[Tensor, "b b"]]:
    """A pair of matrices whose product A B' is the score between coordinates, and B B' what B's own moments say."""
    cross, inside = found.cross / found.count, found.inside / found.count
    squares = [square / found.count for square in (found.square_a, found.square_b)]
    if score in CENTRED:
        mean_a, mean_b = found.sum_a / found.count, found.sum_b / found.count
        cross = cross - mean_a[:, None] * mean_b
        heads = mean_b.unflatten(0, (len(inside), -1)) if len(inside) else mean_b[:0, None]
        inside = inside - heads[:, :, None] * heads[:, None]
        squares = [_variance(total, square, found.count) for total, square in ((found.sum_a, found.square_a), (found.sum_b, found.square_b))]
    if score not in SCALED:
        return _rooted(cross, squares[1], inside)
    left, right = (torch.where(square > 0, square.rsqrt(), 0.0) for square in squares)
    return (left[:, None] * cross * right).float(), torch.eye(len(right), device=cross.device)


def _rooted(cross: Tensor, squares: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """B as a root of its second moments (inside heads where they are known, else coordinate by coordinate), and A to match."""
    if not len(inside):
        root = squares.sqrt()
        return torch.where(root > 0, cross / root, 0.0).float(), torch.diag(root).float()
    size = inside.shape[-1]
    small = 1e-10 * inside.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)[:, None, None]
    root = torch.linalg.cholesky(inside + small * torch.eye(size, device=inside.device, dtype=inside.dtype))
    columns = cross.unflatten(1, (-1, size)).permute(1, 2, 0)  # head, n, a
    matched = torch.linalg.solve_triangular(root, columns, upper=False)
    return matched.flatten(0, 1).T.contiguous().float(), torch.block_diag(*root).float()


@dataclass
class Gatherer:
    """Adds up the moments of two modules that see the same batches: A's pass first, then B's, which meets what A left."""

    spec: Spec
    modules: tuple[nn.Module, nn.Module]
    dtype: torch.dtype = torch.float32
    moments: dict[str, Moments] = field(default_factory=dict)

    @torch.no_grad()
    def batch(self, inputs: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """One batch through both; returns what the models answered."""
        mask = inputs.get("attention_mask")
        waiting: dict[str, Tensor] = {}

        def keep(name: str, axis: Product, values: Tensor) -> None:
            waiting[name] = _rows(values, mask)

        def meet(name: str, axis: Product, values: Tensor) -> None:
            self._add(name, axis, waiting.pop(name), _rows(values, mask))

        with watch(self.spec, self.modules[0], keep):
            first = self.modules[0](**inputs)
        with watch(self.spec, self.modules[1], meet):
            second = self.modules[1](**inputs)
        return first, second

    def _add(self, name: str, axis: Product, a: Tensor, b: Tensor) -> None:
        a, b = a.to(self.dtype), b.to(self.dtype)
        outer = _heads(self.spec, axis)
        inside = torch.einsum("thn,thm->hnm", *(2 * [b.unflatten(1, (outer, -1))])) if outer else b.new_zeros(0, 0, 0)
        new = (torch.tensor(float(len(a)), device=a.device), a.sum(0), b.sum(0), a.square().sum(0), b.square().sum(0), a.T @ b, inside)
        if name not in self.moments:
            self.moments[name] = Moments(axis, *(part.double() for part in new))
            return
        for part, value in zip(PARTS, new, strict=True):
            getattr(self.moments[name], part).add_(value)  # float32 products into float64 sums


def _rows(values: Tensor, mask: Tensor | None) -> Tensor:
    """One row per token; pads are nobody's tokens."""
    if mask is not None and values.shape[:-1] == mask.shape:
        return values[mask.bool()]
    return values.flatten(0, -2)


def _heads(spec: Spec, axis: Product) -> int:
    """How many bases an axis holds, one per head; none where it has no basis inside heads."""
    inner = axis.factors[-1]
    if not isinstance(inner, Atom) or spec.spaces[inner.space].per is None or len(axis.factors) < 2:
        return 0
    count = 1
    for atom in list(atoms((axis,)))[:-1]:
        count *= spec.sizes[atom.space]
    return count


def gather(
    spec: Spec,
    modules: tuple[nn.Module, nn.Module],
    batches: Any,
    *,
    header: Mapping[str, Any] | None = None,
    partial: Path | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] | None = None,
) -> Statistics:
    """One pass of both models over the batches: `labels` in them are not looked at.

    Under `torchrun` every process takes its share of the batches, and all get the sums. With `partial`, what an interrupted pass had is kept
    there, and a pass over the same batches goes on from it.
    """
    rank, world = _rank()
    gatherer, done = Gatherer(spec, modules, dtype), 0
    if partial and partial.exists():
        earlier = Statistics.load(partial)
        _comparable(earlier.header, header or {})
        gatherer.moments, done = earlier.moments, int(earlier.header["batches"])
    mine = islice(enumerate(batches), rank, None, world)
    try:
        for number, batch in mine:
            if number // world < done:
                continue
            device = next(modules[0].parameters()).device
            gatherer.batch({name: tensor.to(device) for name, tensor in batch.items() if name != "labels"})
            done += 1
            if progress:
                progress(f"batch {number + 1} of {len(batches)}")
    except KeyboardInterrupt:
        if partial and gatherer.moments and world == 1:
            Statistics(gatherer.moments, {**(header or {}), "batches": done}).save(partial)
        raise
    if not gatherer.moments and world == 1:
        raise DataError("no batches to gather statistics from: give more data")
    found = Statistics(_reduced(gatherer.moments, world), header or {})
    if partial:
        partial.unlink(missing_ok=True)
    return found


def _rank() -> tuple[int, int]:
    import torch.distributed as distributed

    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_available() and distributed.is_initialized() else (0, 1)


def _reduced(moments: dict[str, Moments], world: int) -> dict[str, Moments]:
    """The sums over all processes. Every process must have seen a batch."""
    if world > 1:
        import torch.distributed as distributed

        for found in moments.values():
            for part in PARTS:
                distributed.all_reduce(getattr(found, part))
    return moments
