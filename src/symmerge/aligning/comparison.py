"""Compare alignment methods by name, as `symmerge barrier` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from symmerge.aligning.aligned import Aligned
from symmerge.aligning.folders import AlignedFolder
from symmerge.aligning.inputs import make_inputs, no_inputs
from symmerge.aligning.many import align_many
from symmerge.aligning.options import METHODS, choose_recipe
from symmerge.errors import MismatchError
from symmerge.evaluation.lines import LineMethod
from symmerge.evaluation.simplices import SimplexMethod
from symmerge.evaluation.tasks import SELF_SOURCES, task_of
from symmerge.matching.efforts import EFFORTS, effort_recipe
from symmerge.matching.learning.options import LearningOptions
from symmerge.matching.recipes import RECIPES, Recipe, with_options
from symmerge.models.alignment_results import SolutionFile, UniverseFile
from symmerge.models.model import Model
from symmerge.models.progress import Progress

PLAIN = "plain average"
ALIGNED = "aligned"  # the line between models of an aligned folder
LABELS = {"weights": "weight matching", "activations": "activation matching"}
Recipes = Mapping[str, Recipe | None]
"""Method name -> recipe; None is the plain average."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods by name, separated by commas, and the inputs for those that need data.

    A method is "none", an effort, method or recipe of `align`, or learned matching of some spaces:
    "learned:residual+ff". `calibration` is the data methods may use, never the evaluation data.
    """

    method: str = "none,weights"
    calibration: str | None = None
    calibration_samples: int | None = None
    steps: int | None = None
    seed: int = 0
    device: str = "cpu"

    def recipes(self, model: Model) -> dict[str, Recipe | None]:
        """The recipe of every method for models like this one, without inputs."""
        names = [name.strip() for name in self.method.split(",")]
        recipes = {name: self._recipe(name, model) for name in names}
        if self.steps and not any(map(_learns, recipes.values())):
            raise MismatchError(
                f"--steps {self.steps}: none of {', '.join(recipes)} learns;"
                " leave it out, or add learned to --method"
            )
        return recipes

    def beside_aligned(self, folder: AlignedFolder) -> dict[str, Recipe | None]:
        """The recipes to measure beside the models of an aligned folder, which stay as they are."""
        recipes = self.recipes(folder.models[0])
        if None in recipes.values():
            raise MismatchError(
                f"--method none: {folder.path} is already measured as it is; leave out none, or"
                " give the original models"
            )
        return recipes

    def _recipe(self, name: str, model: Model) -> Recipe | None:
        if name == "none":
            return None
        name, _, spaces = name.partition(":")
        recipe = self._named(name, model)
        learning: dict[str, object] = {}
        if _learns(recipe):
            chosen = tuple(spaces.split("+")) if spaces else None
            learning = {"steps": self.steps, "spaces": chosen}
        elif spaces:
            raise MismatchError(
                f"{name}:{spaces}: only learned methods take spaces to learn; leave out :{spaces}"
            )
        return with_options(recipe, seed=self.seed, device=self.device, **learning)

    def _named(self, name: str, model: Model) -> Recipe:
        if name in EFFORTS:
            given = self.calibration is not None
            return effort_recipe(name, model, given=given, seed=self.seed, device=self.device)
        is_method = name in METHODS and name not in RECIPES
        return choose_recipe(*((name, None) if is_method else (None, name)), non_symmetric=True)

    def with_inputs(
        self, recipes: Recipes, models: Sequence[Model], data: str
    ) -> dict[str, Recipe | None]:
        """The recipes with inputs where they need some; `data` is the evaluation data."""
        looking = {
            name: recipe
            for name, recipe in recipes.items()
            if recipe and recipe.needs_data and (self.calibration or not _generates(recipe))
        }
        calibration = self._calibration(recipes, looking, models[0], data)
        # A different seed: the same one would sample the evaluation text again.
        seed = self.seed + (data == "self")
        recipes = {
            name: with_options(recipe, seed=seed) if recipe and _generates(recipe) else recipe
            for name, recipe in recipes.items()
        }
        if calibration is None:
            return recipes
        seed = self.seed + (calibration == data)
        tasks = {
            learned: make_inputs(
                models,
                calibration,
                samples=self.calibration_samples,
                learned=learned,
                seed=seed,
                device=self.device,
            )
            for learned in {_learns(recipe) for recipe in looking.values()}
        }
        with_data = {
            name: with_options(recipe, data=tasks[_learns(recipe)])
            for name, recipe in looking.items()
        }
        return {**recipes, **with_data}

    def _calibration(
        self, recipes: Recipes, looking: Mapping[str, Recipe], model: Model, data: str
    ) -> str | None:
        calibration = self.calibration
        if not looking:
            if calibration or self.calibration_samples:
                raise MismatchError(
                    f"--calibration: none of {', '.join(recipes)} looks at activations;"
                    " leave it out, or add one that does to --method"
                )
            return None
        if calibration is None and all(map(_learns, looking.values())):
            calibration = "self" if task_of(model) in SELF_SOURCES else None
        if calibration is None:
            what = f"{', '.join(looking)}: activations need something to look at"
            raise no_inputs(model, what, "--calibration")
        if calibration != "self" and Path(calibration).resolve() == Path(data).resolve():
            raise MismatchError(
                f"--calibration {calibration} is also measured on: a merge fitted to it would"
                " look better than it is; give other data"
            )
        return calibration


def _learns(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.method in ("learned", "soft")


def _generates(recipe: Recipe) -> bool:
    """Whether it says how many inputs to generate; they are made when it learns."""
    solver = recipe.matching
    return isinstance(solver, LearningOptions) and solver.generated is not None


def label(name: str, recipe: Recipe) -> str:
    """A method's label for people; our own recipe needs no name in it."""
    kind = LABELS.get(recipe.method, f"{recipe.method} matching")
    kind = kind if name in METHODS else f"{kind}, {name}"
    return f"{kind} (no symmetry)" if recipe.non_symmetric else kind


