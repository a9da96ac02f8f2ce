"""The verb experiment: the papers' tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.markup import escape

from symmerge.aligning.choices import check_choice
from symmerge.cli import console
from symmerge.cli.options.experiments import Asked, Computing, External
from symmerge.cli.options.groups import verb
from symmerge.errors import MismatchError
from symmerge.evaluation.experiment_results import ExperimentFile
from symmerge.lab.experiments import catalog
from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.external import relink
from symmerge.lab.experiments.plan import (
    check_data,
    check_device,
    check_folder,
    check_same_data,
    check_starts,
    check_train_data,
    claim,
    digests,
    make_size,
    plan_rows,
)
from symmerge.lab.experiments.results import PAGE, RESULTS, printed_rows, write_results
from symmerge.lab.experiments.runner import Report, RunOutcome, State, finished, missing, run
from symmerge.lab.experiments.store import Store
from symmerge.lab.experiments.tables import (
    Experiment,
    ResultTable,
    Size,
    cells_of,
    with_columns,
)
from symmerge.models.model import device_of


@verb(
    "interrupted: finished cells are in {out}; continue with --resume",
    examples=(
        "NAME --size smoke --out smoke",
        "NAME --size published --dry-run --out full",
        "pythia-seeds --size 70m --out pythia",
    ),
)
def experiment(asked: Asked, external: External, computing: Computing) -> None:
    """Compute a paper's table, with the published numbers next to ours.

    A table is a grid of cells (train a model, measure a line), each computed once and kept under
    --out. You can kill it at any time, even with kill -9: --resume continues. A cell that fails is
    tried three times; the others are still computed, and the exit code is 1.

    With --models nothing is trained: the table has one column, computed from all their pairs. Only
    v-tasks fine-tunes them, on its own tasks (python-topics, or GLUE's in --data-dir), so it takes
    no --test-data. Models and data are identified by content, not by path.
    """
    name, chosen, out = asked.name, _experiment(asked.name), asked.folder()
    check_choice("--size", asked.size, chosen.sizes)
    scale, seeds = chosen.sizes[asked.size], asked.seeds
    computing.cluster()
    if asked.size in chosen.named and not external.models:
        external, seeds = external.of(chosen.named[asked.size], seeds), None
    external.check(name, chosen, {"--seeds": seeds, "--data-dir": asked.data_dir})
    size = make_size(
        scale,
        seeds=seeds,
        device=computing.device,
        data=asked.data_dir,
        external=external.gather(name, chosen, scale),
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
            " leave out --show to start"
        )
    return outcome


def _compute(
    asked: Asked, computing: Computing, size: Size, tables: tuple[ResultTable, ...], store: Store
) -> RunOutcome:
    """Compute every unfinished cell on an engine."""
    name, out, cells = asked.name, asked.folder(), cells_of(tables)
    check_data(name, tables, size, store)
    read = digests(tables, size, store)
    check_same_data(out, read)
    if not computing.cluster():  # a cluster's nodes check for themselves
        device_of(computing.device) if computing.device else check_device(tables, size, store)
    engine = computing.start(size.device, cells)
    with _progress(f"{name}, {asked.size}", len(missing(cells, store))) as report:
        claim(out, name, size, read)
        relink(cells, store)
        return run(cells, store, engine, report=report)


def _experiment(name: str) -> Experiment:
    if name not in catalog.EXPERIMENTS:
        rows = (
            {
                "name": known,
                "about": other.about,
                "paper": other.paper,
                "--models": "yes" if other.accepts else "no",
            }
            for known, other in catalog.EXPERIMENTS.items()
        )
        console.show_table("Experiments", rows)
        raise MismatchError(f"no experiment is called {name}: choose one of those listed")
    return catalog.EXPERIMENTS[name]


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
        f" {outcome.reused} reused"
    )
    if outcome.failed:
        rows = ({"cell": row.cell, "reason": row.reason} for row in record.failed)
        console.show_table("Failed cells", rows)
        console.err.print(
            f"{len(outcome.failed)} cells failed: details are in {out / 'failures.log'};"
            " try them again with --resume",
            soft_wrap=True,
        )
        raise typer.Exit(1)
