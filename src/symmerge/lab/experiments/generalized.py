"""T: generalized linear mode connectivity for Transformers. Methods, samplers, iterations, soft permutations, widths, many models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from symmerge.evaluation.tasks import SELF_SOURCES
from symmerge.evaluation.tasks.catalog import SELF_LABELLED
from symmerge.lab.experiments.components import (
    LONG_LEARNING,
    by_scale,
    columns_of,
    line,
    lines,
    models,
    row,
    together,
    unequal,
)
from symmerge.lab.experiments.components import differs as differs_from
from symmerge.lab.experiments.external import Accepts
from symmerge.lab.experiments.tables import Experiment, ResultTable, Size, TableEntry
from symmerge.lab.training.files import describe_files, has_data
from symmerge.lab.training.recipes import training_recipe

METHODS = {
    "vanilla": "none",
    "activation matching": "activations",
    "weight matching": "symmerge",
    "learned, permutations only": "learned-permutations",
    "learned": "learned",
}
# row -> what the paper's Table 1 has, by data set
TABLE_1 = {
    "vanilla": {
        "cifar10": 1.69,
        "cifar100": 2.46,
        "tiny-imagenet": 2.84,
        "shakespeare": 2.02,
        "books": 4.34,
    },
    "activation matching": {
        "cifar10": 1.27,
        "cifar100": 2.11,
        "tiny-imagenet": 1.86,
        "shakespeare": 1.43,
        "books": 4.05,
    },
    "weight matching": {
        "cifar10": 0.36,
        "cifar100": 0.69,
        "tiny-imagenet": 0.47,
        "shakespeare": 0.34,
        "books": 1.56,
    },
    "learned, permutations only": {
        "cifar10": 0.45,
        "cifar100": 0.53,
        "tiny-imagenet": 0.29,
        "shakespeare": 0.63,
        "books": 1.60,
    },
    "learned": {
        "cifar10": 0.00,
        "cifar100": 0.00,
        "tiny-imagenet": 0.00,
        "shakespeare": 0.02,
        "books": 0.42,
    },
}
PICTURES = {"steps": 1500, "inputs": 20_000, "start": "weights"}
WHERE_THERE = ("cifar100", "tiny-imagenet")  # columns that are left out where their data is not
# size -> column -> training recipe, what learned methods are told
MODELS: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "small": {"digits": ("vit-digits", {}), "documentation": ("gpt2-docs", {})},
    "published": {
        "cifar10": ("cifar10-vit", PICTURES),
        "cifar100": ("cifar100-vit", PICTURES),
        "tiny-imagenet": ("tiny-imagenet-vit", PICTURES),
        "shakespeare": ("shakespeare-gpt2", {"steps": 300, "batch_size": 16, "start": "weights"}),
        "books": ("books-gpt2", LONG_LEARNING),
    },
}
# what is varied is varied on a picture and a text, at the published size with models that do not overfit
VARIED: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "small": MODELS["small"],
    "published": {
        "cifar10": ("cifar10-vit-short", PICTURES),
        "shakespeare": MODELS["published"]["shakespeare"],
    },
}
WIDER = {
    "vit-digits": {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 384},
    "gpt2-docs": {"n_embd": 96, "n_head": 6, "n_inner": 384},
    "cifar10-vit-short": {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 768},
    "shakespeare-gpt2": {"n_embd": 384, "n_head": 6, "n_inner": 1536},
}
SAMPLERS = {
    "U(0.4, 0.6)": "narrow",
    "0.5": "fixed",
    "U(0, 1)": "wide",
    "N(0.5, 0.1)": "normal",
    "Beta(2, 2)": "beta:2,2",
}
SWEEPS = (1, 2, 5, 10)
INPUTS = (32, 256)
FEWER_STEPS = {"small": 20, "published": 100}
SMALL_DIFFERS = "Small models and embedded data (digits, Python's documentation), so the numbers are no reproduction; the published size is."


def chosen(size: Size) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Every data set; of those that few people have, the ones that are there."""
    without = absent(size)
    return {
        column: found for column, found in columns_of(size, MODELS).items() if column not in without
    }


