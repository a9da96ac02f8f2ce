"""Our matching methods and the published ones, by name: the same solvers with other options.

| recipe | transforms | evidence |
|---|---|---|
| `symmerge`, `weights-only` | every symmetry | weights, with or without self-generated text |
| `permutations` (git re-basin) | permutations | weights |
| `orthogonal` (generalized LMC) | every symmetry | weights |
| `two-stage` (attention equivalence) | attention | weights |
| `activations`, `activations-untied` | every symmetry | weights and activations |
| `correlation-...`, `residual-...` | permutations | correlation of activations |
| `learned`, `learned-...` | every symmetry, or what was published | gradients of the midpoint |
| `soft`, `soft-hardened` | mixtures of units and of heads | gradients of the midpoint |
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from symmerge.errors import MismatchError
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.evidence import Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.learning.start import default_start
from symmerge.matching.non_symmetric import NON_SYMMETRIC
from symmerge.matching.search import Matching
from symmerge.matching.soft import SoftMatching
from symmerge.matching.weights import WeightMatching
from symmerge.models.canonical.form import STEPS, canonicalize
from symmerge.models.model import Model
from symmerge.symmetry.groups import RotaryPairs, Signs, Trivial

Solver = Matching | LearnedMatching | SoftMatching


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A solver with its options, what may move, and the form both models take first.

    `restrict` says for some spaces that only a "permutation" or the "identity" is allowed. A
    recipe that is `non_symmetric` changes the function, and is for comparison only.
    """

    about: str
    matching: Solver = field(default_factory=WeightMatching)
    restrict: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = tuple(STEPS)
    non_symmetric: Literal["ignore-heads", "separate-streams", "soft"] | None = None

    @property
    def method(self) -> str:
        """Its kind of solver: weights, activations, learned or soft."""
        return self.matching.method

    @property
    def needs_data(self) -> bool:
        """Whether it needs inputs; for language models these may be self-generated."""
        return self.method != "weights"

    def restricted(self, model: Model) -> dict[str, str]:
        """Restrictions for this model: it may lack spaces; a permutation breaks rotary pairs."""
        groups = {name.partition(".")[0]: space.group for name, space in model.spec.spaces.items()}
        fixed = RotaryPairs | Signs | Trivial
        still = {name for name, group in groups.items() if isinstance(group, fixed)}
        return {
            space: "identity" if space in still else to
            for space, to in self.restrict.items()
            if space in groups
        }

    def prepare(self, model: Model) -> Model:
        """The model in the form the recipe needs, with nothing else allowed to move."""
        if allow_more := NON_SYMMETRIC.get(self.non_symmetric or ""):
            model = allow_more(model)
        return canonicalize(model.restrict(**self.restricted(model)), self.steps)


SQUARED_ERROR = Weighting(norm=0.0, all_layers=True)
"""Squared errors as they are, in all layers: what most published methods minimise."""

REBASIN = WeightMatching(weighting=SQUARED_ERROR, generate_text=False, max_sweeps=50, tolerance=0.0)
GENERALIZED = WeightMatching(
    weighting=SQUARED_ERROR,
    generate_text=False,
    max_sweeps=15,
    tolerance=-1.0,
    heads=HeadOptions(metric="frobenius"),
)
TWO_STAGE = WeightMatching(
    weighting=replace(SQUARED_ERROR, all_layers=False),
    generate_text=False,
    max_sweeps=1,
    heads=HeadOptions(metric="frobenius", inside="gradient"),
)
PERMUTATIONS = {
    "residual": "permutation",
    "ff": "permutation",
    "qk": "identity",
    "vo": "identity",
}
CORRELATION = Weighting(
    norm=0.0, stream=1.0, heads=1.0, units=1.0, weights=0.0, score="correlation", all_layers=False
)
FOLLOWING = HeadOptions(follow=True)
COMPONENTS = {
    "ff": ("ff",),
    "attention": ("head", "query", "qk", "vo"),
    "residual": ("residual",),
    "classifier": ("pooled", "classifier", "transform"),
}
"""Components in the words of correlation-based merging, and the spaces of each."""


