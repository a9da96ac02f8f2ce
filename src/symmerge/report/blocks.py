"""Building blocks of a section of the page: figures, and headings with figures and tables."""

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
        """From SVG text of `figures` and `maps`; matplotlib has escaped user text in it."""
        return Figure(Markup(svg), caption)


@dataclass(frozen=True)
class Block:
    """A heading with figures: stacked, side by side (`beside`), or `small`.

    The `folded` figures and `long` tables are collapsed at first.
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
