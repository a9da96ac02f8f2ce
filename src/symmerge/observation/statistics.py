"""Second moments of what flows through two models on the same inputs, gathered in one streaming pass.

Only the block between the two models is kept (with means, variances, and B's own moments inside heads): memory does not depend on how much
data there is. From the moments, `Statistics.activations` makes as many samples as there are coordinates which have these very moments, so that
a solver that matches samples matches statistics too.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symmerge.checkpoints.tensor_file import read_tensors, write_tensors
from symmerge.distributed import broadcast, rank_and_world_size, sum_over_processes
from symmerge.errors import CheckpointError, DataError, MismatchError, NotationError
from symmerge.observation.activations import Activations, Score, watch
from symmerge.observation.moments import SUMS, Moments, samples_with_moments
from symmerge.symmetry.notation import Atom, Product, atoms, parse
from symmerge.symmetry.spec import Spec, text

FORMAT = "symmerge.statistics/1"
BLOCK, TOKENS = (
    1024,
    512,
)  # rows of products, and tokens, added at once: few enough to stay near the cache, not so few that threads wait for each other


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
        total = {
            name: replace(found, **{part: getattr(found, part).clone() for part in SUMS})
            for name, found in self.moments.items()
        }
        for name, found in other.moments.items():
            total[name].add_(found)
        inputs = [*self.header.get("inputs", []), *other.header.get("inputs", [])]
        return Statistics(total, {**self.header, "inputs": inputs})

    def save(self, path: Path) -> None:
        axes = {name: text((found.axis,)) for name, found in self.moments.items()}
        header = {"format": FORMAT, "header": dict(self.header), "axes": axes}
        write_tensors(
            path,
            {
                f"{name}/{part}": getattr(found, part).cpu()
                for name, found in self.moments.items()
                for part in SUMS
            },
            header,
        )

    @staticmethod
    def load(path: Path) -> Statistics:
        remedy = "make it again with symmerge statistics"
        header, tensors = read_tensors(path, FORMAT, "a statistics file", remedy)
        try:
            axes = {name: parse(axis)[0] for name, axis in header["axes"].items()}
            moments = {
                name: Moments(axis, *(tensors[f"{name}/{part}"] for part in SUMS))
                for name, axis in axes.items()
            }
            return Statistics(moments, dict(header["header"]))
        except (KeyError, AttributeError, TypeError, NotationError) as error:
            raise CheckpointError(f"{path} is not whole ({error!r}): {remedy}") from error

    def check(self, header: Mapping[str, Any]) -> None:
        """Refuse statistics of another pair, or of the same pair in another form."""
        _comparable(self.header, header)

    def activations(self, score: Score = "product") -> tuple[Activations, Activations]:
        """Samples with these moments, made one at a time as they are asked for."""
        axes = {name: found.axis for name, found in self.moments.items()}
        counts = {name: found.cross.shape[1] for name, found in self.moments.items()}
        # Both sides of an activation are asked for one after the other, and are made together.
        made = lru_cache(maxsize=1)(lambda name: samples_with_moments(self.moments[name], score))
        a, b = (Activations(axes, _Samples(list(axes), made, side), counts) for side in (0, 1))
        return a, b


def _comparable(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for side in ("a", "b"):
        if mine.get(side) != theirs.get(side):
            raise MismatchError(
                f"statistics of another pair (model {side.upper()} is another): gather them for this one, with symmerge statistics A B"
            )
    for key in ("spec", "steps"):
        if mine.get(key) != theirs.get(key):
            raise MismatchError(
                f"statistics of this pair in another form ({key} differs): gather them with symmerge statistics --recipe NAME for this recipe"
            )


@dataclass(frozen=True)
class _Samples(Mapping[str, Tensor]):
    """One model's samples. B's are a root of its second moments, A's what then gives the right products between the two."""

    names: list[str]
    made: Callable[[str], tuple[Tensor, Tensor]]
    side: int

    def __getitem__(self, name: str) -> Tensor:
        return self.made(name)[self.side]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass
