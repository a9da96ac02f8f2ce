"""One self-contained HTML page from the result files: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from symmerge.checkpoints.files import write_own_text
from symmerge.checkpoints.folders import add_to_contents
from symmerge.errors import SymmergeError
from symmerge.evaluation.results import CurveFile, CurvesFile, SimplexFile
from symmerge.report import experiment, figures, glossary, phrases, tables
from symmerge.report.drawing import palette_css, standalone
from symmerge.report.results import CurveSummary, read_results, summarize
from symmerge.report.sections import Section, build_section
from symmerge.report.simplices import draw_simplex

HERE = Path(__file__).parent
MARK = '<meta name="generator" content="symmerge">'  # only pages that have it are replaced
HEADING = "Averaging models, before and after alignment"


def report(folder: Path, out: Path) -> Path:
    """Write the page of a folder's results, or its subfolders' results, to `out`; return `out`."""
    if out.suffix not in (".html", ".htm"):
        raise SymmergeError(f"{out} would be an HTML page: choose an --out that ends in .html")
    folders = read_results(folder)
    sections = [
        build_section(f"s{number}", results, named=len(folders) > 1)
        for number, results in enumerate(folders, 1)
    ]
    alone = folders[0].experiment if len(folders) == 1 else None
    heading = HEADING if len(folders) > 1 else sections[0].title
    text = _render(experiment.heading(alone) if alone else heading, sections)
    try:
        write_own_text(out, text, MARK)
        add_to_contents(out.parent, out.name)
    except OSError as error:
        raise SymmergeError(
            f"cannot write {out}: {error.strerror}; choose another --out"
        ) from error
    return out


def curve_svg(curves: CurveFile | CurvesFile) -> str:
    """The loss curve as the text of an SVG file."""
    return standalone(figures.metric_curve(summarize(curves), "loss"))


def simplex_svgs(simplex: SimplexFile) -> dict[str, str]:
    """The figures of simplex.json: file name -> text of an SVG file."""
    return {f"{name}.svg": standalone(svg) for name, svg in draw_simplex(simplex).items()}


def _render(heading: str, sections: Sequence[Section]) -> str:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["explained"] = glossary.explained
    script = (HERE / "page.js").read_text("utf-8")
    barriers = {section.name: section.barriers for section in sections if section.barriers}
    return environment.get_template("page.html").render(
        heading=heading,
        sections=sections,
        overview=tables.overview(barriers) if len(sections) > 1 and barriers else None,
        numbers={s.key: _slider_numbers(s.path.curve) for s in sections if s.path},
        style=Markup(palette_css() + "\n" + (HERE / "page.css").read_text("utf-8")),
        script=Markup(script),
        # Content security policy: only this script runs, nothing is fetched.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        phrases=phrases,
        words={glossary.word_id(word): about for word, about in glossary.WORDS.items()},
    )


def _slider_numbers(curve: CurveSummary) -> dict[str, object]:
    """Data of the slider: the metrics of every method at every t, as text."""
    return {
        "t": [phrases.position_text(t) for t in curve.t],
        "share": [(t - curve.t[0]) for t in curve.t],
        "metrics": list(curve.metrics),
        "methods": [method.label for method in curve.ranked],
        "values": [
            [
                [phrases.estimate_text(method.points[at][metric]) for metric in curve.metrics]
                for method in curve.ranked
            ]
            for at in range(len(curve.t))
        ],
    }
