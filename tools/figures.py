"""Draw the figures of docs/results.md from experiments/results.

    python tools/figures.py

One function per figure; the same results give the same bytes. A test says when one is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symmerge.report.drawing import BEST, INK, PLAIN, REST, SERIES, draw, standalone

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "experiments" / "results", ROOT / "docs" / "figures"
ORANGE, BLUE, GREEN, PINK, *_ = SERIES
# row of the experiment -> its name on the figure, colour
METHODS: Mapping[str, tuple[str, str]] = {
    "vanilla": ("averaging", PLAIN),
    "learned, permutations only": ("learned, permutations", PINK),
    "weight matching": ("weights, no data", GREEN),
    "activation matching": ("activations", REST),
    "learned": ("learned", BEST),
}
ROWS = {  # of Tiny Shakespeare, whose file is older than the experiment's names
    "weights": "weight matching",
    "activations": "activation matching",
    "learned-permutations": "learned, permutations only",
}
PARTS = ("(i) first attention", "(ii) all attention", "(iii) first layer", "(iv) everything")
RETRAINED = {
    "naive": ("naive average", PLAIN),
    "two-stage": ("two stages (published)", REST),
    "ours": ("weights, no data", GREEN),
    "ours, learned": ("learned", BEST),
}


def results(name: str) -> Any:
    """One file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def published_lines() -> str:
    """Loss on the line over the mean of its ends: every method, mean of three pairs."""
    cifar: dict[str, list[list[float]]] = {
        entry["row"]: entry["curves"]
        for entry in results("published-cifar10")["tables"][0]["entries"]
        if entry["row"] in METHODS
    }
    books: dict[str, list[list[float]]] = {}
    for cell in results("published-shakespeare")["best"]["cells"]:
        row: str = cell["row"].split(":")[0]
        books.setdefault(ROWS.get(row) or row, []).append(cell["losses"])

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, 2)
        for axes, (name, curves) in zip(
            panels, (("Tiny Shakespeare, GPT-2", books), ("CIFAR-10, ViT", cifar)), strict=True
        ):
            for row, (label, colour) in METHODS.items():
                heights = [_above_ends(curve) for curve in curves[row]]
                mean = [fmean(at) for at in zip(*heights, strict=True)]
                t = [place / (len(mean) - 1) for place in range(len(mean))]
                axes.plot(t, mean, color=colour, label=label)
            axes.axhline(0, color=INK, linewidth=0.8)
            axes.set(title=name, xlabel="t")
        panels[0].set(ylabel="loss above the mean of the ends")
        _legend(figure, panels[0], columns=3)

    about = "Mean of three pairs each: averaging is highest, learned matching at or below zero."
    return draw("published", "Loss on the line between two seeds", about, (8.2, 3.6), paint)


def _above_ends(losses: Sequence[float]) -> list[float]:
    last = len(losses) - 1
    line = (losses[0] + (losses[-1] - losses[0]) * at / last for at in range(last + 1))
    return [loss - under for loss, under in zip(losses, line, strict=True)]


def retrained() -> str:
    """Barriers after a part was re-initialised and the whole retrained."""
    panels = [
        (column, values)
        for name in ("published-retrain-text", "published-retrain-images")
        for column, values in _by_column(results(name)["tables"][0]).items()
    ]

    def paint(figure: Figure) -> None:
        for axes, (column, values) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            for place, (method, (label, colour)) in enumerate(RETRAINED.items()):
                found = [values.get(f"{part}, {method}") for part in PARTS]
                bars = [(at, one) for at, one in enumerate(found) if one]
                axes.bar(
                    [at + 0.2 * (place - 1.5) for at, _ in bars],
                    [max(mean, 0.0) for _, (mean, _) in bars],
                    yerr=[error for _, (_, error) in bars],
                    width=0.18,
                    color=colour,
                    label=label,
                    error_kw={"ecolor": INK, "elinewidth": 0.9},
                )
            axes.set(title=column, xticks=range(4), xticklabels=["(i)", "(ii)", "(iii)", "(iv)"])
            axes.grid(visible=False, axis="x")
        figure.supylabel("barrier")
        _legend(figure, figure.axes[0], columns=4)

    about = f"Re-initialised: {', '.join(PARTS)}."
    return draw("retrained", "Barriers after retraining a part", about, (8.2, 5.6), paint)


def _by_column(table: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    columns: dict[str, dict[str, tuple[float, float]]] = {}
    for entry in table["entries"]:
        error = entry["standard_error"] or 0.0
        columns.setdefault(entry["column"], {})[entry["row"]] = (entry["mean"], error)
    return columns


def families() -> str:
    """What is left of averaging's barrier in small pairs of new families."""
    cells = results("new-families")["cells"]
    shares: dict[str, dict[str, list[float]]] = {}
    for key, cell in cells.items():
        family, pair, row = key.split("/")
        plain = cells.get(f"{family}/{pair}/averaging", {}).get("barrier")
        if row in ("fast", "standard") and plain and "barrier" in cell:
            shares.setdefault(family, {}).setdefault(row, []).append(cell["barrier"] / plain)
    shown = sorted(
        (family for family in shares if "standard" in shares[family]),
        key=lambda family: fmean(shares[family]["standard"]),
        reverse=True,
    )

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for row, label, colour in (
            ("standard", "effort standard", BEST),
            ("fast", "effort fast", GREEN),
        ):
            rows = [(at, shares[family].get(row)) for at, family in enumerate(shown)]
            for place, (at, found) in enumerate((at, found) for at, found in rows if found):
                axes.errorbar(
                    fmean(found),
                    at,
                    xerr=stdev(found) / len(found) ** 0.5 if len(found) > 1 else None,
                    fmt="o",
                    color=colour,
                    label=label if place == 0 else None,
                )
        axes.set(yticks=range(len(shown)), yticklabels=shown, xlim=(0, 1))
        axes.set(xlabel="share of averaging's barrier that is left")
        _legend(figure, axes, columns=2)

    about = ", ".join(f"{name} {fmean(shares[name]['standard']):.2f}" for name in reversed(shown))
    size = (6.4, 1.3 + 0.28 * len(shown))
    return draw("families", "Small pairs of new families, no data", about, size, paint)


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    lines, labels = axes.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=columns)


DRAWN: Mapping[str, Callable[[], str]] = {
    "results-lines.svg": published_lines,
    "results-retrained.svg": retrained,
    "results-families.svg": families,
}


def out_of_date() -> Iterable[str]:
    """Figures that their results no longer give."""
    for name, drawn in DRAWN.items():
        path = FIGURES / name
        if not path.exists() or path.read_text("utf-8") != standalone(drawn()):
            yield name


def main() -> None:
    for name, drawn in DRAWN.items():
        (FIGURES / name).write_text(standalone(drawn()), "utf-8")
        print(f"docs/figures/{name}")


if __name__ == "__main__":
    main()
