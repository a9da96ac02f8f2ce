"""The verb that looks at a pair once, for many alignments: statistics."""

from __future__ import annotations

from functools import reduce
from operator import add as plus
from pathlib import Path
from typing import Annotated

import typer

from symmerge.checkpoints.writing import return_freed_memory
from symmerge.cli import console, options
from symmerge.distributed import local_device, process_group
from symmerge.errors import CheckpointError, MismatchError
from symmerge.evaluation.tasks import task_of
from symmerge.matching.activations import warn_of_poor_statistics
from symmerge.models.model import device_of, load
from symmerge.observation.calibration import gather_pair, pair_header
from symmerge.observation.statistics import Statistics


def statistics(
    a: options.ModelA,
    b: options.ModelB,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file to write.", show_default=False)
    ],
    data: options.Data = None,
    samples: options.Samples = None,
    recipe: Annotated[
        str, typer.Option(help="For which recipe of align: each sees models in a form of its own.")
    ] = "activations",
    add: Annotated[
        list[Path] | None,
        typer.Option(
            help="Add what is in this file, of the same pair. May be repeated.", show_default=False
        ),
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    resume: options.Resume = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --out if it exists.")
    ] = False,
    config: options.Config = None,
) -> None:
    """Gather statistics of what flows through two models, once; align and merge then take them with --statistics. Several files can be added up.

    Also in several processes: [bold]torchrun --nproc-per-node 2 -m symmerge statistics ...[/]. Ctrl-C keeps what was gathered.

    Example: [bold]symmerge statistics ./seed-0 ./seed-1 --data text.txt --out ./pair.safetensors[/]
    """
    with (
        console.friendly("interrupted: what was gathered so far is kept, --resume goes on from it"),
        process_group() as (rank, world),
    ):
        return_freed_memory()
        device_of(device)
        models = load(a), load(b)
        if out.exists() and not overwrite:
            raise CheckpointError(
                f"{out} exists: choose another --out, or --overwrite to replace it"
            )
        if not data and (not add or samples is not None):
            raise MismatchError(
                f"nothing to gather: give --data: {options.INPUTS[task_of(models[0])]}; or --add files that are there"
            )
        chosen = options.chosen_recipe(name=recipe, non_symmetric=True)
        if chosen.method != "activations":
            raise MismatchError(
                f"--recipe {recipe} does not look at activations: choose one of {', '.join(options.BY_METHOD['activations'])}"
            )
        ready = chosen.prepare(models[0]), chosen.prepare(models[1])
        found = [Statistics.load(file) for file in add or []]
        for one in found:
            one.header.check(pair_header(*ready))
        if data:
            task = options.inputs(models, data, samples=samples, seed=seed, device=device)
            partial = out.with_name(f"{out.name}.partial")
            if not resume:
                _forget(partial)
            with console.progress("looking at both models", -(-len(task.batches) // world)) as tick:
                found.append(
                    gather_pair(
                        ready, task, partial=partial, device=local_device(device), progress=tick
                    )
                )
        total = reduce(plus, found)
        if rank:
            return
        warn_of_poor_statistics(total)
        total.save(out)
        size = out.stat().st_size / 1e6
        console.out.print(
            f"wrote {out}: {total.samples} tokens, {len(total.moments)} activations, {size:.1f} MB",
            soft_wrap=True,
        )


def _forget(partial: Path) -> None:
    """Of every process that an interrupted run had."""
    for file in (partial, *partial.parent.glob(f"{partial.name}.*-of-*")):
        file.unlink(missing_ok=True)
