"""Options that most verbs have: models, the folder to write, seed, device, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from symmerge.aligning.choices import either
from symmerge.errors import MismatchError
from symmerge.models.precision import STORED_DTYPES

ModelPath = Annotated[
    Path,
    typer.Argument(help="A Hugging Face checkpoint folder.", metavar="MODEL", show_default=False),
]
ModelA = Annotated[
    Path, typer.Argument(help="A checkpoint folder.", metavar="A", show_default=False)
]
ModelB = Annotated[
    Path,
    typer.Argument(
        help="Another one, of the same architecture and size.", metavar="B", show_default=False
    ),
]
# Optional for the parser only: our own check refuses too few models in one line.
Models = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Two or more checkpoint folders of one architecture.",
        metavar="A B ...",
        show_default=False,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        help="The folder to write. It appears whole or not at all.",
        show_default=False,
        metavar="DIR",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")]
LARGEST_SEED = 2**63 - 1  # as torch takes them
Seed = Annotated[
    int,
    typer.Option(help="The same seed gives the same result.", min=0, max=LARGEST_SEED),
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.", metavar="NAME")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted run with the same options.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check everything, print the time and memory it will take, and stop."
    ),
]
Residual = Annotated[
    str,
    typer.Option(
        help="How the residual stream may move: full, permutation (keeps a tied head tied)"
        " or identity."
    ),
]


@dataclass(frozen=True)
class Output:
    """How results of align and merge are stored and printed."""

    panel: ClassVar[str] = "Output"
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Precision of the written weights: {either(STORED_DTYPES)}.",
            metavar="NAME",
            show_default="that of the first model",
        ),
    ] = None
    mergekit: Annotated[
        Path | None,
        typer.Option(
            help="Also write a config for mergekit to merge the aligned checkpoints; merge puts"
            " these in OUT-aligned.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    no_verdict: Annotated[
        bool,
        typer.Option(
            "--no-verdict", help="Do not compare the merge with its parents: saves some time."
        ),
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also print every detail.")] = (
        False
    )
    json: Json = False


@dataclass(frozen=True)
class Written:
    """Options of verbs that write one checkpoint: where, and how it is verified."""

    out: Out
    overwrite: Overwrite = False
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify",
            help="Skip the check that the function did not change; the model card will say so.",
        ),
    ] = False
    max_shard_size: Annotated[
        float,
        typer.Option(
            "--max-shard-size", help="Largest weights file, in GB.", min=0.000001, max=1e6
        ),
    ] = 5.0


def check_models(models: Sequence[Path] | None, remedy: str) -> tuple[Path, ...]:
    """Check that there are two models or more, each given once."""
    folders = tuple(models or ())
    if len(folders) < 2:
        raise MismatchError(f"{' and '.join(map(str, folders)) or 'no model'}: {remedy}")
    for number, folder in enumerate(folders):
        if folder.resolve() in {other.resolve() for other in folders[:number]}:
            raise MismatchError(f"{folder} is given twice: name every model only once")
    return folders
