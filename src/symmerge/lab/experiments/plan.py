"""Before anything is computed: how large, where, on what, how long; and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from symmerge.checkpoints.files import read_json, write_json
from symmerge.errors import CheckpointError, DataError, MismatchError
from symmerge.lab.experiments.cells import Cell, with_needs
from symmerge.lab.experiments.external import ExternalModels
from symmerge.lab.experiments.runner import missing
from symmerge.lab.experiments.store import Store
from symmerge.lab.experiments.tables import SIZES, ResultTable, Size, cells_of
from symmerge.lab.training import files as sources
from symmerge.lab.training.pretrained import check_start
from symmerge.lab.training.recipes import training_recipe
from symmerge.models.model import load

CPU_TIMES = 40
"""How much longer a CPU takes for what is made for a GPU."""
GPU_WORKERS, GPU_HEAVY = 9, 3
"""How many cells a GPU bears at once, and how many of those that train or learn: processes take turns there."""
IDENTITY = "experiment.json"
UNITS = {"days": 86400, "h": 3600, "min": 60, "s": 1}


def make_size(
    name: str,
    *,
    seeds: int | None = None,
    device: str | None = None,
    data: Path | None = None,
    external: ExternalModels | None = None,
) -> Size:
    """One of the sizes, with other seeds, another device or models of the user's where they are given."""
    if name not in SIZES:
        raise MismatchError(f"--size {name}: choose one of {', '.join(SIZES)}")
    size = SIZES[name]
    count = len(external.models) if external else seeds or size.seeds
    return replace(
        size,
        seeds=count,
        device=device or size.device,
        data=data.absolute() if data else None,
        external=external,
    )


def check_data(name: str, tables: tuple[ResultTable, ...], size: Size, store: Store) -> None:
    """That data which does not come with the installation is there, as far as something is still to be computed from it."""
    for recipe in _recipes(tables, store):
        try:
            sources.check_data(training_recipe(recipe), size.data)
        except DataError as error:
            raise DataError(
                f"{name} at size {size.name} needs the data of {recipe}: {error}, or use --size small"
            ) from error


def digests(tables: tuple[ResultTable, ...], size: Size, store: Store) -> dict[str, str]:
    """The data that something is still to be computed from, each with a hash of what it is."""
    return sources.digests(map(training_recipe, _recipes(tables, store)), size.data)


def _recipes(tables: tuple[ResultTable, ...], store: Store) -> dict[str, None]:
    return dict.fromkeys(
        cell.settings["recipe"]
        for cell in missing(cells_of(tables), store)
        if "recipe" in cell.settings
    )


def check_same_data(folder: Path, data: Mapping[str, str]) -> None:
    """That data is what it was when others of the folder's cells were computed."""
    held = _held(folder).get("data", {})
    if others := [name for name, digest in data.items() if held.get(name, digest) != digest]:
        raise MismatchError(
            f"{folder} was begun with other data ({' and '.join(others)} changed since): restore it, or choose another --out"
        )


def check_train_data(name: str, tables: tuple[ResultTable, ...]) -> None:
    """That methods which look at data have some, where models are given."""
    lacking = dict.fromkeys(
        cell.settings["method"]
        for cell in cells_of(tables)
        if cell.settings.get("train", "") is None
    )
    if lacking:
        remedy = "add --train-data DATA, other data than --test-data (language models can write their own: --train-data self)"
        raise DataError(
            f"{name}: the methods {', '.join(lacking)} look at data or learn from it: {remedy}"
        )


def check_starts(tables: tuple[ResultTable, ...]) -> None:
    """That models which are given can be trained further, where that is what an experiment does."""
    trained = [cell for cell in with_needs(cells_of(tables)) if "recipe" in cell.settings]
    begun = (
        (cell.settings["recipe"], need.beside["place"])
        for cell in trained
        for need in cell.needs
        if "place" in need.beside
    )
    for recipe, place in dict.fromkeys(begun):
        check_start(training_recipe(recipe), load(place))


