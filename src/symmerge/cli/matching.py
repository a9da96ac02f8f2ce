"""Verbs that find a symmetry between models: align, merge, same."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from symmerge.aligning.equivalence import same as decide
from symmerge.aligning.pair import write
from symmerge.checkpoints.folders import refuse
from symmerge.checkpoints.writing import return_freed_memory
from symmerge.cli import console, options, several
from symmerge.distributed import process_group
from symmerge.errors import MismatchError
from symmerge.matching.resume import ResumeFile
from symmerge.merging.means import Attention
from symmerge.merging.means import merge as average
from symmerge.merging.rescaling import Part
from symmerge.merging.rescaling import repair as restore
from symmerge.models.interpolation import piece_time
from symmerge.models.model import load, save


def align(
    out: options.Out,
    models: options.Models = None,
    method: options.Method = None,
    recipe: options.RecipeName = None,
    data: options.Data = None,
    samples: options.Samples = None,
    statistics: options.StatisticsFile = None,
    score: options.ScoreName = None,
    metric: options.Metric = None,
    inside: options.Inside = None,
    tries: options.Tries = None,
    sweeps: options.SweepsMost = None,
    token_counts: options.TokenCounts = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    lr: options.Rate = None,
    batch_size: options.BatchSize = None,
    accumulate: options.Accumulate = None,
    sampler: options.SamplerName = None,
    concentration: options.Concentration = None,
    target: options.TargetName = None,
    spaces: options.SpaceNames = None,
    start: options.StartName = None,
    patience: options.Patience = None,
    permutations_only: options.PermutationsOnly = False,
    reference: options.Reference = "0",
    rounds: options.Rounds = None,
    mergekit: options.MergekitFile = None,
    units: options.Units = "zero",
    shared_tokens: options.SharedTokens = False,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    dtype: options.SolveType = "float32",
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Bring B into A's basin: writes OUT/reference and OUT/aligned, the same functions as A and B, now close. Of three or more: OUT/aligned-1, -2, ...

    Without data (weights), by what flows through both (activations), or by learning the symmetry itself (learned): slower, and far closer.
    Also alignment.safetensors and solution.json (the evidence). Ctrl-C keeps the best so far. Example: [bold]symmerge align ./seed-0 ./seed-1 --out ./aligned[/]

    Recipes for weights: [bold]symmerge[/] (ours), [bold]weights-only[/] (ours without text the parents write), [bold]permutations[/] (git re-basin),
    [bold]orthogonal[/] (rotated stream, heads by their circuits), [bold]two-stage[/] (attention alone). For activations: [bold]activations[/] (ours),
    [bold]activations-untied[/] (ours, a tied head on its own), [bold]correlation[/] and [bold]correlation-...[/] (published: permutations of units and heads by
    correlation), [bold]residual-...[/] (published: of the stream). Learned: [bold]learned[/] (ours), [bold]learned-permutations[/] and
    [bold]learned-published[/] (as published). Soft: [bold]soft-hardened[/]; [bold]soft[/] is no symmetry, barrier measures it.

    Learning goes on in several processes, too: [bold]torchrun --nproc-per-node 2 -m symmerge align ... --method learned[/].
    """
    with (
        console.friendly(
            "interrupted: no models were written; what was found so far is kept, --resume goes on from it"
        ),
        process_group() as (rank, _),
    ):
        return_freed_memory()
        folders = options.different(
            models,
            "there is nothing to align it to; give two models or more, symmerge align A B --out DIR",
        )
        opened = options.opened(folders, units)
        refuse(out.absolute(), overwrite, folders)  # before the work, not after it
        several.check(len(opened), reference, rounds, mergekit)
        spelled = several.spelled(opened, shared_tokens)
        journal_file, partial = (
            out.with_name(f"{out.name}.{what}partial.safetensors") for what in ("", "statistics.")
        )
        seen = {
            "data": data,
            "samples": samples,
            "statistics": statistics,
            "score": score,
            "partial": partial,
        }
        how = {
            "metric": metric,
            "inside": inside,
            "tries": tries,
            "sweeps": sweeps,
            "token_counts": token_counts,
            "seed": seed,
            "device": device,
        }
        values = (
            steps,
            epochs,
            lr,
            batch_size,
            accumulate,
            sampler,
            concentration,
            target,
            spaces,
            start,
            patience,
        )
        learning = dict(zip(options.LEARNING, values, strict=True))
        chosen = options.solver(
            spelled,
            method,
            recipe,
            **seen,
            **how,
            **learning,
            permutations_only=permutations_only,
            dtype=dtype,
        )
        task = {
            "models": [model.where for model in opened],
            "spec": opened[0].spec.fingerprint,
            "recipe": chosen.about,
            **chosen.matching.record(),
        }
        resume_file = ResumeFile(journal_file, task)
        if not resume and not rank:
            resume_file.remove()
            partial.unlink(missing_ok=True)
        if len(opened) > 2:
            several.align(
                opened,
                chosen,
                out,
                reference,
                rounds,
                resume_file,
                mergekit,
                overwrite=overwrite,
                json=json,
                writes=not rank,
            )
            return
        found, compare = several.pair(opened, chosen, shared_tokens, resume_file)
        if rank:
            return
        with console.progress(
            "writing and verifying", 6 * len(found.reference.weights.names())
        ) as tick:
            write(
                found,
                opened[0],
                opened[1],
                out,
                overwrite=overwrite,
                progress=tick,
                compare=compare,
            )
        if not found.solution.interrupted:
            resume_file.remove()
        several.hand_over(mergekit, [out / "reference", out / "aligned"])
        if json:
            console.show_json(found.to_file().to_json())
            return
        if found.solution.interrupted:
            console.out.print(
                f"interrupted: wrote the best so far ({len(found.solution.trials)} tries done); --resume --overwrite goes on",
                soft_wrap=True,
            )
        if found.already:
            console.out.print(
                "these two were aligned already (fine-tunes of one base?): a plain average would do",
                soft_wrap=True,
            )
        if learned := found.solution.learned:
            first, *_ = losses = found.solution.objective
            console.out.print(
                f"loss of the middle on held-out inputs {first:.4f} at the start, {min(losses):.4f} learned ({learned['stopped']})",
                soft_wrap=True,
            )
        console.out.print(
            f"distance {found.before:.3f} before, {found.after:.3f} after, in {found.solution.seconds:.1f} s; wrote {out}",
            soft_wrap=True,
        )


