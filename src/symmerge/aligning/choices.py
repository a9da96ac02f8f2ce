"""Options with a few allowed values: list them, and refuse others in one line."""

from __future__ import annotations

from collections.abc import Collection

from symmerge.errors import MismatchError


def either(names: Collection[str]) -> str:
    """Join alternatives with commas and a final "or".

    >>> either(["a", "b", "c"])
    'a, b or c'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def check_choice(option: str, value: str | None, known: Collection[str]) -> None:
    """Refuse a value that is not one of `known`; None stands for the default."""
    if value is not None and value not in known:
        raise MismatchError(f"{option} {value}: choose {either(known)}")
