"""Train stock models. The seed determines the initial weights and the order of batches."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from symmerge.checkpoints.files import discard, read_json, set_aside, write_json
from symmerge.checkpoints.folders import new_folder, refuse
from symmerge.checkpoints.writing import write_weights
from symmerge.errors import UnsupportedModel
from symmerge.lab.training.acceleration import ACCELERATIONS, train_accelerated
from symmerge.lab.training.datasets import Dataset, batch_order, map_tensors
from symmerge.lab.training.initialization import Origin
from symmerge.lab.training.pretrained import check_start
from symmerge.lab.training.recipe import TrainingRecipe
from symmerge.lab.training.resume import load_state, partial_file, save_state
from symmerge.lab.training.splits import Splits, load_splits
from symmerge.lab.training.step import TrainingStep, no_packed_sequences
from symmerge.matching.optimization.loop import (
    Evaluation,
    History,
    Hooks,
    Loop,
    LoopPlan,
    NotFinite,
    Saver,
)
from symmerge.models.model import (
    Model,
    device_of,
    load,
)
from symmerge.models.outputs import with_logits
from symmerge.models.progress import Progress
from symmerge.symmetry.groups.linalg import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METRICS = "metrics.json"
SAVE_SECONDS = 60.0  # between checkpoints of the state


def train(
    recipe: TrainingRecipe,
    seed: int,
    out: Path,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    data: Path | None = None,
    device: str = "cpu",
    resume: bool = False,
    acceleration: str | None = None,
    **begun: Any,
) -> Path:
    """Train a model, write a stock checkpoint: `train(training_recipe("vit-digits"), 0, out)`.

    `progress` is called for every step. metrics.json has the loss of every step and evaluation.
    `data` is the folder of data sets that are not installed. `begun` (begin, fresh, ...) goes to
    `Origin`. The state is saved to OUT.partial every minute, and `resume` continues from there, on
    a CPU to bit-identical weights. On a GPU the fastest acceleration that works is used.
    """
    assert acceleration in (None, *ACCELERATIONS), acceleration
    origin = Origin(recipe, seed, **begun)
    inputs = (origin.begin,) if origin.begin else ()
    refuse(out.absolute(), overwrite, inputs)  # before any work
    file, place = partial_file(out), device_of(device)
    if not resume:
        set_aside(file)
    if place.type == "cuda" and acceleration is None:
        train_accelerated(origin, out, progress, overwrite=overwrite, data=data, device=device)
        return out
    if place.type == "cuda":
        torch.cuda.set_device(place.index or 0)
    if origin.begin and recipe.task == "text" and not origin.fresh:
        check_start(recipe, load(origin.begin))
    with (
        one_thread() if place.type == "cpu" else no_packed_sequences(),
        new_folder(out, overwrite=overwrite, inputs=inputs) as folder,
        torch.random.fork_rng(),
    ):
        splits = load_splits(recipe, data, origin.begin)
        training = _Training(origin, splits, place, acceleration or "eager")
        training.write(folder, _run(training, file, progress))
    discard(file)
    return out


def trained(recipe: TrainingRecipe, seed: int, folder: Path, **begun: Any) -> bool:
    """Whether a folder already holds what `train` would write there."""
    if not (folder / METRICS).exists():
        return False
    metrics = read_json(folder / METRICS)
    record = Origin(recipe, seed, **begun).record()
    return all(metrics.get(name) == value for name, value in record.items())


class _Training:
    """One model in training, as the optimisation loop sees it."""

    def __init__(
        self, origin: Origin, splits: Splits, device: torch.device, acceleration: str
    ) -> None:
        self.origin, self.splits, self.acceleration = origin, splits, acceleration
        self.record = origin.record()
        self.schedule = schedule = origin.recipe.schedule

        def on_device(dataset: Dataset) -> Dataset:
            return map_tensors(dataset, lambda tensor: tensor.to(device))

        self.train, self.test = on_device(splits.train), on_device(splits.test)
        self.valid = on_device(splits.valid) if splits.valid else None
        anywhere = origin.recipe.blocks == "anywhere"
        rows = batch_order(
            splits.train, schedule.steps, schedule.batch_size, origin.seed, anywhere=anywhere
        )
        self.stepper = TrainingStep(_start(origin), self.train, rows, schedule, device)
        self.curve: list[dict[str, float]] = []
        self.best: dict[str, Tensor] = {}
        self.loss, self.seconds_before, self.began = math.nan, 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Training time, including earlier processes."""
        return self.seconds_before + time.perf_counter() - self.began

    def advance(self, step: int) -> int:
        done = self.stepper.advance()
        self.loss = self.stepper.losses.values[step:done].mean().item()
        if not math.isfinite(self.loss):
            raise NotFinite(
                f"the loss became {self.loss} within {done} steps:"
                " lower the rate, or lengthen the warm-up (--change lr=..., warmup=...)"
            )
        return done

    def evaluate(self, step: int) -> Evaluation:
        assert self.valid is not None
        since = step - self.schedule.evaluate_every
        training = self.stepper.losses.values[since:step].mean().item()
        point = {"step": step, "training": training, **self.stepper.evaluate(self.valid)}
        self.curve.append(point)
        return Evaluation(point["loss"])

    def keep_best(self) -> None:
        self.best = self.stepper.weights()

    def state(self, history: History) -> dict[str, object]:
        known = {"history": history.to_json(), "curve": self.curve, "best": self.best}
        return {**self.stepper.state(), **known, "seconds": self.seconds}

    def restore(self, state: dict[str, Any]) -> History:
        self.curve, self.best = state["curve"], state["best"]
        self.stepper.prepare(self.acceleration, state["step"])
        self.stepper.restore(state)
        self.seconds_before, self.began = state["seconds"], time.perf_counter()
        return History(**state["history"])

    def write(self, folder: Path, history: History) -> None:
        """Write the best model, and how it was trained."""
        seconds = self.seconds
        if self.best:
            self.stepper.model.load_state_dict(self.best)
        held_out = self.stepper.evaluate(self.test)
        _write_model(self.stepper.model.cpu().eval(), folder)
        self.splits.save(folder)
        metrics = {
            "device": self.stepper.device.type,
            "acceleration": self.acceleration,
            "seconds": seconds,
            "begun_from": str(self.origin.begin or ""),
            "losses": self.stepper.losses.values[: history.step].tolist(),
            "curve": self.curve,
            "best_step": history.best_step or history.step,
            "held_out": held_out,
        }
        write_json(folder / METRICS, {**self.record, **metrics})


