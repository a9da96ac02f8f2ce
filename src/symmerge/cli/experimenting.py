"""The verb that computes the papers' tables: experiment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from symmerge.cli import console
from symmerge.cli.options import Config, choice, either
from symmerge.errors import MismatchError
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
from symmerge.lab.experiments.tables import SIZES, Experiment, cells_of, with_columns
from symmerge.models.model import device_of

ENGINES = ("local", "ray")


def experiment(
    name: Annotated[
        str,
        typer.Argument(
            help="Which one; an unknown name lists those there are.",
            metavar="NAME",
            show_default=False,
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(help="More of --models.", metavar="MODELS", hidden=True, show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Where everything goes: finished cells, results.json, the page.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            help="smoke (does everything work), small (minutes on two cores, longer with large --models) or published (as the paper has it, on a GPU)."
        ),
    ] = "small",
    engine: Annotated[
        str,
        typer.Option(
            help="Where cells are computed: local (processes of this machine) or ray (a Ray cluster)."
        ),
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            help=f"How many cells at once; on a GPU at most {GPU_HEAVY} of them train or learn.",
            min=1,
            show_default=f"one per core, at most {GPU_WORKERS} with a GPU, 2 with ray",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster: auto or HOST:PORT.",
            show_default="RAY_ADDRESS, or one of this machine's own",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with the data sets that published sizes need; a missing one is named.",
            show_default=False,
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            help="Models that are there already, instead of trained ones (v-tasks: to fine-tune): checkpoint folders, names on the hub (owner/name), or multiberts.",
            metavar="A B ...",
            show_default=False,
        ),
    ] = None,
    test_data: Annotated[
        str | None,
        typer.Option(
            help="With --models: what to measure on, as --data of barrier.", show_default=False
        ),
    ] = None,
    train_data: Annotated[
        str | None,
        typer.Option(
            help="With --models: what methods look at or learn from, other data than --test-data.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda for published, else cpu")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Only columns of the table with this word in their name; more than once for several. The others can follow with --resume.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="How many models are trained from different seeds.", min=2, show_default="by size"
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on in --out: what is finished there is not computed again."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only list the cells, what is done, and what the rest will take; writes nothing.",
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="Compute nothing: tables and page of what is finished so far, also while a run is at work.",
        ),
    ] = False,
    config: Config = None,
) -> None:
    """Compute a paper's table: every number beside the published one.

    A table is a grid of cells (train a model, measure a line), each computed once and kept under --out. Kill it whenever you like, even with kill -9: --resume goes on.
    A cell that fails is tried three times; the others are computed all the same, and the exit code is 1.

    With --models nothing is trained: the table is computed of these, their pairs one column. Only v-tasks trains them further, on its own tasks (python-topics,
    or GLUE's in --data), so it takes no --test-data. Cells go by what models and data are, not by where they lie.

    Examples: [bold]symmerge experiment NAME --size smoke --out ./smoke[/], [bold]symmerge experiment NAME --size published --dry-run --out ./full[/],
    [bold]symmerge experiment NAME --out /shared/full --size published --engine ray --address auto --workers 16[/],
    [bold]symmerge experiment t-methods --models ./seed-0 ./seed-1 ./seed-2 --train-data books.txt --test-data valid.txt --out ./mine[/]
    """
    with console.friendly(f"interrupted: what was finished is kept in {out}; go on with --resume"):
        chosen = _known(name)
        if out is None:
            raise MismatchError(f"{name} needs a folder for what it finds: add --out DIR")
        choice("--size", size, SIZES)
        choice("--engine", engine, ENGINES)
        if address and engine != "ray":
            raise MismatchError(
                f"--address {address} is of a Ray cluster: add --engine ray, or leave it out"
            )
        address = address or (os.environ.get("RAY_ADDRESS") if engine == "ray" else None)
        for_given = {
            " ".join(more or ()): more,
            "--test-data": test_data,
            "--train-data": train_data,
        }
        _check_models(name, chosen, bool(models), {"--seeds": seeds, "--data": data}, for_given)
        external = (
            gather_external(
                name,
                chosen.accepts,
                [*models, *(more or ())],
                test_data,
                train_data,
                samples=MEASURED.get(size, {}).get("samples"),
            )
            if models and chosen.accepts
            else None
        )
        asked, store = (
            make_size(size, seeds=seeds, device=device, data=data, external=external),
            Store(out.absolute()),
        )
        check_folder(out, name, asked, resume=resume or dry_run or show)
        tables = with_columns(chosen.tables(asked), column or ())
        check_train_data(name, tables)
        check_starts(tables)
        if dry_run:
            console.show_table(
                f"{name}, size {size}: {chosen.about}; times on one worker",
                plan_rows(tables, asked, store),
            )
            return
        cells = cells_of(tables)
        if show:
            if not (found := finished(cells, store)).results:
                raise MismatchError(
                    f"nothing of {name} at size {size} is finished in {out}: leave out --show to begin"
                )
            _show(out, write_results(out, name, chosen, asked, tables, found), found)
            return
        check_data(name, tables, asked, store)
        read = digests(tables, asked, store)
        check_same_data(out, read)
        if not address:  # what a cluster has, its nodes know
            device_of(device) if device else check_device(tables, asked, store)
        where = _engine(engine, address, workers, asked.device, cells)
        with _progress(f"{name}, {size}", len(missing(cells, store))) as report:
            claim(out, name, asked, read)
            relink(cells, store)
            outcome = run(cells, store, where, report=report)
        _show(out, write_results(out, name, chosen, asked, tables, outcome), outcome)


def _known(name: str) -> Experiment:
    from symmerge.lab.experiments.catalog import (
        EXPERIMENTS,  # its tables need not be built for other verbs
    )

    if name not in EXPERIMENTS:
        rows = (
            {
                "name": known,
                "about": found.about,
                "paper": found.paper,
                "--models": "yes" if found.accepts else "no",
            }
            for known, found in EXPERIMENTS.items()
        )
        console.show_table("Experiments", rows)
        raise MismatchError(f"no experiment is called {name}: choose one of those listed")
    return EXPERIMENTS[name]


def _check_models(
    name: str,
    experiment: Experiment,
    external: bool,
    for_trained: Mapping[str, Any],
    for_given: Mapping[str, Any],
) -> None:
    """Refuse --models where an experiment has to train, and options that are for the other kind of models."""
    if external and experiment.accepts is None:
        from symmerge.lab.experiments.catalog import EXPERIMENTS

        takers = [known for known, found in EXPERIMENTS.items() if found.accepts]
        raise MismatchError(
            f"{name} has to train its models itself: leave out --models, or choose {either(takers) if takers else 'another experiment'}"
        )
    refused = (
        experiment.accepts.refuses
        if external and experiment.accepts
        else dict.fromkeys(for_given, "goes with --models: add --models A B")
    )
    for option, value in {**for_trained, **for_given}.items():
        if value and option in refused:
            raise MismatchError(f"{option} {refused[option]}")


def _engine(
    name: str, address: str | None, workers: int | None, device: str, cells: Iterable[Cell]
) -> Engine:
    if name == "local":
        return LocalEngine(
            workers or default_workers(cells, device),
            GPU_HEAVY if device.startswith("cuda") else None,
        )
    return RayEngine(address, workers or 2, gpus=1.0 if device.startswith("cuda") else 0.0)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Report]:
    """A bar with what is being said on a terminal, a line per finished cell elsewhere; what fails is always told."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[item]}"),
    )
    with Progress(
        *columns, console=console.err, transient=True, disable=not console.err.is_terminal
    ) as bar:
        task, ended = bar.add_task(what, total=total, item=""), 0

        def report(cell: Cell, state: State, detail: str) -> None:
            nonlocal ended
            label = cell.label or cell.key
            ended += (over := state in ("computed", "failed"))
            bar.update(
                task,
                completed=ended,
                item=escape(f"{label}: {detail}" if state == "said" else label),
            )
            if state in ("again", "failed"):
                console.warn(f"{label}: {detail}" + ("; trying again" if state == "again" else ""))
            if over and not console.err.is_terminal:
                console.err.print(escape(f"{ended}/{total} {label}: {state}"), soft_wrap=True)

        yield report


def _show(out: Path, record: Mapping[str, Any], outcome: RunOutcome) -> None:
    for table in record["tables"]:
        console.show_table(table["title"], printed_rows(table))
    console.out.print(
        f"wrote {out / RESULTS} and {out / PAGE}; {outcome.computed} cells computed, {outcome.reused} were there",
        soft_wrap=True,
    )
    if outcome.failed:
        console.show_table(
            "Failed cells",
            ({"cell": row["cell"], "reason": row["reason"]} for row in record["failed"]),
        )
        console.err.print(
            f"{len(outcome.failed)} cells failed: more about them in {out / 'failures.log'}; try them again with --resume",
            soft_wrap=True,
        )
        raise typer.Exit(1)
