"""Train stock models: initial weights and the order of the batches follow the seed, and nothing else does."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from symmerge.checkpoints.files import read_json, write_json
from symmerge.checkpoints.folders import new_folder, refuse
from symmerge.checkpoints.writing import write_weights
from symmerge.errors import SymmergeError, UnsupportedModel
from symmerge.lab.training.acceleration import LEVELS, at_some_level
from symmerge.lab.training.datasets import batch_order, map_tensors
from symmerge.lab.training.initialization import Origin
from symmerge.lab.training.pretrained import check_start
from symmerge.lab.training.recipe import TrainingRecipe
from symmerge.lab.training.resume import keep, kept, partial_file
from symmerge.lab.training.splits import Splits, load_splits
from symmerge.lab.training.step import Pupil, no_packed_sequences
from symmerge.models.model import Model, Progress, device_of, load
from symmerge.models.pooled_logits import with_pooled_logits
from symmerge.symmetry.groups.linalg import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METRICS = "metrics.json"
KEEP_SECONDS = 60.0  # from one state that is kept to the next


def train(
    recipe: TrainingRecipe,
    seed: int,
    out: Path,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    data: Path | None = None,
    device: str = "cpu",
    begin: Path | None = None,
    fresh: str | None = None,
    only_fresh: bool = False,
    head_seed: int = 0,
    resume: bool = False,
    level: str | None = None,
) -> Path:
    """Train a model and write it as a stock checkpoint: `train(training_recipe("vit-digits"), 0, Path("seed-0"))`.

    `progress` is called for every step. The folder appears whole at the end or not at all; metrics.json in it has the loss of every step, every look at
    held-back data, and the result on held-out data. `data` is the folder of data sets that do not come with the installation. `begin`, `fresh`, `only_fresh`
    and `head_seed`: see `Origin`. Every minute the state goes to OUT.partial, and `resume` goes on from there: on a CPU to the very same weights. On a GPU the
    fastest way that works is found in processes of their own, unless `level` is given.
    """
    assert level in (None, *LEVELS), level
    origin, inputs = (
        Origin(recipe, seed, begin, fresh, only_fresh, head_seed),
        (begin,) if begin else (),
    )
    refuse(
        out.absolute(), overwrite, inputs
    )  # before the work: a place that cannot be written is refused now
    if not resume:
        partial_file(out).unlink(missing_ok=True)
    place = device_of(device)
    if place.type == "cuda" and level is None:
        at_some_level(origin, out, progress, overwrite=overwrite, data=data, device=device)
        return out
    if place.type == "cuda":
        torch.cuda.set_device(place.index or 0)
    if begin and recipe.task == "text" and not fresh:
        check_start(recipe, load(begin))
    with (
        one_thread() if place.type == "cpu" else no_packed_sequences(),
        new_folder(out, overwrite=overwrite, inputs=inputs) as folder,
        torch.random.fork_rng(),
    ):
        feed = load_splits(recipe, data, begin)
        _Training(origin, feed, out, place, level or "eager").run(folder, progress)
    partial_file(out).unlink(missing_ok=True)
    return out


def trained(recipe: TrainingRecipe, seed: int, folder: Path, **begun: Any) -> bool:
    """Whether a folder holds what `train` would write there: the same recipe, seed and versions, and `begun` from the same (begin, fresh, ...)."""
    if not (folder / METRICS).exists():
        return False
    found = read_json(folder / METRICS)
    return all(
        found.get(name) == value for name, value in Origin(recipe, seed, **begun).record().items()
    )


class _Training:
    """One model, from its beginning or where it was interrupted, to its end."""

    def __init__(
        self, origin: Origin, feed: Splits, out: Path, device: torch.device, level: str
    ) -> None:
        self.origin, self.record, self.file, self.level = (
            origin,
            origin.record(),
            partial_file(out),
            level,
        )
        self.schedule = origin.recipe.schedule
        train, valid, test = (
            map_tensors(part, lambda tensor: tensor.to(device)) if part else None
            for part in (feed.train, feed.valid, feed.test)
        )
        assert train and test
        self.feed, self.valid, self.test = feed, valid, test
        rows = batch_order(
            feed.train,
            self.schedule.steps,
            self.schedule.batch_size,
            origin.seed,
            anywhere=origin.recipe.blocks == "anywhere",
        )
        model = origin.model()
        if origin.recipe.task in ("image", "text"):
            model.config.problem_type = "single_label_classification"  # what stock classes note down when they compute a loss
        known = _known(model)
        self.pupil = Pupil(
            with_pooled_logits(model, known and known.spec.pooled),
            train,
            rows,
            self.schedule,
            device,
        )
        self.curve: list[dict[str, float]] = []
        self.best: dict[str, Any] = {"loss": math.inf, "step": 0, "weights": {}}
        self.seconds = 0.0

    def run(self, folder: Path, progress: Progress | None) -> None:
        state, began = self._begin(), time.perf_counter()
        done, saved, spent = state["at"], time.perf_counter(), self.seconds
        while done < self.schedule.steps and not self._enough(done):
            before, done = done, self.pupil.advance()
            loss = self.pupil.losses[before:done].mean().item()
            if not math.isfinite(loss):
                raise SymmergeError(
                    f"the loss became {loss} within {done} steps: lower the rate, or lengthen the warm-up (--change lr=..., warmup=...)"
                )
            if self.schedule.evaluate_every and done % self.schedule.evaluate_every == 0:
                self._look(done)
            self.seconds = spent + time.perf_counter() - began
            if time.perf_counter() - saved > KEEP_SECONDS:
                keep(
                    self.file,
                    self.record,
                    {
                        **self.pupil.state(),
                        "curve": self.curve,
                        "best": self.best,
                        "seconds": self.seconds,
                    },
                )
                saved = time.perf_counter()
            for _ in range(done - before) if progress else ():
                progress(f"loss {loss:.3f}")  # pyright: ignore[reportOptionalCall]
        self._finish(folder, done)

    def _begin(self) -> dict[str, Any]:
        torch.manual_seed(self.origin.seed)  # dropout, augmentation and gaps
        state = kept(self.file, self.record)
        if state:
            self.curve, self.best, self.seconds = state["curve"], state["best"], state["seconds"]
        else:
            state = self.pupil.state()
        self.pupil.prepare(self.level, state["at"])
        self.pupil.restore(state)
        return state

    def _look(self, step: int) -> None:
        assert self.valid is not None
        training = self.pupil.losses[step - self.schedule.evaluate_every : step].mean().item()
        self.curve.append({"step": step, "training": training, **self.pupil.judge(self.valid)})
        if self.curve[-1]["loss"] < self.best["loss"]:
            self.best = {
                "loss": self.curve[-1]["loss"],
                "step": step,
                "weights": self.pupil.state()["weights"],
            }

    def _enough(self, step: int) -> bool:
        return (
            bool(self.schedule.patience and self.curve)
            and step - self.best["step"] >= self.schedule.patience * self.schedule.evaluate_every
        )

    def _finish(self, folder: Path, done: int) -> None:
        if self.best["weights"]:
            self.pupil.model.load_state_dict(self.best["weights"])
        held_out = self.pupil.judge(self.test)
        _write(self.pupil.model.cpu().eval(), folder)
        self.feed.save(folder)
        how = {
            "device": self.pupil.order.device.type,
            "level": self.level,
            "seconds": self.seconds,
            "begun_from": str(self.origin.begin or ""),
        }
        results = {
            "losses": self.pupil.losses[:done].tolist(),
            "curve": self.curve,
            "kept_step": self.best["step"] or done,
            "held_out": held_out,
        }
        write_json(folder / METRICS, {**self.record, **how, **results})


def _known(model: PreTrainedModel) -> Model | None:
    """With its table, if its architecture has one here."""
    try:
        return load(model)
    except UnsupportedModel:
        return None


def _write(model: PreTrainedModel, folder: Path) -> None:
    """As transformers does, without its progress bars among ours; and as it does, where an architecture has no table here."""
    stock = _known(model)
    if stock is None:
        model.save_pretrained(folder)
        return
    write_json(folder / "config.json", stock.config)
    write_weights(folder, stock.weights, stored_as=stock.stored_as)
