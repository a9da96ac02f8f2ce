"""Bring one model into another's basin: canonical forms, a solver, and both checkpoints with proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

from symmerge.checkpoints.folders import new_folder
from symmerge.errors import SymmetryError
from symmerge.matching.base import Solution
from symmerge.matching.learning.soft_permutations import relax
from symmerge.matching.recipes import RECIPES, Recipe, Solver
from symmerge.matching.resume import ResumeFile
from symmerge.models.alignment import apply
from symmerge.models.alignment_results import SolutionFile
from symmerge.models.distances import distance
from symmerge.models.model import Model, Progress, save
from symmerge.models.orbit import keep
from symmerge.models.structure import structure_of
from symmerge.verification.verdict import Verdict, gate, verify

# Fine-tunes of one base lie this close without any alignment; independently trained models are about 1.4 apart.
ALREADY_ALIGNED = 0.5


@dataclass(frozen=True)
class Aligned:
    """A in canonical form, B in A's coordinates, and how it was found."""

    reference: Model
    aligned: Model
    solution: Solution
    recipe: Recipe
    before: float
    after: float

    @property
    def already(self) -> bool:
        """Whether the pair was aligned to begin with."""
        return self.before < ALREADY_ALIGNED

    def evidence(self) -> dict[str, Any]:
        """In short, for the card of a merged model."""
        solution = self.solution
        return {
            "recipe": self.recipe.about,
            "distance_before": f"{self.before:.3f}",
            "distance_after": f"{self.after:.3f}",
            "weighting_chosen": str(solution.weighting or ""),
            "chosen_by": f"{solution.scored_on}, of {len(solution.trials)} tries",
            **({"learned": solution.learned} if solution.learned else {}),
            **({"soft": solution.soft} if solution.soft else {}),
            "seed": solution.options["seed"],
        }

    def to_file(self) -> SolutionFile:
        """Content of solution.json."""
        return SolutionFile(
            recipe=self.recipe.about,
            distance_before=self.before,
            distance_after=self.after,
            already_aligned=self.already,
            **self.solution.to_json(),
        )


def align(
    a: Model,
    b: Model,
    matching: Solver | Recipe | None = None,
    *,
    progress: Progress | None = None,
    resume_file: ResumeFile | None = None,
) -> Aligned:
    """Find the symmetry that brings `b` closest to `a`. Both stay the same functions."""
    chosen = recipe_for(matching)
    ready = [chosen.prepare(model).cached() for model in (a, b)]
    solution = chosen.matching.solve(ready[0], ready[1], progress=progress, resume_file=resume_file)
    # a soft method that was interrupted before it began has no soft end
    moved = (
        relax(solution, ready[1])
        if chosen.non_symmetric == "soft" and solution.relaxed
        else apply(solution.alignment, ready[1])
    )
    after = distance(ready[0], moved) if isnan(solution.distance) else solution.distance
    return Aligned(ready[0], moved, solution, chosen, _before(a, b, ready), after)


def recipe_for(matching: Solver | Recipe | None) -> Recipe:
    """A recipe as it is, a solver in ours, and ours if nothing is given."""
    if isinstance(matching, Recipe):
        return matching
    return (
        RECIPES["symmerge"] if matching is None else replace(RECIPES["symmerge"], matching=matching)
    )


def _before(a: Model, b: Model, ready: list[Model]) -> float:
    """As stored where that compares, else in canonical form: what a plain average would see."""
    return (
        distance(a, b) if a.spec.fingerprint == b.spec.fingerprint else distance(ready[0], ready[1])
    )


def write(
    found: Aligned,
    a: Model,
    b: Model,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    compare: Callable[..., Verdict] = verify,
) -> None:
    """DIR/reference and DIR/aligned (stock checkpoints, verified to be the functions of A and B), the alignment and the evidence.

    `compare` may replace `verify` for B, where it has another vocabulary.
    """
    if found.recipe.non_symmetric:
        raise SymmetryError(
            f"this recipe is no symmetry ({found.recipe.about}): what it gives is not the function of {b.where}; measure it with barrier"
        )
    inputs = tuple(model.path for model in (a, b) if model.path)
    with new_folder(
        out,
        overwrite=overwrite,
        needs_bytes=found.reference.bytes + found.aligned.bytes,
        inputs=inputs,
    ) as folder:
        save(
            found.reference,
            folder / "reference",
            progress=progress,
            gate=gate(a, progress=progress),
        )
        save(
            found.aligned,
            folder / "aligned",
            progress=progress,
            gate=gate(b, progress=progress, compare=compare),
        )
        keep(
            found.solution.alignment,
            b,
            folder / "alignment.safetensors",
            steps=found.recipe.steps,
            restrict=found.recipe.restricted(b),
        )
        write_evidence(found, folder)


def write_evidence(found: Aligned, folder: Path) -> None:
    """How the alignment was found, and what it does: for `symmerge report`."""
    found.to_file().write(folder / "solution.json")
    structure_of(found.solution.alignment).write(folder / "structure.json")
    if found.solution.correlations:
        found.solution.correlations.write(folder / "correlations.json")