def _run(training: _Training, file: Path, progress: Progress | None) -> History:
    """Train from the beginning, or from the state in `file`."""
    schedule, record = training.schedule, training.record
    plan = LoopPlan(
        steps=schedule.steps,
        evaluate_every=schedule.evaluate_every,
        patience=schedule.patience or None,
    )

    def tell(before: int, step: int) -> None:
        for _ in range(step - before) if progress else ():
            progress(f"loss {training.loss:.3f}")  # pyright: ignore[reportOptionalCall]

    saver = Saver[dict[str, Any]](lambda state: save_state(file, record, state), SAVE_SECONDS)
    loop = Loop(training, plan, Hooks(progress=tell, saver=saver))
    torch.manual_seed(training.origin.seed)  # dropout, augmentation and masks
    loop.resume(load_state(file, record) or training.state(loop.history))
    return loop.run()


def _start(origin: Origin) -> PreTrainedModel:
    """The initial model."""
    model = origin.model()
    if origin.recipe.task in ("image", "text"):
        # stock classes set this when they first compute a loss
        model.config.problem_type = "single_label_classification"
    known = _known(model)
    return with_logits(model, known and known.spec)


def _known(model: PreTrainedModel) -> Model | None:
    """The model with its table; None if its architecture has none."""
    try:
        return load(model)
    except UnsupportedModel:
        return None


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write as transformers does, but without progress bars if we have a table for the model."""
    stock = _known(model)
    if stock is None:
        model.save_pretrained(folder)
        return
    write_json(folder / "config.json", stock.config)
    write_weights(folder, stock.weights, stored_as=stock.stored_as)
