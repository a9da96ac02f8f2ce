"""External models and data: they replace trained models and are identified by content hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from symmerge.checkpoints.files import replacing
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
"""Alias -> hub names of several models."""
_TRAINED = "is for models that are trained, and --models exist already: leave one of them out"
_MEASURED = (
    "is for models that are measured as they are, and these are fine-tuned on the experiment's own"
    " tasks: leave it out (their data sets: --data-dir FOLDER)"
)
# Options refused for models that are measured directly, and for those that are fine-tuned first.
REFUSED_AS_IS = {"--seeds": _TRAINED, "--data-dir": _TRAINED}
REFUSED_FURTHER = {"--seeds": _TRAINED, "--test-data": _MEASURED, "--train-data": _MEASURED}
FORMATS = (".tsv", ".csv", ".jsonl", ".npz", ".xz")  # suffixes that decide how a file is read


@dataclass(frozen=True)
class Accepts:
    """Which external models an experiment accepts: at least how many, of which widths.

    `widths`: they must differ in width only. `further`: they are fine-tuned first.
    """

    least: int = 2
    widths: bool = False
    further: bool = False

    @property
    def refuses(self) -> Mapping[str, str]:
        """Options that are refused for such models -> why."""
        return REFUSED_FURTHER if self.further else REFUSED_AS_IS


@dataclass(frozen=True)
class NamedModels:
    """Models of the hub that an experiment knows by name, and what they are measured on.

    `usual` of them are taken if nobody says how many.
    """

    models: tuple[str, ...]
    usual: int
    test: str
    train: str = "self"

    def first(self, count: int | None) -> list[str]:
        """The first models; more than there are is refused."""
        if count and count > len(self.models):
            raise MismatchError(
                f"--seeds {count}: there are only {len(self.models)} such models,"
                f" {self.models[0]} to {self.models[-1]}"
            )
        return list(self.models[: count or self.usual])


@dataclass(frozen=True)
class DataSource:
    """Data of a task with its content hash; a name that is no file stands for itself."""

    place: str
    content: str

    @classmethod
    def at(cls, data: str) -> DataSource:
        path = Path(data)
        return cls(str(path.absolute()), _digest(path)) if path.exists() else cls(data, data)

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
        return f"{Path(self.name).name} ({self.content[:6]})"  # folders often share a name


@dataclass(frozen=True)
class ExternalModels:
    """Models of one kind, and the data they are measured on and matched with.

    No data if the models are fine-tuned first. Results depend on `record`, not on paths.
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
        return {split: data.place for split, data in self.data.items() if data}

    @property
    def record(self) -> dict[str, object]:
        return {
            "architecture": self.architecture,
            "models": [model.content for model in self.models],
            "task": self.task,
            **{split: data.record if data else None for split, data in self.data.items()},
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
    """Open models by folder, hub name or alias, and their data; check all of it first."""
    names = [name for alias in names for name in _expand(alias)]
    if len(names) < accepts.least:
        raise MismatchError(
            f"--models {' '.join(names)}: {experiment} needs {accepts.least} models or more,"
            f" {len(names)} given; add some"
        )
    on, by = (None, None) if accepts.further else _data(experiment, test, train)
    folders = [local_folder(name) for name in names]
    loaded = [load(folder) for folder in folders]
    check_models(experiment, accepts, loaded)
    models = tuple(
        ExternalModel(name, folder, checkpoint_digest(folder), model.parameters)
        for name, folder, model in zip(names, folders, loaded, strict=True)
    )
    _check_distinct(models)
    task, spec = task_of(loaded[0]), loaded[0].spec
    if on:
        make_task(task, on.place, loaded[:1], samples=samples)
    if by and by.place != "self":
        make_task(task, by.place, loaded[:1], max_samples=1)
    layers = sum(name.startswith("ff.") for name in spec.spaces)
    return ExternalModels(models, spec.architecture, layers, task, on, by)


def _expand(name: str) -> tuple[str, ...]:
    return (name,) if Path(name).is_dir() else ALIASES.get(name, (name,))


def check_models(experiment: str, accepts: Accepts, models: Sequence[Model]) -> None:
    """Refuse models that the experiment cannot compare."""
    if accepts.widths:
        unequal = [
            sorted(pair, key=lambda model: model.parameters)
            for pair in combinations(models, 2)
            if pair[0].parameters != pair[1].parameters
        ]
        if not unequal:
            raise MismatchError(
                f"{experiment} merges a narrow model into a wide one,"
                " and all of --models are equally wide: add one of another width"
            )
        for narrow, wide in unequal:
            widen(narrow, wide)  # lazy: it only checks
    else:
        check_same_table(models)
    check_same_tokenizers(models)


def relink(cells: Iterable[Cell], store: Store) -> None:
    """Update the links of finished cells to their external models, which may have moved."""
    for cell in with_needs(cells):
        if "place" not in cell.beside or not store.done(cell):
            continue
        link, place = store.folder(cell) / "model", Path(cell.beside["place"])
        if not (link.is_symlink() and link.readlink() == place):
            with replacing(link) as beside:
                beside.symlink_to(place)


def _data(
    experiment: str, test: str | None, train: str | None
) -> tuple[DataSource, DataSource | None]:
    if test is None:
        raise DataError(
            f"{experiment} with --models needs something to measure on:"
            " add --test-data DATA (a file, a folder or a name, as --data of barrier)"
        )
    if test == "self":
        raise DataError(
            "--test-data self: every pair would be measured on different text; give data"
        )
    on, by = DataSource.at(test), DataSource.at(train) if train else None
    if by and by.content == on.content:
        raise DataError(
            f"--train-data {train} is also measured on:"
            " a merge fitted to it would look better than it is; give other data"
        )
    return on, by


def _check_distinct(models: Sequence[ExternalModel]) -> None:
    names: dict[str, str] = {}
    for model in models:
        if other := names.get(model.content):
            raise MismatchError(
                f"{other} and {model.name} are the same checkpoint: name every model only once"
            )
        names[model.content] = model.name


def _digest(path: Path) -> str:
    """Hash of the content and of what decides how it is read: file suffix, names in a folder."""
    endings = path.suffixes if path.is_file() else ()
    return path_digest(path) + "".join(ending for ending in endings if ending.lower() in FORMATS)
