"""What TUNED teaches: how its change is carried, and afterwards its answers; and from what."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from symmerge.aligning.inputs import make_inputs
from symmerge.errors import SymmergeWarning
from symmerge.evaluation.tasks import SELF_SOURCES, Task, task_of
from symmerge.evaluation.tasks.catalog import TASKS
from symmerge.matching.efforts import USUAL
from symmerge.merging.healing import HealOptions
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.transporting.adapter_files import Adapter
from symmerge.transporting.adapters import adapted
from symmerge.transporting.frames import Passage
from symmerge.transporting.healing import heal_adapter, heal_carried
from symmerge.transporting.inputs import WRITERS, written_texts
from symmerge.transporting.learning import amount_to_learn, learn_passage
from symmerge.transporting.options import TransportOptions


def learned(
    passage: Passage,
    writer: Model,
    tuned: Model,
    options: TransportOptions,
    progress: Progress,
    adapts: bool,
) -> tuple[Passage, Mapping[str, float] | float, int]:
    """The passage made for this change, and its scales: by module in an adapter."""
    if not options.learns:
        return passage, options.scale or 1.0, 0
    if options.data is None and not (makes_inputs(tuned) or _reads_texts_of(writer, tuned)):
        warnings.warn(
            f"{tuned.where} cannot generate inputs: the change is carried at scale 1, aligned by"
            " weights; give --data for a better result",
            SymmergeWarning,
            stacklevel=3,
        )
        return passage, 1.0, 0
    result = learn_passage(
        passage,
        tuned,
        effort=options.effort or USUAL,
        data=_inputs(writer, tuned, options, progress),
        steps=options.steps,
        by_module=adapts,
        seed=options.seed,
        device=options.device,
        progress=progress,
    )
    return result.passage, result.scales, result.steps


def healed(
    model: Model,
    adapter: Adapter | None,
    other: Model,
    writer: Model,
    tuned: Model,
    options: TransportOptions,
    progress: Progress,
) -> tuple[Model, Adapter | None, int]:
    """What arrived, after steps in which it learned TUNED's answers; and how many steps."""
    if not options.heal:
        return model, adapter, 0
    data = _inputs(writer, tuned, options, progress)
    how = HealOptions(steps=options.heal, data=data, seed=options.seed, device=options.device)
    if adapter is None:
        return heal_carried(model, tuned, how, progress).model, None, options.heal
    after = heal_adapter(other, adapter, tuned, how, progress).adapter
    return adapted(other, after), after, options.heal


def makes_inputs(model: Model) -> bool:
    """Whether there are inputs without data for a model."""
    has_task = model.spec.task in {one for task in TASKS.values() for one in task.purposes}
    return has_task and task_of(model) in SELF_SOURCES


def _reads_texts_of(writer: Model, tuned: Model) -> bool:
    """Whether TUNED classifies texts, and BASE is a language model, which writes some."""
    return tuned.spec.task == "text-classification" and writer.spec.task in WRITERS


def _inputs(
    writer: Model, tuned: Model, options: TransportOptions, progress: Progress
) -> Task | None:
    """What is learned from; None: what TUNED makes itself."""
    if options.data is not None:
        how = {"learned": True, "seed": options.seed, "device": options.device, "part": "learn"}
        return make_inputs([tuned], options.data, **how)  # type: ignore[arg-type]
    if not _reads_texts_of(writer, tuned):
        return None
    amount = amount_to_learn(options.effort or USUAL, tuned, options.device)
    how = {"samples": amount["generated"], "seed": options.seed, "device": options.device}
    return written_texts(tuned, writer, **how, progress=progress)
