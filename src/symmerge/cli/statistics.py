"""The verb statistics: gather activation statistics once, for several runs."""

from __future__ import annotations

from functools import reduce
from operator import add as plus
from pathlib import Path
from typing import Annotated

import typer

from symmerge.aligning.inputs import make_inputs, no_inputs
from symmerge.aligning.options import choose_recipe
from symmerge.checkpoints.files import set_aside
from symmerge.checkpoints.memory import return_freed_memory
from symmerge.checkpoints.tensor_file import refuse_foreign_tensors
from symmerge.cli import console
from symmerge.cli.options.common import Device, ModelA, ModelB, Resume, Seed
from symmerge.cli.options.groups import verb
from symmerge.cli.options.matching import Calibration, CalibrationSamples
from symmerge.distributed import local_device, process_group
from symmerge.errors import CheckpointError, MismatchError
from symmerge.evaluation.tasks import Task
from symmerge.matching.activations import warn_of_poor_statistics
from symmerge.matching.recipes import BY_METHOD, Recipe
from symmerge.models.model import Model, device_of, load
from symmerge.observation.calibration import gather_pair, pair_header
from symmerge.observation.statistics import FORMAT, Statistics


@verb(
    "interrupted: what was gathered so far is saved, --resume continues from it",
    examples=(
        "a b --calibration text.txt --out pair.st",
        "a b --add one.st --add two.st --out both.st",
        "a b --calibration text.txt --out pair.st --resume",
    ),
)
def statistics(
    a: ModelA,
    b: ModelB,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The file to write.", metavar="FILE", show_default=False),
    ],
    calibration: Calibration = None,
    calibration_samples: CalibrationSamples = None,
    recipe: Annotated[
        str,
        typer.Option(help="The recipe of align to gather for: each prepares models its own way."),
    ] = "activations",
    add: Annotated[
        list[Path] | None,
        typer.Option(
            help="Add the contents of this file, for the same pair. May be repeated.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    resume: Resume = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --out if it is a statistics file.")
    ] = False,
) -> None:
    """Gather activation statistics of two models once, to reuse in align and merge.

    Use this to match by activations several times, or on a lot of data: pass the file to
    --statistics. Several files can be added up. Ctrl-C keeps what was gathered so far. Can run in
    several processes: [bold]torchrun --nproc-per-node 2 -m symmerge statistics ...[/].
    """
    with process_group() as (rank, world):
        return_freed_memory()
        device_of(device)
        models = load(a), load(b)
        if out.exists() and not overwrite:
            raise CheckpointError(
                f"{out} exists: choose another --out, or add --overwrite to replace it"
            )
        refuse_foreign_tensors(out, FORMAT)
        if not calibration and (not add or calibration_samples is not None):
            raise no_inputs(models[0], "nothing to gather", "--calibration (or --add FILE)")
        chosen = _recipe(recipe)
        prepared = chosen.prepare(models[0]), chosen.prepare(models[1])
        gathered = [Statistics.load(file) for file in add or []]
        for one in gathered:
            one.check(pair_header(*prepared), prepared[0].spec)
        if calibration:
            how = {"samples": calibration_samples, "seed": seed, "device": device}
            task = make_inputs(models, calibration, **how)
            gathered.append(_observe(prepared, task, out, resume, device, world))
        total = reduce(plus, gathered)
        if not rank:
            _write(total, out)


def _recipe(name: str) -> Recipe:
    recipe = choose_recipe(name=name, non_symmetric=True)
    if recipe.method != "activations":
        raise MismatchError(
            f"--recipe {name} does not look at activations:"
            f" choose one of {', '.join(BY_METHOD['activations'])}"
        )
    return recipe


def _observe(
    models: tuple[Model, Model], task: Task, out: Path, resume: bool, device: str, world: int
) -> Statistics:
    partial = out.with_name(f"{out.name}.partial")
    if not resume:  # leftovers of every process of an interrupted run
        set_aside(partial, *partial.parent.glob(f"{partial.name}.*-of-*[0-9]"))
    with console.progress("observing both models", -(-len(task.batches) // world)) as tick:
        return gather_pair(
            models, task, partial=partial, device=local_device(device), progress=tick
        )


def _write(total: Statistics, out: Path) -> None:
    warn_of_poor_statistics(total)
    total.save(out)
    size = out.stat().st_size / 1e6
    console.say(
        f"wrote {out}: {total.samples} tokens, {len(total.moments)} activations, {size:.1f} MB"
    )