def merge(
    out: options.Out,
    models: options.Models = None,
    t: Annotated[
        float | None,
        typer.Option(
            "-t",
            help="Of two models: where on the line from A (0) to B (1).",
            min=0.0,
            max=1.0,
            show_default="0.5",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="How much each model counts, with commas: 0.5,0.3,0.2.", show_default="equal"
        ),
    ] = None,
    combine: Annotated[
        str, typer.Option(help=f"How aligned models become one: {options.either(several.COMBINE)}.")
    ] = "mean",
    density: Annotated[
        float,
        typer.Option(
            help="Of ties and dare: the share of each difference that is kept.", min=0.0, max=1.0
        ),
    ] = 0.5,
    held_out: Annotated[
        str | None,
        typer.Option(
            help="What a soup is chosen by, as --data: never what it is measured on.",
            show_default=False,
        ),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            help="Another t for a part: ff=0.3, vo.2=0.1, layer.0=0.4, residual=0.5. May be repeated.",
            show_default=False,
        ),
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            help="Merge heads by factors (a straight line), svd (circuits cut to rank) or circuits (twice the head size; no stock checkpoint)."
        ),
    ] = "factors",
    method: Annotated[
        str | None,
        typer.Option(
            help=f"How to align first: {options.either(options.METHODS)}; none for a plain average.",
            show_default="weights, or by recipe",
        ),
    ] = None,
    recipe: options.RecipeName = None,
    data: options.Data = None,
    samples: options.Samples = None,
    statistics: options.StatisticsFile = None,
    score: options.ScoreName = None,
    metric: options.Metric = None,
    inside: options.Inside = None,
    tries: options.Tries = None,
    sweeps: options.SweepsMost = None,
    token_counts: options.TokenCounts = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    lr: options.Rate = None,
    batch_size: options.BatchSize = None,
    accumulate: options.Accumulate = None,
    sampler: options.SamplerName = None,
    concentration: options.Concentration = None,
    target: options.TargetName = None,
    spaces: options.SpaceNames = None,
    start: options.StartName = None,
    patience: options.Patience = None,
    permutations_only: options.PermutationsOnly = False,
    repair: Annotated[
        str | None,
        typer.Option(
            help="Last of all, give coordinates back the spread that averaging took: of maps or of norms. Told apart.",
            show_default="not",
        ),
    ] = None,
    repair_data: Annotated[
        str | None,
        typer.Option(
            help="Inputs to repair by, as --data: never what the merge is measured on.",
            show_default="--data",
        ),
    ] = None,
    reference: options.Reference = "0",
    rounds: options.Rounds = None,
    units: options.Units = "zero",
    shared_tokens: options.SharedTokens = False,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    dtype: options.SolveType = "float32",
    overwrite: options.Overwrite = False,
    config: options.Config = None,
) -> None:
    """Merge two models or more into one stock checkpoint of the original size: align all to the first, then average.

    Aligned models combine as fine-tunes of one base do: [bold]mean[/], [bold]slerp[/] (two), [bold]ties[/] and [bold]dare[/] (differences from the reference), [bold]soup[/] (those that help on --held-out).

    Example: [bold]symmerge merge ./seed-0 ./seed-1 --out ./merged[/]; of three: [bold]symmerge merge ./seed-0 ./seed-1 ./seed-2 --weights 0.5,0.3,0.2 --out ./merged[/]
    """
    with console.friendly():
        options.choice("--attention", attention, get_args(Attention))
        _repairable(repair, repair_data or data, attention)
        return_freed_memory()
        folders = options.different(
            models,
            "there is nothing to merge it with; give two models or more, symmerge merge A B --out DIR",
        )
        opened = options.opened(folders, units)
        refuse(out.absolute(), overwrite, folders)
        several.check(len(opened), reference, rounds)
        spelled = several.spelled(opened, shared_tokens and method != "none")
        plan = several.Plan(
            combine, several.shares_of(weights, t, opened), density, held_out, seed, device
        )
        plan.check(opened, at=bool(at), attention=attention, repair=repair)
        times = _times(at or [])
        piece_time(
            opened[0].spec, 0.5, times
        )  # a part that is not there is refused before the work
        mend_by = (
            options.inputs(spelled, repair_data or data or "self", seed=seed, device=device)
            if repair
            else None
        )
        if mend_by:
            mend_by.check_labels()
        aligned, evidence = opened, None
        if method == "none" and recipe:
            raise MismatchError(f"--method none aligns nothing: leave out --recipe {recipe}")
        if method != "none":
            seen = {"data": data, "samples": samples, "statistics": statistics, "score": score}
            how = {
                "metric": metric,
                "inside": inside,
                "tries": tries,
                "sweeps": sweeps,
                "token_counts": token_counts,
                "seed": seed,
                "device": device,
            }
            values = (
                steps,
                epochs,
                lr,
                batch_size,
                accumulate,
                sampler,
                concentration,
                target,
                spaces,
                start,
                patience,
            )
            learning = dict(zip(options.LEARNING, values, strict=True))
            chosen = options.solver(
                spelled,
                method,
                recipe,
                **seen,
                **how,
                **learning,
                permutations_only=permutations_only,
                dtype=dtype,
            )
            if len(opened) > 2:
                many = several.together(opened, chosen, reference, rounds)
                aligned, evidence, plan = (
                    list(many.models),
                    many.evidence(),
                    plan.without(many.universe),
                )
            else:
                found, _ = several.pair(opened, chosen, shared_tokens)
                aligned, evidence = [found.reference, found.aligned], found.evidence()
                if found.solution.interrupted:
                    console.note("interrupted: merging with the best alignment so far")
        if len(opened) == 2 and combine == "mean":
            merged = average(
                aligned[0],
                aligned[1],
                plan.shares[1],
                at=times,
                attention=attention,
                evidence=evidence,
            )  # type: ignore[arg-type]
        else:
            merged = plan.merged(aligned, evidence)
        if mend_by:
            mended = restore(
                merged, aligned, mend_by, shares=plan.shares, part=repair, device=device
            )  # type: ignore[arg-type]
            merged, loss = mended.model, mend_by.metrics[0]
            console.out.print(
                f"repaired {repair}: {loss} {mended.before[loss]:.4f} before, {mended.after[loss]:.4f} after, on a part held out",
                soft_wrap=True,
            )
        with console.progress("writing", len(merged.weights.names())) as tick:
            save(merged, out, overwrite=overwrite, progress=tick)
        console.out.print(f"wrote {out}: {merged.history[-1]['what']}", soft_wrap=True)
        if attention == "circuits":
            console.out.print(
                "this is no stock checkpoint: its heads have twice the size; only symmerge loads it",
                soft_wrap=True,
            )


