"""`transport`: carry a fine-tune, several, or an adapter along an alignment; its checks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from symmerge.aligning.aligned import Aligned, solve_pair
from symmerge.aligning.choices import check_choice
from symmerge.aligning.inputs import ModelLike, make_inputs, open_model
from symmerge.aligning.options import NONE, options_named, recipe_for
from symmerge.checkpoints.card import public_name
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.evaluation.tasks import SELF_SOURCES, Task, task_of
from symmerge.evaluation.tasks.catalog import TASKS
from symmerge.matching.efforts import EFFORTS, USUAL
from symmerge.models.alignment import Alignment
from symmerge.models.distances import SAME_BASIN, distance, likeness
from symmerge.models.model import Model
from symmerge.models.progress import Notice, Progress, ProgressLike, reporter
from symmerge.models.tables import check_same_kind, check_same_table, layer_count
from symmerge.models.widening import widen
from symmerge.symmetry.spec import Spec
from symmerge.transporting.adapter_files import Adapter, is_adapter, read_adapter
from symmerge.transporting.adapters import adapted, carried_adapter
from symmerge.transporting.carrying import carried
from symmerge.transporting.frames import Passage, framed
from symmerge.transporting.judging import judge_transport
from symmerge.transporting.learning import learn_passage
from symmerge.transporting.transport_results import BASE, CARRIED, OTHER, TUNED, TransportVerdict

UNALIGNED = "not aligned: the change is added as it is"


@final
@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """How a change is carried.

    `effort` says how OTHER is aligned to BASE and how long the way of carrying is learned;
    `method` is one of `align` (or "none") with nothing learned; `alignment` is a file of `align`.
    `scale` times the change; None: chosen where inputs can be made, else 1.
    """

    effort: str | None = None
    method: str | None = None
    alignment: Path | None = None
    scale: float | None = None
    data: str | None = None
    steps: int | None = None
    untie: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_choice("--effort", self.effort, EFFORTS)
        if self.method and self.effort:
            raise MismatchError("--method and --effort: give one of them")
        if self.alignment and self.method:
            raise MismatchError("--alignment and --method: the alignment is there already")
        if self.scale is not None and not 0 < self.scale < 100:
            raise MismatchError(f"--scale {self.scale:g}: give a number above 0 and below 100")

    @property
    def learns(self) -> bool:
        """Whether the way of carrying is learned: with an effort, and without --scale."""
        return self.method is None and self.scale is None


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Transported:
    """What arrived: a model in OTHER's own coordinates, or an adapter for it, and a verdict."""

    model: Model
    adapter: Adapter | None
    passage: Passage
    verdict: TransportVerdict | None
    scales: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Transported({self.adapter or self.model!r},\n  {self.verdict!r})"


def transport(
    base: ModelLike,
    tuned: ModelLike,
    other: ModelLike,
    *,
    verdict: bool = True,
    progress: ProgressLike = None,
    **options: Any,
) -> Transported:
    """Carry what `tuned` learned from `base` to `other`: `transport("a", "a-news", "b").model`.

    `tuned` may be a LoRA adapter of `base`, then `.adapter` is one of `other`. Options are those of
    `TransportOptions`. Directions and probes are carried by `carry_direction`.
    """
    how, tell = TransportOptions(**options), reporter(progress)
    pair = open_model(base), open_model(other)
    adapter = _adapter(tuned, pair[0])
    change = adapted(pair[0], adapter) if adapter else open_model(tuned)
    pair, change = _as_wide(pair, change, adapter is not None)
    check_transport(pair[0], change, pair[1])
    passage, method = find_passage(*pair, how, tell)
    passage, scales, steps = _learned(passage, change, how, tell, adapter is not None)
    moved = None
    if adapter:
        moved = carried_adapter(passage, adapter, scales)
        model = adapted(passage.other, moved)
    else:
        model = carried(passage, change, scales, untie=how.untie)
    models = {BASE: pair[0], TUNED: change, OTHER: pair[1], CARRIED: model}
    factors = scales if isinstance(scales, Mapping) else {"all": scales}
    judged = None
    if verdict:
        shown = {"method": method, "learned": steps, "scales": factors}
        name = public_name(str(adapter.path)) if adapter and adapter.path else None
        judged = judge_transport(
            models, how.data, **shown, name=name, seed=how.seed, device=how.device, progress=tell
        )
    return Transported(model=model, adapter=moved, passage=passage, verdict=judged, scales=factors)


def _adapter(tuned: ModelLike, base: Model) -> Adapter | None:
    if isinstance(tuned, str | os.PathLike) and is_adapter(Path(tuned)):
        return read_adapter(Path(tuned), base)
    return None


