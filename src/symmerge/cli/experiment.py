"""The verb experiment: the papers' tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from symmerge.aligning.choices import check_choice, either
from symmerge.cli import console
from symmerge.cli.options.groups import verb
from symmerge.errors import MismatchError
from symmerge.evaluation.experiment_results import ExperimentFile
from symmerge.lab.experiments.catalog import EXPERIMENTS
from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.cluster import RayEngine
from symmerge.lab.experiments.components import MEASURED
from symmerge.lab.experiments.engines import Engine, LocalEngine
from symmerge.lab.experiments.external import gather_external, relink
from symmerge.lab.experiments.plan import (
    GPU_HEAVY,
    GPU_WORKERS,
    check_data,
    check_device,
    check_folder,
    check_same_data,
    check_starts,
    check_train_data,
    claim,
    default_workers,
    digests,
    make_size,
    plan_rows,
)
from symmerge.lab.experiments.results import PAGE, RESULTS, printed_rows, write_results
from symmerge.lab.experiments.runner import Report, RunOutcome, State, finished, missing, run
from symmerge.lab.experiments.store import Store
from symmerge.lab.experiments.tables import (
    SIZES,
    Experiment,
    ResultTable,
    Size,
    cells_of,
    with_columns,
)
from symmerge.models.model import device_of

ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Computing:
    """Where cells are computed."""

    engine: Annotated[
        str,
        typer.Option(help="local (processes of this machine) or ray (a Ray cluster)."),
    ] = "local"
    workers: Annotated[
        int | None,
        typer.Option(
            help=f"How many cells at once; on a GPU at most {GPU_HEAVY} of them train or learn.",
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
                f"--address {self.address} is of a Ray cluster: add --engine ray, or leave it out"
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
    """Models that are there already, and the data for them."""

    more: Annotated[
        list[str] | None,
        typer.Argument(help="More of --models.", metavar="MODELS", hidden=True, show_default=False),
    ] = None
    models: Annotated[
        list[str] | None,
        typer.Option(
            help="Models that are there already, instead of trained ones (v-tasks: to fine-tune):"
            " checkpoint folders, names on the hub (owner/name), or multiberts.",
            metavar="A B ...",
            show_default=False,
        ),
    ] = None
    test_data: Annotated[
        str | None,
        typer.Option(
            help="With --models: what to measure on, as --data of barrier.", show_default=False
        ),
    ] = None
    train_data: Annotated[
        str | None,
        typer.Option(
            help="With --models: what methods look at or learn from; not --test-data.",
            show_default=False,
        ),
    ] = None

    def check(self, name: str, experiment: Experiment, trained: Mapping[str, Any]) -> None:
        """Refuse models that an experiment does not take, and options for the other kind."""
        if self.models and experiment.accepts is None:
            takers = [known for known, other in EXPERIMENTS.items() if other.accepts]
            raise MismatchError(
                f"{name} has to train its models itself: leave out --models,"
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

    def gather(self, name: str, experiment: Experiment, size: str) -> Any:
        """The models and their data, checked; None where models are trained."""
        if not self.models or not experiment.accepts:
            return None
        models = [*self.models, *(self.more or ())]
        samples = MEASURED.get(size, {}).get("samples")
        data = self.test_data, self.train_data
        return gather_external(name, experiment.accepts, models, *data, samples=samples)


@dataclass(frozen=True)
class Asked:
    """Which table, how large, and where it goes."""

    name: Annotated[
        str,
        typer.Argument(
            help="Which one; an unknown name lists those there are.",
            metavar="NAME",
            show_default=False,
        ),
    ]
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Where everything goes: finished cells, results.json, the page.",
            show_default=False,
        ),
    ] = None
    size: Annotated[
        str,
        typer.Option(
            help="smoke (does everything work), small (minutes on two cores, longer with large"
            " --models) or published (as in the paper, on a GPU)."
        ),
    ] = "small"
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with the data sets that published sizes need; a missing one is named.",
            show_default=False,
        ),
    ] = None
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Only columns of the table with this word in their name; may be repeated."
            " The others can follow with --resume.",
            show_default=False,
        ),
    ] = None
    seeds: Annotated[
        int | None,
        typer.Option(
            help="How many models are trained from different seeds.", min=2, show_default="by size"
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue in --out: finished cells are not computed again."),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only list the cells, what is done, and what the rest will take; writes nothing.",
        ),
    ] = False
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="Compute nothing: tables and page of what is finished, also during a run.",
        ),
    ] = False

    def folder(self) -> Path:
        """--out, which every experiment needs."""
        if self.out is None:
            raise MismatchError(f"{self.name} needs a folder for its results: add --out DIR")
        return self.out


@verb("interrupted: finished cells are in {out}; continue with --resume")
def experiment(asked: Asked, external: External, computing: Computing) -> None:
    """Compute a paper's table: every number beside the published one.

    A table is a grid of cells (train a model, measure a line), each computed once and kept under
    --out. Kill it whenever you like, even with kill -9: --resume continues. A cell that fails is
    tried three times; the others are computed all the same, and the exit code is 1.

    With --models nothing is trained: the table is computed of these, their pairs one column. Only
    v-tasks trains them further, on its own tasks (python-topics, or GLUE's in --data), so it takes
    no --test-data. Cells go by what models and data are, not by where they lie.

    Examples: [bold]symmerge experiment NAME --size smoke --out ./smoke[/],
    [bold]symmerge experiment NAME --size published --dry-run --out ./full[/],
    [bold]symmerge experiment NAME --out /shared/full --size published --engine ray --address auto
    --workers 16[/], [bold]symmerge experiment t-methods --models ./seed-0 ./seed-1 ./seed-2
    --train-data books.txt --test-data valid.txt --out ./mine[/]
    """
    name, chosen, out = asked.name, _experiment(asked.name), asked.folder()
    check_choice("--size", asked.size, SIZES)
    computing.cluster()
    external.check(name, chosen, {"--seeds": asked.seeds, "--data": asked.data})
    size = make_size(
        asked.size,
        seeds=asked.seeds,
        device=computing.device,
        data=asked.data,
        external=external.gather(name, chosen, asked.size),
    )
    store = Store(out.absolute())
    check_folder(out, name, size, resume=asked.resume or asked.dry_run or asked.show)
    tables = with_columns(chosen.tables(size), asked.column or ())
    check_train_data(name, tables)
    check_starts(tables)
    if asked.dry_run:
        title = f"{name}, size {asked.size}: {chosen.about}; times on one worker"
        console.show_table(title, plan_rows(tables, size, store))
        return
    if asked.show:
        outcome = _finished(asked, tables, store)
    else:
        outcome = _compute(asked, computing, size, tables, store)
    _show(out, write_results(out, name, chosen, size, tables, outcome), outcome)


def _finished(asked: Asked, tables: tuple[ResultTable, ...], store: Store) -> RunOutcome:
    outcome = finished(cells_of(tables), store)
    if not outcome.results:
        raise MismatchError(
            f"nothing of {asked.name} at size {asked.size} is finished in {asked.out}:"
            " leave out --show to begin"
        )
    return outcome


def _compute(
    asked: Asked, computing: Computing, size: Size, tables: tuple[ResultTable, ...], store: Store
) -> RunOutcome:
    """Every cell that is not finished, on an engine."""
    name, out, cells = asked.name, asked.folder(), cells_of(tables)
    check_data(name, tables, size, store)
    read = digests(tables, size, store)
    check_same_data(out, read)
    if not computing.cluster():  # what a cluster has, its nodes know
        device_of(computing.device) if computing.device else check_device(tables, size, store)
    engine = computing.start(size.device, cells)
    with _progress(f"{name}, {asked.size}", len(missing(cells, store))) as report:
        claim(out, name, size, read)
        relink(cells, store)
        return run(cells, store, engine, report=report)


def _experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        rows = (
            {
                "name": known,
                "about": other.about,
                "paper": other.paper,
                "--models": "yes" if other.accepts else "no",
            }
            for known, other in EXPERIMENTS.items()
        )
        console.show_table("Experiments", rows)
        raise MismatchError(f"no experiment is called {name}: choose one of those listed")
    return EXPERIMENTS[name]


@contextmanager
def _progress(what: str, total: int) -> Iterator[Report]:
    """A bar on a terminal, a line per finished cell elsewhere; failures are always printed."""
    with console.bar(what, total) as (bar, task):
        ended = 0

        def report(cell: Cell, state: State, detail: str) -> None:
            nonlocal ended
            label = cell.label or cell.key
            ended += (over := state in ("computed", "failed"))
            item = f"{label}: {detail}" if state == "said" else label
            bar.update(task, completed=ended, item=escape(item))
            if state in ("again", "failed"):
                console.warn(f"{label}: {detail}" + ("; trying again" if state == "again" else ""))
            if over and not console.err.is_terminal:
                console.err.print(escape(f"{ended}/{total} {label}: {state}"), soft_wrap=True)

        yield report


def _show(out: Path, record: ExperimentFile, outcome: RunOutcome) -> None:
    for table in record.tables:
        console.show_table(table.title, printed_rows(table))
    console.say(
        f"wrote {out / RESULTS} and {out / PAGE}; {outcome.computed} cells computed,"
        f" {outcome.reused} were there"
    )
    if outcome.failed:
        rows = ({"cell": row.cell, "reason": row.reason} for row in record.failed)
        console.show_table("Failed cells", rows)
        console.err.print(
            f"{len(outcome.failed)} cells failed: more about them in {out / 'failures.log'};"
            " try them again with --resume",
            soft_wrap=True,
        )
        raise typer.Exit(1)
