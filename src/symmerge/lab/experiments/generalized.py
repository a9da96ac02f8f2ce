"""Generalized linear mode connectivity for Transformers.

Methods, samplers, iterations, soft permutations, widths, many models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

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
from symmerge.lab.experiments.external import Accepts, ExternalModels
from symmerge.lab.experiments.methods import (
    FORMS,
    IMAGES,
    METHODS,
    TABLE_1,
    method_rows,
    options_of,
)
from symmerge.lab.experiments.tables import Experiment, ResultTable, Size, TableEntry
from symmerge.lab.training.files import describe_files, has_data
from symmerge.lab.training.recipes import training_recipe

Rows = dict[str, tuple[str, Mapping[str, object]]]
"""Row -> method and options."""
OPTIONAL = ("cifar100", "tiny-imagenet")  # columns that are omitted if their data is missing
# size -> column -> training recipe, options of learned methods
MODELS: Mapping[str, Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "small": {"digits": ("vit-digits", {}), "documentation": ("gpt2-docs", {})},
    "published": {
        "cifar10": ("cifar10-vit", IMAGES),
        "cifar100": ("cifar100-vit", IMAGES),
        "tiny-imagenet": ("tiny-imagenet-vit", IMAGES),
        "shakespeare": ("shakespeare-gpt2", {"steps": 300, "batch_size": 16, "start": "weights"}),
        "books": ("books-gpt2", LONG_LEARNING),
    },
}
# Ablations: one image and one text data set; at the published size, models without overfitting.
VARIED: Mapping[str, Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "small": MODELS["small"],
    "published": {
        "cifar10": ("cifar10-vit-short", IMAGES),
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
SMALL_DIFFERS = (
    "Small models and embedded data (digits, Python's documentation): no reproduction;"
    " the published size is one."
)
PUBLISHED_DIFFERS = (
    "Merged models are stock checkpoints of the original size; the paper's have heads inflated"
    " by one."
)
SPACES = (("residual",), ("heads",), ("ff",), ("residual", "heads"), ("residual", "heads", "ff"))
LABELS = "labels instead of the parents' answers"
NO_DATA = "no data at all"


def chosen(size: Size) -> Mapping[str, tuple[str, Mapping[str, object]]]:
    """Every data set; optional ones only if their files exist."""
    without = absent(size)
    columns = columns_of(size, MODELS)
    return {column: columns[column] for column in columns if column not in without}


def absent(size: Size) -> list[str]:
    columns = columns_of(size, MODELS)
    return [
        column
        for column in OPTIONAL
        if column in columns and not has_data(training_recipe(columns[column][0]), size.data)
    ]


def first(size: Size) -> Mapping[str, tuple[str, Mapping[str, object]]]:
    """One image and one text data set."""
    return columns_of(size, VARIED)


def differs(size: Size) -> str:
    return differs_from(size, PUBLISHED_DIFFERS if size.name == "published" else SMALL_DIFFERS)


def methods(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    for column, (recipe, learning) in chosen(size).items():
        published = {name: TABLE_1[name].get(column) for name in TABLE_1}
        entries += method_rows(size, column, recipe, learning, published)
    without = "".join(
        f" Left out: {column}, whose data is missing;"
        f" put {describe_files(column)} into the folder of --data-dir."
        for column in absent(size)
    )
    about = f"Highest loss over the straight line between the ends, held-out data. {FORMS}"
    title = "Barriers by method (Table 1)"
    return (ResultTable(title, tuple(entries), about, differs(size) + without),)


def _ablation(
    size: Size, title: str, about: str, rows: Callable[[Mapping[str, object]], Rows]
) -> tuple[ResultTable, ...]:
    """A table over an image and a text data set; `rows` maps learning options to rows."""
    entries = [
        row(name, column, lines(size, models(size, recipe), method, **options))
        for column, (recipe, learning) in first(size).items()
        for name, (method, options) in rows(learning).items()
    ]
    return (ResultTable(title, tuple(entries), about, differs(size)),)


def samplers(size: Size) -> tuple[ResultTable, ...]:
    def rows(learning: Mapping[str, object]) -> Rows:
        return {n: ("learned", {**learning, "sampler": by}) for n, by in SAMPLERS.items()}

    about = "Sampler of the interpolation weight; barrier of learned matching."
    return _ablation(size, "Where on the line is learned", about, rows)


def iterations(size: Size) -> tuple[ResultTable, ...]:
    rows: Rows = {
        f"{method}, {sweeps} sweeps": (method, {"max_sweeps": sweeps})
        for method in ("permutations", "orthogonal")
        for sweeps in SWEEPS
    }
    title = "Sweeps of weight matching, permutation against orthogonal"
    return _ablation(size, title, "", lambda _: rows)


def soft(size: Size) -> tuple[ResultTable, ...]:
    learning = {"steps": 1000, "inputs": 8000} if size.name == "published" else {}
    rows: Rows = {
        "permutations": ("permutations", {}),
        "soft": ("soft", learning),
        "soft, hardened": ("soft-hardened", learning),
    }
    about = "A soft permutation is no symmetry: its barrier is taken over the parents."
    return _ablation(size, "Soft permutations", about, lambda _: rows)


def spaces(size: Size) -> tuple[ResultTable, ...]:
    def rows(learning: Mapping[str, object]) -> Rows:
        return {
            " + ".join(names): ("learned", {**learning, "spaces": list(names)}) for names in SPACES
        }

    about = "All start from the same weight matching."
    return _ablation(size, "Which symmetries are learned", about, rows)


def needs(size: Size) -> tuple[ResultTable, ...]:
    """Every row changes one thing relative to the first; the last is the start alone."""
    start = by_scale(size, {"small": "weights-only", "published": "weights"})
    changes = _changes(by_scale(size, FEWER_STEPS))
    for name in _impossible(size.external):
        del changes[name]

    def rows(learning: Mapping[str, object]) -> Rows:
        learned: Rows = {
            name: ("learned", {**learning, "start": start, **change})
            for name, change in changes.items()
        }
        return {
            **learned,
            "weights, not learned": ("symmerge" if start == "weights" else start, {}),
        }

    about = (
        "Barrier of learned matching. Each row changes one thing of the first; without data,"
        " language models generate text, and dead leaves are drawn for others."
    )
    return _ablation(size, "What learned matching needs", about, rows)


def _changes(fewer_steps: int) -> dict[str, Mapping[str, object]]:
    return {
        "from weights": {},
        "from activations": {"start": "activations"},
        "from models as they are": {"start": "identity"},
        LABELS: {"target": "labels"},
        **{f"{count} inputs": {"inputs": count} for count in INPUTS},
        f"{fewer_steps} steps": {"steps": fewer_steps},
        "permutations stay": {"permutations": False},
        NO_DATA: {"data": "self"},
    }


def _impossible(external: ExternalModels | None) -> Iterator[str]:
    """Rows to omit for external models, as nothing can generate their inputs or labels."""
    if external and external.task not in SELF_SOURCES:
        yield NO_DATA
    own = external and external.train and external.train.place == "self"
    if external and own and external.task not in SELF_LABELLED:
        yield LABELS


def widths(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    for column, (recipe, learning) in first(size).items():
        pairs = unequal(size, recipe, WIDER.get(recipe, {}))
        rows: Rows = {"padded average": ("none", {}), "weight matching": ("symmerge", {})}
        for name in ("narrow", "wide"):
            rows[f"learned, {name}"] = ("learned", {**learning, "sampler": name})
        for name, (method, options) in rows.items():
            cells = [line(size, pair, method, **options) for pair in pairs]
            entries.append(row(name, column, cells, "midpoint"))
    wide = "" if size.external else "; the wide model is half as wide again"
    about = f"Loss of the midpoint over the mean of the ends{wide}."
    return (ResultTable("A narrow model in a wide one", tuple(entries), about, differs(size)),)


def many(size: Size) -> tuple[ResultTable, ...]:
    entries: list[TableEntry] = []
    count = str(size.seeds) if size.external and size.seeds != 3 else "three"
    for column, (recipe, learning) in first(size).items():
        cells = models(replace(size, seeds=3), recipe)
        for name in ("vanilla", "weight matching", "learned"):
            merged = together(size, cells, METHODS[name], **options_of(METHODS[name], learning))
            entries += [
                row(f"{name}: {count} merged", column, [merged], "all"),
                row(f"{name}: mean of the pairs", column, [merged], "pairs"),
            ]
    title = f"{count.capitalize()} models in one"
    about = f"Loss of the mean of {count} over the mean of their losses, and the pairs' barriers."
    return (ResultTable(title, tuple(entries), about, differs(size)),)


PAPER = "Generalized Linear Mode Connectivity for Transformers, arXiv 2506.22712"
ANY = Accepts()
EXPERIMENTS: Mapping[str, Experiment] = {
    "t-methods": Experiment(
        "every method on every data set, with standard errors", f"{PAPER}, Table 1", methods, ANY
    ),
    "t-samplers": Experiment(
        "which points of the line are learned from", f"{PAPER}, ablation", samplers, ANY
    ),
    "t-iterations": Experiment(
        "sweeps of weight matching, permutations against rotations",
        f"{PAPER}, ablation",
        iterations,
        ANY,
    ),
    "t-soft": Experiment(
        "soft permutations, and what remains of them when hardened", PAPER, soft, ANY
    ),
    "t-spaces": Experiment("what each symmetry buys when it is learned", "ours", spaces, ANY),
    "t-learning": Experiment(
        "what learned matching needs: a start, a target, inputs, steps, permutations",
        "ours",
        needs,
        ANY,
    ),
    "t-widths": Experiment(
        "a narrow model merged into a wide one", f"{PAPER}, widths", widths, Accepts(widths=True)
    ),
    "t-many": Experiment(
        "three models merged into one", f"{PAPER}, many models", many, Accepts(least=3)
    ),
}
