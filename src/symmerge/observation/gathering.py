"""Gather statistics of two models in one streaming pass, which can be interrupted and resumed."""

from __future__ import annotations

import math
import signal
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from symmerge.checkpoints.files import discard
from symmerge.distributed import broadcast, rank_and_world_size, sum_over_processes
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks.base import Batch, Batches
from symmerge.observation.activations import watch
from symmerge.observation.moments import Moments
from symmerge.observation.statistics import Statistics, StatisticsHeader, flatten, unflatten
from symmerge.symmetry.groups import GeneralLinear
from symmerge.symmetry.notation import Atom, Product, atoms
from symmerge.symmetry.spec import Spec

# Rows of products, and tokens, added at once: few enough for the cache, enough to keep threads busy
ROWS, TOKENS = 1024, 512


@dataclass
class Gatherer:
    """Adds up the moments of two modules on the same batches: A's pass, then B's."""

    spec: Spec
    modules: tuple[nn.Module, nn.Module]
    dtype: torch.dtype = torch.float32
    moments: dict[str, Moments] = field(default_factory=dict)
    batches: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.modules[0].parameters()).device

    @torch.no_grad()
    def add_batch(self, batch: Batch) -> None:
        """Run one batch through both; labels are ignored, and outputs dropped: they are large."""
        inputs = {key: value.to(self.device) for key, value in batch.items() if key != "labels"}
        mask = inputs.get("attention_mask")
        # A layer may be run many times: its runs meet in their order.
        waiting: dict[str, deque[Tensor]] = defaultdict(deque)

        def keep(name: str, axis: Product, values: Tensor) -> None:
            waiting[name].append(_token_rows(values, mask))

        def meet(name: str, axis: Product, values: Tensor) -> None:
            self._add(name, axis, waiting[name].popleft(), _token_rows(values, mask))

        for module, callback in zip(self.modules, (keep, meet), strict=True):
            with watch(self.spec, module, callback):
                module(**inputs)
        self.batches += 1

    def _add(self, name: str, axis: Product, a: Tensor, b: Tensor) -> None:
        a, b = a.to(self.dtype), b.to(self.dtype)
        inside = _products_inside_heads(b, _heads(self.spec, axis))
        if name not in self.moments:
            cross = torch.Size((a.shape[1], b.shape[1]))
            self.moments[name] = Moments.zeros(axis, cross, inside.shape, a.device)
        moments = self.moments[name]
        moments.count.add_(len(a))
        moments.inside.add_(inside)
        _add_sums(a, moments.sum_a, moments.square_a)
        _add_sums(b, moments.sum_b, moments.square_b)
        # float32 products into float64 sums, block by block: each is added while it is in the cache
        for total, rows in zip(moments.cross.split(ROWS), a.T.split(ROWS), strict=True):
            total += rows @ b


def _products_inside_heads(b: Tensor, heads: int) -> Tensor:
    if not heads:
        return b.new_zeros(0, 0, 0)
    b = b.unflatten(1, (heads, -1))
    return torch.einsum("thn,thm->hnm", b, b)


def _add_sums(values: Tensor, total: Tensor, square: Tensor) -> None:
    """Add in float64: float32 rounding would make a constant coordinate seem to vary."""
    for rows in values.split(TOKENS):
        wide = rows.double()
        total += wide.sum(0)
        square += wide.square().sum(0)


def _token_rows(values: Tensor, mask: Tensor | None) -> Tensor:
    """One row per token, without padding."""
    if mask is not None and values.shape[:-1] == mask.shape:
        return values[mask.bool()]
    return values.flatten(0, -2)


def _heads(spec: Spec, axis: Product) -> int:
    """How many heads with a basis of their own an axis holds; 0 if none.

    Coordinates of any basis count as one head: their products among themselves are needed, too.
    """
    inner = axis.factors[-1]
    if len(axis.factors) == 1 and isinstance(inner, Atom):
        return int(isinstance(spec.spaces[inner.space].group, GeneralLinear))
    if not isinstance(inner, Atom) or spec.spaces[inner.space].per is None:
        return 0
    return math.prod(spec.sizes[atom.space] for atom in list(atoms((axis,)))[:-1])


def gather(
    spec: Spec,
    modules: tuple[nn.Module, nn.Module],
    batches: Batches,
    *,
    header: StatisticsHeader | None = None,
    partial: Path | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] | None = None,
) -> Statistics:
    """One pass of both models over the batches.

    Under `torchrun` each process takes its share of the batches, and all get the sums. With
    `partial`, an interrupted pass saves its sums there; the next one over the same batches resumes.
    """
    if not len(batches):
        raise DataError("no batches to gather statistics from: give more data")
    rank, world = rank_and_world_size()
    header = replace(header or StatisticsHeader(), products=str(dtype).removeprefix("torch."))
    if partial and world > 1:
        partial = partial.with_name(f"{partial.name}.{rank}-of-{world}")
    gatherer = Gatherer(spec, modules, dtype)
    if partial and partial.exists():
        _resume(gatherer, partial, header)
    try:
        _pass(gatherer, batches, progress)
    except KeyboardInterrupt:
        if partial and gatherer.moments:
            Statistics(gatherer.moments, replace(header, batches=gatherer.batches)).save(partial)
        raise
    moments = _over_processes(gatherer.moments) if world > 1 else gatherer.moments
    if partial:
        discard(partial)
    return Statistics(moments, header)


def _pass(gatherer: Gatherer, batches: Batches, progress: Callable[[str], None] | None) -> None:
    """Add this process's share of the batches, except those an interrupted pass has added."""
    rank, world = rank_and_world_size()
    for number, batch in islice(enumerate(batches), rank, None, world):
        if number // world < gatherer.batches:
            continue
        with _interrupts_wait():
            gatherer.add_batch(batch)
        if progress:
            progress(f"batch {number + 1} of {len(batches)}")


def _resume(gatherer: Gatherer, partial: Path, header: StatisticsHeader) -> None:
    """Continue an interrupted pass, which must have used the very same inputs."""
    earlier = Statistics.load(partial)
    if replace(earlier.header, batches=None).to_json() != header.to_json():
        raise MismatchError(
            f"{partial} was left by a pass over other models or other data:"
            " repeat that command with --resume, or remove the file"
        )
    earlier.check(header, gatherer.spec)
    for name, moments in earlier.moments.items():
        if len(moments.inside) != _heads(gatherer.spec, moments.axis):
            raise MismatchError(f"{partial}: {name} has other heads: it is damaged; remove it")
        gatherer.moments[name] = moments.to(gatherer.device)
    gatherer.batches = earlier.header.batches or 0


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C to the end of a batch: sums that hold half a batch cannot be resumed."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt


def _over_processes(moments: Mapping[str, Moments]) -> dict[str, Moments]:
    """The sums over all processes."""
    axes = broadcast({name: one.axis for name, one in moments.items()})
    return unflatten(axes, sum_over_processes(flatten(moments)))
