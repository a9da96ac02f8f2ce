"""evaluation.json: loss and metrics of checkpoints side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from symmerge.checkpoints.json_results import OMIT, ResultFile
from symmerge.evaluation.results import Metrics, ModelRecord, TaskRecord

# All others are better the higher they are; lm-eval says it of its own metrics.
LOWER_IS_BETTER = ("loss", "perplexity", "pseudo_perplexity", "bits_per_character")


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(ModelRecord):
    """One checkpoint, and how good it is."""

    metrics: Annotated[Metrics, "Value of each metric of the task; none where no task was run."]
    lm_eval: Annotated[
        Mapping[str, Metrics], "Task of lm-eval -> value of each of its metrics."
    ] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, float]:
        """All its numbers by name, in the order of a table: the loss first."""
        harness = {
            f"{task} {metric}": value
            for task, metrics in self.lm_eval.items()
            for metric, value in metrics.items()
        }
        return {**self.metrics, **harness}


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationFile(ResultFile):
    """Checkpoints side by side on the same data."""

    SCHEMA, WRITER = "symmerge.evaluation/1", "symmerge evaluate"

    task: Annotated[TaskRecord | None, "What was measured; null where only lm-eval was run."]
    models: Annotated[tuple[EvaluatedModel, ...], "The checkpoints, in the order given."]
    ensemble: Annotated[
        Metrics | None, OMIT, "All run, their predictions averaged; of two models or more."
    ] = None
    lower_is_better: Annotated[
        tuple[str, ...], "The metrics that are better the lower they are."
    ] = LOWER_IS_BETTER
    versions: Annotated[Mapping[str, str], "Versions of what can change a number."]

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("it holds no model")
        if len({frozenset(model.scores) for model in self.models}) > 1:
            raise ValueError("the models have different metrics")

    def __repr__(self) -> str:
        what = f"{self.task.name} on {self.task.data}" if self.task else "lm-eval"
        values = "; ".join(_short(model) for model in self.models)
        return f"EvaluationFile({what}, {len(self.models)} models:\n  {values[:180]})"

    def best(self, metric: str) -> float:
        """The best value of a metric among the models, without the ensemble."""
        values = [model.scores[metric] for model in self.models]
        return min(values) if metric in self.lower_is_better else max(values)

    def rows(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Every model and the ensemble by name, with their numbers."""
        for model in self.models:
            yield model.where, model.scores
        if self.ensemble is not None:
            count = len(self.models)
            yield f"ensemble of {'both' if count == 2 else f'all {count}'}", dict(self.ensemble)


def _short(model: EvaluatedModel) -> str:
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in model.scores.items())
    return f"{model.where} {numbers}"
