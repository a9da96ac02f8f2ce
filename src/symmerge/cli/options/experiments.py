"""Options of the verb experiment: the table, external models, and where to compute."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from symmerge.aligning.choices import check_choice, either
from symmerge.errors import MismatchError
from symmerge.lab.experiments import catalog
from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.cluster import RayEngine
from symmerge.lab.experiments.components import MEASURED
from symmerge.lab.experiments.engines import Engine, LocalEngine
from symmerge.lab.experiments.external import NamedModels, gather_external
from symmerge.lab.experiments.plan import (
    GPU_HEAVY,
    GPU_WORKERS,
    default_workers,
)
from symmerge.lab.experiments.tables import (
    Experiment,
)

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Computing:
    """Where cells are computed."""

    panel: ClassVar[str] = "Computing"
    engine: Annotated[
        str,
        typer.Option(help="local (processes on this machine) or ray (a Ray cluster)."),
    ] = "local"
    workers: Annotated[
        int | None,
        typer.Option(
            help=f"Cells to compute at once; on a GPU at most {GPU_HEAVY} of them train or learn.",
            min=1,
            show_default=f"one per core, at most {GPU_WORKERS} with a GPU, 2 with ray",
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster: auto or HOST:PORT.",
            show_default="RAY_ADDRESS, or a new one on this machine",
        ),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda for published, else cpu")
    ] = None

    def cluster(self) -> str | None:
        """The address of the Ray cluster, if there is one."""
        check_choice("--engine", self.engine, ENGINES)
        if self.engine == "ray":
            return self.address or os.environ.get("RAY_ADDRESS")
        if self.address:
            raise MismatchError(
                f"--address {self.address} names a Ray cluster: add --engine ray, or leave it out"
            )
        return None

    def start(self, device: str, cells: Iterable[Cell]) -> Engine:
        """The engine that computes cells on a device."""
        on_gpu = device.startswith("cuda")
        if self.engine == "ray":
            return RayEngine(self.cluster(), self.workers or 2, gpus=1.0 if on_gpu else 0.0)
        workers = self.workers or default_workers(cells, device)
        return LocalEngine(workers, GPU_HEAVY if on_gpu else None)


@dataclass(frozen=True)
class External:
    """Existing models to use instead of trained ones, and their data."""

    panel: ClassVar[str] = "Existing models"
    main: ClassVar[tuple[str, ...]] = ("models",)
    more: Annotated[
        list[str] | None,
        typer.Argument(help="More of --models.", metavar="MODELS", hidden=True, show_default=False),
    ] = None
    models: Annotated[
        list[str] | None,
        typer.Option(
            help="Use existing models instead of training them (v-tasks fine-tunes them):"
            " checkpoint folders, names on the hub (owner/name), or multiberts.",
            metavar="A B ...",
            show_default=False,
        ),
    ] = None
    test_data: Annotated[
        str | None,
        typer.Option(
            help="With --models: what to measure on, like --data of barrier.", show_default=False
        ),
    ] = None
    train_data: Annotated[
        str | None,
        typer.Option(
            help="With --models: what methods look at or learn from; must differ from --test-data.",
            show_default=False,
        ),
    ] = None

    def check(self, name: str, experiment: Experiment, trained: Mapping[str, object]) -> None:
        """Refuse models that the experiment does not accept, and options that do not apply."""
        if self.models and experiment.accepts is None:
            takers = [known for known, other in catalog.EXPERIMENTS.items() if other.accepts]
            raise MismatchError(
                f"{name} must train its own models: leave out --models,"
                f" or choose {either(takers) if takers else 'another experiment'}"
            )
        own = {
            " ".join(self.more or ()): self.more,
            "--test-data": self.test_data,
            "--train-data": self.train_data,
        }
        refused = dict.fromkeys(own, "goes with --models: add --models A B")
        if self.models and experiment.accepts:
            refused = experiment.accepts.refuses
        for option, value in {**trained, **own}.items():
            if value and option in refused:
                raise MismatchError(f"{option} {refused[option]}")

    def of(self, named: NamedModels, count: int | None) -> External:
        """These options for models that the experiment knows by name."""
        return replace(
            self,
            models=named.first(count),
            test_data=self.test_data or named.test,
            train_data=self.train_data or named.train,
        )

    def gather(self, name: str, experiment: Experiment, size: str) -> Any:
        """The checked models and their data; None if models are trained."""
        if not self.models or not experiment.accepts:
            return None
        models = [*self.models, *(self.more or ())]
        samples = MEASURED.get(size, {}).get("samples")
        data = self.test_data, self.train_data
        return gather_external(name, experiment.accepts, models, *data, samples=samples)


@dataclass(frozen=True)
class Asked:
    """Which table, its size, and the output folder."""

    name: Annotated[
        str,
        typer.Argument(
            help="The experiment; an unknown name lists all of them.",
            metavar="NAME",
            show_default=False,
        ),
    ]
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Output folder: finished cells, results.json, the page.",
            show_default=False,
            metavar="DIR",
        ),
    ] = None
    size: Annotated[
        str,
        typer.Option(
            help="smoke (does everything work?), small (minutes on two cores, longer with large"
            " --models) or published (as in the paper, on a GPU); for models by name, their size,"
            " such as 70m."
        ),
    ] = "small"
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with the data sets for published sizes; an error names missing ones.",
            show_default=False,
        ),
    ] = None
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Only table columns with this word in their name; may be repeated. Compute the"
            " others later with --resume.",
            show_default=False,
        ),
    ] = None
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of models from different seeds.", min=2, show_default="by size"),
    ] = None
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue in --out: finished cells are not computed again."),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="List the cells, what is done and how long the rest will take; write nothing.",
        ),
    ] = False
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="Compute nothing: show tables and page of finished cells, even during a run.",
        ),
    ] = False

    def folder(self) -> Path:
        """The folder of --out, which every experiment needs."""
        if self.out is None:
            raise MismatchError(f"{self.name} needs a folder for its results: add --out DIR")
        return self.out
