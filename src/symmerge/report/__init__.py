"""Figures and one self-contained page, from the JSON results alone."""

from symmerge.report.page import curve_svg, report
from symmerge.report.structure import structure

__all__ = ["curve_svg", "report", "structure"]