def _repairable(part: str | None, data: str | None, attention: str) -> None:
    if part is None:
        return
    options.choice("--repair", part, get_args(Part))
    if data is None:
        raise MismatchError(
            f"--repair {part} needs inputs to see coordinates on: give --repair-data, as --data of align"
        )
    if attention == "circuits":
        raise MismatchError(
            "--repair works on stock checkpoints: --attention circuits makes none; use factors or svd"
        )


def _times(given: list[str]) -> dict[str, float]:
    found = {}
    for item in given:
        name, _, value = item.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise MismatchError(f"--at {item}: write NAME=T, for example ff=0.3") from None
        if not 0 <= found[name] <= 1:
            raise MismatchError(f"--at {item}: t must lie between 0 and 1")
    return found


def same(
    a: options.ModelA, b: options.ModelB, json: options.Json = False, config: options.Config = None
) -> None:
    """Are two checkpoints the same function up to symmetry? Prints the certificate; exit code 0 for yes, 1 for no.

    Example: [bold]symmerge same ./gpt2 ./elsewhere[/]
    """
    with console.friendly():
        found = decide(load(a), load(b), progress=console.note)
        if json:
            console.show_json(found.to_json())
        else:
            answer = "the same function up to symmetry" if found.same else "NOT the same function"
            console.out.print(
                f"{answer}: weights {found.before:.2e} apart before, {found.after:.2e} after (tolerance {found.tolerance:.0e});"
                f" logits {found.verdict.difference:.2e} apart (tolerance {found.verdict.tolerance:.0e})",
                soft_wrap=True,
            )
            console.show_table(
                "Distance by space",
                [{"space": name, **row} for name, row in found.by_space.items()],
            )
        raise typer.Exit(0 if found.same else 1)