def check_device(tables: tuple[ResultTable, ...], size: Size, store: Store) -> None:
    """That there is the GPU a size is made for, or else how long it would take without."""
    left = missing(cells_of(tables), store)
    if (
        size.device == "cpu" or torch.cuda.is_available() or not left
    ):  # what was computed elsewhere is shown anywhere
        return
    long = duration(CPU_TIMES * sum((cell.cost.seconds for cell in left), 0.0))
    raise MismatchError(
        f"size {size.name} is made for a GPU, and PyTorch sees none here: on one core it would take about {long};"
        " use --size small, or --device cpu if that is what you want"
    )


def default_workers(cells: Iterable[Cell], device: str) -> int:
    """How many cells this machine computes at once: one per core, as far as half of its memory reaches and a GPU bears."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2e9
    most = GPU_WORKERS if device.startswith("cuda") else cores
    return max(
        1, min(cores, most, int(room / max((cell.cost.gigabytes for cell in cells), default=1.0)))
    )


def check_folder(folder: Path, name: str, size: Size, *, resume: bool) -> None:
    """That a folder is new, or belongs to the same experiment and is to be continued."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: choose another --out")
    if _is_new(folder):
        return
    if not (folder / IDENTITY).is_file():
        raise CheckpointError(f"{folder} exists and holds no experiment: choose another --out")
    holds = _held(folder)
    if (holds.get("name"), holds.get("size")) != (name, size.name):
        raise MismatchError(
            f"{folder} holds {holds.get('name')} at size {holds.get('size')}, not {name} at size {size.name}: choose another --out"
        )
    if {**holds, "data": None} != {**_identity(name, size), "data": None}:
        raise MismatchError(
            f"{folder} holds {name} of other models or other data: choose another --out, or give those it began with"
        )
    if not resume and any((folder / "cells").glob("[!.]*")):
        raise MismatchError(
            f"{folder} exists: add --resume to go on there (what is finished is kept), or choose another --out"
        )


def claim(folder: Path, name: str, size: Size, data: Mapping[str, str]) -> None:
    """Say in the folder whose it is, and what its data is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            folder / IDENTITY,
            {**_identity(name, size), "data": {**_held(folder).get("data", {}), **data}},
        )
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from error


def _held(folder: Path) -> dict[str, Any]:
    return read_json(folder / IDENTITY) if (folder / IDENTITY).is_file() else {}


def _is_new(folder: Path) -> bool:
    return not folder.exists() or all(
        file.name.startswith(".") for file in folder.iterdir()
    )  # hidden: what a killed run left


def _identity(name: str, size: Size) -> dict[str, Any]:
    return {
        "name": name,
        "size": size.name,
        **({"external": size.external.record} if size.external else {}),
    }


def plan_rows(
    tables: tuple[ResultTable, ...], size: Size, store: Store
) -> Iterator[dict[str, Any]]:
    """Every cell in the order of computation: is it done, and what it is expected to take. The last row has the totals of what is left."""
    cells = with_needs(cells_of(tables))
    left = missing(cells_of(tables), store)
    states = {cell.key: "to do" for cell in left}
    for cell in cells:
        state = "done" if store.done(cell) else states.get(cell.key, "not needed")
        yield {
            "cell": cell.label or cell.key,
            "step": cell.step.partition(":")[2],
            "state": state,
            **_cost([cell], size),
        }
    yield {
        "cell": f"total: {len(cells)} cells",
        "step": "",
        "state": f"{len(left)} to do",
        **_cost(left, size),
    }


def _cost(cells: Iterable[Cell], size: Size) -> dict[str, str]:
    cells = list(cells)
    times = CPU_TIMES if (SIZES[size.name].device, size.device) == ("cuda", "cpu") else 1
    return {
        "time": duration(times * sum((cell.cost.seconds for cell in cells), 0.0)),
        "memory": f"{max((cell.cost.gigabytes for cell in cells), default=0.0):.1f} GB",
    }


def duration(seconds: float) -> str:
    """About how long, in words.

    >>> duration(90.0), duration(5400.0), duration(3e5)
    ('90 s', '90 min', '3.5 days')
    """
    unit, length = next(
        ((unit, length) for unit, length in UNITS.items() if seconds >= 2 * length), ("s", 1)
    )
    amount = seconds / length
    return f"{amount:.1f} {unit}" if amount < 10 and unit != "s" else f"{amount:.0f} {unit}"