def _correlation(
    about: str,
    *components: str,
    still: tuple[str, ...] = (),
    heads: HeadOptions = FOLLOWING,
    places: Literal["all", "first", "last"] = "all",
    untie: bool = False,
    non_symmetric: Literal["ignore-heads", "separate-streams"] | None = None,
) -> Recipe:
    """Permute these components, except the `still` spaces, by correlation of activations."""
    moving = {space for component in components for space in COMPONENTS[component]} - {*still}
    matching = ActivationMatching(
        weighting=CORRELATION, held_out=0.0, max_sweeps=1, heads=heads, places=places
    )
    return Recipe(
        about=f"correlation of activations: {about}",
        matching=matching,
        restrict={
            space: "permutation" if space in moving else "identity"
            for spaces in COMPONENTS.values()
            for space in spaces
        },
        steps=("untie",) if untie else (),
        non_symmetric=non_symmetric,
    )


RECIPES: Mapping[str, Recipe] = {
    "symmerge": Recipe(
        about="ours: every symmetry; the best of several weightings, scored on self-generated text"
    ),
    "weights-only": Recipe(
        about="ours without self-generated text: every symmetry, from the tensors alone",
        matching=WeightMatching(generate_text=False),
    ),
    "permutations": Recipe(
        about="git re-basin: permutations of units, heads and stream, until nothing changes",
        matching=REBASIN,
        restrict=PERMUTATIONS,
        steps=(),
    ),
    # The published inflated attention is no stock checkpoint: use a rotation inside each head.
    "orthogonal": Recipe(
        about="generalized linear mode connectivity: stream rotated by all layers, heads by the"
        " Frobenius distance of their circuits and rotated inside, 15 sweeps",
        matching=GENERALIZED,
    ),
    "two-stage": Recipe(
        about="functional equivalence of attention: heads by the distance of their circuits, then"
        " any invertible basis inside; the stream and the units stay",
        matching=TWO_STAGE,
        restrict={"residual": "identity", "ff": "identity"},
    ),
    "activations": Recipe(
        about="ours with data: every symmetry, weights and activations mixed by held-out data",
        matching=ActivationMatching(),
    ),
    "activations-untied": Recipe(
        about="ours with data, tied tensors untied first: a decoder moves by itself, and is stored",
        matching=ActivationMatching(),
        steps=("untie", *STEPS),
    ),
    "correlation": _correlation("units, heads, and coordinates inside heads", "ff", "attention"),
    "correlation-ff": _correlation("units alone", "ff"),
    "correlation-attention": _correlation("heads and coordinates inside them alone", "attention"),
    "correlation-monotonic": _correlation(
        "units, and coordinates inside heads; heads keep their order",
        "ff",
        "attention",
        still=("head",),
    ),
    "correlation-separate-qk": _correlation(
        "units and heads; queries and keys in another order than values",
        "ff",
        "attention",
        heads=HeadOptions(),
    ),
    "correlation-ignore-heads": _correlation(
        "coordinates leave their heads; NO SYMMETRY, for comparison",
        "ff",
        "attention",
        non_symmetric="ignore-heads",
    ),
    "correlation-classifier": _correlation(
        "units, heads, and what the classifier or the decoder reads",
        "ff",
        "attention",
        "classifier",
    ),
    "correlation-all": _correlation(
        "units, heads, the stream, and what the classifier reads", *COMPONENTS
    ),
    "residual-separate": _correlation(
        "the stream anew after every block; NO SYMMETRY, for comparison",
        "residual",
        non_symmetric="separate-streams",
    ),
    "residual-first": _correlation(
        "the stream alone, by its first place", "residual", places="first"
    ),
    "residual-first-untied": _correlation(
        "the stream by its first place, and the untied decoder's input",
        "residual",
        "classifier",
        places="first",
        untie=True,
    ),
    "residual-last": _correlation("the stream alone, by its last place", "residual", places="last"),
    "residual-last-untied": _correlation(
        "the stream by its last place, and the untied decoder's input",
        "residual",
        "classifier",
        places="last",
        untie=True,
    ),
    "residual-all": _correlation("the stream alone, by all layers", "residual"),
    "residual-all-untied": _correlation(
        "the stream by all layers, and the untied decoder's input",
        "residual",
        "classifier",
        untie=True,
    ),
    "learned": Recipe(
        about="ours, learned: every symmetry moves by gradient until the midpoint predicts what"
        " its parents predict together",
        matching=LearnedMatching(),
    ),
    "learned-permutations": Recipe(
        about="learned permutations of units, heads and stream, from those of git re-basin",
        matching=LearnedMatching(start=REBASIN, target="labels"),
        restrict=PERMUTATIONS,
        steps=(),
    ),
    "learned-permutations-free": Recipe(
        about="learned permutations of units, heads and stream, with any basis inside heads",
        matching=LearnedMatching(start=REBASIN, target="labels"),
        restrict={"residual": "permutation", "ff": "permutation"},
        steps=(),
    ),
    "learned-published": Recipe(
        about="learned as in generalized linear mode connectivity: stream, units and heads, from"
        " labels, lr 3e-4, 30 epochs in batches of 128; bases inside heads stay as at the start",
        matching=LearnedMatching(
            start=GENERALIZED,
            target="labels",
            lr=3e-4,
            epochs=30.0,
            batch_size=128,
            spaces=("residual", "head", "query", "ff"),
            patience=20,
        ),
    ),
    "soft": Recipe(
        about="learned soft permutations of units and heads, by Sinkhorn; NO SYMMETRY",
        matching=SoftMatching(),
        restrict={"ff": "permutation"},
        non_symmetric="soft",
    ),
    "soft-hardened": Recipe(
        about="learned soft permutations of units and heads, rounded to the nearest permutation",
        matching=SoftMatching(),
        restrict={"ff": "permutation"},
    ),
}

