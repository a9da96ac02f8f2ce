"""Building blocks of experiments, as cells: models, pairs of models, and lines between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any, TypeVar

from symmerge.lab.experiments.cells import Cell, Cost, Settings
from symmerge.lab.experiments.tables import Size, TableEntry
from symmerge.lab.training.recipes import training_recipe
from symmerge.matching.recipes import get_recipe

T = TypeVar("T")
STEPS = "symmerge.lab.experiments.steps"
PLAIN = "none"
"""The method of the plain average."""
SMOKE = {"steps": 12, "warmup": 2}  # training that only has to run
SMOKE_BATCH = 16  # at most
# Samples of the test split; `small` takes the task's default.
MEASURED = {"smoke": {"samples": 24}, "published": {"max_samples": 10_000}}
# Expected seconds of a cell: on one core; at the published size, on a GPU.
SECONDS = {
    "external": {"smoke": 1, "small": 1, "published": 1},
    "train": {"smoke": 3, "small": 25, "published": 200},
    "retrain": {"smoke": 3, "small": 12, "published": 60},
    "line": {"smoke": 1, "small": 4, "published": 30},
    "learned": {"smoke": 2, "small": 15, "published": 60},
    "together": {"smoke": 3, "small": 30, "published": 150},
    "orders": {"smoke": 10, "small": 40, "published": 300},
    "freedom": {"smoke": 1, "small": 1, "published": 1},
}
HEAVY = ("train", "retrain", "learned", "together")
SLOWER = {"tiny-imagenet-vit": 20.0, "books-bert-base": 6.0}  # factors for the cells of a recipe
GIGABYTES = {"smoke": 1.0, "small": 1.0, "published": 6.0}
# Parameters of these models; larger external ones take proportionally longer.
PARAMETERS = {"smoke": 2e5, "small": 2e5, "published": 1e7}
COPIES = 10  # peak memory, in copies of a model's float32 weights
LEARNING = {"smoke": {"steps": 2, "inputs": 48}, "small": {"steps": 60, "inputs": 600}}
"""Default learning options by size."""
STARTS = {"smoke": {"start": "identity"}, "small": {"start": "weights-only"}}
LONG_LEARNING: Mapping[str, object] = {"steps": 1500, "inputs": 8000, "start": "weights"}
"""Enough for models of the published size on any data."""
EXTERNAL_LEARNING: Mapping[str, Mapping[str, object]] = {"published": LONG_LEARNING}
"""For external models, at sizes where settings otherwise depend on the data set."""
EXTERNAL_DIFFERS = (
    "Models and data are external: published numbers belong to other models,"
    " unless these are the paper's."
)
QUICK = {"smoke": {"tries": 1, "max_sweeps": 2}}
"""Default options of search methods by size."""


def by_scale(size: Size, table: Mapping[str, T]) -> T:
    """The entry for the published size, or for smaller ones."""
    return table["published" if size.name == "published" else "small"]


def columns_of(
    size: Size, table: Mapping[str, Mapping[str, tuple[str, Mapping[str, object]]]]
) -> Mapping[str, tuple[str, Mapping[str, object]]]:
    """Column -> training recipe and learning options. External models are one column."""
    if size.external:
        return {size.external.column: ("", EXTERNAL_LEARNING.get(size.name, {}))}
    return by_scale(size, table)


def differs(size: Size, trained: str, *, external: str = EXTERNAL_DIFFERS) -> str:
    """How our setting differs from the paper's, for trained and for external models."""
    return external if size.external else trained


def model(
    size: Size,
    recipe: str,
    seed: int,
    *,
    config: Mapping[str, object] | None = None,
    base: Cell | None = None,
) -> Cell:
    """A model trained from a seed, or a classifier fine-tuned from `base`.

    All such classifiers start with the same head.
    """
    content = training_recipe(recipe)
    smoke = {**SMOKE, "batch_size": min(SMOKE_BATCH, content.schedule.batch_size)}
    settings = {
        "recipe": recipe,
        "seed": seed,
        "config": dict(config or {}),
        "schedule": smoke if size.name == "smoke" else {},
        "device": size.device,
        # The key contains the recipe's content, except its description.
        "content": asdict(replace(content, about="", duration="")),
    }
    origin = base.label if base and size.external else f"seed {seed}"
    label = f"{recipe}{'*' if config else ''}, {origin}"
    if base:
        return _cell(size, "train", settings, (base,), label, "retrain")
    return _cell(size, "train", settings, (), label, "train")


def models(size: Size, recipe: str, **changes: Any) -> list[Cell]:
    """One model per seed, or the external ones."""
    if not size.external:
        return [model(size, recipe, seed, **changes) for seed in range(size.seeds)]
    return [
        _cell(size, "external", {"content": one.content}, (), one.label, place=str(one.place))
        for one in size.external.models
    ]


def retrained_from(
    size: Size, base: Cell, fresh: str, seed: int, schedule: Mapping[str, object] | None = None
) -> Cell:
    """A model with a component initialised afresh, trained again."""
    smoke = SMOKE if size.name == "smoke" else {}
    schedule = {**base.settings["schedule"], **(schedule or {}), **smoke}
    settings = {**base.settings, "seed": seed, "fresh": fresh, "schedule": schedule}
    label = f"{base.label}, {fresh} fresh by seed {seed}"
    return _cell(size, "train", settings, (base,), label, "retrain")


def pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """All pairs of models."""
    return list(combinations(cells, 2))


def unequal(size: Size, recipe: str, wider: Mapping[str, object]) -> list[tuple[Cell, Cell]]:
    """A wide and a narrow model per seed, or external pairs that differ in width."""
    if size.external:
        parameters = {one.content: one.parameters for one in size.external.models}
        return [
            pair
            for pair in pairs(models(size, recipe))
            if len({parameters[cell.settings["content"]] for cell in pair}) > 1
        ]
    return [
        (model(size, recipe, seed + 100, config=wider), model(size, recipe, seed))
        for seed in range(size.seeds)
    ]


def line(size: Size, pair: tuple[Cell, Cell], method: str, **options: object) -> Cell:
    """The line between two models by a method; default options depend on the size.

    `circuits=True`: also with attention averaged as circuits, under that name in the result.
    """
    circuits = options.pop("circuits", False)
    settings = _measured(size, pair[0], method, {**default_options(size, method), **options})
    settings |= {"circuits": True} if circuits else {}
    changes = "".join(f", {name} {value}" for name, value in options.items())
    kind = "learned" if method.startswith(("learned", "soft")) else "line"
    label = f"{method}{changes}: {pair[0].label} / {pair[1].label}"
    return _cell(size, "line", settings, pair, label, kind, **_places(size))


def lines(size: Size, cells: Sequence[Cell], method: str, **options: object) -> list[Cell]:
    """The lines between all pairs of models."""
    return [line(size, pair, method, **options) for pair in pairs(cells)]


def together(size: Size, cells: Sequence[Cell], method: str, **options: object) -> Cell:
    """Many models merged into one."""
    options = {**default_options(size, method), **options}
    if method == "learned":
        # Otherwise text would be sampled again for every model and round.
        options["start"] = "weights-only"
    settings = _measured(size, cells[0], method, options)
    label = f"{method}: {' / '.join(cell.label for cell in cells)}"
    return _cell(size, "together", settings, tuple(cells), label, **_places(size))


def default_options(size: Size, method: str) -> dict[str, object]:
    """Default options of a method by size; learned methods pass unknown ones to their start."""
    quick, learning = QUICK.get(size.name, {}), LEARNING.get(size.name, {})
    if method == "learned":
        return {**learning, **STARTS.get(size.name, {}), **quick}
    if method.startswith(("learned", "soft")):
        return {**learning, **quick}
    return dict(quick) if method in ("symmerge", "activations") else {}


def orders(size: Size, pair: tuple[Cell, Cell]) -> Cell:
    """Every order of the heads of a layer."""
    label = f"orders of heads: {pair[0].label} / {pair[1].label}"
    return _cell(size, "orders", _measured(size, pair[0], "two-stage", {}), pair, label)


def freedom(size: Size, architecture: str, config: Mapping[str, object]) -> Cell:
    """The symmetries of an architecture."""
    settings = {"architecture": architecture, "config": dict(config)}
    return _cell(size, "freedom", settings, (), f"symmetries of {architecture}")


def _measured(
    size: Size, of: Cell, method: str, options: Mapping[str, object]
) -> dict[str, object]:
    """Settings of a measurement on held-out data, the recipe's or the external models'."""
    return {
        "method": method,
        "options": dict(options),
        **_data(size, of, method),
        "points": size.points,
        "device": size.device,
        **MEASURED.get(size.name, {}),
    }


def _data(size: Size, of: Cell, method: str) -> dict[str, object]:
    if "recipe" in of.settings:
        return {"recipe": of.settings["recipe"]}
    assert size.external and size.external.test
    settings: dict[str, object] = {"task": size.external.task, "test": size.external.test.content}
    if method != PLAIN and get_recipe(method).needs_data:
        settings["train"] = size.external.train and size.external.train.content
    return settings


def _places(size: Size) -> dict[str, Any]:
    return {"places": size.external.places} if size.external and size.external.places else {}


def _cell(
    size: Size,
    step: str,
    settings: Settings,
    needs: tuple[Cell, ...],
    label: str,
    kind: str = "",
    **beside: object,
) -> Cell:
    """A cell of `steps.py`; `kind` is the kind of cost, by default the name of the step."""
    cost = _cost(size, kind or step, settings.get("recipe", ""))
    data = {"data": str(size.data)} if size.data else {}
    return Cell(f"{STEPS}:{step}", settings, needs, {**data, **beside}, label, cost)


def _cost(size: Size, kind: str, recipe: str) -> Cost:
    parameters = max(one.parameters for one in size.external.models) if size.external else 0
    larger = max(1.0, parameters / PARAMETERS[size.name])
    seconds = SECONDS[kind][size.name] * SLOWER.get(recipe, 1.0) * larger
    gigabytes = max(GIGABYTES[size.name], COPIES * 4 * parameters / 1e9)
    return Cost(seconds, gigabytes, kind in HEAVY)


def row(
    name: str,
    column: str,
    cells: Sequence[Cell],
    quantity: str = "barrier_linear",
    published: float | None = None,
) -> TableEntry:
    return TableEntry(name, column, tuple(cells), quantity, published)
