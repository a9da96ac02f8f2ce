"""The verb merge: align and average models."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symmerge.aligning.folders import AlignedFolder
from symmerge.aligning.jobs import (
    Unfinished,
    dropping_if_quick,
    preview,
    relations,
    was_interrupted,
)
from symmerge.aligning.options import NONE
from symmerge.checkpoints.folders import nearest_folder, refuse
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
from symmerge.cli.options.config import Config
from symmerge.cli.options.groups import verb
from symmerge.cli.options.matching import Aligning, Learning, Many, align_options
from symmerge.cli.options.merging import Merging
from symmerge.cli.verdicts import show_verdict
from symmerge.errors import MismatchError
from symmerge.merging.handover import check_handover, hand_over
from symmerge.merging.mergekit_methods import MergekitMerge
from symmerge.merging.mergekit_reading import is_mergekit, read_mergekit
from symmerge.merging.pipeline import MergeJob, prepare_merge
from symmerge.merging.plan import MergePlan
from symmerge.merging.proof import NEW
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.merging.verdict_words import advice, check_worth
from symmerge.models.model import Model
from symmerge.models.precision import check_dtype, to_dtype
from symmerge.models.saving import provenance_of
from symmerge.report.published import publish

REMEDY = "there is nothing to merge it with; give two or more models: symmerge merge A B --out DIR"


@verb(
    "interrupted: no model was written; if an alignment was started, --resume continues from it",
    examples=(
        "seed-0 seed-1 --out merged",
        "seed-0 seed-1 --data text.txt --effort best --out merged",
        "seed-0 seed-1 seed-2 --weights 0.5,0.3,0.2 --out merged",
    ),
)
def merge(
    out: Out,
    aligning: Aligning,
    merging: Merging,
    learning: Learning,
    many: Many,
    output: Output,
    models: Models = None,
    device: Device = "cpu",
    seed: Seed = 0,
    resume: Resume = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    config: Config = None,
) -> None:
    """Merge two or more models into one stock checkpoint of the original size.

    For models trained from different initialisations, whose plain average would be useless: all
    are aligned to the first, which changes no function, then combined. No data is needed. A
    folder written by align is merged without aligning again.
    """
    console.phases.verbose = output.verbose
    return_freed_memory()
    source, folders = _source(models, config)
    check_dtype(output.dtype)
    refuse(out.absolute(), overwrite, folders)
    unfinished, method = Unfinished(out, resume), align_options(aligning, learning, seed, device)
    plan = MergePlan(**merging.keywords(), seed=seed, device=device)  # type: ignore[arg-type]
    check_handover(output.mergekit, plan, out, overwrite)
    how = {**vars(many), "unfinished": unfinished, "generate": not dry_run}
    job = prepare_merge(source, plan, method, **how)
    if dry_run:
        _show_preview(job, out)
        return
    resume_file = unfinished.start(job.models, job.recipe) if job.recipe else None
    for line in relations(job.models) if not job.folder else ():
        console.warn(line)
    with dropping_if_quick(resume_file):
        result = job.align(console.note, resume_file, scratch=nearest_folder(out))
        combined = job.combine(result, console.note)
        merged = healed = job.heal(result, combined, console.note)
        merged = to_dtype(merged, output.dtype or job.dtype)
        unhealed = None if healed is combined else combined
        verdict = None
        if not output.no_verdict:
            more = {"unhealed": unhealed, "skills": tuple(merging.skill or ())}
            verdict = job.judge(result, merged, console.note, **more)
        if aligning.method != NONE and not merging.anyway:
            check_worth(verdict)
        best = aligning.effort == "best"
        verdict = verdict and advice(verdict, best=best)
        with console.progress("writing", len(merged.weights.names())) as tick:
            publish(merged, verdict, out, overwrite=overwrite, progress=tick)
    aligned = None if isinstance(result, AlignedFolder) else result
    if resume_file and aligned and not was_interrupted(aligned):
        resume_file.remove()
    if output.mergekit:
        stored = {"overwrite": overwrite, "dtype": output.dtype}
        hand_over(output.mergekit, job, aligned, out, **stored)
        console.note(f"wrote {output.mergekit}: mergekit-yaml {output.mergekit} MERGED")
    if output.json:
        record = {"verdict": verdict.to_json() if verdict else None}
        console.show_json({**provenance_of(merged, None).to_json(), **record})
    else:
        _show(merged, job, out)
        show_verdict(verdict and _advised(verdict, folders, out, best=best))


def _source(
    models: Sequence[Path] | None, config: Path | None
) -> tuple[Path | MergekitMerge | Sequence[Path], tuple[Path, ...]]:
    """What is merged, and its folders: a mergekit config, a folder that align wrote, or models."""
    if config is not None and is_mergekit(config):
        if models:
            raise MismatchError(
                f"{config} already names the models to merge: leave out {models[0]}"
            )
        merge = read_mergekit(config)
        return merge, tuple(map(Path, merge.models))
    if models and len(models) == 1 and not (models[0] / "config.json").exists():
        return models[0], tuple(models)  # a folder that align wrote
    folders = check_models(models, REMEDY)
    return folders, folders


def _advised(
    verdict: MergeVerdict, folders: Sequence[Path], out: Path, *, best: bool
) -> MergeVerdict:
    command = shlex.join(["symmerge", "merge", *map(str, folders), "--out", f"{out}-2"])
    return advice(verdict, command, str(out), best=best)


def _show_preview(job: MergeJob, out: Path) -> None:
    for line in preview(job.models, job.recipe):
        console.say(line)
    console.say(
        f"then combine {len(job.models)} models by {job.plan.combine}; nothing was written to {out}"
    )


def _show(merged: Model, job: MergeJob, out: Path) -> None:
    _show_steps(merged, job.plan)
    console.say(f"wrote {out}: {merged.history[-1].what}")
    console.say(_proof(merged))
    if not merged.stock:
        console.say(
            "this is not a stock checkpoint: its heads are twice as large; only symmerge loads it"
        )


def _proof(merged: Model) -> str:
    """What is certain about a merge, and what is not."""
    evidence = next((step.evidence for step in merged.history if step.evidence), {})
    proved = evidence.get("proved", "nothing: the models were averaged as they are")
    return f"proved: {proved}; not proved: {evidence.get('not_proved', NEW)}"


def _show_steps(merged: Model, plan: MergePlan) -> None:
    """Print the attempts of a soup, and the changes of REPAIR."""
    for step in merged.history:
        details: Mapping[str, Any] = step.details
        if details.get("method") == "soup":
            console.show_table(f"Soup, by the loss on {plan.data}", details["tried"])
        if step.step == "repair":
            before, after = details["before"]["loss"], details["after"]["loss"]
            console.say(
                f"repaired {plan.repair}: loss {before:.4f} before, {after:.4f} after,"
                " on held-out inputs"
            )
