"""Bring many models into one basin: canonical forms, universe matching, learned refinement, and every checkpoint with proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symmerge.aligning.pair import recipe_for
from symmerge.checkpoints.folders import new_folder
from symmerge.errors import MismatchError
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.recipes import Recipe, Solver
from symmerge.matching.resume import ResumeFile
from symmerge.matching.search import Matching
from symmerge.matching.universes import ROUNDS, Universe, cycle_error, match_universe
from symmerge.models.alignment import apply
from symmerge.models.alignment_results import UniverseFile
from symmerge.models.model import Model, Progress, save
from symmerge.models.orbit import keep
from symmerge.verification.verdict import gate


@dataclass(frozen=True)
class AlignedMany:
    """All models in the coordinates of the reference, in the order given, without those that failed; and how it was found."""

    models: tuple[Model, ...]
    universe: Universe
    recipe: Recipe

    @property
    def reference(self) -> Model:
        return self.models[self.universe.members.index(self.universe.reference)]

    def evidence(self) -> dict[str, Any]:
        """In short, for the card of a merged model."""
        spreads = self.universe.spreads
        found = {
            "recipe": self.recipe.about,
            "reference": self.reference.where,
            "rounds": len(spreads) - 1,
        }
        found |= {"spread_first": f"{spreads[0]:.3f}", "spread_last": f"{spreads[-1]:.3f}"}
        return found | (
            {"left_out": list(self.universe.left_out.values())} if self.universe.left_out else {}
        )

    def to_file(self) -> UniverseFile:
        """Content of universe.json."""
        return UniverseFile(
            recipe=self.recipe.about,
            models=tuple(model.where for model in self.models),
            reference=self.universe.reference,
            spreads=self.universe.spreads,
            moved=self.universe.moved,
            left_out=self.universe.left_out,
            interrupted=self.universe.interrupted,
            settings=self.universe.settings,
            cycle_error=cycle_error(self.universe),
        )


def align_many(
    models: Sequence[Model],
    matching: Solver | Recipe | None = None,
    *,
    reference: int | str = 0,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
    resume_file: ResumeFile | None = None,
) -> AlignedMany:
    """Find one symmetry per model that brings all together: `align_many([a, b, c])`. All stay the same functions.

    `reference` is whose coordinates all take: a place in the list, or "medoid" for the one closest to all others (every pair is matched to find it).
    """
    chosen = recipe_for(matching)
    if chosen.non_symmetric:
        raise MismatchError(
            f"this recipe is no symmetry ({chosen.about}): measure it with barrier, pair by pair"
        )
    if isinstance(reference, int) and not 0 <= reference < len(models):
        raise MismatchError(
            f"reference {reference}: there are {len(models)} models, counted from 0"
        )
    ready = [chosen.prepare(model) for model in models]
    first = chosen.matching
    start = first.first_solver() if isinstance(first, LearnedMatching) else first
    if not isinstance(start, Matching):
        raise MismatchError(
            "many models start from weights or activations: choose one of these with start"
        )
    found = match_universe(
        ready, start, reference=reference, rounds=rounds, progress=progress, resume_file=resume_file
    )
    if isinstance(first, LearnedMatching) and not found.interrupted:
        found = first.refine(
            [ready[number].cached() for number in found.members], found, progress=progress
        )
    return AlignedMany(
        tuple(apply(found.alignments[number], ready[number]) for number in found.members),
        found,
        chosen,
    )


def write(
    found: AlignedMany,
    models: Sequence[Model],
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """OUT/reference, and OUT/aligned-N for every other by its place: stock checkpoints, each verified to be the function it was, with its alignment."""
    chosen, inputs = found.universe, tuple(model.path for model in models if model.path)
    with new_folder(
        out,
        overwrite=overwrite,
        needs_bytes=sum(model.bytes for model in found.models),
        inputs=inputs,
    ) as folder:
        for number, model in zip(chosen.members, found.models, strict=True):
            name = "reference" if number == chosen.reference else f"aligned-{number}"
            save(
                model,
                folder / name,
                progress=progress,
                gate=gate(models[number], progress=progress),
            )
            if number != chosen.reference:
                restrict = found.recipe.restricted(models[number])
                keep(
                    chosen.alignments[number],
                    models[number],
                    folder / f"alignment-{number}.safetensors",
                    steps=found.recipe.steps,
                    restrict=restrict,
                )
        found.to_file().write(folder / "universe.json")
