"""Scores of the lm-eval package (EleutherAI's harness) for a model in hand. It is optional."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.results import Metrics
from symmerge.evaluation.tasks.preprocessing import tokenizer_of
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.verification.modules import full_module

INSTALL = "pip install 'symmerge[lm-eval]'"
PURPOSE = "causal-lm"
BATCH_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Harness:
    """What lm-eval is asked for: `Harness(tasks=("lambada_openai",), samples=100)`.

    `include` is a folder with more tasks as YAML files; what Python code these name is run.
    """

    tasks: tuple[str, ...]
    include: Path | None = None
    samples: int | None = None
    seed: int = 0
    device: str = "cpu"

    def check(self, models: Sequence[Model]) -> None:
        """Refuse what cannot be run, before any work."""
        _package()
        for model in models:
            if model.spec.task != PURPOSE:
                raise MismatchError(
                    f"--lm-eval scores text, and {model.where} is for {model.spec.task}:"
                    " leave it out, or give models that continue a text"
                )
            _wrapped(model)
        known = self.manager().all_tasks
        if unknown := [task for task in self.tasks if task not in known]:
            raise DataError(
                f"--lm-eval {', '.join(unknown)}: lm-eval has no such task; `lm_eval ls tasks`"
                " lists them, --lm-eval-include DIR adds those of a folder"
            )

    def manager(self) -> Any:
        """lm-eval's list of tasks, with those of the folder."""
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

        if self.include is not None and not self.include.is_dir():
            raise DataError(f"--lm-eval-include {self.include}: give a folder with YAML files")
        return TaskManager(include_path=str(self.include) if self.include else None)


@dataclass(frozen=True)
class HarnessScores:
    """Task -> metric -> value, and which of these are better the lower they are."""

    values: Mapping[str, Metrics] = field(default_factory=dict)
    lower_is_better: tuple[str, ...] = ()


def harness_scores(
    model: Model, harness: Harness | None, *, progress: Progress | None = None
) -> HarnessScores:
    """Run lm-eval's tasks on a model, in float32."""
    if harness is None:
        return HarnessScores()
    if progress:
        progress(f"{model.where}: lm-eval, {', '.join(harness.tasks)}")
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    module = full_module(model, torch.float32).to(harness.device)
    seeds = dict.fromkeys(
        ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"),
        harness.seed,
    )
    try:
        with _quiet():
            results = simple_evaluate(
                model=HFLM(pretrained=module, device=harness.device, **_wrapped(model)),
                tasks=list(harness.tasks),
                task_manager=harness.manager(),
                limit=harness.samples,
                bootstrap_iters=0,
                log_samples=False,
                **seeds,
            )
    except Exception as error:  # data that is not there, code of a task: many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"lm-eval fails on {', '.join(harness.tasks)} ({reason}): HF_HUB_OFFLINE=0 lets"
            " it fetch their data; --lm-eval-include DIR adds tasks with local data"
        ) from error
    return _scores(results)


def _wrapped(model: Model) -> dict[str, object]:
    """The tokenizer for lm-eval, and the token it puts before a text if that names none."""
    tokenizer, config = tokenizer_of(model), model.config
    options: dict[str, object] = {"tokenizer": tokenizer, "batch_size": BATCH_ROWS}
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        prefix = config.get("bos_token_id", config.get("eos_token_id"))
        if prefix is None or not 0 <= int(prefix) < model.spec.sizes["vocabulary"]:
            raise MismatchError(
                f"the tokenizer of {model.where} has neither a BOS nor an EOS token, which lm-eval"
                " puts before a text: set bos_token in its tokenizer_config.json"
            )
        options["prefix_token_id"] = int(prefix)
    return options


def _scores(results: Any) -> HarnessScores:
    """The numbers of lm-eval's result; its standard errors and aliases are left out."""
    values, lower = {}, set()
    for task, scores in results["results"].items():
        higher = results.get("higher_is_better", {}).get(task, {})
        metrics = {
            key.partition(",")[0]: float(value)
            for key, value in scores.items()
            if isinstance(value, Real) and "_stderr" not in key and "," in key
        }
        lower |= {f"{task} {name}" for name in metrics if higher.get(name) is False}
        if metrics:
            values[task] = metrics
    return HarnessScores(values, tuple(sorted(lower)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed: neither a bar per request, nor what the programs it starts complain."""
    nowhere, saved = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(nowhere, 2)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _package() -> None:
    try:
        import lm_eval  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(f"--lm-eval needs the package lm_eval: {INSTALL}") from error
