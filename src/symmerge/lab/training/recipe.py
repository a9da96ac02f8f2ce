"""What a training recipe is: a stock class with its config, what it learns from, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from symmerge.errors import MismatchError
from symmerge.matching.optimization.schedules import Curve, LearningRate

DEFAULT_BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Schedule:
    """How long and how fast, with AdamW: a linear warm-up, then down to zero.

    `curve` is a cosine, a cosine in one stair per epoch ("epochs"), or a line ("linear"). With
    `evaluate_every` the model is evaluated every so many steps on held-back training data, and the
    best is kept instead of the last. `patience` evaluations without a better one end training.
    """

    steps: int
    batch_size: int
    lr: float
    warmup: int
    decay: float
    clip: float = 1.0  # of the gradient's norm; 0: none
    betas: tuple[float, float] = (0.9, 0.98)  # a shorter memory than usual: small runs are short
    curve: Curve = "cosine"
    all_decay: bool = False  # gains and biases, too
    evaluate_every: int = 0
    patience: int = 0

    def learning_rate(self, epoch: int) -> LearningRate:
        """The learning rate of every step, if so many steps are an epoch."""
        return LearningRate(
            lr=self.lr, steps=self.steps, warmup=self.warmup, curve=self.curve, epoch=epoch
        )


@dataclass(frozen=True)
class TrainingRecipe:
    """A stock transformers class with its config, the task and the data it learns, and a schedule.

    `data` comes with the installation (digits, python-docs) or is read from a folder (`sources.py` says which files). `tokenizer` is a folder beside the
    data, or none: then one is made from the text. `length` is of a block of text; as many tokens as the model has positions, unless it is given.
    """

    about: str
    architecture: str
    config: Mapping[str, Any]
    task: Literal["image", "clm", "mlm", "text"]
    data: str
    schedule: Schedule
    duration: str = "20 s on one core"
    blocks: Literal["anywhere", "whole"] = (
        "anywhere"  # where blocks of text begin: at any token, or one after the other
    )
    length: int | None = None
    tokenizer: str | None = None
    augment: bool = False  # pictures are cropped, flipped and jittered

    @property
    def block(self) -> int:
        """How many tokens the model sees at a time."""
        return (
            self.length or self.config.get("n_positions") or self.config["max_position_embeddings"]
        )


def with_changes(
    recipe: TrainingRecipe,
    *,
    config: Mapping[str, Any] | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> TrainingRecipe:
    """The recipe with other sizes or another schedule: `changed(training_recipe("gpt2-docs"), config={"n_embd": 96}, schedule={"steps": 100})`.

    With other steps the warm-up is as long in proportion, unless it is given, too.
    """
    import transformers  # slow to import, and only needed here

    schedule, kind = dict(schedule or {}), getattr(transformers, recipe.architecture).config_class
    names = {kind.attribute_map.get(name, name): value for name, value in (config or {}).items()}
    known, there = {field.name for field in fields(Schedule)}, kind()
    unknown = sorted(schedule.keys() - known) + sorted(
        name for name in names if not hasattr(there, name)
    )
    if unknown:
        raise MismatchError(
            f"{recipe.architecture} has no setting {', '.join(unknown)}: give one of its config's, or one of {', '.join(sorted(known))}"
        )
    if "steps" in schedule and recipe.schedule.steps:
        schedule.setdefault(
            "warmup", round(recipe.schedule.warmup * schedule["steps"] / recipe.schedule.steps)
        )
    return replace(
        recipe, config={**recipe.config, **names}, schedule=replace(recipe.schedule, **schedule)
    )
