"""Second moments of the activations of two models on the same inputs, and their file.

Only the products between the two models are stored, with means, variances, and B's own products
inside heads, so memory does not depend on the amount of data. `Statistics.activations` makes
samples with exactly these moments, so that a solver for samples also works on statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from torch import Tensor

from symmerge.checkpoints.json_results import OMIT, Record
from symmerge.checkpoints.tensor_file import read_tensors, write_tensors
from symmerge.errors import CheckpointError, MismatchError, NotationError
from symmerge.evaluation.results import TaskRecord
from symmerge.observation.activations import Activations, Score
from symmerge.observation.moments import SUMS, Moments, problem_of, samples_with_moments
from symmerge.symmetry.notation import Product, atoms, parse, size, unparse
from symmerge.symmetry.spec import Spec

FORMAT = "symmerge.statistics/1"
REMEDY = "make it again with symmerge statistics"


@dataclass(frozen=True)
class StatisticsHeader(Record):
    """Which models, in which form, on which inputs."""

    a: Annotated[str | None, OMIT, "Digest of model A."] = None
    b: Annotated[str | None, OMIT, "Digest of model B."] = None
    spec: Annotated[str | None, OMIT, "Fingerprint of their table."] = None
    steps: Annotated[tuple[str, ...], "Canonical steps that were taken before."] = ()
    inputs: Annotated[tuple[TaskRecord, ...], "Tasks whose inputs both models saw."] = ()
    products: Annotated[str | None, OMIT, "Precision of the products."] = None
    batches: Annotated[int | None, OMIT, "How many an interrupted pass has added."] = None

    def check(self, other: StatisticsHeader) -> None:
        """Refuse another pair, or the same pair in another form."""
        for side in ("a", "b"):
            if getattr(self, side) != getattr(other, side):
                raise MismatchError(
                    f"statistics of another pair (model {side.upper()} is another):"
                    " gather them for this one, with symmerge statistics A B"
                )
        for key in ("spec", "steps"):
            if getattr(self, key) != getattr(other, key):
                raise MismatchError(
                    f"statistics of this pair in another form ({key} differs):"
                    " gather them with symmerge statistics --recipe NAME for this recipe"
                )


@dataclass(frozen=True)
class Statistics:
    """The moments of every activation of a pair, by name."""

    moments: Mapping[str, Moments]
    header: StatisticsHeader = StatisticsHeader()

    @property
    def samples(self) -> int:
        """Number of tokens (or patches)."""
        return max((int(moments.count) for moments in self.moments.values()), default=0)

    @property
    def axes(self) -> dict[str, Product]:
        """The axis of every activation."""
        return {name: moments.axis for name, moments in self.moments.items()}

    def __add__(self, other: Statistics) -> Statistics:
        """Statistics of both sets of inputs, for the same pair in the same form."""
        self.header.check(other.header)
        if self._shapes() != other._shapes():
            raise MismatchError(f"statistics of other activations cannot be added: {REMEDY}")
        total = {name: moments.clone() for name, moments in self.moments.items()}
        for name, moments in other.moments.items():
            total[name].add_(moments.sums())
        inputs = (*self.header.inputs, *other.header.inputs)
        return Statistics(total, replace(self.header, inputs=inputs))

    def _shapes(self) -> dict[str, object]:
        return {name: (one.axis, one.cross.shape) for name, one in self.moments.items()}

    def check(self, header: StatisticsHeader, spec: Spec) -> None:
        """Refuse statistics of another pair or form, and activations the model does not have."""
        self.header.check(header)
        for name, moments in self.moments.items():
            spaces = {atom.space for atom in atoms((moments.axis,))}
            known = name.rpartition(":")[0] in spec.tensors and spaces <= spec.spaces.keys()
            if not known or moments.cross.shape != 2 * (size(moments.axis, spec.sizes),):
                raise MismatchError(
                    f"statistics of {name} {list(moments.cross.shape)} do not fit the model:"
                    f" {REMEDY}"
                )

    def without(self, names: Collection[str]) -> Statistics:
        """The same without these activations."""
        remaining = {name: one for name, one in self.moments.items() if name not in names}
        return replace(self, moments=remaining)

    def save(self, path: Path) -> None:
        """Write all sums to a file."""
        axes = {name: unparse((axis,)) for name, axis in self.axes.items()}
        header = {"format": FORMAT, "header": self.header.to_json(), "axes": axes}
        sums = {name: total.cpu() for name, total in flatten(self.moments).items()}
        write_tensors(path, sums, header)

    @staticmethod
    def load(path: Path) -> Statistics:
        """Read what `save` wrote."""
        content, tensors = read_tensors(path, FORMAT, "a statistics file", REMEDY)
        try:
            axes = {name: parse(axis)[0] for name, axis in content["axes"].items()}
            header = StatisticsHeader.from_json(content["header"], str(path), REMEDY)
            sums = {name: {part: tensors[f"{name}/{part}"] for part in SUMS} for name in axes}
        except (KeyError, AttributeError, TypeError, IndexError, NotationError) as error:
            reason = " ".join(repr(error).split())[:120]
            raise CheckpointError(f"{path} is incomplete ({reason}): {REMEDY}") from error
        for name, one in sums.items():
            if problem := problem_of(one):
                raise CheckpointError(f"{path}: {name} has {problem}: {REMEDY}")
        if not sums:
            raise CheckpointError(f"{path} holds no activations: {REMEDY}")
        return Statistics({name: Moments(axes[name], **one) for name, one in sums.items()}, header)

    def activations(self, score: Score = "product") -> tuple[Activations, Activations]:
        """Samples with these moments, computed per activation on access."""
        axes = self.axes
        counts = {name: moments.cross.shape[1] for name, moments in self.moments.items()}
        # Both models' samples of an activation are read in a row, and computed together.
        make = lru_cache(maxsize=1)(lambda name: samples_with_moments(self.moments[name], score))
        a, b = (Activations(axes, _LazySamples(list(axes), make, side), counts) for side in (0, 1))
        return a, b


def flatten(moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """All sums of all activations, by `activation/sum`."""
    return {
        f"{name}/{part}": total
        for name, one in moments.items()
        for part, total in one.sums().items()
    }


def unflatten(axes: Mapping[str, Product], sums: Mapping[str, Tensor]) -> dict[str, Moments]:
    """The inverse of `flatten`."""
    return {
        name: Moments(axis, **{part: sums[f"{name}/{part}"] for part in SUMS})
        for name, axis in axes.items()
    }


@dataclass(frozen=True)
class _LazySamples(Mapping[str, Tensor]):
    """One model's samples, computed on access."""

    names: list[str]
    make: Callable[[str], tuple[Tensor, Tensor]]
    side: int

    def __getitem__(self, name: str) -> Tensor:
        return self.make(name)[self.side]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
