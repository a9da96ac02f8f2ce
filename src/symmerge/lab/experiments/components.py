"""What experiments are put together from: models, pairs of them, and lines between the pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any, TypeVar

from symmerge.lab.experiments.cells import Cell, Cost
from symmerge.lab.experiments.tables import Size, TableEntry
from symmerge.lab.training.recipes import training_recipe
from symmerge.matching.recipes import get_recipe as matching_recipe

T = TypeVar("T")
STEPS = "symmerge.lab.experiments.steps"
PLAIN = "none"
"""The name of the method that does nothing."""
SMOKE = {"steps": 12, "warmup": 2}  # of a training that only has to work
MEASURED = {
    "smoke": {"samples": 24},
    "published": {"most": 10_000},
}  # on how much of the test part: all of it at the published size, else as the task has it
# what a cell of each size is expected to take: seconds on one core, or on a GPU at the published size
SECONDS = {
    "external": {"smoke": 1, "small": 1, "published": 1},
    "train": {"smoke": 3, "small": 25, "published": 200},
    "again": {"smoke": 3, "small": 12, "published": 60},
    "line": {"smoke": 1, "small": 4, "published": 30},
    "learned": {"smoke": 2, "small": 15, "published": 60},
    "together": {"smoke": 3, "small": 30, "published": 150},
    "orders": {"smoke": 10, "small": 40, "published": 300},
    "freedom": {"smoke": 1, "small": 1, "published": 1},
}
HEAVY = ("train", "again", "learned", "together")
LONGER = {"tiny-imagenet-vit": 20.0}  # recipes whose cells take so many times as long
GIGABYTES = {"smoke": 1.0, "small": 1.0, "published": 6.0}
PARAMETERS = {
    "smoke": 2e5,
    "small": 2e5,
    "published": 1e7,
}  # of the models these are for; larger ones that are given take as much longer
COPIES = 10  # of a model's weights, in float32: what a cell has in memory beside all else
LEARNING = {"smoke": {"steps": 2, "inputs": 48}, "small": {"steps": 60, "inputs": 600}}
"""How much is learned, where an experiment does not say it itself."""
STARTS = {"smoke": {"start": "identity"}, "small": {"start": "weights-only"}}
LONG_LEARNING: Mapping[str, Any] = {"steps": 1500, "inputs": 8000, "start": "weights"}
"""What is enough for models of the published size, wherever they learned."""
EXTERNAL_LEARNING: Mapping[str, Mapping[str, Any]] = {"published": LONG_LEARNING}
"""How much is learned of models that are given, at a size where an experiment says it for each data set."""
EXTERNAL_DIFFERS = "The models and the data are those given: published numbers belong to others, unless these are the paper's."
QUICK = {"smoke": {"tries": 1, "max_sweeps": 2}}
"""How long is searched, by methods that try several ways."""


def by_scale(size: Size, table: Mapping[str, T]) -> T:
    """What a table has for the published size, or for the small ones."""
    return table["published" if size.name == "published" else "small"]


def columns_of(
    size: Size, table: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]]
) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Column -> training recipe, what learned methods are told. Models that are given are one column, and need no recipe."""
    return (
        {size.external.column: ("", EXTERNAL_LEARNING.get(size.name, {}))}
        if size.external
        else by_scale(size, table)
    )


def differs(size: Size, otherwise: str, *, external: str = EXTERNAL_DIFFERS) -> str:
    """In what our setting is another than the paper's."""
    return external if size.external else otherwise


def model(
    size: Size,
    get_recipe: str,
    seed: int,
    *,
    config: Mapping[str, Any] | None = None,
    base: Cell | None = None,
) -> Cell:
    """A model trained from a seed; or, with a `base`, a classifier made of that one, whose head begins alike for every seed."""
    schedule = SMOKE if size.name == "smoke" else {}
    settings = {
        "recipe": get_recipe,
        "seed": seed,
        "config": dict(config or {}),
        "schedule": schedule,
        "device": size.device,
    }
    # another recipe under the same name is another cell; what is said about it is for people
    settings["content"] = {
        name: value
        for name, value in asdict(training_recipe(get_recipe)).items()
        if name not in ("about", "duration")
    }
    label = f"{get_recipe}{'*' if config else ''}, {base.label if base and size.external else f'seed {seed}'}"
    return (
        _cell(size, "train", settings, (base,), label, "again")
        if base
        else _cell(size, "train", settings, (), label, "train")
    )


def models(size: Size, get_recipe: str, **changes: Any) -> list[Cell]:
    """As many as the size has seeds; or those that are given."""
    if size.external:
        return [
            _cell(
                size,
                "external",
                {"content": one.content},
                (),
                one.label,
                "external",
                place=str(one.place),
            )
            for one in size.external.models
        ]
    return [model(size, get_recipe, seed, **changes) for seed in range(size.seeds)]


def retrained_from(
    size: Size, base: Cell, fresh: str, seed: int, schedule: Mapping[str, Any] | None = None
) -> Cell:
    """A model with a part of it fresh, trained again."""
    settings = {
        **base.settings,
        "seed": seed,
        "fresh": fresh,
        "schedule": {
            **base.settings["schedule"],
            **(schedule or {}),
            **(SMOKE if size.name == "smoke" else {}),
        },
    }
    return _cell(
        size, "train", settings, (base,), f"{base.label}, {fresh} fresh by seed {seed}", "again"
    )


def pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Every two."""
    return list(combinations(cells, 2))


def unequal(size: Size, get_recipe: str, wider: Mapping[str, Any]) -> list[tuple[Cell, Cell]]:
    """A wide model and a narrow one, for every seed; or every two of those given that differ in width."""
    if size.external:
        parameters = {one.content: one.parameters for one in size.external.models}
        return [
            pair
            for pair in pairs(models(size, get_recipe))
            if len({parameters[cell.settings["content"]] for cell in pair}) > 1
        ]
    return [
        (model(size, get_recipe, seed + 100, config=wider), model(size, get_recipe, seed))
        for seed in range(size.seeds)
    ]


def line(size: Size, pair: tuple[Cell, Cell], method: str, **options: Any) -> Cell:
    """The line between two models by a method; what the learned ones are not told they get by the size."""
    settings = _measured(size, pair[0], method, {**by_size(size, method), **options})
    told = "".join(f", {name} {value}" for name, value in options.items())
    kind = "learned" if method.startswith(("learned", "soft")) else "line"
    return _cell(
        size,
        "line",
        settings,
        pair,
        f"{method}{told}: {pair[0].label} / {pair[1].label}",
        kind,
        **_places(size),
    )


def lines(size: Size, cells: Sequence[Cell], method: str, **options: Any) -> list[Cell]:
    """The line between every two."""
    return [line(size, pair, method, **options) for pair in pairs(cells)]


def together(size: Size, cells: Sequence[Cell], method: str, **options: Any) -> Cell:
    """Many models merged into one."""
    start = (
        {"start": "weights-only"} if method == "learned" else {}
    )  # the parents' own text would be written anew for every member and round
    settings = _measured(size, cells[0], method, {**by_size(size, method), **options, **start})
    return _cell(
        size,
        "together",
        settings,
        tuple(cells),
        f"{method}: {' / '.join(cell.label for cell in cells)}",
        "together",
        **_places(size),
    )


def by_size(size: Size, method: str) -> dict[str, Any]:
    """What a method is told at a size, where an experiment does not say it. What learning does not know is meant for what it starts from."""
    quick, learning = QUICK.get(size.name, {}), LEARNING.get(size.name, {})
    if method == "learned":
        return {**learning, **STARTS.get(size.name, {}), **quick}
    if method.startswith(("learned", "soft")):
        return {**learning, **quick}
    return dict(quick) if method in ("symmerge", "activations") else {}


def orders(size: Size, pair: tuple[Cell, Cell]) -> Cell:
    """Every order of the heads of a layer."""
    return _cell(
        size,
        "orders",
        _measured(size, pair[0], "two-stage", {}),
        pair,
        f"orders of heads: {pair[0].label} / {pair[1].label}",
        "orders",
    )


def freedom(size: Size, architecture: str, config: Mapping[str, Any]) -> Cell:
    """The symmetries of an architecture."""
    return _cell(
        size,
        "freedom",
        {"architecture": architecture, "config": dict(config)},
        (),
        f"symmetries of {architecture}",
        "freedom",
    )


def _measured(size: Size, of: Cell, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """On the data that the model learned its task from, the part held out; or on what is given with it."""
    settings = {
        "method": method,
        "options": dict(options),
        **_data(size, of, method),
        "points": size.points,
        "device": size.device,
    }
    return settings | MEASURED.get(size.name, {})


def _data(size: Size, of: Cell, method: str) -> dict[str, Any]:
    if "recipe" in of.settings:
        return {"recipe": of.settings["recipe"]}
    assert size.external and size.external.test
    train = (
        {"train": size.external.train and size.external.train.content}
        if method != PLAIN and matching_recipe(method).needs_data
        else {}
    )
    return {"task": size.external.task, "test": size.external.test.content, **train}


def _places(size: Size) -> dict[str, Any]:
    return {"places": size.external.places} if size.external and size.external.places else {}


def _cell(
    size: Size,
    step: str,
    settings: Mapping[str, Any],
    needs: tuple[Cell, ...],
    label: str,
    kind: str,
    **beside: Any,
) -> Cell:
    beside = {**({"data": str(size.data)} if size.data else {}), **beside}
    return Cell(
        f"{STEPS}:{step}",
        settings,
        needs,
        beside,
        label,
        _cost(size, kind, settings.get("recipe", "")),
    )


def _cost(size: Size, kind: str, get_recipe: str) -> Cost:
    parameters = max(one.parameters for one in size.external.models) if size.external else 0
    seconds = (
        SECONDS[kind][size.name]
        * LONGER.get(get_recipe, 1.0)
        * max(1.0, parameters / PARAMETERS[size.name])
    )
    return Cost(seconds, max(GIGABYTES[size.name], COPIES * 4 * parameters / 1e9), kind in HEAVY)


def row(
    name: str,
    column: str,
    cells: Sequence[Cell],
    quantity: str = "barrier_linear",
    published: float | None = None,
) -> TableEntry:
    return TableEntry(name, column, tuple(cells), quantity, published)
