"""Options of merge: how aligned models are combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from symmerge.aligning.choices import either
from symmerge.errors import MismatchError
from symmerge.merging.plan import COMBINE, LEARNED

OF_VERDICT = "skill", "anyway"


@dataclass(frozen=True)
class Merging:
    """How aligned models are combined."""

    panel: ClassVar[str] = "Merging"
    main: ClassVar[tuple[str, ...]] = ("t", "weights", "heal")
    t: Annotated[
        float | None,
        typer.Option(
            "-t",
            help="For two models: where on the line from A (0) to B (1).",
            metavar="T",
            min=0.0,
            max=1.0,
            show_default="0.5",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="How much each model counts, separated by commas: 0.5,0.3,0.2.",
            metavar="W,W,...",
            show_default="equal",
        ),
    ] = None
    combine: Annotated[
        str,
        typer.Option(
            help=f"How aligned models become one: {either(COMBINE)}"
            " (of the models that help on --data).",
            metavar="NAME",
        ),
    ] = "mean"
    density: Annotated[
        float,
        typer.Option(
            help="For ties and dare: the share of each difference that is kept.", min=0.0, max=1.0
        ),
    ] = 0.5
    at: Annotated[
        list[str] | None,
        typer.Option(
            help="Another t for one part: ff=0.3, vo.2=0.1, layer.0=0.4, residual=0.5."
            " May be repeated. Or learned: learn the t of each part, starting from -t.",
            show_default=False,
        ),
    ] = None
    attention: Annotated[
        str,
        typer.Option(
            help="Average heads by factors (a straight line), svd (circuits cut to rank) or"
            " circuits (twice the head size; not a stock checkpoint)."
        ),
    ] = "factors"
    repair: Annotated[
        str | None,
        typer.Option(
            help="REPAIR after merging: rescale the outputs of maps or of norms to the parents'"
            " variance, measured on --calibration.",
            show_default="no",
        ),
    ] = None
    heal: Annotated[
        int | None,
        typer.Option(
            help="After merging, distil the parents into all weights for this many steps, on --data"
            " or on text sampled from them.",
            metavar="STEPS",
            min=1,
            show_default="no",
        ),
    ] = None
    heal_lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of --heal.", show_default="by width"),
    ] = None
    skill: Annotated[
        list[str] | None,
        typer.Option(
            help="Data that the verdict shows in its own column, in the form of --data. May be"
            " repeated.",
            metavar="DATA",
            show_default="text of each parent",
        ),
    ] = None
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Write the merge even if the verdict says that it is of no use."
        ),
    ] = False

    def keywords(self) -> dict[str, object]:
        """Keyword arguments of `merge`, with strings parsed to numbers."""
        values = {name: value for name, value in vars(self).items() if name not in OF_VERDICT}
        return {**values, "weights": _weights(self.weights), "at": _times(self.at or [])}


def _weights(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise MismatchError(
            f"--weights {text}: write one number per model, separated by commas: 0.5,0.3,0.2"
        ) from None


def _times(items: list[str]) -> dict[str, float] | str:
    if items == [LEARNED]:
        return LEARNED
    times = {}
    for item in items:
        name, _, value = item.partition("=")
        try:
            times[name] = float(value)
        except ValueError:
            raise MismatchError(f"--at {item}: write NAME=T, for example ff=0.3") from None
        if not 0 <= times[name] <= 1:
            raise MismatchError(f"--at {item}: t must be between 0 and 1")
    return times
