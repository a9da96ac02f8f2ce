"""`merge`: widen, align, combine and repair models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike

from symmerge.aligning.aligned import Aligned
from symmerge.aligning.folders import AlignedFolder, load_aligned
from symmerge.aligning.inputs import ModelLike, open_models
from symmerge.aligning.many import AlignedMany, align_many, check_many
from symmerge.aligning.options import AlignOptions, Method, recipe_for
from symmerge.aligning.pair import align
from symmerge.aligning.vocabularies import read_alike
from symmerge.errors import MismatchError
from symmerge.evaluation.tasks import Task
from symmerge.matching.recipes import Recipe
from symmerge.merging.mergekit_methods import MergekitMerge
from symmerge.merging.plan import MergePlan
from symmerge.merging.proof import prove_parents
from symmerge.models.model import Model, Progress
from symmerge.models.precision import to_dtype

Folder = str | PathLike[str]


def merge(
    models: Aligned | AlignedMany | AlignedFolder | MergekitMerge | Folder | Sequence[ModelLike],
    *,
    method: Method = None,
    t: float | None = None,
    weights: Sequence[float] | None = None,
    combine: str = "mean",
    density: float = 0.5,
    held_out: str | Task | None = None,
    at: Mapping[str, float] | None = None,
    attention: str = "factors",
    repair: str | None = None,
    repair_data: str | Task | None = None,
    units: str = "zero",
    shared_tokens: bool = False,
    reference: int | str = 0,
    rounds: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Model:
    """Merge models into one: `merge([a, b])` aligns them first, `merge(align(a, b))` does not.

    `merge("aligned")` merges what `symmerge align` wrote to a folder,
    `merge(read_mergekit("merge.yml"))` what a mergekit config says.

    | option | what it does |
    |---|---|
    | `method` | how to align, as for `align`; "none" for a plain average |
    | `t`, `weights` | position between two models; weight of each model |
    | `combine`, `density` | mean, slerp, ties, dare, dare_ties or soup; share of differences kept |
    | `held_out` | data by which a soup is chosen |
    | `at`, `attention` | another t for parts; how heads are averaged: see `average` |
    | `repair`, `repair_data` | REPAIR of "maps" or "norms", and its inputs |
    | `units`, `shared_tokens` | different widths and vocabularies: see `align` |
    | `reference`, `rounds` | for three models or more: see `align_many` |
    """
    plan = MergePlan(
        t=t,
        weights=weights,
        combine=combine,
        density=density,
        held_out=held_out,
        at=at or {},
        attention=attention,
        repair=repair,
        repair_data=repair_data,
        seed=seed,
        device=device,
    )
    if isinstance(models, MergekitMerge):
        return _merge_by_config(models, plan, method, units, progress)
    if isinstance(models, str | PathLike):
        models = load_aligned(models)
    if isinstance(models, AlignedFolder):
        _refuse_method(models, method)
        return models.with_origins(_merge_aligned(models, plan, progress))
    if isinstance(models, Aligned | AlignedMany):
        return _merge_aligned(models, plan, progress)
    how = {"reference": reference, "rounds": rounds, "shared_tokens": shared_tokens}
    return _merge_models(models, plan, method, units, progress, **how)


def _merge_by_config(
    config: MergekitMerge, plan: MergePlan, method: Method, units: str, progress: Progress | None
) -> Model:
    """Align the models of a mergekit config to its base, then merge as it says."""
    plan = replace(plan, mergekit=config)
    return to_dtype(_merge_models(config.models, plan, method, units, progress), config.dtype)


def _merge_models(
    models: Sequence[ModelLike],
    plan: MergePlan,
    method: Method,
    units: str,
    progress: Progress | None,
    *,
    reference: int | str = 0,
    rounds: int | None = None,
    shared_tokens: bool = False,
) -> Model:
    if isinstance(method, AlignOptions):
        plan = replace(plan, repair_data=plan.repair_data or method.data)
    check_many(reference, len(models), rounds)
    opened, aligns = open_models(models, units=units), _aligns(method)
    readable = read_alike(opened, shared_tokens and aligns)
    plan.check(opened)
    shares, repair_task = plan.shares(opened), plan.repair_task(readable)
    aligned, evidence = opened, None
    if aligns:
        recipe = recipe_for(method, readable)
        if len(opened) > 2:
            how = {"reference": reference, "rounds": rounds, "progress": progress}
            result = align_many(opened, recipe, **how)
            shares = _without_failed(shares, result)
        else:
            result = _align(opened, recipe, shared_tokens, progress)
        aligned = list(result.models)
        evidence = {**result.evidence(), **prove_parents(result, progress)}
    merged = plan.combined(aligned, shares, evidence, progress)
    return plan.repaired(merged, aligned, shares, repair_task)


def _refuse_method(folder: AlignedFolder, method: Method) -> None:
    """Refuse options of an alignment: an aligned folder is not aligned again."""
    given = method is not None
    if isinstance(method, AlignOptions):  # the command line gives them all; the usual ones say none
        usual = AlignOptions(seed=method.seed, device=method.device)
        given = method != usual
    if given:
        raise MismatchError(
            f"{folder.path} is aligned already: leave out the options that say how to align,"
            " or merge the original models"
        )


def _merge_aligned(
    result: Aligned | AlignedMany | AlignedFolder, plan: MergePlan, progress: Progress | None
) -> Model:
    models = result.models
    plan.check(models)
    shares = plan.shares(models)
    evidence = {**result.evidence(), **prove_parents(result, progress)}
    merged = plan.combined(models, shares, evidence, progress)
    return plan.repaired(merged, models, shares, plan.repair_task(models))


def _aligns(method: Method) -> bool:
    if isinstance(method, AlignOptions) and method.method == "none" and method.recipe:
        raise MismatchError(f"--method none aligns nothing: leave out --recipe {method.recipe}")
    return (method.method if isinstance(method, AlignOptions) else method) != "none"


def _align(
    models: Sequence[Model], recipe: Recipe, shared_tokens: bool, progress: Progress | None
) -> Aligned:
    a, b = models
    result = align(a, b, recipe, shared_tokens=shared_tokens, progress=progress)
    if result.solution.interrupted and progress:
        progress("interrupted: merging with the best alignment so far")
    return result


def _without_failed(shares: Sequence[float], result: AlignedMany) -> list[float]:
    """The weights of the models that could be aligned."""
    kept = [shares[number] for number in result.universe.members]
    return [share / sum(kept) for share in kept]