def absent(size: Size) -> list[str]:
    found = columns_of(size, MODELS)
    return [
        column
        for column in WHERE_THERE
        if column in found and not has_data(training_recipe(found[column][0]), size.data)
    ]


def first(size: Size) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Two data sets: a picture and a text."""
    return columns_of(size, VARIED)


def told(method: str, learning: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a method: only learned ones are told how much to learn."""
    if not method.startswith("learned"):
        return {}
    return dict(
        learning
        if method == "learned"
        else {name: value for name, value in learning.items() if name != "start"}
    )


def differs(size: Size) -> str:
    published = "Merged models are stock checkpoints of the original size; the paper's have heads inflated by one."
    return differs_from(size, published if size.name == "published" else SMALL_DIFFERS)


def methods(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    for column, (recipe, learning) in chosen(size).items():
        for name, method in METHODS.items():
            cells = lines(size, models(size, recipe), method, **told(method, learning))
            entries.append(row(name, column, cells, published=TABLE_1[name].get(column)))
            if name == "learned":
                entries.append(
                    row("learned: middle below the better parent", column, cells, "gain")
                )
    without = "".join(
        f" Left out: {column}, whose data is not there; put {describe_files(column)} into the folder of --data."
        for column in absent(size)
    )
    about = "Highest loss over the straight line between the ends, held-out data."
    return (
        ResultTable("Barriers by method (Table 1)", tuple(entries), about, differs(size) + without),
    )


def samplers(size: Size) -> tuple[ResultTable, ...]:
    entries = [
        row(name, column, lines(size, models(size, recipe), "learned", **learning, sampler=sampler))
        for column, (recipe, learning) in first(size).items()
        for name, sampler in SAMPLERS.items()
    ]
    return (
        ResultTable(
            "Where on the line is learned",
            tuple(entries),
            "Sampler of the interpolation weight; barrier of learned matching.",
            differs(size),
        ),
    )


def iterations(size: Size) -> tuple[ResultTable, ...]:
    entries = [
        row(
            f"{method}, {sweeps} sweeps",
            column,
            lines(size, models(size, recipe), method, max_sweeps=sweeps),
        )
        for column, (recipe, _) in first(size).items()
        for method in ("permutations", "orthogonal")
        for sweeps in SWEEPS
    ]
    return (
        ResultTable(
            "Sweeps of weight matching, permutation against orthogonal",
            tuple(entries),
            "",
            differs(size),
        ),
    )


def soft(size: Size) -> tuple[ResultTable, ...]:
    learning = {"steps": 1000, "inputs": 8000} if size.name == "published" else {}
    rows = {
        "permutations": ("permutations", {}),
        "soft": ("soft", learning),
        "soft, hardened": ("soft-hardened", learning),
    }
    entries = [
        row(name, column, lines(size, models(size, recipe), method, **options))
        for column, (recipe, _) in first(size).items()
        for name, (method, options) in rows.items()
    ]
    return (
        ResultTable(
            "Soft permutations",
            tuple(entries),
            "A soft permutation is no symmetry: its barrier is taken over the parents.",
            differs(size),
        ),
    )


def spaces(size: Size) -> tuple[ResultTable, ...]:
    parts = (("residual",), ("heads",), ("ff",), ("residual", "heads"), ("residual", "heads", "ff"))
    entries = [
        row(
            " + ".join(some),
            column,
            lines(size, models(size, recipe), "learned", **learning, spaces=list(some)),
        )
        for column, (recipe, learning) in first(size).items()
        for some in parts
    ]
    return (
        ResultTable(
            "Which symmetries are learned",
            tuple(entries),
            "All start from the same weight matching.",
            differs(size),
        ),
    )


def needs(size: Size) -> tuple[ResultTable, ...]:
    """Every row changes one thing of the first; the last is its start."""
    fewer, start = (
        by_scale(size, FEWER_STEPS),
        by_scale(size, {"small": "weights-only", "published": "weights"}),
    )
    rows: dict[str, Mapping[str, Any]] = {
        "from weights": {},
        "from activations": {"start": "activations"},
        "from models as they are": {"start": "identity"},
        "labels instead of the parents' answers": {"target": "labels"},
        **{f"{count} inputs": {"inputs": count} for count in INPUTS},
        f"{fewer} steps": {"steps": fewer},
        "permutations stay": {"permutations": False},
        "no data at all": {"data": "self"},
    }
    if size.external and size.external.task not in SELF_SOURCES:
        del rows["no data at all"]
    if (
        size.external
        and size.external.train
        and size.external.train.place == "self"
        and size.external.task not in SELF_LABELLED
    ):
        del rows["labels instead of the parents' answers"]
    entries: list[TableEntry] = []
    for column, (recipe, base) in first(size).items():
        found = models(size, recipe)
        entries += [
            row(name, column, lines(size, found, "learned", **{**base, "start": start, **changes}))
            for name, changes in rows.items()
        ]
        entries.append(
            row(
                "weights, not learned",
                column,
                lines(size, found, {"weights": "symmerge"}.get(start, start)),
            )
        )
    about = "Barrier of learned matching. Each row changes one thing of the first; without data, language models write text, and dead leaves are drawn for others."
    return (ResultTable("What learned matching needs", tuple(entries), about, differs(size)),)


def widths(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    for column, (recipe, learning) in first(size).items():
        found = unequal(size, recipe, WIDER.get(recipe, {}))
        rows = {"padded average": ("none", {}), "weight matching": ("symmerge", {})}
        rows |= {
            f"learned, {name}": ("learned", {**learning, "sampler": name})
            for name in ("narrow", "wide")
        }
        entries += [
            row(name, column, [line(size, pair, method, **options) for pair in found], "middle")
            for name, (method, options) in rows.items()
        ]
    wide = "" if size.external else "; the wide model is half as wide again"
    return (
        ResultTable(
            "A narrow model in a wide one",
            tuple(entries),
            f"Loss of the middle over the mean of the ends{wide}.",
            differs(size),
        ),
    )


def many(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    count = str(size.seeds) if size.external and size.seeds != 3 else "three"
    for column, (recipe, learning) in first(size).items():
        found = models(replace(size, seeds=3), recipe)
        for name in ("vanilla", "weight matching", "learned"):
            cell = together(size, found, METHODS[name], **told(METHODS[name], learning))
            entries += [
                row(f"{name}: {count} merged", column, [cell], "all"),
                row(f"{name}: mean of the pairs", column, [cell], "pairs"),
            ]
    about = (
        f"Loss of the mean of {count} over the mean of their own losses, and the pairs' barriers."
    )
    return (
        ResultTable(f"{count.capitalize()} models in one", tuple(entries), about, differs(size)),
    )


ANY = Accepts()
EXPERIMENTS: Mapping[str, Experiment] = {
    "t-methods": Experiment(
        "every method on every data set, with standard errors", "T, Table 1", methods, ANY
    ),
    "t-samplers": Experiment(
        "where between the models learning looks", "T, ablation", samplers, ANY
    ),
    "t-iterations": Experiment(
        "sweeps of weight matching, permutations against rotations", "T, ablation", iterations, ANY
    ),
    "t-soft": Experiment(
        "soft permutations, and what remains of them when hardened", "T", soft, ANY
    ),
    "t-spaces": Experiment("what each symmetry buys when it is learned", "ours", spaces, ANY),
    "t-learning": Experiment(
        "what learned matching needs: a start, a target, inputs, steps, flips", "ours", needs, ANY
    ),
    "t-widths": Experiment(
        "a narrow model merged into a wide one", "T, widths", widths, Accepts(widths=True)
    ),
    "t-many": Experiment("three models merged into one", "T, many models", many, Accepts(least=3)),
}
