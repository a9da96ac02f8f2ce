"""Alignment options, shared by align, merge and barrier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from symmerge.aligning.choices import either
from symmerge.aligning.learning_options import STARTS
from symmerge.aligning.options import (
    INSIDES,
    METHODS,
    METRICS,
    SCORES,
    SOLVE_DTYPES,
    AlignOptions,
)
from symmerge.matching.efforts import USUAL
from symmerge.matching.learning.samplers import HELP as SAMPLERS
from symmerge.matching.learning.spaces import SPACE_KINDS
from symmerge.matching.recipes import BY_METHOD


def abbreviated(names: Iterable[str]) -> str:
    """A compact list: a dash stands for the prefix of the name before.

    >>> abbreviated(["a", "b", "b-c", "b-d"])
    'a, b, -c, -d'
    """
    short, last = [], None
    for name in names:
        head, dash, rest = name.partition("-")
        short.append(dash + rest if head == last else name)
        last = head
    return ", ".join(short)


RECIPES = " ".join(
    f"{method.capitalize()}: {abbreviated(names)}." for method, names in BY_METHOD.items()
)
SOURCES = (
    "a file (text, .xz, TSV, CSV, JSONL, .npz), a folder of images, hf:NAME, python-docs:train,"
    " digits:train, or self (no data: text sampled from the models, synthetic images)"
)
INPUTS = "Data to learn from, measure on and look at"
"""The panel of options that go with --data."""
Data = Annotated[
    str | None,
    typer.Option(
        help="What to learn from and to measure on: a text file, a table, a folder of images or"
        " hf:NAME (--help-all lists more).",
        show_default="none needed",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(help="Number of samples of --data to use.", show_default="by task"),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        help=f"What activations and REPAIR look at, in the form of --data: {SOURCES}.",
        show_default="--data",
    ),
]
CalibrationSamples = Annotated[
    int | None,
    typer.Option(
        help="Number of samples of --calibration to use.",
        show_default="by task",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(help="Number of learning steps.", min=1, show_default="by effort or recipe"),
]


@dataclass(frozen=True)
class Aligning:
    """How the symmetry is found."""

    panel: ClassVar[str] = "Aligning"
    main: ClassVar[tuple[str, ...]] = ("effort", "method", "data")
    panels: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("samples", "calibration", "calibration_samples", "statistics"), INPUTS
    )
    effort: Annotated[
        str | None,
        typer.Option(
            help="How much work: fast (match weights, seconds), standard (then learn for about a"
            " minute) or best (learn for longer).",
            metavar="NAME",
            show_default=USUAL,
        ),
    ] = None
    data: Data = None
    method: Annotated[
        str | None,
        typer.Option(
            help=f"Instead of --effort: {either(METHODS)}; for merge also none, a plain average."
            " Activations look at --calibration, or else at --data.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None
    samples: Samples = None
    calibration: Calibration = None
    calibration_samples: CalibrationSamples = None
    statistics: Annotated[
        Path | None,
        typer.Option(
            help="Output of symmerge statistics for this pair: saves the pass over --calibration.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"{RECIPES} A leading dash continues the previous name.",
            metavar="NAME",
            show_default="ours, by method",
        ),
    ] = None
    score: Annotated[
        str | None,
        typer.Option(
            help=f"How activations are compared: {either(SCORES)}.", show_default="by recipe"
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(help=f"How heads are compared: {either(METRICS)}.", show_default="by recipe"),
    ] = None
    inside: Annotated[
        str | None,
        typer.Option(
            help=f"How the basis inside heads is found: {either(INSIDES)}.",
            show_default="by recipe",
        ),
    ] = None
    tries: Annotated[
        int | None,
        typer.Option(help="Maximum number of weightings to try.", min=1, show_default="by size"),
    ] = None
    sweeps: Annotated[
        int | None,
        typer.Option(help="Maximum number of sweeps.", min=1, show_default="by recipe"),
    ] = None
    token_counts: Annotated[
        Path | None,
        typer.Option(
            help="How often each token occurred in training, as .npy; tokens with a count of zero"
            " are ignored.",
            show_default=False,
        ),
    ] = None
    solve_dtype: Annotated[
        str,
        typer.Option(help=f"The precision to solve in: {either(SOLVE_DTYPES)}.", metavar="NAME"),
    ] = "float32"


@dataclass(frozen=True)
class Learning:
    """How the symmetry is learned, with --method learned or soft."""

    panel: ClassVar[str] = "Learning: every effort but fast, --method learned or soft"
    steps: Steps = None
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Number of passes through the data, instead of --steps.", show_default=False
        ),
    ] = None
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate.", show_default="by recipe"),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples per batch: fewer need less memory.", min=1, show_default="by task"
        ),
    ] = None
    accumulate: Annotated[
        int | None,
        typer.Option(
            help="Batches per step: more make gradients less noisy and need no more memory.",
            min=1,
            show_default="1",
        ),
    ] = None
    sampler: Annotated[
        str | None,
        typer.Option(help=f"Where between A and B to learn: {SAMPLERS}.", show_default="narrow"),
    ] = None
    concentration: Annotated[
        float | None,
        typer.Option(
            help="For three or more models: where between them to learn;"
            " 0.1 near the corners (as published), 10 near the midpoint.",
            show_default="10",
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            help="What the midpoint should predict: parents (their mean), bayes or author (their"
            " mean weighted by how well each explains the text so far, or the whole row) or labels;"
            " auto is bayes if the parents have different skills, else parents.",
            show_default="by recipe",
        ),
    ] = None
    spaces: Annotated[
        str | None,
        typer.Option(
            help=f"What may move, separated by commas: {either(SPACE_KINDS)}, or individual spaces"
            " listed by inspect.",
            show_default="all",
        ),
    ] = None
    start_from: Annotated[
        str | None,
        typer.Option(
            help=f"Where learning starts: {either(STARTS)}.",
            show_default="activations with data, else weights",
        ),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            help="Stop after this many checks (20 per run) without improvement.",
            min=1,
            show_default="10",
        ),
    ] = None
    permutations_only: Annotated[
        bool,
        typer.Option(
            "--permutations-only",
            help="Learn only permutations, as published: --recipe learned-permutations.",
        ),
    ] = False


@dataclass(frozen=True)
class Many:
    """Options for many models, different widths and different vocabularies."""

    panel: ClassVar[str] = "Many models, widths, vocabularies"
    reference: Annotated[
        str,
        typer.Option(
            help="For three or more models: the one whose coordinates all take, counted from 0, or"
            " medoid (the one closest to all others; every pair is matched)."
        ),
    ] = "0"
    rounds: Annotated[
        int | None,
        typer.Option(
            help="For three or more models: maximum number of rounds that match each to the mean"
            " of the others.",
            min=0,
            show_default="10",
        ),
    ] = None
    units: Annotated[
        str,
        typer.Option(
            help="For models of different widths: the units a narrow one lacks are dead (zero) or"
            " copies of others (split)."
        ),
    ] = "zero"
    shared_tokens: Annotated[
        bool,
        typer.Option(
            "--shared-tokens",
            help="For two models with different vocabularies: match the tokens both have;"
            " the result has A's tokenizer and keeps A's other rows.",
        ),
    ] = False


def align_options(aligning: Aligning, learning: Learning, seed: int, device: str) -> AlignOptions:
    """Convert to the library's options."""
    return AlignOptions(**vars(aligning), **vars(learning), seed=seed, device=device)
