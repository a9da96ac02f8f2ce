"""`merge`: widen, align, combine and repair models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from symmerge.aligning.aligned import Aligned
from symmerge.aligning.folders import AlignedFolder, load_aligned
from symmerge.aligning.inputs import ModelLike, open_models
from symmerge.aligning.jobs import Unfinished, align_models, was_interrupted
from symmerge.aligning.many import AlignedMany, check_many
from symmerge.aligning.options import NONE, AlignOptions, Method, options_named, recipe_for
from symmerge.aligning.vocabularies import read_alike
from symmerge.checkpoints.scratch import computed_once
from symmerge.errors import MismatchError
from symmerge.evaluation.tasks import Task
from symmerge.matching.recipes import Recipe
from symmerge.matching.resume import ResumeFile
from symmerge.merging.healing import HealOptions, heal
from symmerge.merging.mergekit_methods import MergekitMerge
from symmerge.merging.plan import MergePlan
from symmerge.merging.proof import prove_parents
from symmerge.merging.verdict import judge_alignment, parents_of
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.models.model import Model
from symmerge.models.precision import check_dtype, to_dtype
from symmerge.models.progress import Notice, Progress, ProgressLike, reporter

INPUTS = ("data", "samples", "calibration", "calibration_samples")
"""Options that an alignment and a merge share."""

Folder = str | PathLike[str]
Result = Aligned | AlignedMany | AlignedFolder


def merge(
    models: Aligned | AlignedMany | AlignedFolder | MergekitMerge | Folder | Sequence[ModelLike],
    *,
    method: Method = None,
    t: float | None = None,
    weights: Sequence[float] | None = None,
    combine: str = "mean",
    density: float = 0.5,
    data: str | Task | None = None,
    samples: int | None = None,
    at: Mapping[str, float] | Literal["learned"] | None = None,
    attention: str = "factors",
    repair: str | None = None,
    calibration: str | Task | None = None,
    calibration_samples: int | None = None,
    heal: int | None = None,
    units: str = "zero",
    shared_tokens: bool = False,
    reference: int | str = 0,
    rounds: int | None = None,
    dtype: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressLike = None,
) -> Model:
    """Merge models into one: `merge([a, b])` aligns them first, `merge(align(a, b))` does not.

    `merge("aligned")` merges what `symmerge align` wrote to a folder,
    `merge(read_mergekit("merge.yml"))` what a mergekit config says.

    | option | what it does |
    |---|---|
    | `method` | how to align, as for `align`; "none" for a plain average |
    | `t`, `weights` | position between two models; weight of each model |
    | `combine`, `density` | mean, slerp, ties, dare, dare_ties or soup; share of differences kept |
    | `data`, `samples` | what is learned from, and what a soup is chosen by |
    | `at`, `attention` | another t for parts, or "learned"; how heads are averaged: see `average` |
    | `repair` | REPAIR of "maps" or "norms" |
    | `calibration`, `calibration_samples` | what activations and REPAIR look at; else `data` |
    | `heal` | steps of distillation from the parents into all weights, after merging |
    | `units`, `shared_tokens` | different widths and vocabularies: see `align` |
    | `reference`, `rounds` | for three models or more: see `align_many` |
    | `dtype` | precision of the result: float32, float16 or bfloat16; as the first model's |
    """
    progress = reporter(progress)
    check_dtype(dtype)
    plan = MergePlan(
        t=t,
        weights=weights,
        combine=combine,
        density=density,
        data=data,
        samples=samples,
        at=at or {},
        attention=attention,
        repair=repair,
        calibration=calibration,
        calibration_samples=calibration_samples,
        heal=heal,
        seed=seed,
        device=device,
    )
    if isinstance(models, Aligned | AlignedMany):
        job = _aligned_job(models, plan)
        return to_dtype(job.heal(models, job.combine(models, progress), progress), dtype)
    job = prepare_merge(
        models,
        plan,
        method,
        units=units,
        shared_tokens=shared_tokens,
        reference=reference,
        rounds=rounds,
    )
    result = job.align(progress)
    merged = job.heal(result, job.combine(result, progress), progress)
    return to_dtype(merged, dtype or job.dtype)


@dataclass(frozen=True, kw_only=True)
class MergeJob:
    """A merge whose options are checked and whose inputs are read; nothing is solved yet.

    Without a recipe, the models are combined as they are.
    """

    models: Sequence[Model]
    recipe: Recipe | None
    plan: MergePlan
    shares: Sequence[float]
    repair_task: Task | None
    many: Mapping[str, Any] = field(default_factory=dict)  # options of `align_models`
    folder: AlignedFolder | None = None  # models that were aligned before
    healing: HealOptions | None = None

    @property
    def dtype(self) -> str | None:
        """The precision that a mergekit config asks for."""
        return self.plan.mergekit.dtype if self.plan.mergekit else None

    def align(
        self,
        progress: Progress | None = None,
        resume_file: ResumeFile | None = None,
        scratch: Path | None = None,
    ) -> Result | None:
        """The models in one basin; None if they are combined as they are.

        What does not fit in memory is kept in the folder `scratch`, else computed several times.
        """
        if self.folder or self.recipe is None:
            return self.folder
        how = {**self.many, "progress": progress, "resume_file": resume_file}
        result = align_models(self.models, self.recipe, **how)
        if was_interrupted(result) and progress:
            progress(Notice("interrupted: merging with the best alignment so far"))
        return _computed_once(result, scratch)

    def combine(self, result: Result | None, progress: Progress | None = None) -> Model:
        """The merge of what `align` gave."""
        models, shares, evidence = list(self.models), self.shares_of(result), None
        if result is not None:
            models = list(result.models)
            evidence = {**result.evidence(), **prove_parents(result, progress, self.plan.device)}
        plan = self.plan.with_shares(models, shares, progress)
        merged = plan.combined(models, shares, evidence, progress)
        merged = self.plan.repaired(merged, models, shares, self.repair_task)
        return self.folder.with_origins(merged) if self.folder else merged

    def heal(self, result: Result | None, merged: Model, progress: Progress | None = None) -> Model:
        """The merge, healed if that was asked for; unchanged where healing does not help."""
        if self.healing is None:
            return merged
        parents = parents_of(result, self.models)[0]
        return heal(merged, parents, options=self.healing, progress=progress).model

    def judge(
        self,
        result: Result | None,
        merged: Model,
        progress: Progress,
        unhealed: Model | None = None,
        skills: Sequence[str] = (),
    ) -> MergeVerdict | None:
        """How good the merge of what `align` gave is; None where it cannot be measured.

        A healed one is shown beside what it was before; `skills` are data that are measured apart.
        """
        plan = self.plan
        how = {"weights": self.shares_of(result), "seed": plan.seed, "device": plan.device}
        how |= {"unhealed": unhealed, "skills": skills}
        return judge_alignment(result, merged, self.models, plan.data, progress=progress, **how)

    def shares_of(self, result: Result | None) -> list[float]:
        """The weights of the models that could be aligned."""
        if not isinstance(result, AlignedMany) or len(self.shares) == len(result.models):
            return list(self.shares)
        kept = [self.shares[number] for number in result.universe.members]
        return [share / sum(kept) for share in kept]


def _computed_once(result: Aligned | AlignedMany, scratch: Path | None) -> Aligned | AlignedMany:
    """The same models, whose moved tensors are kept.

    Each costs a product with the stream's rotation, and is read five times: its transport is
    checked, both runs of the check need it, every row of embeddings once more, then the merge.
    """
    share = 1.0 if isinstance(result, Aligned) else 1 / len(result.models)

    def kept(model: Model) -> Model:
        return replace(model, weights=computed_once(model.weights, scratch, share))

    if isinstance(result, Aligned):
        return replace(result, aligned=kept(result.aligned))
    return replace(result, models=tuple(map(kept, result.models)))


def prepare_merge(
    models: Folder | AlignedFolder | MergekitMerge | Sequence[ModelLike],
    plan: MergePlan,
    method: Method = None,
    *,
    units: str = "zero",
    unfinished: Unfinished | None = None,
    generate: bool = True,
    **many: Any,
) -> MergeJob:
    """Open the models, check every option and read the inputs, before any work.

    One folder is one that `symmerge align` wrote. `many` are the options of `align_models`; for
    `generate` see `AlignOptions.to_recipe`.
    """
    if isinstance(models, str | PathLike | AlignedFolder):
        folder = models if isinstance(models, AlignedFolder) else load_aligned(models)
        _refuse_method(folder, method)
        return _aligned_job(folder, _with_inputs(plan, method)[0])
    if isinstance(models, MergekitMerge):
        plan, models = replace(plan, mergekit=models), models.models
    check_many(many.get("reference", 0), len(models), many.get("rounds"))
    opened, (plan, method) = open_models(models, units=units), _with_inputs(plan, method)
    aligns = not (isinstance(method, AlignOptions) and method.method == NONE)
    readable = read_alike(opened, many.get("shared_tokens", False) and aligns)
    plan.check(opened)
    shares = plan.shares(opened)
    return MergeJob(
        models=opened,
        recipe=_recipe(method, readable, unfinished, generate),
        plan=plan,
        shares=shares,
        repair_task=plan.repair_task(readable) if generate else None,
        many=many,
        healing=plan.heal_options(readable) if generate else None,
    )


def _recipe(
    method: Method, models: Sequence[Model], unfinished: Unfinished | None, generate: bool
) -> Recipe | None:
    if not isinstance(method, AlignOptions):
        return recipe_for(method, models)
    if method.method == NONE:
        method.check_unaligned()
        return None
    partial = unfinished and unfinished.statistics
    return method.to_recipe(models, partial=partial, generate=generate)


def _with_inputs(plan: MergePlan, method: Method) -> tuple[MergePlan, Method]:
    """The inputs of a merge are those of its alignment, and the other way round."""
    if method is None or isinstance(method, str):
        options = options_named(method) if method else AlignOptions()
        method = replace(options, seed=plan.seed, device=plan.device)
    if not isinstance(method, AlignOptions):
        return plan, method
    given = {name: getattr(plan, name) or getattr(method, name) for name in INPUTS}
    plan, method = replace(plan, **given), replace(method, **given)
    plan = replace(plan, target=method.target or plan.target)
    # What only REPAIR looks at is none of the alignment's.
    if plan.repair and (method.method == NONE or not method.observes):
        method = replace(method, calibration=None, calibration_samples=None)
    return plan, method


def _refuse_method(folder: AlignedFolder, method: Method) -> None:
    """Refuse options of an alignment: an aligned folder is not aligned again."""
    given = method is not None
    if isinstance(method, AlignOptions):  # the command line gives them all; the usual ones say none
        inputs = {name: getattr(method, name) for name in (*INPUTS, "seed", "device")}
        usual = AlignOptions(**inputs)
        given = method != usual
    if given:
        raise MismatchError(
            f"{folder.path} is already aligned: leave out the options that say how to align,"
            " or merge the original models"
        )


def _aligned_job(result: Result, plan: MergePlan) -> MergeJob:
    """A merge of models that are aligned already."""
    models = result.models
    plan.check(models)
    return MergeJob(
        models=models,
        recipe=None,
        plan=plan,
        shares=plan.shares(models),
        repair_task=plan.repair_task(models),
        folder=result if isinstance(result, AlignedFolder) else None,
        healing=plan.heal_options(models),
    )