BY_METHOD = {
    method: {name: recipe for name, recipe in RECIPES.items() if recipe.method == method}
    for method in ("weights", "activations", "learned", "soft")
}
DATA_FREE, WITH_DATA = BY_METHOD["weights"], BY_METHOD["activations"]


def get_recipe(name: str) -> Recipe:
    """One of `RECIPES`; another name is refused with the list."""
    if name not in RECIPES:
        raise MismatchError(f"no recipe called '{name}': choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def with_options(recipe: Recipe, **options: object) -> Recipe:
    """The recipe with options of its solver changed: `with_options(recipe, lr=1e-3, tries=4)`.

    None leaves an option unchanged. Options of `HeadOptions` and the `score` of activations count
    as the solver's own. Options that a learned solver lacks go to the solver of its start.
    """
    changes = {name: value for name, value in options.items() if value is not None}
    solver = recipe.matching
    if isinstance(solver, Matching):
        return replace(recipe, matching=_change(solver, changes))
    own = {name: value for name, value in changes.items() if name in _names(solver)}
    rest = {name: value for name, value in changes.items() if name not in own}
    solver = replace(solver, **own)
    start = solver.start
    if start is None and rest:
        start = default_start(solver.data)
    if isinstance(start, Matching):
        shared = {name: own[name] for name in ("seed", "device") if name in own}
        start = _change(start, {**rest, **shared}, also=_names(solver))
    else:
        _change(WeightMatching(), rest, also=_names(solver))  # no start to change: check the names
    return replace(recipe, matching=replace(solver, start=start))


def _change(
    matching: Matching, changes: Mapping[str, object], also: Set[str] = frozenset()
) -> Matching:
    """A solver with other options. Unknown ones are refused with the list of valid ones."""
    names, of_heads = _names(matching), _names(matching.heads)
    known = names | of_heads | {"score"}
    if unknown := changes.keys() - known:
        raise MismatchError(
            f"no option {', '.join(sorted(unknown))} of {matching.method} matching:"
            f" choose from {', '.join(sorted(known | also))}"
        )
    own = {name: value for name, value in changes.items() if name in names}
    heads = {name: value for name, value in changes.items() if name in of_heads}
    if "score" in changes:
        weighting = matching.weighting or matching.start(None)
        own["weighting"] = replace(weighting, score=changes["score"])
    return replace(matching, **{"heads": replace(matching.heads, **heads), **own})


def _names(options: Solver | HeadOptions) -> set[str]:
    return {item.name for item in fields(options)}
