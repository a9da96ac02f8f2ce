"""Merging text Transformers by the correlation of activations.

Heads, the residual stream, components, amount of data, features, fine-tuned classifiers.
"""

from __future__ import annotations

from collections.abc import Mapping

from symmerge.lab.experiments.components import by_scale, lines, model, models, row
from symmerge.lab.experiments.components import differs as differs_from
from symmerge.lab.experiments.external import Accepts
from symmerge.lab.experiments.tables import Experiment, ResultTable, Size
from symmerge.lab.training.files import has_data
from symmerge.lab.training.recipes import training_recipe

PRETRAINED = {"small": "bert-docs", "published": "books-bert"}
BASE_SIZE = {
    "masked text, 12 layers of 768": "books-bert-base"
}  # of Tables 1 and 2, when published
# row -> recipe, published number
HEADS = {
    "heads stay as they are": ("correlation-ff", 4.31),
    "heads stay in order": ("correlation-monotonic", 4.13),
    "heads torn apart (no symmetry)": ("correlation-ignore-heads", 3.97),
    "heads permuted": ("correlation", 3.71),
}
STREAM = {
    "identity": ("none", 4.95),
    "first place": ("residual-first", 7.58),
    "last place": ("residual-last", 7.41),
    "all places": ("residual-all", 7.34),
    "anew after every block (no symmetry)": ("residual-separate", 9.38),
}
COMPONENTS = {
    "plain average": "none",
    "feed-forward": "correlation-ff",
    "attention": "correlation-attention",
    "feed-forward and attention": "correlation",
    "these and the stream": "correlation-all",
}
# size -> data set -> recipes of the pretrained and of the fine-tuned models
TASKS = {
    "small": {"python-topics": ("bert-docs-long", "topics-bert")},
    # CoLA and RTE say little of models this small; AG News and the topics are not the paper's.
    "published": {
        **{name: ("books-bert", f"{name}-bert") for name in ("sst2", "cola", "mrpc", "rte")},
        "agnews": ("books-bert", "agnews-bert"),
        "python-topics": ("books-bert", "topics-bert"),
    },
}
OPTIONAL = ("agnews",)  # left out if the data is missing
# row -> recipe, published numbers by data set
TUNED: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "plain average": ("none", {"sst2": 0.42, "cola": 1.31, "mrpc": 2.74, "rte": 0.53}),
    "correlation": ("correlation", {"sst2": 0.36, "cola": 1.11, "mrpc": 1.93, "rte": 0.41}),
    "correlation, classifier too": ("correlation-classifier", {}),
    "ours, with data": ("activations", {}),
}
ACCURACIES, HALFWAY = ("plain average", "ours, with data"), "halfway/accuracy"
OURS = {"ours, no data": "symmerge", "ours, with data": "activations"}
AMOUNTS = {"smoke": (8, 16), "small": (12, 48, 192), "published": (12, 48, 192, 1000)}
LAYERS = {"smoke": 2, "small": 2, "published": 6}
COLUMN = "masked text"
ABOUT = "Highest pseudo-loss over the mean of the ends (their definition), held-out masked text."
DIFFERS = {
    "small": "Two layers, 64 wide, on Python's documentation; the paper merges BERT-base"
    " (MultiBERTs), so its numbers belong to other models.",
    "published": "Smaller BERTs trained here on novels; the paper merges BERT-base (MultiBERTs):"
    " `--models multiberts`, with access to the hub.",
}
FINE_TUNED_DIFFERS = (
    "External pretrained models, fine-tuned by our recipes:"
    " published numbers belong to the paper's models and its fine-tuning."
)


def recipe(size: Size) -> str:
    return by_scale(size, PRETRAINED)


def differs(size: Size) -> str:
    return differs_from(size, by_scale(size, DIFFERS))


def column(size: Size) -> str:
    return size.external.column if size.external else COLUMN


def _table(
    size: Size, title: str, rows: Mapping[str, tuple[str, float | None]]
) -> tuple[ResultTable, ...]:
    recipes = {column(size): recipe(size)}
    if size.name == "published" and not size.external:
        recipes |= BASE_SIZE
    entries = [
        row(name, shown, lines(size, models(size, trained), method), "barrier_mean", published)
        for shown, trained in recipes.items()
        for name, (method, published) in rows.items()
    ]
    return (ResultTable(title, tuple(entries), ABOUT, differs(size)),)


