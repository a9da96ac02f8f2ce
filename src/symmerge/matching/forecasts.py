"""What an alignment will take, before it begins: seconds and bytes, to one digit.

A product of matrices is timed on the device. The rest is arithmetic: products per token and step,
the share of that speed which solvers were measured to reach, and what a GPU needs to be told.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import final

import torch

from symmerge.checkpoints.memory import workers
from symmerge.checkpoints.weights import CACHE_BYTES
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.recipes import Recipe, Solver
from symmerge.matching.search import Matching
from symmerge.matching.sweeps import GRAMS, MEMORY
from symmerge.models.model import Model, device_of
from symmerge.models.tables import layer_count

SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices that are multiplied
REACHED = {"cpu": 0.6, "cuda": 1.5}  # of their speed, by learning: a GPU learns in bfloat16
SAMPLING = {"cpu": 0.1, "cuda": 0.12}  # one token after the other
READING = 9e-8  # seconds of a core for each weight of canonical forms, in all passes of a solver
LAUNCH = {"cpu": 0.0, "cuda": 2e-3}  # seconds for a layer to be told what to do
SETUP = 3.0  # seconds to open models and to warm up
ROWS, PLACES = 12, 256  # inputs of a step and their tokens, where nothing says how many
PROCESS = 500_000_000  # bytes of Python with torch
COPIES = 9  # of the weights in float32 while learning: parents, A, B, B moved, the mean, gradients
ACTIVATIONS = 64  # bytes per token, layer and coordinate, kept for the gradient
LOGITS = 12  # bytes per token and word: logits, their logarithms, targets


@final
@dataclass(frozen=True)
class Forecast:
    """Seconds and bytes, from counts of operations: right to a factor of two or so."""

    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"about {_time(self.seconds)} and {gigabytes(self.bytes)} of memory"


@cache  # as long as aligning two small models
@torch.no_grad()
def products_per_second(device: torch.device) -> float:
    """Floating-point operations per second of one product of float32 matrices."""
    side = SIDE[device.type]
    matrix = torch.ones(side, side, device=device)
    torch.mm(matrix, matrix)
    _wait(device)
    began = time.perf_counter()
    torch.mm(matrix, matrix)
    _wait(device)
    return 2 * side**3 / max(1e-9, time.perf_counter() - began)


def memory_needed(solver: Solver, model: Model) -> int:
    """Bytes that aligning two such models takes, the weights of both included."""
    if isinstance(solver, Matching) and device_of(solver.device).type == "cpu":
        return PROCESS + 2 * min(4 * model.parameters, CACHE_BYTES) + _at_once(model)
    if not isinstance(solver, LearnedMatching):
        return PROCESS + 2 * 4 * model.parameters
    words, width = model.spec.sizes.get("vocabulary", 0), model.spec.sizes[model.spec.stream]
    per_token = LOGITS * words + ACTIVATIONS * layer_count(model) * width
    tokens = (solver.batch_size or ROWS) * _length(solver, model)
    return PROCESS + 4 * COPIES * model.parameters + tokens * per_token


def _at_once(model: Model) -> int:
    """Bytes that matching holds beside cached weights.

    First the largest matrix of both models, as it is and with weighted rows; later the Gram
    matrices of two spaces of units.
    """
    largest = max(torch.Size(shape).numel() for shape in model.spec.shapes.values())
    widest = max((model.spec.sizes[name] for name in model.spec.hidden), default=1)
    return max(4 * 4 * largest, min(MEMORY, 2 * 4 * GRAMS * widest**2))


def forecast(solver: Solver, model: Model) -> Forecast:
    """What aligning two such models takes."""
    device = device_of(solver.device)
    speed, width = products_per_second(device), model.spec.sizes[model.spec.stream]
    weights, layers = model.parameters, layer_count(model)
    # Every weight meets the rotation of the stream when it is moved, and again in the evidence.
    seconds = SETUP + 4 * weights * width / (REACHED[device.type] * speed)
    seconds += READING * weights / workers()
    if isinstance(solver, LearnedMatching):
        length = _length(solver, model)
        tokens, sampled = (solver.batch_size or ROWS) * length, (solver.generated or 512) * length
        step = (6 * weights * tokens + 4 * weights * width) / (REACHED[device.type] * speed)
        seconds += solver.steps * max(step, LAUNCH[device.type] * layers)
        sampling = 2 * weights * sampled / (SAMPLING[device.type] * speed)
        seconds += max(sampling, 2 * length * LAUNCH[device.type] * layers)
    return Forecast(seconds, memory_needed(solver, model))


def _length(solver: LearnedMatching, model: Model) -> int:
    return solver.generated_length or model.spec.sizes.get("position", PLACES)


def announcement(recipe: Recipe, model: Model) -> str:
    """The first line of an alignment: what it will take, and where."""
    return f"{recipe.about}: {forecast(recipe.matching, model)} on {recipe.matching.device}"


def _time(seconds: float) -> str:
    """A time to one or two digits, in the unit that people would use.

    >>> _time(41.0), _time(400.0), _time(20000.0)
    ('40 s', '7 min', '6 h')
    """
    if seconds < 100:
        return f"{max(1, round(seconds, -1) if seconds > 20 else round(seconds)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def gigabytes(count: int) -> str:
    """A size to one or two digits.

    >>> gigabytes(40_000_000), gigabytes(1_600_000_000), gigabytes(24_000_000_000)
    ('0.1 GB', '2 GB', '24 GB')
    """
    size = max(0.1, count / 1e9)
    return f"{size:.1g} GB" if size < 10 else f"{size:.0f} GB"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
