"""Building blocks of a section of the page: figures, and headings with figures and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

from symmerge.report import tables
from symmerge.report.chart import NARROW, WIDE, Frame


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption; `narrow` replaces it on a phone."""

    svg: Markup
    caption: str
    narrow: Markup | None = None

    @staticmethod
    def of(svg: str, caption: str) -> Figure:
        """From SVG text of `figures` and `maps`; matplotlib has escaped user text in it."""
        return Figure(Markup(svg), caption)

    @staticmethod
    def of_chart(name: str, draw: Callable[[str, Frame], str], caption: str) -> Figure:
        """A chart in both widths; `draw` takes the name for its ids and the frame."""
        wide, narrow = draw(name, WIDE), draw(f"{name}-narrow", NARROW)
        return Figure(Markup(wide), caption, Markup(narrow))


@dataclass(frozen=True)
class Block:
    """A heading with figures: stacked, side by side (`beside`), or `small`.

    Blocks are folded, unless `shown`. The `folded` figures and `long` tables are collapsed again.
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
    definitions: tuple[tuple[str, str], ...] = ()
    shown: bool = False

    @property
    def has_picture(self) -> bool:
        """Whether it begins with a picture."""
        return bool(self.figures or self.beside or self.small)
