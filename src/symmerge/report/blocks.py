"""What a section of the page is made of."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from symmerge.report import tables


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption."""

    svg: Markup
    caption: str

    @staticmethod
    def of(svg: str, caption: str) -> Figure:
        """From SVG text of `figures` and `maps`, in which matplotlib escaped what users wrote."""
        return Figure(Markup(svg), caption)


@dataclass(frozen=True)
class Block:
    """A heading with figures one below the other, `beside` each other, or `small`.

    The `folded` figures and `long` tables open on demand.
    """

    title: str
    text: str = ""
    figures: tuple[Figure, ...] = ()
    beside: tuple[Figure, ...] = ()
    small: tuple[Figure, ...] = ()
    folded: tuple[Figure, ...] = ()
    tables: tuple[tables.PageTable, ...] = ()
    long: tuple[tables.PageTable, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
