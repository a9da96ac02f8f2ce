"""Read what `symmerge align` wrote: models in one basin with their evidence, nothing solved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from symmerge.aligning.aligned import pair_evidence
from symmerge.aligning.many import many_evidence
from symmerge.checkpoints.json_results import read_result
from symmerge.checkpoints.provenance import Parent, Provenance
from symmerge.errors import CheckpointError
from symmerge.models.alignment_results import SolutionFile, UniverseFile
from symmerge.models.model import Model, load
from symmerge.models.tables import check_same_table

REMEDY = "symmerge align A B --out DIR makes one"
RECORDS = {"solution.json": SolutionFile, "universe.json": UniverseFile}


@dataclass(frozen=True, repr=False)
class AlignedFolder:
    """Models in one basin as `symmerge align` wrote them, in the order they were given.

    `record` says how they were aligned, `origins` where each came from and how it was verified.
    """

    path: Path
    models: tuple[Model, ...]
    record: SolutionFile | UniverseFile
    origins: tuple[Provenance, ...]

    def __repr__(self) -> str:
        names = ", ".join(origin.source for origin in self.origins)
        return f"AlignedFolder({self.path}: {len(self.models)} models,\n  {names[:150]})"

    @property
    def reference(self) -> Model:
        """The model whose coordinates all have."""
        return next(model for model in self.models if Path(model.where).name == "reference")

    def evidence(self) -> dict[str, object]:
        """A summary for the model card of a merge."""
        if isinstance(self.record, SolutionFile):
            return pair_evidence(self.record)
        reference = self.origins[self.models.index(self.reference)].source
        how = {"spreads": self.record.spreads, "left_out": self.record.left_out}
        return many_evidence(self.record.recipe, reference, **how)

    def with_origins(self, merged: Model) -> Model:
        """A merge of these models whose record names the models that were aligned as parents."""
        steps = list(merged.history)
        for number, step in enumerate(steps):
            if step.parents is not None:
                steps[number] = replace(step, parents=tuple(map(self._origin, step.parents)))
        return replace(merged, history=tuple(steps))

    def _origin(self, parent: Parent) -> Parent:
        for model, origin in zip(self.models, self.origins, strict=True):
            if model.where == parent.where:
                return Parent(origin.source, origin.source_sha256, parent.weight, origin.steps)
        return parent


def load_aligned(folder: str | os.PathLike[str]) -> AlignedFolder:
    """Open a folder that `symmerge align` wrote: `merge(load_aligned("aligned"))`.

    Weights are lazy. The folder's own record says how the models were aligned, and theirs that
    each was verified then.
    """
    path = Path(folder)
    record = _record(path)
    models = tuple(load(_checked(path, name)) for name in _names(record))
    check_same_table(models)
    origins = tuple(Provenance.read(path / name / "symmerge.json") for name in _names(record))
    return AlignedFolder(path, models, record, origins)


def lone_folder(models: Sequence[Path]) -> AlignedFolder | None:
    """The aligned folder, if one path is given and it is no checkpoint; None for all else."""
    if len(models) != 1 or (models[0] / "config.json").exists():
        return None
    return load_aligned(models[0])


def _record(path: Path) -> SolutionFile | UniverseFile:
    for name, kind in RECORDS.items():
        if (path / name).is_file():
            return read_result(path / name, kind)
    what = f"it has neither {' nor '.join(RECORDS)}" if path.is_dir() else "there is no such folder"
    if (path / "config.json").is_file():
        what = "it is a single checkpoint"
    raise CheckpointError(f"{path} is not an aligned folder: {what}; {REMEDY}")


def _names(record: SolutionFile | UniverseFile) -> Iterator[str]:
    """The folders of the models, in the order in which they were given to align."""
    if isinstance(record, SolutionFile):
        yield from ("reference", "aligned")
        return
    for number in range(len(record.models) + len(record.left_out)):
        if number not in record.left_out:
            yield "reference" if number == record.reference else f"aligned-{number}"


def _checked(path: Path, name: str) -> Path:
    if not (path / name / "symmerge.json").is_file():
        what = "has no symmerge.json" if (path / name).is_dir() else "is missing"
        raise CheckpointError(f"{path} is not an aligned folder: {path / name} {what}; {REMEDY}")
    return path / name
