"""Models that are there already, in the place of trained ones, and the data that comes with them: what they are, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from symmerge.checkpoints.hashes import checkpoint_digest, path_digest
from symmerge.checkpoints.hub import local_folder
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks import make_task, task_of
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.lab.experiments.cells import Cell, with_needs
from symmerge.lab.experiments.store import Store
from symmerge.models.model import Model, load
from symmerge.models.tables import check_same_table
from symmerge.models.widening import widen

ALIASES = {"multiberts": tuple(f"google/multiberts-seed_{seed}" for seed in range(1, 6))}
"""Names for several models at once."""
_THERE = "is for models that are trained, and --models are there already: leave one of them out"
_LEARNED = "is for models that are measured as they are, and these are trained further, on the experiment's own tasks: leave it out (their data sets: --data FOLDER)"
# options that do not go with models that are measured as they are, and with those that are trained further
AS_THEY_ARE = {"--seeds": _THERE, "--data": _THERE}
FURTHER = {"--seeds": _THERE, "--test-data": _LEARNED, "--train-data": _LEARNED}
MEANINGS = (".tsv", ".csv", ".jsonl", ".npz", ".xz")  # endings of files that say how they are read


@dataclass(frozen=True)
class Accepts:
    """What an experiment takes where models are given: at least so many, alike, or of different widths; measured as they are, or trained further first."""

    least: int = 2
    widths: bool = False
    further: bool = False

    @property
    def refuses(self) -> Mapping[str, str]:
        """Options that do not go with such models, and why."""
        return FURTHER if self.further else AS_THEY_ARE


@dataclass(frozen=True)
class DataSource:
    """As tasks take it, and a hash of what it is; names that are no files stand for themselves."""

    place: str
    content: str

    @classmethod
    def at(cls, data: str) -> DataSource:
        path = Path(data)
        return cls(str(path.absolute()), _content(path)) if path.exists() else cls(data, data)

    @property
    def record(self) -> dict[str, str]:
        return {"name": Path(self.place).name, "content": self.content}


@dataclass(frozen=True)
class ExternalModel:
    name: str
    place: Path
    content: str
    parameters: int

    @property
    def label(self) -> str:
        return f"{Path(self.name).name} ({self.content[:6]})"  # folders are often called alike


@dataclass(frozen=True)
class ExternalModels:
    """Models of one kind, and what they are measured on and matched by: nothing that is given, where they are trained further.

    What `record` says decides results, and where things lie does not.
    """

    models: tuple[ExternalModel, ...]
    architecture: str
    layers: int
    task: str
    test: DataSource | None
    train: DataSource | None

    @property
    def column(self) -> str:
        assert self.test is not None
        return f"{self.architecture}, {self.test.record['name']}"

    @property
    def data(self) -> dict[str, DataSource | None]:
        return {"test": self.test, "train": self.train}

    @property
    def places(self) -> dict[str, str]:
        return {part: data.place for part, data in self.data.items() if data}

    @property
    def record(self) -> dict[str, Any]:
        data = {part: data.record if data else None for part, data in self.data.items()}
        return {
            "architecture": self.architecture,
            "models": [model.content for model in self.models],
            "task": self.task,
            **data,
        }


def gather_external(
    experiment: str,
    accepts: Accepts,
    names: Sequence[str],
    test: str | None,
    train: str | None,
    *,
    samples: int | None = None,
) -> ExternalModels:
    """The models by folder, name on the hub or short name, and their data: everything is looked at before anything is computed."""
    names = [
        one
        for name in names
        for one in (ALIASES.get(name, (name,)) if not Path(name).is_dir() else (name,))
    ]
    if len(names) < accepts.least:
        raise MismatchError(
            f"--models {' '.join(names)}: {experiment} needs {accepts.least} models or more, {len(names)} given; add some"
        )
    on, by = (None, None) if accepts.further else _data(experiment, test, train)
    folders = [local_folder(name) for name in names]
    opened = [load(folder) for folder in folders]
    check_models(experiment, accepts, opened)
    found = tuple(
        ExternalModel(name, folder, checkpoint_digest(folder), model.parameters)
        for name, folder, model in zip(names, folders, opened, strict=True)
    )
    _different(found)
    kind, first = task_of(opened[0]), opened[0].spec
    if on:
        make_task(kind, on.place, opened[:1], samples=samples)
    if by and by.place != "self":
        make_task(kind, by.place, opened[:1], max_samples=1)
    return ExternalModels(
        found,
        first.architecture,
        sum(name.startswith("ff.") for name in first.spaces),
        kind,
        on,
        by,
    )


def check_models(experiment: str, accepts: Accepts, models: Sequence[Model]) -> None:
    """Refuse models that do not belong together."""
    if accepts.widths:
        unequal = [
            sorted(pair, key=lambda model: model.parameters)
            for pair in combinations(models, 2)
            if pair[0].parameters != pair[1].parameters
        ]
        if not unequal:
            raise MismatchError(
                f"{experiment} merges a narrow model into a wide one, and all of --models are equally wide: add one of another width"
            )
        for narrow, wide in unequal:
            widen(narrow, wide)  # lazy: it only refuses
    else:
        check_same_table(models)
    check_same_tokenizers(models)


def relink(cells: Iterable[Cell], store: Store) -> None:
    """Where finished cells point to given models, let them point to where those lie now: the same content may have moved."""
    for cell in with_needs(cells):
        link = store.folder(cell) / "model"
        if (
            "place" in cell.beside
            and store.done(cell)
            and not (link.is_symlink() and link.readlink() == Path(cell.beside["place"]))
        ):
            beside = link.with_name(".model")
            beside.unlink(missing_ok=True)
            beside.symlink_to(cell.beside["place"])
            beside.replace(link)


def _data(
    experiment: str, test: str | None, train: str | None
) -> tuple[DataSource, DataSource | None]:
    if test is None:
        raise DataError(
            f"{experiment} with --models needs something to measure on: add --test-data DATA (a file, a folder or a name, as --data of barrier)"
        )
    if test == "self":
        raise DataError("--test-data self: every pair would be measured on other text; give data")
    on, by = DataSource.at(test), DataSource.at(train) if train else None
    if by and by.content == on.content:
        raise DataError(
            f"--train-data {train} is what is measured on: a merge fitted to it would look better than it is; give other data"
        )
    return on, by


def _different(models: Sequence[ExternalModel]) -> None:
    seen: dict[str, str] = {}
    for model in models:
        if model.content in seen:
            raise MismatchError(
                f"{seen[model.content]} and {model.name} are the same checkpoint: name every model once"
            )
        seen[model.content] = model.name


def _content(path: Path) -> str:
    """Bytes, and what names say about them: endings of files, places in a folder."""
    return "".join(
        [
            path_digest(path),
            *(ending for ending in path.suffixes if path.is_file() and ending.lower() in MEANINGS),
        ]
    )
