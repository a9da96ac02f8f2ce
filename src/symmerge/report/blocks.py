"""What a section of the page is made of."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from symmerge.report import tables


@dataclass(frozen=True)
class Figure:
    """A drawing and what it says."""

    svg: Markup
    caption: str

    @staticmethod
    def of(svg: str, caption: str) -> Figure:
        """From SVG text of `figures` and `maps`, in which matplotlib has escaped what users wrote."""
        return Figure(Markup(svg), caption)


@dataclass(frozen=True)
class Part:
    """A heading with what belongs under it: figures one below the other, `beside` each other, or `small`; the `folded` and `long` tables come behind a button."""

    title: str
    text: str = ""
    figures: tuple[Figure, ...] = ()
    beside: tuple[Figure, ...] = ()
    small: tuple[Figure, ...] = ()
    folded: tuple[Figure, ...] = ()
    tables: tuple[tables.PageTable, ...] = ()
    long: tuple[tables.PageTable, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
