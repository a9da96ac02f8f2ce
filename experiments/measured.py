"""Cells of a table that are measured one by one, and merges as the tables want them.

A file of cells is rewritten after each; cells that it has are skipped, so that the same command
goes on where it was interrupted. After `--seconds` no cell is begun.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import symmerge as sm
from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.matching.efforts import effort_recipe, learning_rate
from symmerge.matching.learning import distillation
from symmerge.merging.healing import HealOptions, heal
from symmerge.models.model import Model
from symmerge.report.phrases import estimate_text
from symmerge.verification.modules import full_module

Values = dict[str, float]
STEPS, HEAL_STEPS = 250, 300
TEXTS = {"learn": 512, "long": 2048, "heal": 1024}  # rows of self-generated inputs
SEEDS = {"learn": 0, "long": 0, "heal": 500}


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that all experiments share."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--work", type=Path, required=True, help="models stay here")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--zoo", type=Path, help="folder of trained pairs, NAME-s0 and NAME-s1")
    made.add_argument("--pairs", type=int, default=3)
    made.add_argument("--device", default="cpu")
    made.add_argument("--tiny", action="store_true", help="small, to try it on a processor")
    made.add_argument("--seconds", type=float, default=1e9, help="begin no cell after this")
    return made


class Cells:
    """What was measured, by group, pair and row."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.file, self.began = options.out, time.perf_counter()
        self.until = self.began + options.seconds
        self.all: list[dict[str, Any]] = []
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self.all = json.loads(self.file.read_text())

    def has(self, group: str, pair: str, row: str) -> bool:
        return any((c["group"], c["pair"], c["row"]) == (group, pair, row) for c in self.all)

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.until

    def measure(self, group: str, pair: str, row: str, make: Callable[[], Values]) -> None:
        """Measure a cell that is not there yet; one that fails is named, and the others go on."""
        if self.has(group, pair, row):
            return
        if self.late:
            print(f"out of time before {group} {pair} {row}: the same command goes on", flush=True)
            return
        began = time.perf_counter()
        try:
            values = make()
        except Exception:
            traceback.print_exc()
            print(f"FAILED: {group} {pair} {row}", flush=True)
            return
        seconds = round(time.perf_counter() - began, 2)
        self.all.append({"group": group, "pair": pair, "row": row, **values, "seconds": seconds})
        self.file.write_text(json.dumps(self.all, indent=1) + "\n")
        shown = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        at = time.perf_counter() - self.began
        print(f"{at:5.0f} s  {group} {pair} {row:44} {shown}  ({seconds:.1f} s)", flush=True)

    def table(self) -> str:
        """Mean and standard error over pairs, by group and row."""
        lines = []
        for group in dict.fromkeys(cell["group"] for cell in self.all):
            mine = [cell for cell in self.all if cell["group"] == group]
            names = [name for name in mine[0] if name not in ("group", "pair", "row", "seconds")]
            lines += ["", f"{group:46}" + "".join(f"{name:>20}" for name in names)]
            for row in dict.fromkeys(cell["row"] for cell in mine):
                of = [cell for cell in mine if cell["row"] == row]
                columns = [[cell[name] for cell in of if name in cell] for name in names]
                shown = [estimate_text(Estimate.of(each)) if each else "-" for each in columns]
                lines.append(f"{row:42} ({len(of)})" + "".join(f"{text:>20}" for text in shown))
        return "\n".join(lines)


# Measuring.


@torch.no_grad()
def measure(models: Sequence[Model], tasks: Mapping[str, Task], device: str) -> Values:
    """Loss, and accuracy where there is one, of a model or of the ensemble of several."""
    modules = [full_module(model, torch.float32).to(device) for model in models]
    found: Values = {}
    for name, task in tasks.items():
        columns = []
        for batch in task.batches:
            batch = {key: value.to(device) for key, value in batch.items()}
            each = [task.readout.predict(module, batch) for module in modules]
            joint = task.readout.ensemble(each) if len(each) > 1 else each[0]
            columns.append(task.readout.score(joint, batch))
        metrics = task.summary(columns)
        found[name] = metrics["loss"]
        if "accuracy" in metrics:
            found[f"{name} accuracy"] = metrics["accuracy"]
    if len(tasks) > 1:
        found["mean"] = sum(found[name] for name in tasks) / len(tasks)
    return found


# Answers that the product does not offer.

Answer = Callable[[Sequence[Tensor]], Tensor]
"""From the parents' logits, probabilities to learn."""


def tempered(temperature: float) -> Answer:
    """The mean of probabilities, sharpened below 1."""

    def answer(logits: Sequence[Tensor]) -> Tensor:
        mean = torch.stack([each.softmax(-1) for each in logits]).mean(0)
        return (mean.clamp(min=1e-12).log() / temperature).softmax(-1)

    return answer


def product(temperature: float = 1.0) -> Answer:
    """The mean of logits."""
    return lambda logits: (torch.stack(list(logits)).mean(0) / temperature).softmax(-1)