def _as_wide(
    pair: tuple[Model, Model], tuned: Model, adapts: bool
) -> tuple[tuple[Model, Model], Model]:
    """BASE and TUNED, widened alike to the width of OTHER: the same functions."""
    base, other = pair
    sizes = [{name: model.spec.sizes[name] for name in model.spec.hidden} for model in pair]
    depths = {layer_count(model) for model in (*pair, tuned)}
    if len(depths) > 1 or sizes[0].keys() != sizes[1].keys() or sizes[0] == sizes[1]:
        return pair, tuned
    if any(sizes[0][name] > sizes[1][name] for name in sizes[0]):
        raise MismatchError(
            f"{base.where} is wider than {other.where}: changes are carried to models of the same"
            " width or wider"
        )
    if adapts:
        raise MismatchError(
            f"{base.where} is narrower than {other.where}, and adapters keep their sizes: merge the"
            " adapter into its base and carry the model"
        )
    return (widen(base, other), other), widen(tuned, other)


def check_transport(base: Model, tuned: Model, other: Model) -> None:
    """Refuse models that do not fit, and a TUNED that is no fine-tune of BASE."""
    check_same_kind([base, tuned, other], "carried")
    if len(depths := {layer_count(model) for model in (base, tuned, other)}) > 1:
        counts = " and ".join(map(str, sorted(depths)))
        raise MismatchError(
            f"{base.where}, {tuned.where} and {other.where} have {counts} layers: a change can be"
            " carried to models of the same depth only"
        )
    rows = [model.spec.sizes.get("vocabulary") for model in (base, tuned)]
    if rows[0] != rows[1]:
        raise MismatchError(
            f"{tuned.where} has {rows[1]} tokens and {base.where} {rows[0]}: rows of new tokens are"
            " not carried; resize TUNED to the tokens of BASE (resize_token_embeddings)"
        )
    # In their frames, because one of them may be tied and another not.
    first, second, third = (framed(model) for model in (base, tuned, other))
    check_same_table([first, second], "compared")
    check_same_table([first, third], "aligned")
    alike = likeness(first, second)
    if alike < SAME_BASIN:
        raise MismatchError(
            f"{tuned.where} is no fine-tune of {base.where}: their weights agree by {alike:.2f},"
            f" those of fine-tunes by more than {SAME_BASIN:g}; give the base it was trained from"
        )
    if distance(first, second) == 0:
        raise MismatchError(
            f"{tuned.where} has the weights of {base.where}: there is nothing to carry"
        )


def find_passage(
    base: Model, other: Model, options: TransportOptions, progress: Progress
) -> tuple[Passage, str]:
    """The way from BASE to OTHER, by a saved alignment or a new one; and how it was found."""
    if options.alignment:
        passage = Passage.read(_file(options.alignment), base, other)
        return passage, f"by the alignment {options.alignment.name}"
    if options.method == NONE:
        return Passage(base, other, Alignment.identity(_frame(base)), ()), UNALIGNED
    if likeness(base, other) >= SAME_BASIN:
        progress(Notice(f"{other.where} is in the basin of {base.where} already: no alignment"))
        return Passage(base, other, Alignment.identity(_frame(base)), ()), UNALIGNED
    # An effort's alignment is by weights alone: what is learned afterwards is made for carrying.
    name = options.method or "fast"
    chosen = replace(
        options_named(name), seed=options.seed, device=options.device, data=_data(options, name)
    )
    recipe = recipe_for(chosen, [base, other])
    result = solve_pair(base, other, recipe, progress=progress)
    return Passage.of(result), recipe.about


def _data(options: TransportOptions, name: str) -> str | None:
    return options.data if name != "fast" and name != "weights" else None


def _file(path: Path) -> Path:
    """An alignment file, or that of a folder that `align` wrote."""
    return path / "alignment.safetensors" if path.is_dir() else path


def _frame(model: Model) -> Spec:
    return framed(model).spec


def _learned(
    passage: Passage,
    tuned: Model,
    options: TransportOptions,
    progress: Progress,
    adapts: bool,
) -> tuple[Passage, Mapping[str, float] | float, int]:
    """The passage made for this change, and its scales: by module in an adapter."""
    if not options.learns:
        return passage, options.scale or 1.0, 0
    task = _inputs(tuned, options, progress)
    if task is None and not _makes_inputs(tuned):
        warnings.warn(
            f"{tuned.where} makes no inputs itself: the change is carried at scale 1, by weights;"
            " give --data for more",
            SymmergeWarning,
            stacklevel=3,
        )
        return passage, 1.0, 0
    result = learn_passage(
        passage,
        tuned,
        effort=options.effort or USUAL,
        data=task,
        steps=options.steps,
        by_module=adapts,
        seed=options.seed,
        device=options.device,
        progress=progress,
    )
    return result.passage, result.scales, result.steps


def _makes_inputs(model: Model) -> bool:
    has_task = model.spec.task in {task.purpose for task in TASKS.values()}
    return has_task and task_of(model) in SELF_SOURCES


def _inputs(tuned: Model, options: TransportOptions, progress: Progress) -> Task | None:
    if options.data is None:
        return None
    how = {"learned": True, "seed": options.seed, "device": options.device, "part": "learn"}
    return make_inputs([tuned], options.data, **how)  # type: ignore[arg-type]


def passage_of(alignment: Aligned | Passage) -> Passage:
    """The way back along an alignment."""
    return alignment if isinstance(alignment, Passage) else Passage.of(alignment)
