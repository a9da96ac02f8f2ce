"""Hand aligned checkpoints over to mergekit: a config file beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from symmerge.aligning.aligned import Aligned, Beside, write_aligned
from symmerge.aligning.many import AlignedMany, write_aligned_many
from symmerge.checkpoints.files import refuse_foreign, write_own_text
from symmerge.checkpoints.folders import refuse
from symmerge.errors import MismatchError
from symmerge.merging.mergekit import FORMS, mergekit_config
from symmerge.merging.pipeline import MergeJob
from symmerge.merging.plan import MergePlan
from symmerge.models.progress import Progress

MARK = "# written by symmerge"
"""The first line of a config for mergekit; only files that have it are replaced."""


def check_config(file: Path | None) -> None:
    """Refuse a place where no config can be written, before any work."""
    if file and not file.absolute().parent.is_dir():
        raise MismatchError(
            f"--mergekit {file}: there is no folder {file.absolute().parent}; create it first"
        )
    if file:
        refuse_foreign(file, MARK)


def write_config(
    file: Path, folders: Sequence[Path], dtype: str | None = None, **how: object
) -> None:
    """Write the config with which mergekit merges these folders, stored as `dtype` if given.

    For `how` see `mergekit_config`.
    """
    config = mergekit_config(folders, **how)  # type: ignore[arg-type]
    if dtype:
        kept = [line for line in config.splitlines() if not line.startswith("out_dtype:")]
        config = "\n".join([*kept, f"out_dtype: {dtype}", ""])
    write_own_text(file, f"{MARK}\n{config}", MARK)


def write_result(
    result: Aligned | AlignedMany,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    beside: Beside | None = None,
) -> None:
    """Write aligned models to a folder, each verified against its source."""
    write = write_aligned if isinstance(result, Aligned) else write_aligned_many
    how = {"overwrite": overwrite, "progress": progress, "beside": beside}
    write(result, out, **how)  # type: ignore[arg-type]


def aligned_folders(result: Aligned | AlignedMany, out: Path) -> list[Path]:
    """Where `write_result` puts the models, in their order."""
    if isinstance(result, Aligned):
        return [(out / name).absolute() for name in ("reference", "aligned")]
    universe = result.universe
    names = {number: f"aligned-{number}" for number in universe.members}
    names[universe.reference] = "reference"
    return [(out / name).absolute() for name in names.values()]


def hand_over_aligned(file: Path, result: Aligned | AlignedMany, out: Path) -> None:
    """Write the config of the mean of aligned models; the reference is its base."""
    folders = sorted(aligned_folders(result, out), key=lambda folder: folder.name != "reference")
    write_config(file, folders)


def parents_folder(out: Path) -> Path:
    """Where a merge that is handed over leaves its aligned parents."""
    return out.with_name(f"{out.name}-aligned")


def check_handover(file: Path | None, plan: MergePlan, out: Path, overwrite: bool) -> None:
    """Refuse merges that mergekit cannot make, and places that are taken."""
    check_config(file)
    if file is None:
        return
    own = {
        f"--combine {plan.combine}": plan.combine not in FORMS,
        "--at": plan.at,
        f"--attention {plan.attention}": plan.attention != "factors",
        f"--repair {plan.repair}": plan.repair,
        f"--heal {plan.heal}": plan.heal,
    }
    if problems := [option for option, given in own.items() if given]:
        raise MismatchError(
            f"--mergekit {file}: mergekit cannot merge with {', '.join(problems)};"
            " leave one of them out"
        )
    refuse(parents_folder(out).absolute(), overwrite, ())


def hand_over(
    file: Path,
    job: MergeJob,
    result: Aligned | AlignedMany | None,
    out: Path,
    *,
    overwrite: bool = False,
    dtype: str | None = None,
) -> list[Path]:
    """Write the parents, aligned, beside OUT, and the config of the same merge; their folders."""
    folders, shares = [model.path for model in job.models if model.path], job.shares_of(result)
    if result is not None:
        place = parents_folder(out)
        write_result(result, place, overwrite=overwrite)
        folders = aligned_folders(result, place)
    how = {"weights": shares, "method": FORMS[job.plan.combine].name, "density": job.plan.density}
    write_config(file, folders, dtype, **how)
    return folders
