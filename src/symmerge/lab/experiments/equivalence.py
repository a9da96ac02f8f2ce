"""F: functional equivalence of attention under position encodings. Parts re-initialised and retrained, orders of heads, metrics, symmetry groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

PARTS = {
    "(i) first attention": "first-attention",
    "(ii) all attention": "attention",
    "(iii) first layer": "first-layer",
    "(iv) everything": "everything",
}
METHODS = {"naive": "none", "two-stage": "two-stage", "ours": "symmerge"}
METRICS = ("frobenius", "cosine", "spectrum", "best")
# size -> column -> training recipe: absolute positions against rotary ones
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
RETRAINED = 120  # steps of a small model: it has most of what it knew
_BODY: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 1000,
}
_PICTURES: Mapping[str, Any] = {
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
ABOUT = "A trained model, a part of it re-initialised and the whole retrained, three times; loss barriers of the three pairs."
DIFFERS = "The paper shows these as figures, without numbers, on other data and sizes; the comparison is naive against matched, absolute against rotary."


def columns(size: Size, recipes: Mapping[str, Mapping[str, str]] = MODELS) -> Mapping[str, str]:
    return by_scale(size, recipes)


def retrained(size: Size, recipe: str, part: str) -> list[Cell]:
    """Models that share all but what was re-initialised. (iv) shares nothing: fresh models."""
    if part == "everything":
        return models(size, recipe)
    base = model(size, recipe, 0)
    steps = training_recipe(recipe).schedule.steps // 3 if size.name == "published" else RETRAINED
    return [
        retrained_from(size, base, part, seed, {"steps": steps})
        for seed in range(1, size.seeds + 1)
    ]


def retrain(size: Size) -> tuple[ResultTable, ...]:
    return _retrain(size, columns(size))


def retrain_masked(size: Size) -> tuple[ResultTable, ...]:
    return _retrain(size, columns(size, MASKED))


def retrain_images(size: Size) -> tuple[ResultTable, ...]:
    return _retrain(size, columns(size, IMAGES))


def _retrain(size: Size, recipes: Mapping[str, str]) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    for column, recipe in recipes.items():
        for name, part in PARTS.items():
            found = retrained(size, recipe, part)
            entries += [
                row(f"{name}, {method}", column, lines(size, found, chosen))
                for method, chosen in METHODS.items()
            ]
            if (
                size.name == "published" and part != "first-attention"
            ):  # there nothing is left to learn
                entries.append(
                    row(
                        f"{name}, ours, learned",
                        column,
                        lines(size, found, "learned", **LONG_LEARNING),
                    )
                )
    return (ResultTable("Re-initialised and retrained", tuple(entries), ABOUT, DIFFERS),)


def head_orders(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    for column, recipe in list(columns(size).items())[:2]:
        cells = [
            orders(size, pair)
            for pair in pairs(retrained(size, recipe, "first-attention"))[
                : 1 if size.name == "smoke" else None
            ]
        ]
        entries += [row(name, column, cells, name) for name in ("ours", "best", "median", "worst")]
        entries.append(row("place of ours among all orders", column, cells, "place"))
    return (
        ResultTable(
            "Every order of the heads, with the best bases inside",
            tuple(entries),
            "Loss of the middle over the mean of the ends (below zero: the middle is better); the first attention layer was re-initialised.",
            DIFFERS,
        ),
    )


def metrics(size: Size) -> tuple[ResultTable, ...]:
    entries = [
        row(
            metric,
            column,
            lines(size, retrained(size, recipe, "attention"), "two-stage", metric=metric),
            "middle",
        )
        for column, recipe in list(columns(size).items())[:2]
        for metric in METRICS
    ]
    return (
        ResultTable(
            "How pairs of heads are scored",
            tuple(entries),
            "Loss of the middle over the mean of the ends (below zero: the middle is better); all attention was re-initialised.",
            DIFFERS,
        ),
    )


def groups(size: Size) -> tuple[ResultTable, ...]:
    entries = [
        row(name, column, [freedom(size, *of)], quantity)
        for name, of in GROUPS.items()
        for column, quantity in QUANTITIES.items()
    ]
    return (
        ResultTable(
            "Symmetry groups", tuple(entries), "Of canonical models, all layers together.", ""
        ),
    )


EXPERIMENTS: Mapping[str, Experiment] = {
    "f-retrain": Experiment(
        "parts re-initialised and retrained, absolute against rotary positions",
        "F, protocol",
        retrain,
    ),
    "f-retrain-masked": Experiment(
        "parts re-initialised and retrained: models of masked text", "F, protocol", retrain_masked
    ),
    "f-retrain-images": Experiment(
        "parts re-initialised and retrained: classifiers of images", "F, protocol", retrain_images
    ),
    "f-orders": Experiment("every order of the heads, ours marked", "F, ablation", head_orders),
    "f-metrics": Experiment("metrics by which heads are matched", "F, ablation", metrics),
    "f-groups": Experiment(
        "degrees of freedom per family and position encoding", "F, theory", groups
    ),
}