def line_method(name: str, a: Model, b: Model, alignment: Aligned | None) -> LineMethod:
    """The line between aligned models; without an alignment, between the original ones."""
    if alignment is None:
        return LineMethod(name, PLAIN, a, b)
    return LineMethod(
        name,
        label(name, alignment.recipe),
        alignment.reference,
        alignment.aligned,
        alignment.solution.settings,
        alignment.solution.objective,
        exact=not alignment.recipe.non_symmetric,
    )


def aligned_line(folder: AlignedFolder, a: Model, b: Model) -> LineMethod:
    """The line between two models of an aligned folder, as they are."""
    objective = folder.record.objective if isinstance(folder.record, SolutionFile) else ()
    return LineMethod(ALIGNED, "as aligned", a, b, folder.record.settings, objective)


def aligned_simplex(folder: AlignedFolder) -> SimplexMethod:
    """All models of an aligned folder, as they are."""
    record = folder.record if isinstance(folder.record, UniverseFile) else None
    return SimplexMethod(ALIGNED, "as aligned", folder.models, record)


def check_together(count: int, recipes: Recipes) -> None:
    """Refuse --together for fewer than three models and for methods that only align pairs."""
    if count < 3:
        raise MismatchError(
            f"--together needs three or more models, not {count}: leave it out, or give more models"
        )
    pairwise = [
        name
        for name, recipe in recipes.items()
        if recipe and (recipe.non_symmetric or recipe.method == "soft")
    ]
    if pairwise:
        raise MismatchError(
            f"--together: {', '.join(pairwise)} only aligns pairs;"
            " leave out --together, or this method"
        )


def simplex_method(
    name: str, models: Sequence[Model], recipe: Recipe | None, progress: Progress | None = None
) -> SimplexMethod:
    """All models aligned by a recipe (None: unaligned); an error if one cannot be aligned."""
    if recipe is None:
        return SimplexMethod(name, PLAIN, models)
    alignment = align_many(models, recipe, progress=progress)
    universe = alignment.universe
    if universe.left_out and universe.interrupted:
        raise KeyboardInterrupt
    if universe.left_out:
        raise MismatchError(
            f"{name} could not bring all models together:"
            f" {'; '.join(universe.left_out.values())}; measure without these"
        )
    return SimplexMethod(name, label(name, recipe), alignment.models, alignment.to_file())
