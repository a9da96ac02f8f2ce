"""The verb align: bring models into one basin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from symmerge.aligning.aligned import Aligned, write_aligned
from symmerge.aligning.inputs import open_models
from symmerge.aligning.many import AlignedMany, align_many, check_many, write_aligned_many
from symmerge.aligning.pair import align as align_pair
from symmerge.aligning.vocabularies import read_alike
from symmerge.checkpoints.files import refuse_foreign, set_aside, write_own_text
from symmerge.checkpoints.folders import refuse
from symmerge.checkpoints.memory import return_freed_memory
from symmerge.cli import console
from symmerge.cli.options.common import (
    Device,
    Json,
    Models,
    Out,
    Overwrite,
    Resume,
    Seed,
    check_models,
)
from symmerge.cli.options.groups import verb
from symmerge.cli.options.matching import Aligning, Learning, Many, align_options
from symmerge.distributed import process_group
from symmerge.errors import MismatchError
from symmerge.matching.base import cycle_error
from symmerge.matching.recipes import Recipe
from symmerge.matching.resume import ResumeFile
from symmerge.merging.mergekit import mergekit_config
from symmerge.models.model import Model
from symmerge.verification.written import PASSES

MARK = "# written by symmerge"
"""The first line of a config for mergekit; only files that have it are replaced."""
MergekitFile = Annotated[
    Path | None,
    typer.Option(
        "--mergekit",
        help="Also write a config with which mergekit merges the aligned checkpoints.",
        show_default=False,
    ),
]
REMEDY = "there is nothing to align it to; give two models or more, symmerge align A B --out DIR"


@verb(
    "interrupted: no models were written; the best alignment so far is saved,"
    " --resume continues from it"
)
def align(
    out: Out,
    aligning: Aligning,
    learning: Learning,
    many: Many,
    models: Models = None,
    mergekit: MergekitFile = None,
    seed: Seed = 0,
    device: Device = "cpu",
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Bring B into A's basin: OUT/reference and OUT/aligned, the same functions, close.

    With three models or more: OUT/aligned-1, -2, ... Also writes alignment.safetensors and
    solution.json (the evidence). Ctrl-C keeps the best so far.
    Example: [bold]symmerge align ./seed-0 ./seed-1 --out ./aligned[/]

    --effort says how much work to take: [bold]fast[/] matches weights in seconds,
    [bold]standard[/] (the default) then learns the symmetry for about a minute, [bold]best[/] for
    many. None needs data: models write their own text, image models get synthetic images. With
    --data, standard and best learn from that.

    Or choose a method: without data (weights), by activations on some inputs (activations), or by
    learning the symmetry itself (learned). The first two give the same bytes
    with any number of threads; learning agrees to rounding only (about 1e-6; solution.json says how
    many threads there were). Learning also runs in several processes:
    [bold]torchrun --nproc-per-node 2 -m symmerge align ... --method learned[/].

    Recipes for weights: [bold]symmerge[/] (ours), [bold]weights-only[/] (ours without
    self-generated text), [bold]permutations[/] (git re-basin), [bold]orthogonal[/] (rotated
    stream, heads by their circuits), [bold]two-stage[/] (attention alone).
    For activations: [bold]activations[/] (ours), [bold]activations-untied[/] (ours, a tied head on
    its own), [bold]correlation[/] and [bold]correlation-...[/] (published: permutations of units
    and heads by correlation), [bold]residual-...[/] (published: of the stream).
    Learned: [bold]learned[/] (ours), [bold]learned-permutations[/] and [bold]learned-published[/]
    (as published). Soft: [bold]soft-hardened[/]; [bold]soft[/] is no symmetry, barrier measures it.
    """
    with process_group() as (rank, _):
        return_freed_memory()
        folders = check_models(models, REMEDY)
        opened = open_models(folders, units=many.units)
        refuse(out.absolute(), overwrite, folders)  # before any work
        check_many(many.reference, len(opened), many.rounds)
        _check_config(mergekit)
        statistics = out.with_name(f"{out.name}.statistics.partial.safetensors")
        options = align_options(aligning, learning, seed, device)
        readable = read_alike(opened, many.shared_tokens)
        recipe = options.to_recipe(readable, partial=statistics)
        resume_file = _resume_file(out, opened, recipe)
        if not resume and not rank:
            set_aside(resume_file.path, statistics)
        result = _solve(opened, recipe, many, resume_file)
        if rank:
            return
        _write(result, out, overwrite)
        if not _interrupted(result):
            resume_file.remove()
        _hand_over(mergekit, result, out)
        console.show_json(result.to_file().to_json()) if json else _show(result, out)


def _check_config(file: Path | None) -> None:
    if file and not file.absolute().parent.is_dir():
        raise MismatchError(
            f"--mergekit {file}: there is no folder {file.absolute().parent}; make it first"
        )
    if file:
        refuse_foreign(file, MARK)


def _resume_file(out: Path, models: Sequence[Model], recipe: Recipe) -> ResumeFile:
    """The file to resume from, for exactly these models and options."""
    task = {
        "models": [model.where for model in models],
        "spec": models[0].spec.fingerprint,
        "recipe": recipe.about,
        **recipe.matching.record(),
    }
    return ResumeFile(out.with_name(f"{out.name}.partial.safetensors"), task)


def _solve(
    models: Sequence[Model], recipe: Recipe, many: Many, resume_file: ResumeFile
) -> Aligned | AlignedMany:
    how: dict[str, Any] = {"progress": console.note, "resume_file": resume_file}
    if len(models) > 2:
        where: dict[str, Any] = {"reference": many.reference, "rounds": many.rounds}
        return align_many(models, recipe, **where, **how)
    a, b = models
    return align_pair(a, b, recipe, shared_tokens=many.shared_tokens, **how)


def _write(result: Aligned | AlignedMany, out: Path, overwrite: bool) -> None:
    ticks = (1 + PASSES) * len(result.models) * len(result.reference.weights.names())
    with console.progress("writing and verifying", ticks) as tick:
        if isinstance(result, Aligned):
            write_aligned(result, out, overwrite=overwrite, progress=tick)
        else:
            write_aligned_many(result, out, overwrite=overwrite, progress=tick)


def _interrupted(result: Aligned | AlignedMany) -> bool:
    how = result.solution if isinstance(result, Aligned) else result.universe
    return how.interrupted


def _hand_over(file: Path | None, result: Aligned | AlignedMany, out: Path) -> None:
    """Write a mergekit config, if requested."""
    if file is None:
        return
    names = ["aligned"]
    if isinstance(result, AlignedMany):
        universe = result.universe
        others = [number for number in universe.members if number != universe.reference]
        names = [f"aligned-{number}" for number in others]
    folders = [(out / name).absolute() for name in ("reference", *names)]
    write_own_text(file, f"{MARK}\n{mergekit_config(folders)}", MARK)
    console.note(f"wrote {file}: mergekit-yaml {file} MERGED")


def _show(result: Aligned | AlignedMany, out: Path) -> None:
    if _interrupted(result):
        console.say("interrupted: wrote the best so far; --resume --overwrite continues")
    _show_pair(result, out) if isinstance(result, Aligned) else _show_many(result, out)


def _show_pair(result: Aligned, out: Path) -> None:
    solution = result.solution
    if result.already:
        console.say(
            "these two were aligned already (fine-tunes of one base?): a plain average would do"
        )
    if learned := solution.learned:
        losses = solution.objective
        console.say(
            f"loss of the midpoint on held-out inputs {losses[0]:.4f} at the start,"
            f" {min(losses):.4f} learned ({learned['stopped']})"
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
