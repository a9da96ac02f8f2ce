"""Contrast of text and figures, computed from the colours of both schemes (WCAG 2.1, AA)."""

import re
from pathlib import Path

import pytest
from contrast import contrast

from symmerge.report import drawing, page

TEXT, GRAPHICS = 4.5, 3.0
BACKGROUNDS = ("paper", "panel")
CSS = Path(page.__file__).with_name("page.css").read_text("utf-8")
# `color: var(--x)` is text; lines of figures and tiles are graphics.
TEXT_COLOURS = sorted(set(re.findall(r"(?<![\w-])color: var\(--([\w-]+)\)", CSS)) - {"paper"})
LINES = ["best", "plain", "rest", "ink", *(n for n in drawing.PALETTE if n.startswith("series"))]


def measured(name, background, scheme):
    return contrast(drawing.PALETTE[name][scheme], drawing.PALETTE[background][scheme])


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("background", BACKGROUNDS)
def test_text_and_lines_can_be_told_from_their_background(background, scheme):
    assert {"ink", "muted", "best", "plain", "good", "usable", "poor"} <= set(TEXT_COLOURS)
    for names, least in ((TEXT_COLOURS, TEXT), (LINES, GRAPHICS)):
        ratios = {name: round(measured(name, background, scheme), 2) for name in names}
        assert min(ratios.values()) >= least, ratios


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_white_on_blue_can_be_read(scheme):
    """The tag of the best row."""
    assert "background: var(--best); color: var(--paper)" in CSS
    assert measured("paper", "best", scheme) >= TEXT


def test_the_measure_itself():
    """Black on white is 21 by definition; the colour of hair lines would fail as text."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert measured("line", "paper", 0) < GRAPHICS
