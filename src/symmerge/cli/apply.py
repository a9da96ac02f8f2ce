"""The verb apply: transform a model by a saved alignment."""

from pathlib import Path
from typing import Annotated

import typer

from symmerge.cli.options.common import Device, ModelPath, Written
from symmerge.cli.options.groups import verb
from symmerge.cli.writing import write_moved
from symmerge.models.model import load
from symmerge.models.orbit import follow


@verb(
    examples=(
        "aligned/alignment.safetensors seed-1 --out moved",
        "elsewhere/alignment.safetensors model --out there",
        "alignment.safetensors model --out there --overwrite",
    )
)
def apply(
    alignment: Annotated[
        Path,
        typer.Argument(
            help="An alignment.safetensors written by random or align.",
            metavar="ALIGNMENT",
            show_default=False,
        ),
    ],
    model: ModelPath,
    written: Written,
    device: Device = "cpu",
) -> None:
    """Apply a saved alignment to a model: new weights, the same function.

    Use this to repeat what align or random did. Models that the alignment was not made for are
    refused. Reads and writes tensor by tensor.
    """
    source = load(model)
    moved = follow(alignment, source, device=device)
    write_moved(source, moved, written, inputs=(alignment,), device=device)
