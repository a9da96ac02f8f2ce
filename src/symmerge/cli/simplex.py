"""barrier --together: all models brought together by each method, and what lies between them measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from symmerge import report as drawing  # the module: matplotlib is loaded when something is drawn
from symmerge.checkpoints.files import write_text
from symmerge.cli import console, several
from symmerge.cli.options import METHODS
from symmerge.errors import MismatchError
from symmerge.evaluation.results import SimplexFile
from symmerge.evaluation.simplices import (
    SimplexMethod,
    measure_methods,
    simplex_places,
    write_simplex,
)
from symmerge.evaluation.tasks import Task
from symmerge.matching.recipes import Recipe
from symmerge.models.model import Model

PLAIN = "plain average"


def check(models: Sequence[Path], solvers: Mapping[str, Recipe | None]) -> None:
    """Refuse what cannot be brought together, before any work."""
    if len(models) < 3:
        raise MismatchError(
            f"--together is for three models or more, and there are {len(models)}: leave it out, or give more models"
        )
    if pairwise := [
        name
        for name, recipe in solvers.items()
        if recipe and (recipe.non_symmetric or recipe.method == "soft")
    ]:
        raise MismatchError(
            f"--together: {', '.join(pairwise)} aligns pairs alone; leave out --together, or this method"
        )


def label(name: str, recipe: Recipe) -> str:
    """A method in words; our own recipe for it needs no name."""
    kind = {"weights": "weight matching", "activations": "activation matching"}.get(
        recipe.method, f"{recipe.method} matching"
    )
    return (kind if name in METHODS else f"{kind}, {name}") + (
        " (no symmetry)" if recipe.non_symmetric else ""
    )


def measure(
    folder: Path,
    models: Sequence[Model],
    solvers: Mapping[str, Recipe | None],
    task: Task,
    points: int,
    device: str,
) -> SimplexFile:
    """All that lies between the models, by every method, and all that is written about it."""
    methods = []
    for name, recipe in solvers.items():
        console.note(f"{len(models)} models, {name}")
        methods.append(
            _together(name, models, recipe) if recipe else SimplexMethod(name, PLAIN, models)
        )
    with console.progress(
        "evaluating", len(task.batches) * len(simplex_places(len(models), points)) * len(methods)
    ) as tick:
        record = measure_methods(models, methods, task, points=points, device=device, progress=tick)
    write_simplex(record, folder)
    for file, text in drawing.simplex_svgs(record).items():
        write_text(folder / file, text)
    return record


def _together(name: str, models: Sequence[Model], recipe: Recipe) -> SimplexMethod:
    found = several.together(models, recipe, "0", None)
    if found.universe.left_out:
        if found.universe.interrupted:
            raise KeyboardInterrupt
        raise MismatchError(
            f"{name} could not bring all models together: {'; '.join(found.universe.left_out.values())}; measure without these"
        )
    return SimplexMethod(name, label(name, recipe), found.models, found.to_file())


def rows(record: SimplexFile) -> Iterator[dict[str, Any]]:
    """For people: how far pairs, and all of them together, lie over their parents."""
    count = len(record.models)
    for method in record.methods:
        pairs = [method.barriers[a][b] for a, b in combinations(range(count), 2)]
        yield {
            "method": method.label,
            "mean barrier of a pair": fmean(pairs),
            f"barrier of all {count} merged": method.means[-1].barrier,
        }
