"""Align many models: universe matching, learned refinement, verification of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from symmerge.aligning.aligned import Beside
from symmerge.aligning.inputs import ModelLike, open_models
from symmerge.aligning.options import Method, recipe_for
from symmerge.checkpoints.folders import new_folder
from symmerge.errors import MismatchError
from symmerge.matching.base import Universe, cycle_error
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.recipes import Recipe
from symmerge.matching.resume import ResumeFile
from symmerge.matching.search import Matching
from symmerge.matching.universes import MEDOID, ROUNDS, match_universe
from symmerge.models.alignment import apply
from symmerge.models.alignment_results import UniverseFile
from symmerge.models.model import Model
from symmerge.models.orbit import keep
from symmerge.models.progress import Notice, Progress, ProgressLike, reporter
from symmerge.models.saving import save
from symmerge.symmetry.threads import same_bytes
from symmerge.verification.written import gate


@dataclass(frozen=True, repr=False)
class AlignedMany:
    """All models in the reference's coordinates, in the order given, without those that failed.

    `sources` are the original models; `universe` is the solver's record.
    """

    models: tuple[Model, ...]
    universe: Universe
    recipe: Recipe
    sources: tuple[Model, ...]

    def __repr__(self) -> str:
        spreads = self.universe.spreads
        return (
            f"AlignedMany({len(self.models)} models to {self.reference.where},"
            f" by {self.recipe.method}:\n"
            f"  spread {spreads[0]:.3f} at first, {spreads[-1]:.3f} at last)"
        )

    @property
    def reference(self) -> Model:
        return self.models[self.universe.members.index(self.universe.reference)]

    def evidence(self) -> dict[str, object]:
        """A summary for the model card of a merge."""
        universe = self.universe
        how = {"spreads": universe.spreads, "left_out": universe.left_out}
        return many_evidence(self.recipe.about, self.reference.where, **how)

    def to_file(self) -> UniverseFile:
        """Content of universe.json."""
        universe = self.universe
        return UniverseFile(
            recipe=self.recipe.about,
            models=tuple(model.where for model in self.models),
            reference=universe.reference,
            spreads=universe.spreads,
            moved=universe.moved,
            left_out=universe.left_out,
            interrupted=universe.interrupted,
            settings=universe.settings,
            cycle_error=cycle_error(universe),
        )


def many_evidence(
    recipe: str, reference: str, *, spreads: Sequence[float], left_out: Mapping[int, str]
) -> dict[str, object]:
    """A summary of an alignment of many models, for the model card of a merge."""
    return {
        "recipe": recipe,
        "reference": reference,
        "rounds": len(spreads) - 1,
        "spread_first": f"{spreads[0]:.3f}",
        "spread_last": f"{spreads[-1]:.3f}",
        **({"left_out": list(left_out.values())} if left_out else {}),
    }


def check_many(reference: int | str, count: int, rounds: int | None) -> None:
    """Refuse many-model options for a pair, and a reference that is out of range."""
    if count == 2 and (str(reference) != "0" or rounds is not None):
        raise MismatchError(
            "--reference and --rounds are for three or more models: leave them out;"
            " of two, the first is the reference"
        )
    _place(reference, count)


def _place(reference: int | str, count: int) -> int | str:
    if reference == MEDOID:
        return reference
    if not str(reference).isdecimal() or int(reference) >= count:
        raise MismatchError(
            f"--reference {reference}: give a number from 0 to {count - 1}, or {MEDOID}"
        )
    return int(reference)


def align_many(
    models: Sequence[ModelLike],
    method: Method = None,
    *,
    reference: int | str = 0,
    rounds: int | None = None,
    units: str = "zero",
    progress: ProgressLike = None,
    resume_file: ResumeFile | None = None,
) -> AlignedMany:
    """Find one symmetry per model that brings all into one basin: `align_many([a, b, c])`.

    No function changes. `reference` is the model whose coordinates all take: an index, or
    "medoid", the model closest to all others (every pair is matched to find it). `method` and
    `units` are those of `align`.
    """
    place, progress = _place(reference, len(models)), reporter(progress)
    sources = open_models(models, units=units)
    recipe = recipe_for(method, sources)
    if recipe.non_symmetric:
        raise MismatchError(
            f"this recipe is not a symmetry ({recipe.about}): measure it with barrier, pair by pair"
        )
    solver, prepared = recipe.matching, [recipe.prepare(model) for model in sources]
    start = solver.start_solver() if isinstance(solver, LearnedMatching) else solver
    if not isinstance(start, Matching):
        raise MismatchError(
            "many models start from weights or activations: choose one of these with start"
        )
    universe = match_universe(
        prepared,
        start,
        reference=place,
        rounds=ROUNDS if rounds is None else rounds,
        progress=progress,
        resume_file=resume_file,
    )
    if isinstance(solver, LearnedMatching) and not universe.interrupted:
        members = [prepared[number].cached() for number in universe.members]
        universe = solver.refine(members, universe, progress=progress)
    for reason in universe.left_out.values():
        progress(Notice(f"left out: {reason}"))
    move = partial(apply, device=solver.device)
    aligned = (move(universe.alignments[number], prepared[number]) for number in universe.members)
    return AlignedMany(tuple(aligned), universe, recipe, tuple(sources))


@same_bytes()
def write_aligned_many(
    alignment: AlignedMany,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    beside: Beside | None = None,
) -> None:
    """Write OUT/reference, and OUT/aligned-N for every other model (N: its index).

    Stock checkpoints with their alignments, each verified against its source; `beside` may write
    more files.
    """
    universe, sources, recipe = alignment.universe, alignment.sources, alignment.recipe
    needs = sum(model.bytes for model in alignment.models)
    inputs = tuple(model.path for model in sources if model.path)
    with new_folder(out, overwrite=overwrite, needs_bytes=needs, inputs=inputs) as folder:
        for number, model in zip(universe.members, alignment.models, strict=True):
            source, is_reference = sources[number], number == universe.reference
            name = "reference" if is_reference else f"aligned-{number}"
            check = gate(source, progress=progress, device=recipe.matching.device)
            save(model, folder / name, progress=progress, gate=check)
            if not is_reference:
                elements, file = universe.alignments[number], f"alignment-{number}.safetensors"
                how = {"steps": recipe.steps, "restrict": recipe.restricted(source)}
                keep(elements, source, folder / file, reference=sources[universe.reference], **how)
        alignment.to_file().write(folder / "universe.json")
        if beside:
            beside(folder)
