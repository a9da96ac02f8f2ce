"""Barriers by method: the rows of generalized linear mode connectivity, in both forms.

Stock form averages the factors of attention, circuit form the products QK and OV, as the paper
does: bases inside heads then do not matter, and merged models are no stock checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

from symmerge.lab.experiments.components import lines, models, row
from symmerge.lab.experiments.tables import Size, TableEntry
from symmerge.lab.training.recipes import training_recipe

METHODS = {
    "vanilla": "none",
    "activation matching": "activations",
    "weight matching": "symmerge",
    "learned, permutations only": "learned-permutations",
    "learned": "learned",
}
# Published: Table 1, by row and data set.
DATA_SETS = ("cifar10", "cifar100", "tiny-imagenet", "shakespeare", "books")
TABLE_1: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(DATA_SETS, numbers, strict=True))
    for name, numbers in {
        "vanilla": (1.69, 2.46, 2.84, 2.02, 4.34),
        "activation matching": (1.27, 2.11, 1.86, 1.43, 4.05),
        "weight matching": (0.36, 0.69, 0.47, 0.34, 1.56),
        "learned, permutations only": (0.45, 0.53, 0.29, 0.63, 1.60),
        "learned": (0.00, 0.00, 0.00, 0.02, 0.42),
    }.items()
}
# Architectures without rotary positions, whose heads have circuits.
ABSOLUTE = ("GPT2LMHeadModel", "IJepaForImageClassification", "ViTForImageClassification")
FREE, FREE_BASES = "learned-permutations-free", "learned, permutations and bases inside heads"
IN_CIRCUITS = {"learned, permutations only": FREE, "learned": "learned"}  # learned in that form
BY_CIRCUITS, IN_FORM = ", circuit form", "circuits/barrier_linear"
FORMS = (
    "Circuit form is the paper's: attention by the products QK and OV, in heads of twice the size;"
    " no stock models. The other rows are stock models."
)
IMAGES = {"steps": 1500, "inputs": 20_000, "start": "weights"}


def options_of(method: str, learning: Mapping[str, object]) -> dict[str, object]:
    """Options of a method: only learned ones have any, and only `learned` has a start."""
    if not method.startswith("learned"):
        return {}
    return {n: value for n, value in learning.items() if n != "start" or method == "learned"}


def method_rows(
    size: Size,
    column: str,
    recipe: str,
    learning: Mapping[str, object],
    published: Mapping[str, float | None],
) -> list[TableEntry]:
    """A column of every method: stock form, and circuit form where heads have circuits."""
    cells, entries, free = models(size, recipe), [], has_circuits(size, recipe)
    for name, method in METHODS.items():
        number = published.get(name)
        measured = lines(size, cells, method, circuits=free, **options_of(method, learning))
        entries.append(row(name, column, measured, published=number))
        if name == "learned":
            entries.append(
                row("learned: midpoint below the better parent", column, measured, "gain")
            )
        if free and name not in IN_CIRCUITS:
            entries.append(row(f"{name}{BY_CIRCUITS}", column, measured, IN_FORM, number))
    for name, method in IN_CIRCUITS.items() if free else ():
        options = {**options_of(method, learning), "attention": "circuits"}
        measured = lines(size, cells, method, circuits=True, **options)
        entries.append(row(f"{name}{BY_CIRCUITS}", column, measured, IN_FORM, published.get(name)))
    if free:
        options = options_of(FREE, learning)
        entries.append(row(FREE_BASES, column, lines(size, cells, FREE, **options)))
    return entries


def has_circuits(size: Size, recipe: str) -> bool:
    """Whether heads have one matrix each for QK and OV: no rotary positions."""
    external = size.external
    architecture = external.architecture if external else training_recipe(recipe).architecture
    return architecture in ABSOLUTE