def hard(logits: Sequence[Tensor]) -> Tensor:
    """The likeliest class of the mean alone."""
    mean = torch.stack([each.softmax(-1) for each in logits]).mean(0)
    return F.one_hot(mean.argmax(-1), mean.shape[-1]).float()


@contextmanager
def answering(answer: Answer | None) -> Iterator[None]:
    """Another answer of the parents, in this process, while something is learned."""
    usual = distillation.joint_answer
    if answer is not None:
        distillation.joint_answer = lambda logits, *_, **__: answer(logits)  # type: ignore
    try:
        yield
    finally:
        distillation.joint_answer = usual


# Merges.


@dataclass
class Setting:
    """What a pair is measured with: the models, inputs they make, held-out data."""

    options: argparse.Namespace
    folder: Path
    models: list[Model]
    held_out: Mapping[str, Task]
    inputs: dict[str, Task] = field(default_factory=dict)  # that they made
    aligned: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return task_of(self.models[0])

    @property
    def size(self) -> dict[str, Any]:
        usual = {"clm": 12, "mlm": 24, "image": 64}[self.kind]
        return {"batch_size": 4 if self.options.tiny else usual, "device": self.options.device}

    def steps(self, count: int) -> int:
        return max(2, count // 100) if self.options.tiny else count

    def made(self, use: str) -> Task:
        """Inputs that the parents make, the same for every row."""
        if use not in self.inputs:
            rows = 16 if self.options.tiny else TEXTS[use]
            rows *= 4 if self.kind == "image" else 1
            length = {"clm": 256, "mlm": 128}.get(self.kind)
            length = 32 if self.options.tiny and length else length
            how: dict[str, Any] = {"device": self.options.device, "length": length}
            how |= {"max_samples": rows, "seed": SEEDS[use]}
            self.inputs[use] = make_task(self.kind, "self", self.models, **how)
        return self.inputs[use]

    def stored(self, name: str, make: Callable[[], Model]) -> Model:
        """A model that is made once and kept."""
        folder = self.folder / name.replace(" ", "-").replace("/", "-")
        if not folder.exists():
            sm.save(make(), folder)
        return sm.load(folder)

    def measure(self, *models: Model) -> Values:
        return measure(models, self.held_out, self.options.device)

    def weights(self) -> Any:
        """Aligned by weights."""
        if "weights" not in self.aligned:
            a, b = self.models
            recipe = effort_recipe("fast", a, device=self.options.device)
            self.aligned["weights"] = sm.align(a, b, recipe)
        return self.aligned["weights"]

    def learned(
        self,
        name: str = "learned",
        *,
        data: Task | None = None,
        steps: int = STEPS,
        answer: Answer | None = None,
        start: str = "weights",
        **more: Any,
    ) -> Any:
        """The result of learned alignment, from weights or from an earlier one."""
        if name not in self.aligned:
            a, b = self.models
            begun = self.weights() if start == "weights" else self.aligned[start]
            how = {"lr": learning_rate(a, self.kind), "permutations": False, "target": "parents"}
            how |= {"mixed": False}  # rows say what is mixed
            method = sm.LearnedMatching(
                data=data or self.made("learn"),
                start=begun.solution.alignment,
                steps=self.steps(steps),
                **{**how, **self.size, **more},
            )
            with answering(answer):
                self.aligned[name] = sm.align(a, b, method)
        return self.aligned[name]

    def healed(
        self,
        model: Model,
        steps: int = HEAL_STEPS,
        *,
        data: Task | None = None,
        answer: Answer | None = None,
        **more: Any,
    ) -> Model:
        """The parents distilled into all weights of a model."""
        how = {**self.size, "target": "parents", "mixed": False, **more}
        task = data or self.made("heal")
        options = HealOptions(steps=self.steps(steps), data=task, **how)
        with answering(answer):
            return heal(model, self.models, options=options).model


def midpoint(result: Any) -> Model:
    """The mean of two aligned models."""
    return sm.average(*result.models)


def averaged(setting: Setting) -> Model:
    """The mean of the models as they are."""
    a, b = setting.models
    return sm.average(a, b)


Rows = dict[str, Callable[[Setting], Model]]


def run(cells: Cells, group: str, pair: str, setting: Setting, rows: Rows) -> None:
    """Every row of a pair that is not there yet; the ensemble last but for what comes later."""
    for row, make in rows.items():
        cells.measure(group, pair, row, lambda make=make: setting.measure(make(setting)))
    cells.measure(group, pair, "ensemble", lambda: setting.measure(*setting.models))


def fresh(setting: Setting) -> Model:
    """A model of the same size that has learned nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    first = setting.models[0]
    assert first.path is not None and setting.kind == "clm"
    torch.manual_seed(99)
    place = setting.folder / "fresh"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(first.path)).save_pretrained(place)
    for file in first.files:
        (place / file.name).write_bytes(file.read_bytes())
    return sm.load(place)
