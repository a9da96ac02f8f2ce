"""The result of aligning a pair (`Aligned`): solving for it, its evidence, writing it to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

from symmerge.aligning.tokens import SharedTokens, verify_shared
from symmerge.checkpoints.folders import new_folder
from symmerge.errors import SymmetryError
from symmerge.matching.base import Solution
from symmerge.matching.evidence import Weighting
from symmerge.matching.forecasts import announcement
from symmerge.matching.learning.soft_permutations import relax
from symmerge.matching.recipes import Recipe
from symmerge.matching.resume import ResumeFile
from symmerge.matching.search import Matching
from symmerge.models.alignment import apply
from symmerge.models.alignment_results import SolutionFile
from symmerge.models.distances import SAME_BASIN, distance, likeness
from symmerge.models.model import Model
from symmerge.models.orbit import keep
from symmerge.models.progress import Notice, Progress
from symmerge.models.saving import save
from symmerge.models.structure import structure_of
from symmerge.symmetry.threads import same_bytes
from symmerge.verification.written import gate

Beside = Callable[[Path], None]
"""Writes more files into a folder of aligned models."""


@dataclass(frozen=True, repr=False)
class Aligned:
    """A in canonical form (`reference`), B in A's coordinates (`aligned`), and the evidence.

    `sources` are the original A and B; `shared` holds their common tokens, if B was converted to
    A's vocabulary. `before` and `after` are distances between the weights, `likeness` is that of
    the sources.
    """

    reference: Model
    aligned: Model
    solution: Solution
    recipe: Recipe
    before: float
    after: float
    sources: tuple[Model, Model]
    shared: SharedTokens | None = None
    likeness: float = 0.0

    def __repr__(self) -> str:
        a, b = (model.where for model in self.sources)
        return (
            f"Aligned({b} to {a}, by {self.recipe.method} in {self.solution.seconds:.1f} s:\n"
            f"  distance {self.before:.3f} before, {self.after:.3f} after)"
        )

    @property
    def models(self) -> tuple[Model, Model]:
        """Both models in one basin."""
        return self.reference, self.aligned

    @property
    def already(self) -> bool:
        """Whether the pair was in one basin before alignment."""
        return self.likeness >= SAME_BASIN

    def evidence(self) -> dict[str, object]:
        """A summary for the model card of a merge."""
        return pair_evidence(self.to_file())

    def to_file(self) -> SolutionFile:
        """Content of solution.json."""
        solution = self.solution
        return SolutionFile(
            recipe=self.recipe.about,
            distance_before=self.before,
            distance_after=self.after,
            already_aligned=self.already,
            objective=solution.objective,
            by_space=solution.by_space,
            changes=solution.changes,
            converged=solution.converged,
            seconds=solution.seconds,
            settings=solution.settings,
            trials=tuple(trial.to_json() for trial in solution.trials),
            interrupted=solution.interrupted,
            distance=solution.distance,
        )


def pair_evidence(file: SolutionFile) -> dict[str, object]:
    """A summary of solution.json, for the model card of a merge."""
    settings: Mapping[str, Any] = file.settings
    chosen = settings.get("chosen")
    return {
        "recipe": file.recipe,
        "distance_before": f"{file.distance_before:.3f}",
        "distance_after": f"{file.distance_after:.3f}",
        "weighting_chosen": str(Weighting.from_json(chosen)) if chosen else "",
        "chosen_by": f"{settings.get('scored_on', '')}, of {len(file.trials)} tries",
        **{name: settings[name] for name in ("learned", "soft") if settings.get(name)},
        "seed": settings.get("seed"),
    }


def solve_pair(
    a: Model,
    b: Model,
    recipe: Recipe,
    *,
    progress: Progress | None = None,
    resume_file: ResumeFile | None = None,
) -> Aligned:
    """Bring `b` to `a` by a recipe: prepare both models, solve, apply the alignment."""
    learns = not isinstance(recipe.matching, Matching)
    with nullcontext() if learns else same_bytes():
        return _solve_pair(a, b, recipe, progress, resume_file)


def _solve_pair(
    a: Model,
    b: Model,
    recipe: Recipe,
    progress: Progress | None,
    resume_file: ResumeFile | None,
) -> Aligned:
    first, second = (recipe.prepare(model).cached() for model in (a, b))
    if progress:
        progress(Notice(announcement(recipe, first)))
    solution = recipe.matching.solve(first, second, progress=progress, resume_file=resume_file)
    # Soft matching interrupted before its first step has no soft result.
    soft = recipe.non_symmetric == "soft" and solution.relaxed
    device = recipe.matching.device
    moved = relax(solution, second) if soft else apply(solution.alignment, second, device=device)
    here = {"device": device}
    after = distance(first, moved, **here) if isnan(solution.distance) else solution.distance
    # What a plain average would see: stored weights if the tables agree, else canonical forms.
    comparable = a.spec.fingerprint == b.spec.fingerprint
    before = distance(*((a, b) if comparable else (first, second)), **here)
    alike = likeness(a, b) if comparable else 0.0
    return Aligned(first, moved, solution, recipe, before, after, (a, b), likeness=alike)


@same_bytes()
def write_aligned(
    alignment: Aligned,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    beside: Beside | None = None,
) -> None:
    """Write OUT/reference and OUT/aligned, each verified against its source, and the evidence.

    Both are stock checkpoints. Beside them: alignment.safetensors, solution.json, structure.json,
    and what `beside` writes.
    """
    recipe, (a, b) = alignment.recipe, alignment.sources
    if recipe.non_symmetric:
        raise SymmetryError(
            f"this recipe is not a symmetry ({recipe.about}): its result is not the function of"
            f" {b.where}; measure it with barrier"
        )
    run = partial(verify_shared, shared=alignment.shared) if alignment.shared else None
    how = {"progress": progress, "device": recipe.matching.device}
    gates = gate(a, **how), gate(b, **how, run=run)
    needs = sum(model.bytes for model in alignment.models)
    inputs = tuple(model.path for model in (a, b) if model.path)
    with new_folder(out, overwrite=overwrite, needs_bytes=needs, inputs=inputs) as folder:
        save(alignment.reference, folder / "reference", progress=progress, gate=gates[0])
        save(alignment.aligned, folder / "aligned", progress=progress, gate=gates[1])
        file, restrict = folder / "alignment.safetensors", recipe.restricted(b)
        elements = alignment.solution.alignment
        keep(elements, b, file, steps=recipe.steps, restrict=restrict, reference=a)
        write_evidence(alignment, folder)
        if beside:
            beside(folder)


def write_evidence(alignment: Aligned, folder: Path) -> None:
    """Write the files that `symmerge report` reads: the solver's record and the structure."""
    solution = alignment.solution
    alignment.to_file().write(folder / "solution.json")
    structure_of(solution.alignment).write(folder / "structure.json")
    if solution.correlations:
        solution.correlations.write(folder / "correlations.json")
