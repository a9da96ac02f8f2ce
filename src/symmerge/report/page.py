"""One self-contained HTML page from the JSON results: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from symmerge.checkpoints.files import write_text
from symmerge.errors import SymmergeError
from symmerge.evaluation.results import CurveFile, CurvesFile, SimplexFile
from symmerge.report import experiment, figures, tables
from symmerge.report import phrases as words
from symmerge.report import simplices as together
from symmerge.report.drawing import SERIES, palette_css, standalone
from symmerge.report.results import CurveSummary, as_curve, read_results
from symmerge.report.sections import Section, section

HERE = Path(__file__).parent
HEADING = "Averaging models, before and after alignment"


def report(folder: Path, out: Path) -> Path:
    """Write the page of a folder's results, or of its subfolders', to `out`; returns `out`."""
    if out.suffix not in (".html", ".htm"):
        raise SymmergeError(f"{out} would be an HTML page: choose an --out that ends in .html")
    found = read_results(folder)
    sections = [
        section(f"s{at}", results, named=len(found) > 1) for at, results in enumerate(found, 1)
    ]
    alone = found[0].experiment if len(found) == 1 else None
    text = _render(experiment.heading(alone) if alone else HEADING, sections)
    try:
        write_text(out, text)
    except OSError as error:
        raise SymmergeError(
            f"cannot write {out}: {error.strerror}; choose another --out"
        ) from error
    return out


def curve_svg(record: CurveFile | CurvesFile) -> str:
    """The loss curve of a `curve` or `curves` record, as the text of an SVG file."""
    return standalone(figures.metric_curve(as_curve(record.to_json()), "loss"))


def simplex_svgs(record: SimplexFile) -> dict[str, str]:
    """The figures of a `simplex` record: file name -> text of an SVG file."""
    return {f"{name}.svg": standalone(svg) for name, svg in together.svgs(record.to_json()).items()}


def _render(heading: str, sections: Sequence[Section]) -> str:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (HERE / "page.js").read_text("utf-8")
    curves = {part.key: part.path.curve for part in sections if part.path}
    barriers = {part.name: part.barriers for part in sections if part.barriers}
    return environment.get_template("page.html").render(
        heading=heading,
        sections=sections,
        overview=tables.overview(barriers) if len(sections) > 1 and barriers else None,
        numbers={key: _numbers(curve) for key, curve in curves.items()},
        style=Markup(palette_css() + "\n" + (HERE / "page.css").read_text("utf-8")),
        script=Markup(script),
        # Only this script may run, and nothing may be fetched, whatever the results contain.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        words=words,
        colours=len(SERIES),
    )


def _numbers(curve: CurveSummary) -> dict[str, Any]:
    """What the slider shows: for every t, for every method, its metrics as text."""
    return {
        "t": [words.position(t) for t in curve.t],
        "share": [(t - curve.t[0]) for t in curve.t],
        "metrics": list(curve.metrics),
        "methods": [method.label for method in curve.methods],
        "values": [
            [
                [words.estimate(method.points[at][metric]) for metric in curve.metrics]
                for method in curve.methods
            ]
            for at in range(len(curve.t))
        ],
    }
