"""The verb report: make one page of result files."""

from pathlib import Path
from typing import Annotated

import typer

from symmerge import report as drawing  # the package: imports matplotlib on first use
from symmerge.cli import console
from symmerge.cli.options.groups import verb


@verb(
    examples=(
        "curve --out page.html",
        "aligned --out page.html",
        "results --out page.html",
    )
)
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A folder written by barrier or align, or one with such subfolders.",
            metavar="DIR",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="The page to write: a single HTML file that needs nothing else.",
            show_default=False,
            metavar="FILE",
        ),
    ],
) -> None:
    """Make a self-contained page of results: curves with a slider, sortable tables.

    Use this to look at results of barrier, align or experiment, or to send them to others. Nothing
    is recomputed.
    """
    console.say(f"wrote {drawing.report(folder, out)}")
