"""Functional equivalence of attention under position encodings.

Components initialised afresh and retrained, orders of heads, metrics, symmetry groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.components import (
    LONG_LEARNING,
    by_scale,
    freedom,
    lines,
    model,
    models,
    orders,
    pairs,
    retrained_from,
    row,
)
from symmerge.lab.experiments.tables import Experiment, ResultTable, Size, TableEntry
from symmerge.lab.training.recipes import training_recipe

Recipe = TypeVar("Recipe")
REINITIALIZED = {
    "(i) first attention": "first-attention",
    "(ii) all attention": "attention",
    "(iii) first layer": "first-layer",
    "(iv) everything": "everything",
}
METHODS = {"naive": "none", "two-stage": "two-stage", "ours": "symmerge"}
METRICS = ("frobenius", "cosine", "spectrum", "best")
# size -> column -> training recipe: absolute against rotary positions
MODELS = {
    "small": {"absolute: GPT-2": "gpt2-docs", "rotary: Llama": "llama-docs"},
    "published": {
        "absolute: GPT-2": "books-gpt2-small",
        "rotary: Llama": "books-llama",
        "rotary: GPT-NeoX": "books-neox",
    },
}
MASKED = {
    "small": {"absolute: BERT": "bert-docs", "rotary: RoFormer": "roformer-docs"},
    "published": {"absolute: BERT": "books-bert", "rotary: RoFormer": "books-roformer"},
}
IMAGES = {
    "small": {"absolute: ViT": "vit-digits", "rotary: DINOv3": "dinov3-digits"},
    "published": {"absolute: ViT": "cifar10-vit-short", "rotary: DINOv3": "cifar10-dinov3"},
}
# The same with the recipe that fine-tunes a classifier from it
CLASSIFIERS = {
    "small": {
        "absolute: BERT": ("bert-docs-long", "topics-bert"),
        "rotary: RoFormer": ("roformer-docs-long", "topics-roformer"),
    },
    "published": {
        "absolute: BERT, AG News": ("books-bert", "agnews-bert"),
        "rotary: RoFormer, AG News": ("books-roformer", "agnews-roformer"),
    },
}
RETRAINED = 120  # steps for small models: most of their weights are still trained
_BODY: Mapping[str, object] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 1000,
}
_PICTURES: Mapping[str, object] = {
    name: value for name, value in _BODY.items() if name != "vocab_size"
}
GROUPS = {
    "BERT-base, absolute": ("BertForMaskedLM", _BODY),
    "RoFormer-base, rotary": ("RoFormerForMaskedLM", _BODY),
    "GPT-2 small, absolute": ("GPT2LMHeadModel", {"vocab_size": 1000}),
    "GPT-NeoX 160M, rotary on a quarter": (
        "GPTNeoXForCausalLM",
        {
            **_BODY,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "rope_type": "default",
            },
        },
    ),
    "Llama, 12 heads, rotary": ("LlamaForCausalLM", _BODY),
    "Llama, 12 heads in 4 groups, rotary": (
        "LlamaForCausalLM",
        {**_BODY, "num_key_value_heads": 4},
    ),
    "ViT-base, absolute": ("ViTForImageClassification", _PICTURES),
    "DINOv3 ViT-base, rotary": (
        "DINOv3ViTModel",
        {**_PICTURES, "problem_type": "single_label_classification"},
    ),
}
QUANTITIES = {
    "continuous degrees of freedom": "continuous",
    "of these inside attention": "attention",
    "discrete, as a power of ten": "discrete",
}
ABOUT = (
    "A trained model, a component of it initialised afresh and the whole retrained, three times;"
    " loss barriers of the three pairs."
)
DIFFERS = (
    "The paper shows figures without numbers, on other data and sizes;"
    " compare naive with matched, and absolute with rotary."
)
MIDPOINT = "Loss of the midpoint over the mean of the ends (negative: the midpoint is better)"


def columns(size: Size, recipes: Mapping[str, Mapping[str, str]] = MODELS) -> Mapping[str, str]:
    return by_scale(size, recipes)


def retrained(size: Size, recipe: str, component: str) -> list[Cell]:
    """Models that share all but a component; for (iv), everything, models of different seeds."""
    if component == "everything":
        return models(size, recipe)
    return _afresh(size, model(size, recipe, 0), component)


def _afresh(size: Size, base: Cell, component: str) -> list[Cell]:
    """Copies of a trained model with a component initialised afresh, each retrained."""
    schedule = training_recipe(base.settings["recipe"]).schedule
    steps = schedule.steps // 3 if size.name == "published" else RETRAINED
    changes = {"steps": steps}
    if schedule.evaluate_every:
        changes["evaluate_every"] = max(1, schedule.evaluate_every * steps // schedule.steps)
    return [
        retrained_from(size, base, component, seed, changes) for seed in range(1, size.seeds + 1)
    ]


def retrain(size: Size) -> tuple[ResultTable, ...]:
    return _retrain(size, columns(size), partial(retrained, size))


def retrain_masked(size: Size) -> tuple[ResultTable, ...]:
    return _retrain(size, columns(size, MASKED), partial(retrained, size))


def retrain_images(size: Size) -> tuple[ResultTable, ...]:
    return _retrain(size, columns(size, IMAGES), partial(retrained, size))


def retrain_classifiers(size: Size) -> tuple[ResultTable, ...]:
    """Of fine-tuned classifiers; in (iv) each comes from a pretrained model of its own."""

    def retrained_classifiers(recipe: tuple[str, str], component: str) -> list[Cell]:
        bases = models(size, recipe[0])
        tuned = [model(size, recipe[1], seed, base=base) for seed, base in enumerate(bases)]
        return tuned if component == "everything" else _afresh(size, tuned[0], component)

    return _retrain(size, by_scale(size, CLASSIFIERS), retrained_classifiers)


def _retrain(
    size: Size,
    recipes: Mapping[str, Recipe],
    cells_of: Callable[[Recipe, str], list[Cell]],
) -> tuple[ResultTable, ...]:
    """`cells_of`: models of a recipe that differ in a component."""
    entries: list[TableEntry] = []
    for column, recipe in recipes.items():
        for name, component in REINITIALIZED.items():
            cells = cells_of(recipe, component)
            methods = {label: lines(size, cells, method) for label, method in METHODS.items()}
            # In (i), matching already removes the barrier: nothing is left to learn.
            if size.name == "published" and component != "first-attention":
                methods["ours, learned"] = lines(size, cells, "learned", **LONG_LEARNING)
            entries += [row(f"{name}, {label}", column, of) for label, of in methods.items()]
    return (ResultTable("Re-initialised and retrained", tuple(entries), ABOUT, DIFFERS),)


def head_orders(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    count = 1 if size.name == "smoke" else None
    for column, recipe in list(columns(size).items())[:2]:
        compared = pairs(retrained(size, recipe, "first-attention"))[:count]
        cells = [orders(size, pair) for pair in compared]
        entries += [row(name, column, cells, name) for name in ("ours", "best", "median", "worst")]
        entries.append(row("place of ours among all orders", column, cells, "place"))
    title = "Every order of the heads, with the best bases inside"
    about = f"{MIDPOINT}; the first attention layer was re-initialised."
    return (ResultTable(title, tuple(entries), about, DIFFERS),)


def metrics(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    for column, recipe in list(columns(size).items())[:2]:
        cells = retrained(size, recipe, "attention")
        for metric in METRICS:
            compared = lines(size, cells, "two-stage", metric=metric)
            entries.append(row(metric, column, compared, "midpoint"))
    about = f"{MIDPOINT}; all attention was re-initialised."
    return (ResultTable("How pairs of heads are scored", tuple(entries), about, DIFFERS),)


def groups(size: Size) -> tuple[ResultTable, ...]:
    entries = [
        row(name, column, [freedom(size, architecture, config)], quantity)
        for name, (architecture, config) in GROUPS.items()
        for column, quantity in QUANTITIES.items()
    ]
    about = "Of canonical models, all layers together."
    return (ResultTable("Symmetry groups", tuple(entries), about, ""),)


PAPER = "Functional Equivalence in Attention, arXiv 2606.17830"
EXPERIMENTS: Mapping[str, Experiment] = {
    "f-retrain": Experiment(
        "components re-initialised and retrained, absolute against rotary positions",
        f"{PAPER}, protocol",
        retrain,
    ),
    "f-retrain-masked": Experiment(
        "components re-initialised and retrained: models of masked text",
        f"{PAPER}, protocol",
        retrain_masked,
    ),
    "f-retrain-images": Experiment(
        "components re-initialised and retrained: classifiers of images",
        f"{PAPER}, protocol",
        retrain_images,
    ),
    "f-retrain-classifiers": Experiment(
        "components re-initialised and retrained: classifiers of texts",
        f"{PAPER}, protocol",
        retrain_classifiers,
    ),
    "f-orders": Experiment(
        "every order of the heads, ours marked", f"{PAPER}, ablation", head_orders
    ),
    "f-metrics": Experiment("metrics by which heads are matched", f"{PAPER}, ablation", metrics),
    "f-groups": Experiment(
        "degrees of freedom per family and position encoding", f"{PAPER}, theory", groups
    ),
}
