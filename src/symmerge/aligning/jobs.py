"""Aligning two models or more as one job: described, solved, interrupted and resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from symmerge.aligning.aligned import Aligned
from symmerge.aligning.many import AlignedMany, align_many
from symmerge.aligning.pair import align
from symmerge.checkpoints.files import set_aside
from symmerge.errors import SymmergeError
from symmerge.matching.forecasts import announcement
from symmerge.matching.recipes import Recipe
from symmerge.matching.resume import ResumeFile
from symmerge.models.distances import RELATED, SAME_BASIN, likeness
from symmerge.models.model import Model
from symmerge.models.precision import dtype_name, to_dtype
from symmerge.models.progress import Progress

WORTH_KEEPING = 60.0  # seconds
PLAIN = "no alignment: the models are combined as they are"


@dataclass(frozen=True)
class Unfinished:
    """What an interrupted alignment leaves beside the folder `out`, for --resume."""

    out: Path
    resume: bool = False

    @property
    def statistics(self) -> Path:
        """The file for statistics that are not complete yet."""
        return self.out.with_name(f"{self.out.name}.statistics.partial.safetensors")

    def start(self, models: Sequence[Model], recipe: Recipe, rank: int = 0) -> ResumeFile:
        """The file to go on from, for exactly these models and options.

        Without `resume`, what an earlier run left is set aside, by the first process.
        """
        task = {
            "models": [model.where for model in models],
            "spec": models[0].spec.fingerprint,
            "recipe": recipe.about,
            **recipe.matching.record(),
        }
        file = ResumeFile(self.out.with_name(f"{self.out.name}.partial.safetensors"), task)
        if not self.resume and not rank:
            set_aside(file.path, self.statistics)
        return file


@contextmanager
def dropping_if_quick(resume_file: ResumeFile | None) -> Iterator[None]:
    """After an error, remove the file to go on from, unless it holds a minute of work.

    Ctrl-C keeps it in any case, and one that an earlier run left is never removed.
    """
    began, earlier = time.monotonic(), resume_file is not None and resume_file.path.exists()
    try:
        yield
    except SymmergeError:
        if resume_file and not earlier and time.monotonic() - began < WORTH_KEEPING:
            resume_file.remove()
        raise


def align_models(
    models: Sequence[Model],
    recipe: Recipe,
    *,
    reference: int | str = 0,
    rounds: int | None = None,
    shared_tokens: bool = False,
    progress: Progress | None = None,
    resume_file: ResumeFile | None = None,
) -> Aligned | AlignedMany:
    """Align opened models by a recipe: a pair by `align`, more by `align_many`."""
    if len(models) > 2:
        return align_many(
            models,
            recipe,
            reference=reference,
            rounds=rounds,
            progress=progress,
            resume_file=resume_file,
        )
    a, b = models
    return align(
        a, b, recipe, shared_tokens=shared_tokens, progress=progress, resume_file=resume_file
    )


def was_interrupted(result: Aligned | AlignedMany) -> bool:
    """Whether this is only the best so far."""
    how = result.solution if isinstance(result, Aligned) else result.universe
    return how.interrupted


def stored_in(result: Aligned | AlignedMany, dtype: str | None) -> Aligned | AlignedMany:
    """The same alignment, its models to be stored in another precision (None: as they are)."""
    if isinstance(result, AlignedMany):
        return replace(result, models=tuple(to_dtype(model, dtype) for model in result.models))
    reference, aligned = (to_dtype(model, dtype) for model in result.models)
    return replace(result, reference=reference, aligned=aligned)


def preview(models: Sequence[Model], recipe: Recipe | None) -> Iterator[str]:
    """What would be done, one line each: models, their sizes, the method and what it takes."""
    for model in models:
        yield (
            f"{model.where}: {model.spec.architecture}, {model.parameters:,} parameters,"
            f" {model.bytes / 1e6:,.0f} MB in {dtype_name(model.dtype)}"
        )
    yield from relations(models)
    yield announcement(recipe, models[0]) if recipe else PLAIN


def relations(models: Sequence[Model]) -> Iterator[str]:
    """What should be known about models before they are aligned: which have a common origin."""
    for a, b in combinations(models, 2):
        if a.spec.fingerprint != b.spec.fingerprint:
            continue
        alike = likeness(a, b)
        if alike >= SAME_BASIN:
            yield (
                f"{a.where} and {b.where} are already aligned (their weights agree by {alike:.2f}:"
                " fine-tunes of one base?); a plain average is enough: merge --method none"
            )
        elif alike >= RELATED:
            yield (
                f"{a.where} and {b.where} are related: their weights agree by {alike:.2f},"
                " those of independent models by less than 0.05"
            )
