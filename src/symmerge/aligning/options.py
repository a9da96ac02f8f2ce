"""Methods, recipes and options of alignment by name, as on the command line."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from symmerge.aligning.choices import check_choice
from symmerge.aligning.inputs import make_inputs, no_inputs
from symmerge.aligning.learning_options import SOLVER_FIELDS, LearningOverrides
from symmerge.checkpoints.memory import free_memory
from symmerge.errors import MismatchError, SymmergeWarning, SymmetryError
from symmerge.evaluation.tasks import SELF_SOURCES, Task, task_of
from symmerge.evaluation.tasks.sampling import Part
from symmerge.matching import efforts
from symmerge.matching.efforts import EFFORTS, effort_recipe
from symmerge.matching.evidence import read_token_counts
from symmerge.matching.forecasts import memory_needed
from symmerge.matching.heads import HeadOptions
from symmerge.matching.recipes import (
    BY_METHOD,
    RECIPES,
    Recipe,
    Solver,
    get_recipe,
    with_options,
)
from symmerge.models.model import Model, device_of
from symmerge.observation.activations import Score
from symmerge.observation.statistics import Statistics

METHODS = {
    "weights": "symmerge",
    "activations": "activations",
    "learned": "learned",
    "soft": "soft-hardened",
}
"""Method -> our recipe for it."""
METRICS, INSIDES = (get_args(get_type_hints(HeadOptions)[name]) for name in ("metric", "inside"))
SCORES, SOLVE_DTYPES = get_args(Score), ("float32", "float64")
NONE = "none"  # the method of a merge that aligns nothing
# Of a merge itself, aligned or not
NOT_ALIGNING = {"method", "data", "samples", "calibration", "calibration_samples", "seed", "device"}
LEARN: Part = "learn"  # the rest of the data is for the verdict


@dataclass(frozen=True, kw_only=True)
class AlignOptions(LearningOverrides):
    """How to align: `AlignOptions(method="learned", data="books.txt", steps=300)`.

    The options of `symmerge align`, with its defaults; None keeps the recipe's value. `data` is
    learned from and measured on; `calibration` is looked at, or else `data`.
    """

    effort: str | None = None
    method: str | None = None
    recipe: str | None = None
    data: str | Task | None = None
    samples: int | None = None
    calibration: str | Task | None = None
    calibration_samples: int | None = None
    statistics: Path | None = None
    score: str | None = None
    metric: str | None = None
    inside: str | None = None
    tries: int | None = None
    sweeps: int | None = None
    token_counts: Path | None = None
    permutations_only: bool = False
    seed: int = 0
    device: str = "cpu"
    solve_dtype: str = "float32"

    def to_recipe(
        self, models: Sequence[Model], *, partial: Path | None = None, generate: bool = True
    ) -> Recipe:
        """The recipe with these options and its inputs; invalid ones fail before any work.

        `partial` is the file for unfinished activation statistics. Without `generate`, inputs that
        models would have to generate are left out: for a recipe that is only described.
        """
        if self.by_effort:
            return self._effort_recipe(models, generate)
        recipe = self._recipe()
        self._check(recipe)
        common = {"seed": self.seed, "device": self.device}
        if not recipe.needs_data:
            self.measured(models)
            return with_options(recipe, **self._matching(), **common)
        if recipe.method != "activations":
            return self._learned(with_options(recipe, **common), models, generate)
        statistics = Statistics.load(self.statistics) if self.statistics else None
        observed = {"statistics": statistics, "score": self.score, "partial": partial}
        data = self._looked_at(models, generate)
        return with_options(recipe, **self._matching(), **observed, **common, data=data)

    def _learned(self, recipe: Recipe, models: Sequence[Model], generate: bool) -> Recipe:
        data = self._learned_from(models, generate)
        looked_at = self._looked_at(models, generate) if self.calibration else data
        recipe = with_options(recipe, data=data, **self.for_solver(looked_at))
        # Options of the start come last: only now is it known which start it is.
        start = self._matching()
        if self.solve_dtype == "float32":
            del start["dtype"]
        return with_options(recipe, **start)

    def measured(self, models: Sequence[Model]) -> Task | None:
        """The task on `data`, to measure on; None without data, or where models generate it."""
        if self.data is None or self.data == "self":
            return None
        return self._task(models, self.data, part="judge")

    @property
    def by_effort(self) -> bool:
        """Whether an effort says how to align: by default, and where one is given."""
        named = [self.method, self.recipe, self.statistics, self.permutations_only or None]
        if self.effort and any(named):
            raise MismatchError(
                f"--effort {self.effort} chooses method and recipe:"
                " leave it out, or leave out --method, --recipe, --statistics"
            )
        return not any(named)

    @property
    def observes(self) -> bool:
        """Whether activations are looked at: by the method, or by the start of learning."""
        by_method = not self.by_effort and self._recipe().method == "activations"
        return by_method or self.start_from == "activations"

    def check_unaligned(self) -> None:
        """Refuse what says how to align, for models that are not aligned."""
        device_of(self.device)
        for option in fields(self):
            value, flag = getattr(self, option.name), option.name.replace("_", "-")
            if option.name not in NOT_ALIGNING and value != option.default:
                given = f"--{flag}" if value is True else f"--{flag} {value}"
                raise MismatchError(f"--method none aligns nothing: leave out {given}")

    def _effort_recipe(self, models: Sequence[Model], generate: bool) -> Recipe:
        """What is learned from, and how long, by effort; every option may be changed."""
        check_choice("--effort", self.effort, EFFORTS)
        device_of(self.device)
        effort, how = self.effort or efforts.USUAL, {"seed": self.seed, "device": self.device}
        recipe = effort_recipe(effort, models[0], given=self.data is not None, **how)
        self._check(recipe)
        if recipe.needs_data and not self._fits(effort, recipe, models[0]):
            recipe = effort_recipe("fast", models[0], **how)
        if not recipe.needs_data:
            self.measured(models)
            return with_options(recipe, **self._matching())
        return self._learned(recipe, models, generate)

    def _fits(self, effort: str, recipe: Recipe, model: Model) -> bool:
        """Whether there is memory to learn; an effort that was asked for is refused where not."""
        needed, free = memory_needed(recipe.matching, model), free_memory(device_of(self.device))
        if needed <= free:
            return True
        why = (
            f"{effort} effort needs about {needed / 1e9:.0f} GB of memory on {self.device},"
            f" and {free / 1e9:.0f} GB are free"
        )
        if self.effort or self.data:
            raise MismatchError(f"{why}: choose --effort fast, or a --device with more memory")
        warnings.warn(f"{why}: only weights are matched", SymmergeWarning, stacklevel=2)
        return False

    def _recipe(self) -> Recipe:
        if not self.permutations_only:
            return choose_recipe(self.method, self.recipe)
        if self.recipe in (None, "learned-permutations") and self.method in (None, "learned"):
            return choose_recipe(self.method, "learned-permutations")
        raise MismatchError(
            "--permutations-only is a recipe of --method learned:"
            " leave out --recipe, or ask for learned-permutations"
        )

    def _check(self, recipe: Recipe) -> None:
        check_choice("--solve-dtype", self.solve_dtype, SOLVE_DTYPES)
        check_choice("--metric", self.metric, METRICS)
        check_choice("--inside", self.inside, INSIDES)
        check_choice("--score", self.score, SCORES)
        device_of(self.device)
        self._check_inputs(recipe)
        for option in fields(LearningOverrides):
            self._refuse_unlearned(option.name, recipe)

    def _check_inputs(self, recipe: Recipe) -> None:
        """Refuse what nothing would read."""
        for name in ("statistics", "score"):
            if (value := getattr(self, name)) is not None and recipe.method != "activations":
                raise MismatchError(f"--{name} {value}: only --method activations takes it")
        if self.samples is not None and self.data is None and not recipe.needs_data:
            raise MismatchError(
                f"--samples {self.samples}: weights are matched without data;"
                " add --data, or --method learned"
            )
        if self.calibration_samples is not None and self.calibration is None:
            raise MismatchError(
                f"--calibration-samples {self.calibration_samples}: there is nothing to take them"
                " from; add --calibration, or use --samples for --data"
            )
        looks = recipe.method == "activations" or self.start_from == "activations"
        if self.calibration is not None and not looks:
            name = self.calibration.data if isinstance(self.calibration, Task) else self.calibration
            raise MismatchError(
                f"--calibration {name}: {recipe.about} does not look at activations;"
                " add --method activations or --start-from activations, or leave it out"
            )

    def _refuse_unlearned(self, name: str, recipe: Recipe) -> None:
        value, flag = getattr(self, name), name.replace("_", "-")
        if value is None:
            return
        if recipe.method not in ("learned", "soft"):
            raise MismatchError(
                f"--{flag} {value}: {recipe.method} learns nothing; add --method learned"
            )
        if SOLVER_FIELDS.get(name, name) not in {field.name for field in fields(recipe.matching)}:
            raise MismatchError(f"--{flag} {value}: only --method learned takes it")

    def _matching(self) -> dict[str, object]:
        """Keyword arguments of weight and activation matching."""
        return {
            "metric": self.metric,
            "inside": self.inside,
            "tries": self.tries,
            "max_sweeps": self.sweeps,
            "token_counts": read_token_counts(self.token_counts) if self.token_counts else None,
            "dtype": getattr(torch, self.solve_dtype),
        }

    def _learned_from(self, models: Sequence[Model], generate: bool) -> Task | None:
        data = self.data
        if data is None and self.by_effort and self.samples is None:
            return None  # an effort says how many inputs it generates
        if data is None and task_of(models[0]) in SELF_SOURCES:
            data = "self"
        if data is None:
            raise no_inputs(models[0], "learning needs something to learn from")
        if data == "self" and not generate:
            return None
        return self._task(models, data, self.samples, learned=True, part=LEARN)

    def _looked_at(self, models: Sequence[Model], generate: bool) -> Task | None:
        source, samples, part = self.data, self.samples, LEARN
        if self.calibration is not None:
            source, samples, part = self.calibration, self.calibration_samples, "all"
        if source is None and (self.statistics is None or samples is not None):
            what = "activations need something to look at"
            raise no_inputs(models[0], what, "--calibration")
        if source is None or (source == "self" and not generate):
            return None
        return self._task(models, source, samples, part=part)

    def _task(
        self,
        models: Sequence[Model],
        source: str | Task,
        samples: int | None = None,
        *,
        learned: bool = False,
        part: Part = "all",
    ) -> Task:
        if isinstance(source, Task):
            return source
        how = {"samples": samples, "learned": learned, "seed": self.seed, "device": self.device}
        return make_inputs(models, source, part=part, **how)  # type: ignore[arg-type]


def choose_recipe(
    method: str | None = None, name: str | None = None, *, non_symmetric: bool = False
) -> Recipe:
    """A recipe by method, by name, or by both if they agree.

    Recipes that are no symmetry are refused unless `non_symmetric` (for `barrier`).
    """
    check_choice("--method", method, METHODS)
    recipe = get_recipe(name or METHODS[method or "weights"])
    if method not in (None, recipe.method):
        raise MismatchError(
            f"--recipe {name} is for --method {recipe.method}, not {method}:"
            f" leave out --method, or choose one of {', '.join(BY_METHOD[method])}"
        )
    if recipe.non_symmetric and not non_symmetric:
        raise SymmetryError(
            f"recipe {name} is not a symmetry: its result is not the function of the model;"
            " measure it with barrier"
        )
    return recipe


def options_named(name: str) -> AlignOptions:
    """The options for the name of an effort, a method or a recipe."""
    if name in EFFORTS:
        return AlignOptions(effort=name)
    if name == NONE:
        return AlignOptions(method=name)
    is_method = name in METHODS and name not in RECIPES
    return AlignOptions(method=name) if is_method else AlignOptions(recipe=name)


Method = str | AlignOptions | Recipe | Solver | None
"""How to align: a method or recipe by name, options, a recipe, a solver; None: the usual effort."""


def recipe_for(method: Method, models: Sequence[Model]) -> Recipe:
    """The recipe a user asks for; a solver replaces the one in our recipe."""
    if isinstance(method, Recipe):
        return method
    if isinstance(method, str | AlignOptions):
        options = options_named(method) if isinstance(method, str) else method
        return options.to_recipe(models)
    if method is None:
        return AlignOptions().to_recipe(models)
    return replace(RECIPES["symmerge"], matching=method)
