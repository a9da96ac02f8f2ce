"""The ViT of generalized linear mode connectivity, as it may have been trained.

Its code for images is not public: which of the possible settings gives the published barriers?
"""

from __future__ import annotations

from collections.abc import Mapping

from symmerge.lab.experiments.components import by_scale
from symmerge.lab.experiments.generalized import PAPER
from symmerge.lab.experiments.methods import FORMS, IMAGES, TABLE_1, method_rows
from symmerge.lab.experiments.tables import Experiment, ResultTable, Size
from symmerge.lab.training.files import has_data
from symmerge.lab.training.recipes import training_recipe

DROPOUT, L2, OURS = "averaged patches, dropout, best kept", "the same, Adam with L2", "ours"
LEARNING: Mapping[str, Mapping[str, object]] = {"published": IMAGES, "small": {}}
# size -> data set -> column -> training recipe
SETTINGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "small": {
        "digits": {DROPOUT: "ijepa-digits", L2: "vit-digits-l2", OURS: "vit-digits"},
    },
    "published": {
        data: {
            DROPOUT: f"{data}-ijepa",
            L2: f"{data}-ijepa-l2",
            "ours, Adam with L2": f"{data}-vit-l2",
            OURS: f"{data}-vit",
            f"24 epochs: {DROPOUT}": f"{data}-ijepa-short",
            f"24 epochs: {L2}": f"{data}-ijepa-l2-short",
            f"24 epochs: {OURS}": f"{data}-vit-short",
        }
        for data in ("cifar10", "cifar100")
    },
}
ABOUT = (
    "Which setting has the published barrier of a plain average, and what do the methods give"
    f" there? {FORMS}"
)
DIFFERS = "The published training is not known in these points; every column is a guess."


def settings(size: Size) -> tuple[ResultTable, ...]:
    entries = []
    for data, columns in by_scale(size, SETTINGS).items():
        published = {name: numbers.get(data) for name, numbers in TABLE_1.items()}
        for column, recipe in columns.items():
            if size.name == "published" and not has_data(training_recipe(recipe), size.data):
                continue
            learning = by_scale(size, LEARNING)
            entries += method_rows(size, f"{data}, {column}", recipe, learning, published)
    return (ResultTable("Barriers by setting", tuple(entries), ABOUT, DIFFERS),)


EXPERIMENTS: Mapping[str, Experiment] = {
    "t-vits": Experiment(
        "which training gives the published barriers of image classifiers",
        f"{PAPER}, Table 1, CIFAR",
        settings,
    ),
}
