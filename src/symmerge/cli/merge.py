"""The verb merge: align and average models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symmerge.aligning.folders import lone_folder
from symmerge.aligning.inputs import open_models
from symmerge.checkpoints.folders import refuse
from symmerge.checkpoints.memory import return_freed_memory
from symmerge.cli import console
from symmerge.cli.options.common import Device, Models, Out, Overwrite, Seed, check_models
from symmerge.cli.options.groups import Config, verb
from symmerge.cli.options.matching import Aligning, Learning, Many, align_options
from symmerge.cli.options.merging import Merging
from symmerge.errors import MismatchError
from symmerge.merging.mergekit_methods import MergekitMerge
from symmerge.merging.mergekit_reading import is_mergekit, read_mergekit
from symmerge.merging.pipeline import merge as merge_models
from symmerge.merging.proof import NEW
from symmerge.models.model import Model, save

REMEDY = "there is nothing to merge it with; give two models or more, symmerge merge A B --out DIR"


@verb()
def merge(
    out: Out,
    merging: Merging,
    aligning: Aligning,
    learning: Learning,
    many: Many,
    models: Models = None,
    seed: Seed = 0,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    config: Config = None,
) -> None:
    """Merge two models or more into one stock checkpoint of the original size.

    All are aligned to the first, then averaged. Of one folder that align wrote, what is in it
    is averaged: [bold]symmerge merge ./aligned --out ./merged[/].
    Aligned models combine as fine-tunes of one base do: [bold]mean[/], [bold]slerp[/] (two),
    [bold]ties[/] and [bold]dare[/] (differences from the reference), [bold]soup[/] (those that
    help on --held-out).

    --config also takes a config of mergekit: linear, slerp, ties, dare_linear, dare_ties and
    task_arithmetic of whole models, aligned to its base_model.

    Example: [bold]symmerge merge ./seed-0 ./seed-1 --out ./merged[/]; of three:
    [bold]symmerge merge ./seed-0 ./seed-1 ./seed-2 --weights 0.5,0.3,0.2 --out ./merged[/]
    """
    return_freed_memory()
    how = {**merging.keywords(), **vars(many), "seed": seed, "device": device}
    folders, opened = tuple(models or ()), lone_folder(models or ())
    if config is not None and is_mergekit(config):
        opened = _by_mergekit(config, models)
        folders = tuple(map(Path, opened.models))
    if opened is None:
        folders = check_models(models, REMEDY)
        opened = open_models(folders, units=many.units)
    refuse(out.absolute(), overwrite, folders)
    method = align_options(aligning, learning, seed, device)
    merged = merge_models(opened, method=method, **how, progress=console.note)
    _show_steps(merged, merging)
    with console.progress("writing", len(merged.weights.names())) as tick:
        save(merged, out, overwrite=overwrite, progress=tick)
    console.say(f"wrote {out}: {merged.history[-1].what}")
    console.say(_proof(merged))
    if not merged.stock:
        console.say(
            "this is no stock checkpoint: its heads have twice the size; only symmerge loads it"
        )


def _by_mergekit(file: Path, models: Sequence[Path] | None) -> MergekitMerge:
    if models:
        raise MismatchError(f"{file} names the models to merge: leave out {models[0]}")
    return read_mergekit(file)


def _proof(merged: Model) -> str:
    """What is certain about a merge, and what is not."""
    evidence = next((step.evidence for step in merged.history if step.evidence), {})
    proved = evidence.get("proved", "nothing: the models were averaged as they are")
    return f"proved: {proved}; not proved: {evidence.get('not_proved', NEW)}"


def _show_steps(merged: Model, merging: Merging) -> None:
    """Print the attempts of a soup, and the changes of REPAIR."""
    for step in merged.history:
        details: Mapping[str, Any] = step.details
        if details.get("method") == "soup":
            console.show_table(f"Soup, by the loss on {merging.held_out}", details["tried"])
        if step.step == "repair":
            before, after = details["before"]["loss"], details["after"]["loss"]
            console.say(
                f"repaired {merging.repair}: loss {before:.4f} before, {after:.4f} after,"
                " on held-out inputs"
            )
