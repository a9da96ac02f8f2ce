"""Checks and cost estimates of an experiment before anything is computed."""

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
from symmerge.lab.training import files
from symmerge.lab.training.pretrained import check_start
from symmerge.lab.training.recipes import training_recipe
from symmerge.models.model import load

CPU_TIMES = 40
"""Estimated slowdown of GPU work on a CPU."""
GPU_WORKERS, GPU_HEAVY = 9, 3
"""Cells at once on a GPU, and how many of them may be heavy: more would only take turns."""
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
    """A size by name, with optional changes to seeds, device, data or models."""
    if name not in SIZES:
        raise MismatchError(f"--size {name}: choose one of {', '.join(SIZES)}")
    size = SIZES[name]
    return replace(
        size,
        seeds=len(external.models) if external else seeds or size.seeds,
        device=device or size.device,
        data=data.absolute() if data else None,
        external=external,
    )


def check_data(name: str, tables: tuple[ResultTable, ...], size: Size, store: Store) -> None:
    """Check that the data sets of missing cells exist."""
    for recipe in _recipes(tables, store):
        try:
            files.check_data(training_recipe(recipe), size.data)
        except DataError as error:
            needs = f"{name} at size {size.name} needs the data of {recipe}"
            raise DataError(f"{needs}: {error}, or use --size small") from error


def digests(tables: tuple[ResultTable, ...], size: Size, store: Store) -> dict[str, str]:
    """Hashes of the data sets of missing cells."""
    return files.digests(map(training_recipe, _recipes(tables, store)), size.data)


def _recipes(tables: tuple[ResultTable, ...], store: Store) -> dict[str, None]:
    return dict.fromkeys(
        cell.settings["recipe"]
        for cell in missing(cells_of(tables), store)
        if "recipe" in cell.settings
    )


def check_same_data(folder: Path, data: Mapping[str, str]) -> None:
    """Check that the data sets have not changed since the folder was begun."""
    known = _identity_in(folder).get("data", {})
    if changed := [name for name, digest in data.items() if known.get(name, digest) != digest]:
        raise MismatchError(
            f"{folder} was started with other data ({' and '.join(changed)} changed since):"
            " restore it, or choose another --out"
        )


def check_train_data(name: str, tables: tuple[ResultTable, ...]) -> None:
    """With external models, check that methods that need data have --train-data."""
    methods = dict.fromkeys(
        cell.settings["method"]
        for cell in cells_of(tables)
        if cell.settings.get("train", "") is None
    )
    if methods:
        raise DataError(
            f"{name}: the methods {', '.join(methods)} use data: add --train-data DATA, other data"
            " than --test-data (language models can generate it: --train-data self)"
        )


def check_starts(tables: tuple[ResultTable, ...]) -> None:
    """If the experiment fine-tunes external models, check that it can."""
    cells = [cell for cell in with_needs(cells_of(tables)) if "recipe" in cell.settings]
    starts = (
        (cell.settings["recipe"], need.beside["place"])
        for cell in cells
        for need in cell.needs
        if "place" in need.beside
    )
    for recipe, place in dict.fromkeys(starts):
        check_start(training_recipe(recipe), load(place))


def check_device(tables: tuple[ResultTable, ...], size: Size, store: Store) -> None:
    """Check for a GPU if the size needs one; the error says how long a CPU would take."""
    left = missing(cells_of(tables), store)
    if size.device == "cpu" or torch.cuda.is_available() or not left:
        return  # finished results can be shown on any machine
    long = duration(CPU_TIMES * sum((cell.cost.seconds for cell in left), 0.0))
    raise MismatchError(
        f"size {size.name} is made for a GPU, and PyTorch sees none here: on one core it would take"
        f" about {long}; use --size small, or --device cpu if that is what you want"
    )


def default_workers(cells: Iterable[Cell], device: str) -> int:
    """Cells at once on this machine: one per core, limited by half the memory and the GPU."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2e9
    largest = max((cell.cost.gigabytes for cell in cells), default=1.0)
    limit = GPU_WORKERS if device.startswith("cuda") else cores
    return max(1, min(cores, limit, int(memory / largest)))


def check_folder(folder: Path, name: str, size: Size, *, resume: bool) -> None:
    """Check that a folder is new, or holds the same experiment and is to be resumed."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: choose another --out")
    if _is_new(folder):
        return
    if not (folder / IDENTITY).is_file():
        raise CheckpointError(
            f"{folder} exists, but does not hold an experiment: choose another --out"
        )
    there = _identity_in(folder)
    if (there.get("name"), there.get("size")) != (name, size.name):
        raise MismatchError(
            f"{folder} holds {there.get('name')} at size {there.get('size')},"
            f" not {name} at size {size.name}: choose another --out"
        )
    if {**there, "data": None} != {**_identity(name, size), "data": None}:
        raise MismatchError(
            f"{folder} holds {name} of other models or other data:"
            " choose another --out, or give those it was started with"
        )
    if not resume and any((folder / "cells").glob("[!.]*")):
        raise MismatchError(
            f"{folder} exists: add --resume to continue there (finished cells are kept),"
            " or choose another --out"
        )


def claim(folder: Path, name: str, size: Size, data: Mapping[str, str]) -> None:
    """Record in the folder which experiment it holds, and hashes of its data."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            folder / IDENTITY,
            {**_identity(name, size), "data": {**_identity_in(folder).get("data", {}), **data}},
        )
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from error


def _identity_in(folder: Path) -> dict[str, Any]:
    return read_json(folder / IDENTITY) if (folder / IDENTITY).is_file() else {}


def _is_new(folder: Path) -> bool:
    """Whether it is absent or empty; hidden files left by a killed run do not count."""
    return not folder.exists() or all(file.name.startswith(".") for file in folder.iterdir())


def _identity(name: str, size: Size) -> dict[str, object]:
    external = {"external": size.external.record} if size.external else {}
    return {"name": name, "size": size.name, **external}


def plan_rows(
    tables: tuple[ResultTable, ...], size: Size, store: Store
) -> Iterator[dict[str, object]]:
    """Every cell in order with state and expected cost; the last row totals the missing ones."""
    cells = with_needs(cells_of(tables))
    left = missing(cells_of(tables), store)
    states = {cell.key: "to do" for cell in left}
    for cell in cells:
        state = "done" if store.done(cell) else states.get(cell.key, "not needed")
        step = cell.step.partition(":")[2]
        yield {"cell": cell.label or cell.key, "step": step, "state": state, **_cost([cell], size)}
    total, state = f"total: {len(cells)} cells", f"{len(left)} to do"
    yield {"cell": total, "step": "", "state": state, **_cost(left, size)}


def _cost(cells: Iterable[Cell], size: Size) -> dict[str, str]:
    cells = list(cells)
    times = CPU_TIMES if (SIZES[size.name].device, size.device) == ("cuda", "cpu") else 1
    return {
        "time": duration(times * sum((cell.cost.seconds for cell in cells), 0.0)),
        "memory": f"{max((cell.cost.gigabytes for cell in cells), default=0.0):.1f} GB",
    }


def duration(seconds: float) -> str:
    """A duration, rounded, with its unit.

    >>> duration(90.0), duration(5400.0), duration(3e5)
    ('90 s', '90 min', '3.5 days')
    """
    unit, length = next(
        ((unit, length) for unit, length in UNITS.items() if seconds >= 2 * length), ("s", 1)
    )
    amount = seconds / length
    return f"{amount:.1f} {unit}" if amount < 10 and unit != "s" else f"{amount:.0f} {unit}"
