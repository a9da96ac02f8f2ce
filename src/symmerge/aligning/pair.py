"""Align one model to another: `align`."""

from __future__ import annotations

from symmerge.aligning.aligned import Aligned, solve_pair
from symmerge.aligning.inputs import ModelLike, open_models
from symmerge.aligning.options import Method, recipe_for
from symmerge.aligning.vocabularies import align_vocabularies, read_alike
from symmerge.matching.recipes import Recipe
from symmerge.matching.resume import ResumeFile
from symmerge.models.progress import ProgressLike, reporter


def align(
    a: ModelLike,
    b: ModelLike,
    method: Method = None,
    *,
    units: str = "zero",
    shared_tokens: bool = False,
    progress: ProgressLike = None,
    resume_file: ResumeFile | None = None,
) -> Aligned:
    """Find the symmetry that brings `b` closest to `a`. Neither function changes.

    `method` is a method or recipe by name ("learned", "permutations"), `AlignOptions`, a recipe or
    a solver. A narrow model is widened first (`units`: see `open_models`). `shared_tokens` matches
    different vocabularies by the tokens both have; the result has A's tokenizer. `progress` is True
    (lines on standard error) or a function that takes lines.
    """
    first, second = open_models([a, b], units=units)
    pair = [first, second]
    readable = pair if isinstance(method, Recipe) else read_alike(pair, shared_tokens)
    recipe = recipe_for(method, readable)
    solve = align_vocabularies if shared_tokens else solve_pair
    return solve(first, second, recipe, progress=reporter(progress), resume_file=resume_file)
