"""Figures and one self-contained HTML page, from the JSON result files alone."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from symmerge.report.page import curve_svg, report, simplex_svgs

__all__ = ["curve_svg", "report", "simplex_svgs"]


def __getattr__(name: str) -> object:
    """Import lazily: matplotlib and jinja2 are slow to load."""
    if name not in ("curve_svg", "report", "simplex_svgs"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from symmerge.report import page

    return getattr(page, name)