class Gatherer:
    """Adds up the moments of two modules that see the same batches: A's pass first, then B's, which meets what A left."""

    spec: Spec
    modules: tuple[nn.Module, nn.Module]
    dtype: torch.dtype = torch.float32
    moments: dict[str, Moments] = field(default_factory=dict)

    @torch.no_grad()
    def batch(self, inputs: Mapping[str, Tensor]) -> None:
        """One batch through both. What they answer is not kept: a batch of logits is large."""
        mask = inputs.get("attention_mask")
        waiting: dict[str, Tensor] = {}

        def keep(name: str, axis: Product, values: Tensor) -> None:
            waiting[name] = _rows(values, mask)

        def meet(name: str, axis: Product, values: Tensor) -> None:
            self._add(name, axis, waiting.pop(name), _rows(values, mask))

        with watch(self.spec, self.modules[0], keep):
            self.modules[0](**inputs)
        with watch(self.spec, self.modules[1], meet):
            self.modules[1](**inputs)

    def _add(self, name: str, axis: Product, a: Tensor, b: Tensor) -> None:
        a, b = a.to(self.dtype), b.to(self.dtype)
        outer = _heads(self.spec, axis)
        inside = (
            torch.einsum("thn,thm->hnm", *(2 * [b.unflatten(1, (outer, -1))]))
            if outer
            else b.new_zeros(0, 0, 0)
        )
        if name not in self.moments:
            n, m = a.shape[1], b.shape[1]
            self.moments[name] = Moments(
                axis,
                *(
                    a.new_zeros(shape, dtype=torch.float64)
                    for shape in ((), n, m, n, m, (n, m), inside.shape)
                ),
            )
        found = self.moments[name]
        found.count += len(a)
        found.inside += inside
        for side, total, square in (
            (a, found.sum_a, found.square_a),
            (b, found.sum_b, found.square_b),
        ):
            _add_sums(side, total, square)
        # float32 products into float64 sums, a block at a time: what was just multiplied is added while it is at hand
        for total, rows in zip(found.cross.split(BLOCK), a.T.split(BLOCK), strict=True):
            total += rows @ b


def _add_sums(side: Tensor, total: Tensor, square: Tensor) -> None:
    """In float64 from the start: in float32 a coordinate that never changes would seem to, by rounding."""
    for rows in side.split(TOKENS):
        wide = rows.double()
        total += wide.sum(0)
        square += wide.square().sum(0)


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
    rank, world = rank_and_world_size()
    about = {**(header or {}), "products": str(dtype).removeprefix("torch.")}
    if not len(batches):
        raise DataError("no batches to gather statistics from: give more data")
    kept = (
        partial.with_name(f"{partial.name}.{rank}-of-{world}") if partial and world > 1 else partial
    )
    gatherer, done = Gatherer(spec, modules, dtype), 0
    device = next(modules[0].parameters()).device
    if kept and kept.exists():
        gatherer.moments, done = _taken_up(kept, about, device)
    try:
        for number, batch in islice(enumerate(batches), rank, None, world):
            if number // world < done:
                continue
            with _whole():
                gatherer.batch(
                    {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
                )
                done += 1
            if progress:
                progress(f"batch {number + 1} of {len(batches)}")
    except KeyboardInterrupt:
        if kept and gatherer.moments:
            Statistics(gatherer.moments, {**about, "batches": done}).save(kept)
        raise
    found = Statistics(_reduced(gatherer.moments) if world > 1 else gatherer.moments, about)
    if kept:
        kept.unlink(missing_ok=True)
    return found


def _taken_up(
    kept: Path, about: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Moments], int]:
    """What an interrupted pass had; of the very same inputs, or it cannot be gone on from."""
    earlier = Statistics.load(kept)
    if {name: value for name, value in earlier.header.items() if name != "batches"} != json.loads(
        json.dumps(about)
    ):
        raise MismatchError(
            f"{kept} was left by a pass over other models or other data: repeat that command with --resume, or remove the file"
        )
    for found in earlier.moments.values():
        for part in SUMS:
            setattr(found, part, getattr(found, part).to(device))
    return earlier.moments, int(earlier.header["batches"])


@contextmanager
def _whole() -> Iterator[None]:
    """An interrupt waits for the end of a batch: sums that hold half of one cannot be gone on from."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
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


def _reduced(moments: Mapping[str, Moments]) -> dict[str, Moments]:
    """The sums over all processes."""
    axes = broadcast({name: found.axis for name, found in moments.items()})
    sums = sum_over_processes(
        {f"{name}/{part}": getattr(found, part) for name, found in moments.items() for part in SUMS}
    )
    return {
        name: Moments(axis, *(sums[f"{name}/{part}"] for part in SUMS))
        for name, axis in axes.items()
    }