def heads(size: Size) -> tuple[ResultTable, ...]:
    ours = {name: (method, None) for name, method in OURS.items()}
    return _table(
        size, "Feed-forward and attention, by what heads may do (Table 1)", {**HEADS, **ours}
    )


def stream(size: Size) -> tuple[ResultTable, ...]:
    ours = {"all places, decoder untied": ("residual-all-untied", None)}
    return _table(size, "The residual stream alone (Table 2)", {**STREAM, **ours})


def components(size: Size) -> tuple[ResultTable, ...]:
    rows = {name: (method, None) for name, method in {**COMPONENTS, **OURS}.items()}
    return _table(size, "Curves by component", rows)


def amount(size: Size) -> tuple[ResultTable, ...]:
    cells = models(size, recipe(size))
    entries = [
        row(name, f"{count} samples", lines(size, cells, method, inputs=count), "barrier_mean")
        for count in AMOUNTS[size.name]
        for name, method in (("correlation", "correlation"), ("ours, with data", "activations"))
    ]
    return (ResultTable("Barrier against amount of data", tuple(entries), ABOUT, differs(size)),)


def features(size: Size) -> tuple[ResultTable, ...]:
    cells = lines(size, models(size, recipe(size)), "correlation")
    entries = [
        row(f"layer {layer}, {kind}", when, cells, f"alike/{kind} {layer} {when}")
        for layer in range(size.external.layers if size.external else LAYERS[size.name])
        for kind in ("vo", "ff")
        for when in ("before", "after")
    ]
    about = "Mean over the features of a layer, before and after they are matched."
    title = "Correlation of matched features"
    return (ResultTable(title, tuple(entries), about, differs(size)),)


def tasks(size: Size) -> tuple[ResultTable, ...]:
    entries = []
    for column, (pretrained, fine_tuned) in by_scale(size, TASKS).items():
        if column in OPTIONAL and not has_data(training_recipe(fine_tuned), size.data):
            continue
        bases = models(size, pretrained)
        cells = [model(size, fine_tuned, seed, base=base) for seed, base in enumerate(bases)]
        plain = lines(size, cells, "none")
        entries.append(row("accuracy of the parents", column, plain, "parents/accuracy"))
        for name, (method, published) in TUNED.items():
            compared = lines(size, cells, method)
            entries.append(row(name, column, compared, "barrier_mean", published.get(column)))
            if name in ACCURACIES:
                entries.append(row(f"{name}: accuracy halfway", column, compared, HALFWAY))
    about = (
        "Classifiers fine-tuned from models of different seeds, with the same initial head;"
        " highest loss over the mean of the ends."
    )
    notes = differs_from(size, by_scale(size, DIFFERS), external=FINE_TUNED_DIFFERS)
    return (ResultTable("Fine-tuned classifiers (Table 3)", tuple(entries), about, notes),)


PAPER = "Merging Text Transformer Models from Different Initializations, arXiv 2403.00986"
ANY = Accepts()
EXPERIMENTS: Mapping[str, Experiment] = {
    "v-heads": Experiment(
        "what heads may do when features are matched by correlation",
        f"{PAPER}, Table 1",
        heads,
        ANY,
    ),
    "v-stream": Experiment(
        "the residual stream alone, matched at one place or at all",
        f"{PAPER}, Table 2",
        stream,
        ANY,
    ),
    "v-tasks": Experiment(
        "classifiers fine-tuned from models of different seeds",
        f"{PAPER}, Table 3",
        tasks,
        Accepts(further=True),
    ),
    "v-components": Experiment("loss curves by component", f"{PAPER}, figures", components, ANY),
    "v-amount": Experiment("barrier against amount of data", f"{PAPER}, figure", amount, ANY),
    "v-features": Experiment(
        "how alike features are, layer by layer, before and after",
        f"{PAPER}, figure",
        features,
        ANY,
    ),
}
