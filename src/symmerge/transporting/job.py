"""`transport`: carry a fine-tune, several, or an adapter along an alignment; its checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from symmerge.aligning.aligned import Aligned, solve_pair
from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.aligning.options import NONE, options_named, recipe_for
from symmerge.checkpoints.card import public_name
from symmerge.errors import MismatchError
from symmerge.models.alignment import Alignment
from symmerge.models.distances import SAME_BASIN, distance, likeness
from symmerge.models.model import Model
from symmerge.models.progress import Notice, Progress, ProgressLike, reporter
from symmerge.models.tables import check_same_kind, check_same_table, layer_count
from symmerge.models.widening import widen
from symmerge.symmetry.spec import Spec
from symmerge.transporting.adapter_files import Adapter, is_adapter, read_adapter
from symmerge.transporting.adapters import adapted, carried_adapter, warn_unmerged
from symmerge.transporting.carrying import carried
from symmerge.transporting.frames import Passage, framed
from symmerge.transporting.heads import as_tuned, has_more, headed, tied_alike
from symmerge.transporting.judging import judge_transport
from symmerge.transporting.options import TransportOptions
from symmerge.transporting.teaching import healed, learned, makes_inputs
from symmerge.transporting.transport_results import BASE, CARRIED, OTHER, TUNED, TransportVerdict

UNALIGNED = "not aligned: the change is added as it is"


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
    opened = open_model(base), open_model(other)
    adapter = _adapter(tuned, opened[0])
    if adapter and how.untie:
        raise MismatchError(
            f"--untie: {adapter.path} is an adapter, and its base stays as it is; leave it out"
        )
    change = adapted(opened[0], adapter) if adapter else open_model(tuned)
    check_same_kind(opened, "carried")
    first, change, second = tied_alike(opened[0], change, opened[1])
    pair, change, narrow = fitted_widths((first, second), change, adapter is not None)
    check_transport(pair[0], change, pair[1])
    passage, method = find_passage(*pair, how, tell)
    if has_more(pair[0], change):
        passage = headed(passage, change)
    if adapter:
        carried_adapter(passage, adapter)  # refused before anything is learned
    passage, scales, steps = learned(passage, pair[0], change, how, tell, adapter is not None)
    moved = None
    if adapter:
        moved = carried_adapter(passage, adapter, scales)
        warn_unmerged(moved, passage.other)
        model = adapted(passage.other, moved)
    else:
        model = carried(passage, change, scales, untie=how.untie, narrow=narrow)
    model, moved, steps_healed = healed(model, moved, passage.other, pair[0], change, how, tell)
    models = {BASE: passage.base, TUNED: change, OTHER: narrow or passage.other, CARRIED: model}
    factors = scales if isinstance(scales, Mapping) else {"all": scales}
    judged = None
    if verdict:
        shown = {"method": method, "learned": steps, "scales": factors, "healed": steps_healed}
        name = public_name(str(adapter.path)) if adapter and adapter.path else None
        judged = judge_transport(
            models, how.data, **shown, name=name, seed=how.seed, device=how.device, progress=tell
        )
    return Transported(model=model, adapter=moved, passage=passage, verdict=judged, scales=factors)


def _adapter(tuned: ModelLike, base: Model) -> Adapter | None:
    if isinstance(tuned, str | os.PathLike) and is_adapter(Path(tuned)):
        return read_adapter(Path(tuned), base)
    return None


def fitted_widths(
    pair: tuple[Model, Model], tuned: Model, adapts: bool
) -> tuple[tuple[Model, Model], Model, Model | None]:
    """BASE and OTHER in one width: the narrow ones are widened, which changes no function.

    A narrow BASE is widened with its TUNED. A narrow OTHER is given as well: what arrives at its
    widened self has to be cut to its size.
    """
    base, other = pair
    sizes = [{name: model.spec.sizes[name] for name in model.spec.hidden} for model in pair]
    depths = {layer_count(model) for model in (*pair, tuned)}
    if len(depths) > 1 or sizes[0].keys() != sizes[1].keys() or sizes[0] == sizes[1]:
        return pair, tuned, None
    if adapts or has_more(base, tuned):
        raise MismatchError(
            f"{base.where} and {other.where} differ in width, and adapters, new heads and new"
            " tokens keep their sizes: merge the adapter into its base and carry the model, or"
            " carry between models of the same width"
        )
    if any(sizes[0][name] > sizes[1][name] for name in sizes[0]):
        return (base, widen(other, base)), tuned, other
    return (widen(base, other), other), widen(tuned, other), None


def check_transport(base: Model, tuned: Model, other: Model) -> None:
    """Refuse models that do not fit, and a TUNED that is no fine-tune of BASE."""
    check_same_kind([base, other], "carried")
    if len(depths := {layer_count(model) for model in (base, tuned, other)}) > 1:
        counts = " and ".join(map(str, sorted(depths)))
        raise MismatchError(
            f"{base.where}, {tuned.where} and {other.where} have {counts} layers: a change can only"
            " be carried between models of the same depth; give such models"
        )
    # In their frames, because one of them may be tied and another not.
    check_same_table([framed(base), framed(other)], "aligned")
    extended = as_tuned(base, base, tuned) if has_more(base, tuned) else base
    first, second = framed(extended), framed(tuned)
    check_same_table([first, second], "compared")
    alike = likeness(first, second)
    if alike < SAME_BASIN:
        raise MismatchError(
            f"{tuned.where} is not a fine-tune of {base.where}: their weights agree by {alike:.2f},"
            f" those of fine-tunes by more than {SAME_BASIN:g}; give the base it was trained from"
        )
    if distance(first, second) == 0:
        raise MismatchError(
            f"{tuned.where} has the same weights as {base.where}: there is nothing to carry;"
            " give its fine-tune"
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
        progress(
            Notice(f"{other.where} is already in the basin of {base.where}: no alignment needed")
        )
        return Passage(base, other, Alignment.identity(_frame(base)), ()), UNALIGNED
    # An effort's alignment is by weights alone: what is learned afterwards is made for carrying.
    name = options.method or "fast"
    data = _data(options, name, base)
    chosen = replace(options_named(name), seed=options.seed, device=options.device, data=data)
    recipe = recipe_for(chosen, [base, other])
    result = solve_pair(base, other, recipe, progress=progress)
    return Passage.of(result), recipe.about


def _data(options: TransportOptions, name: str, base: Model) -> str | None:
    """What OTHER is aligned on: without data, what the models make themselves."""
    if name in ("fast", "weights"):
        return None
    return options.data or ("self" if makes_inputs(base) else None)


def _file(path: Path) -> Path:
    """An alignment file, or that of a folder that `align` wrote."""
    return path / "alignment.safetensors" if path.is_dir() else path


def _frame(model: Model) -> Spec:
    return framed(model).spec


def passage_of(alignment: Aligned | Passage) -> Passage:
    """The way back along an alignment."""
    return alignment if isinstance(alignment, Passage) else Passage.of(alignment)
