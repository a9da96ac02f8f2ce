"""The verb align: bring models into one basin."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from symmerge.aligning.aligned import Aligned
from symmerge.aligning.inputs import open_models
from symmerge.aligning.jobs import (
    Unfinished,
    align_models,
    dropping_if_quick,
    preview,
    relations,
    stored_in,
    was_interrupted,
)
from symmerge.aligning.many import AlignedMany, check_many
from symmerge.aligning.options import AlignOptions
from symmerge.aligning.vocabularies import read_alike
from symmerge.checkpoints.folders import refuse
from symmerge.checkpoints.memory import return_freed_memory
from symmerge.cli import console
from symmerge.cli.options.common import (
    Device,
    DryRun,
    Models,
    Out,
    Output,
    Overwrite,
    Resume,
    Seed,
    check_models,
)
from symmerge.cli.options.groups import verb
from symmerge.cli.options.matching import Aligning, Learning, Many, align_options
from symmerge.cli.verdicts import show_verdict
from symmerge.distributed import process_group
from symmerge.matching.base import cycle_error
from symmerge.merging.handover import check_config, hand_over_aligned, write_result
from symmerge.merging.verdict import judge_alignment
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.merging.verdict_words import advice
from symmerge.models.interpolation import mean
from symmerge.models.model import Model
from symmerge.models.precision import check_dtype
from symmerge.report.published import write_verdict
from symmerge.verification.written import PASSES

REMEDY = "there is nothing to align it to; give two or more models: symmerge align A B --out DIR"


@verb(
    "interrupted: no models were written; the best alignment so far is saved,"
    " --resume continues from it",
    examples=(
        "seed-0 seed-1 --out aligned",
        "seed-0 seed-1 --effort best --data text.txt --out aligned",
        "a b --method activations --calibration text.txt --out aligned",
    ),
)
def align(
    out: Out,
    aligning: Aligning,
    learning: Learning,
    many: Many,
    output: Output,
    models: Models = None,
    device: Device = "cpu",
    seed: Seed = 0,
    resume: Resume = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
) -> None:
    """Bring B into A's basin: OUT/reference and OUT/aligned compute what A and B do.

    Use this to average, compare or interpolate the models yourself. Each output is a stock
    checkpoint, verified to compute what its source does. With three or more models you get
    OUT/aligned-1, -2, ... The alignment and its evidence are saved as well. Ctrl-C keeps the best
    alignment so far.
    """
    with process_group() as (rank, _):
        console.phases.verbose = output.verbose
        return_freed_memory()
        folders = check_models(models, REMEDY)
        opened = open_models(folders, units=many.units)
        refuse(out.absolute(), overwrite, folders)  # before any work
        check_many(many.reference, len(opened), many.rounds)
        check_config(output.mergekit)
        check_dtype(output.dtype)
        options, unfinished = (
            align_options(aligning, learning, seed, device),
            Unfinished(out, resume),
        )
        readable = read_alike(opened, many.shared_tokens)
        recipe = options.to_recipe(readable, partial=unfinished.statistics, generate=not dry_run)
        if dry_run:
            _show_preview([*preview(opened, recipe)] if not rank else [], out)
            return
        where = {
            "reference": many.reference,
            "rounds": many.rounds,
            "shared_tokens": many.shared_tokens,
        }
        resume_file = unfinished.start(opened, recipe, rank)
        how = {**where, "progress": console.note, "resume_file": resume_file}
        for line in relations(opened) if not rank else ():
            console.warn(line)
        with dropping_if_quick(resume_file):
            result = stored_in(align_models(opened, recipe, **how), output.dtype)
            if rank:
                return
            verdict = None if output.no_verdict else _judge(result, opened, options)
            _write(result, out, overwrite, verdict)
        if not was_interrupted(result):
            resume_file.remove()
        if output.mergekit:
            hand_over_aligned(output.mergekit, result, out)
            console.note(f"wrote {output.mergekit}: mergekit-yaml {output.mergekit} MERGED")
        if output.json:
            record = {"verdict": verdict.to_json() if verdict else None}
            console.show_json({**result.to_file().to_json(), **record})
            return
        _show(result, out)
        if verdict:
            command = shlex.join(["symmerge", "merge", *map(str, folders), "--out", f"{out}-2"])
            show_verdict(advice(verdict, command, str(out), best=aligning.effort == "best"))


def _judge(
    result: Aligned | AlignedMany,
    models: Sequence[Model],
    options: AlignOptions,
) -> MergeVerdict | None:
    """The verdict on the mean of what was aligned."""
    how = {"seed": options.seed, "device": options.device, "progress": console.note}
    verdict = judge_alignment(result, mean(result.models), models, options.data, **how)
    return verdict and advice(verdict, best=options.effort == "best")


def _show_preview(lines: Sequence[str], out: Path) -> None:
    for line in lines:
        console.say(line)
    if lines:
        console.say(f"nothing was written to {out}")


def _write(
    result: Aligned | AlignedMany, out: Path, overwrite: bool, verdict: MergeVerdict | None
) -> None:
    ticks = (1 + PASSES) * len(result.models) * len(result.reference.weights.names())
    with console.progress("writing and verifying", ticks) as tick:
        beside = partial(write_verdict, verdict) if verdict else None
        write_result(result, out, overwrite=overwrite, progress=tick, beside=beside)


def _show(result: Aligned | AlignedMany, out: Path) -> None:
    if was_interrupted(result):
        console.say("interrupted: wrote the best alignment so far; --resume --overwrite continues")
    _show_pair(result, out) if isinstance(result, Aligned) else _show_many(result, out)


def _show_pair(result: Aligned, out: Path) -> None:
    solution = result.solution
    if learned := solution.learned:
        losses = solution.objective
        console.say(
            f"loss of the midpoint on held-out inputs: {losses[0]:.4f} at the start,"
            f" {min(losses):.4f} after learning ({learned['stopped']})"
        )
    console.say(
        f"distance {result.before:.3f} before, {result.after:.3f} after,"
        f" in {solution.seconds:.1f} s; wrote {out}"
    )


def _show_many(result: AlignedMany, out: Path) -> None:
    spreads = result.universe.spreads
    console.say(
        f"{len(result.models)} models in the coordinates of {result.reference.where}: spread"
        f" {spreads[0]:.3f} aligned to it, {spreads[-1]:.3f} after {len(spreads) - 1} rounds;"
        f" cycle error {cycle_error(result.universe):.0e}; wrote {out}"
    )
