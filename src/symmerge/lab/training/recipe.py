"""A training recipe: a stock class with its config, its data, and a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from symmerge.errors import MismatchError
from symmerge.matching.optimization.schedules import Curve, LearningRate

DEFAULT_BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Schedule:
    """AdamW with linear warm-up and decay to zero.

    `optimizer`: "adam" adds weight decay to the gradient, as an L2 penalty.

    `curve`: half a cosine, the same with one step per epoch ("epochs"), or a line ("linear").
    `evaluate_every`: steps between validations; if set, the best model is kept, else the last.
    `patience`: stop after this many validations without improvement.
    """

    steps: int
    batch_size: int
    lr: float
    warmup: int
    decay: float
    clip: float = 1.0  # largest gradient norm; 0: no clipping
    betas: tuple[float, float] = (0.9, 0.98)  # beta2 below 0.999: runs are short
    curve: Curve = "cosine"
    all_decay: bool = False  # weight decay for gains and biases, too
    evaluate_every: int = 0
    patience: int = 0
    optimizer: Literal["adamw", "adam"] = "adamw"

    def learning_rate(self, epoch: int) -> LearningRate:
        """The learning rate schedule; `epoch` is the number of steps per epoch."""
        return LearningRate(
            lr=self.lr, steps=self.steps, warmup=self.warmup, curve=self.curve, epoch=epoch
        )


@dataclass(frozen=True)
class TrainingRecipe:
    """A stock transformers class with its config, task, data and schedule.

    `data` comes with the installation (digits, python-docs) or from a folder (see `files.py`).
    `tokenizer` is a folder beside the data, or of installed data the name of another text to train
    it on; without it one is trained on the text.
    `length` is the block length of text; by default, the model's number of positions.
    `initial`: ends of names of parameters -> their standard deviation at first.
    `kept_by`: what the best model is chosen by: training samples that are held back, or the test
    split, as in published code (its loss there is then too good).
    """

    about: str
    architecture: str
    config: Mapping[str, Any]
    task: Literal["image", "clm", "mlm", "seq2seq", "text"]
    data: str
    schedule: Schedule
    duration: str = "20 s on one core"
    blocks: Literal["anywhere", "adjacent"] = "anywhere"  # start at any token, or are adjacent
    length: int | None = None
    tokenizer: str | None = None
    augment: bool = False  # random crops, flips and colour jitter
    initial: Mapping[str, float] = field(default_factory=dict)
    kept_by: Literal["held back", "test"] = "held back"

    @property
    def block(self) -> int:
        """Tokens per block."""
        if self.length:
            return self.length
        return self.config.get("n_positions") or self.config["max_position_embeddings"]


def with_changes(
    recipe: TrainingRecipe,
    *,
    config: Mapping[str, object] | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> TrainingRecipe:
    """The recipe with other sizes or another schedule, for example `config={"n_embd": 96}`.

    If `steps` changes, the warm-up scales with it, unless it is set, too.
    """
    import transformers  # slow to import, and only needed here

    kind, schedule = getattr(transformers, recipe.architecture).config_class, dict(schedule or {})
    sizes = {kind.attribute_map.get(name, name): value for name, value in (config or {}).items()}
    known, default = {field.name for field in fields(Schedule)}, kind()
    unknown = sorted(schedule.keys() - known)
    unknown += sorted(name for name in sizes if not hasattr(default, name))
    if unknown:
        raise MismatchError(
            f"{recipe.architecture} has no setting {', '.join(unknown)}:"
            f" give one of its config, or one of {', '.join(sorted(known))}"
        )
    before = recipe.schedule
    if "steps" in schedule and before.steps:
        schedule.setdefault("warmup", round(before.warmup * schedule["steps"] / before.steps))
    return replace(recipe, config={**recipe.config, **sizes}, schedule=replace(before, **schedule))
