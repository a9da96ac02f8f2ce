"""Style of figures: a palette for light and dark mode, and SVG that refers to it by name."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

# name -> light, dark. Figures are drawn in light colours, which are then replaced by names.
# tests/report/test_contrast.py measures them: WCAG AA on paper and panel, in both schemes.
PALETTE = {
    "ink": ("#16191d", "#eceff2"),
    "muted": ("#57606a", "#a5afba"),
    "line": ("#dde1e6", "#333b44"),
    "paper": ("#ffffff", "#12161b"),
    "panel": ("#f4f6f8", "#1b2128"),
    "best": ("#0b62b4", "#63b3f5"),
    "plain": ("#b34700", "#ff9a57"),
    "rest": ("#868f99", "#75808c"),
    "good": ("#0a6b3d", "#4fcf8f"),
    "usable": ("#7a5b00", "#e0b53c"),
    "poor": ("#a8182c", "#ff7d86"),
    "series-1": ("#c25500", "#ff8f45"),
    "series-2": ("#0072b2", "#5cb6f2"),
    "series-3": ("#00855d", "#3ccc9d"),
    "series-4": ("#a8468c", "#e59bd2"),
    "series-5": ("#7d5f00", "#dcbc50"),
    "series-6": ("#4d51cc", "#a6a9ff"),
}
INK, MUTED, LINE = (PALETTE[name][0] for name in ("ink", "muted", "line"))
BEST, PLAIN, REST = (PALETTE[name][0] for name in ("best", "plain", "rest"))
SERIES = tuple(light for name, (light, _) in PALETTE.items() if name.startswith("series"))
# Raster images cannot follow the page's mode: transparent to a colour visible in both.
_BLUE, _ORANGE = (0.11, 0.5, 0.85), (0.9, 0.42, 0.05)
RISING = LinearSegmentedColormap.from_list("rising", [(*_BLUE, 0.0), (*_BLUE, 1.0)])
SIGNED = LinearSegmentedColormap.from_list(
    "signed",
    [(0.0, (*_ORANGE, 1.0)), (0.5, (*_ORANGE, 0.0)), (0.5, (*_BLUE, 0.0)), (1.0, (*_BLUE, 1.0))],
)

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: scalable, searchable, no embedded font
    "text.parse_math": False,  # user text may contain dollar signs
    "figure.dpi": 72,  # one point is one SVG unit
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
MARGIN = 12  # points around a standalone figure
# Left out of the SVG, so that equal results give equal bytes.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def draw(
    name: str,
    title: str,
    description: str,
    size: tuple[float, float],
    paint: Callable[[Figure], Mapping[str, float] | None],
    *,
    font: float = STYLE["font.size"],
) -> str:
    """SVG text of what `paint` draws on a figure of `size` inches.

    `name` makes its ids unique on a page. The return value of `paint` becomes data attributes.
    """
    buffer = io.StringIO()
    # "default" first: ignore the user's matplotlibrc
    with style.context(["default", {**STYLE, "font.size": font, "svg.hashsalt": name}]):
        figure = Figure(figsize=size)
        data = paint(figure) or {}
        figure.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    return _dress(buffer.getvalue(), name, title, description, data)


def name_point(
    axes: Axes, place: tuple[float, float], name: str, offset: tuple[float, float]
) -> None:
    """Write a bold name `offset` points away from a data point."""
    text = axes.annotate(name, place, offset, textcoords="offset points", fontweight="bold")
    text.set(ha="center", va="center", annotation_clip=False)


def _dress(text: str, name: str, title: str, description: str, data: Mapping[str, float]) -> str:
    text = text[text.index("<svg") :].strip()
    text = re.sub(r'style="[^"]*"', lambda match: _by_name(match[0]), text)
    text = re.sub(r'( id="| xlink:href="#|url\(#)(?=[A-Za-z])', rf"\g<1>{name}-", text)
    # The cursor shows when a script moves it.
    text = text.replace(f'id="{name}-cursor"', f'id="{name}-cursor" visibility="hidden"')
    extra = "".join(f' data-{key}="{value:.2f}"' for key, value in data.items())
    head = f'<svg role="img" aria-labelledby="{name}-title {name}-desc"{extra}'
    text = text.replace("<svg", head, 1)
    labels = f'<title id="{name}-title">{escape(title)}</title>'
    labels += f'<desc id="{name}-desc">{escape(description)}</desc>'
    end_of_head = text.index(">") + 1
    return text[:end_of_head] + labels + text[end_of_head:]


def _by_name(style_attribute: str) -> str:
    for name, (light, _) in PALETTE.items():
        style_attribute = style_attribute.replace(light, f"var(--{name})")
    return re.sub(r"(font: [^']*?[\d.]+px) [^;\"]*", r"\1 system-ui, sans-serif", style_attribute)


def palette_css() -> str:
    """The palette as CSS custom properties, for light and dark mode."""
    light, dark = (
        "".join(f"--{name}: {pair[at]}; " for name, pair in PALETTE.items()).strip()
        for at in (0, 1)
    )
    # On screens only: paper is white.
    in_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f":root {{ color-scheme: light dark; {light} }}\n{in_dark}"


def standalone(svg: str) -> str:
    """A figure as a standalone SVG file, with the palette in it and a margin around it."""
    svg = re.sub(
        r'width="[\d.]+pt" height="[\d.]+pt" viewBox="([^"]+)"', _with_margin, svg, count=1
    )
    end_of_head = svg.index(">") + 1
    style_text = f"<style>{palette_css()}\nsvg {{ background: var(--paper); }}</style>"
    return f"{svg[:end_of_head]}{style_text}{svg[end_of_head:]}\n"


def _with_margin(size: re.Match[str]) -> str:
    _, _, width, height = map(float, size[1].split())
    wide, high = width + 2 * MARGIN, height + 2 * MARGIN
    box = f"{-MARGIN} {-MARGIN} {wide:g} {high:g}"
    return f'width="{wide:g}pt" height="{high:g}pt" viewBox="{box}"'
