"""The verb transport: carry a fine-tune or an adapter to another base."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from symmerge.aligning.choices import either
from symmerge.aligning.options import METHODS
from symmerge.checkpoints.folders import refuse
from symmerge.checkpoints.memory import return_freed_memory
from symmerge.cli import console
from symmerge.cli.options.common import Device, Json, Out, Overwrite, Seed
from symmerge.cli.options.groups import verb
from symmerge.cli.verdicts import show_arrival
from symmerge.models.saving import save
from symmerge.transporting.adapter_files import save_adapter
from symmerge.transporting.job import Transported
from symmerge.transporting.job import transport as carry
from symmerge.transporting.options import TransportOptions
from symmerge.transporting.transport_results import TransportVerdict

RECORD = "transport.json"


def _folder(name: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(name, help=text, metavar="MODEL", show_default=False)


@dataclass(frozen=True)
class Carrying:
    """How the change is carried."""

    panel: ClassVar[str] = "Carrying"
    main: ClassVar[tuple[str, ...]] = ("effort", "scale", "alignment", "data")
    effort: Annotated[
        str | None,
        typer.Option(
            help="How much work: fast (seconds), standard or best. Without --data it learns from"
            " inputs that TUNED makes itself.",
            metavar="NAME",
            show_default="standard",
        ),
    ] = None
    scale: Annotated[
        float | None,
        typer.Option(
            help="Move the change by the alignment and multiply it by X; nothing is learned.",
            metavar="X",
            show_default="learned for each tensor",
        ),
    ] = None
    alignment: Annotated[
        Path | None,
        typer.Option(
            help="The output of symmerge align BASE OTHER: a folder or its alignment file.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="What to learn from and to measure on, as for merge.",
            show_default="none needed",
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            help=f"Align by {either(METHODS)}, or not at all (none), and learn nothing more.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(help="Number of learning steps.", min=1, show_default="by effort"),
    ] = None
    heal: Annotated[
        int,
        typer.Option(
            help="Afterwards, distil TUNED for N steps into all weights, or into an adapter's"
            " factors; this is reported.",
            metavar="N",
            min=0,
        ),
    ] = 0
    untie: Annotated[
        bool,
        typer.Option(
            "--untie",
            help="If the head is tied to the embedding: give the head its own weights, which is"
            " exact but larger.",
        ),
    ] = False
    no_verdict: Annotated[
        bool, typer.Option("--no-verdict", help="Do not measure how much arrived.")
    ] = False


@verb(
    examples=(
        "--from a --tuned a-news --to b --out b-news",
        "--from a --tuned lora --to b --effort best --out b-lora",
        "--from a --tuned a-news --to b --scale 1 --out c",
    )
)
def transport(
    base: Annotated[Path, _folder("--from", "The model that was fine-tuned.")],
    tuned: Annotated[Path, _folder("--tuned", "What it became, or a LoRA adapter for it.")],
    to: Annotated[Path, _folder("--to", "The model to carry the change to.")],
    out: Out,
    carrying: Carrying,
    device: Device = "cpu",
    seed: Seed = 0,
    json: Json = False,
    overwrite: Overwrite = False,
) -> None:
    """Carry what a fine-tune or an adapter learned over to another base.

    OTHER (--to) keeps its own coordinates, so anything else made for it still fits. It is aligned
    to BASE (--from), and what TUNED changed moves by the same symmetry. No data is needed. A full
    fine-tune gives a checkpoint, a LoRA adapter another adapter of the same ranks. TUNED may have
    its own head or new tokens. For a narrower OTHER, the change is cut to its widths, which is an
    approximation.
    """
    return_freed_memory()
    folders = base, tuned, to
    refuse(out.absolute(), overwrite, folders)
    values = {name: value for name, value in vars(carrying).items() if name != "no_verdict"}
    TransportOptions(**values, seed=seed, device=device)  # refused before any work
    result = carry(
        str(base),
        str(tuned),
        str(to),
        verdict=not carrying.no_verdict,
        progress=console.note,
        seed=seed,
        device=device,
        **values,
    )
    _write(result, out, overwrite, folders)
    if json:
        console.show_json({"verdict": result.verdict.to_json() if result.verdict else None})
        return
    what = f"an adapter for {to}" if result.adapter else result.model.history[-1].what
    console.say(f"wrote {out}: {what}")
    show_arrival(result.verdict)


def _write(result: Transported, out: Path, overwrite: bool, folders: tuple[Path, ...]) -> None:
    beside = partial(_record, result.verdict) if result.verdict else None
    if result.adapter:
        save_adapter(result.adapter, out, overwrite=overwrite, inputs=folders, beside=beside)
        return
    with console.progress("writing", len(result.model.weights.names())) as tick:
        save(result.model, out, overwrite=overwrite, progress=tick, inputs=folders, beside=beside)


def _record(verdict: TransportVerdict, folder: Path) -> None:
    verdict.write(folder / RECORD)
