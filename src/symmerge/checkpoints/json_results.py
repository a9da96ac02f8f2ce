"""Typed JSON: one frozen dataclass says what a file holds, for its writer and for its readers.

A field is a bool, int, float, str, another `Record`, a tuple, a mapping, `X | None`, or `object`
for anything JSON has. `Annotated[float, "Share of model B."]` adds the line that
docs/results-format.md shows. A float that is not finite is written as null and read as NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from math import isfinite, nan
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from symmerge.checkpoints.files import write_json
from symmerge.checkpoints.limits import LARGEST_JSON, LARGEST_STRING, read_plain
from symmerge.errors import SymmergeError
from symmerge.symmetry.spec import listing


class Flag(Enum):
    """How a field is stored, beside its type: `Annotated[Mapping[str, float], INLINE]`."""

    INLINE = "a mapping whose keys lie beside those of the other fields"
    OMIT = "left out of the file where it is None or an empty list"


LARGEST_FLOAT = 10**300  # sums of larger ones overflow
INLINE, OMIT = Flag.INLINE, Flag.OMIT


class Record:
    """Base of the frozen dataclasses that are stored as a JSON object."""

    def to_json(self) -> dict[str, object]:
        """Plain dicts, lists, numbers and strings."""
        return dict(_items(self))

    @classmethod
    def from_json(
        cls: type[AnyRecord], content: object, source: str = "", remedy: str = ""
    ) -> AnyRecord:
        """The inverse of `to_json`. Errors (missing or unknown keys) name source and remedy."""
        try:
            return _parse_record(cls, content, "")
        except _Malformed as error:
            message = f"{source or cls.__name__} {error}"
            raise SymmergeError(f"{message}: {remedy}" if remedy else message) from None


class ResultFile(Record):
    """A record with a schema: the whole content of one file, written by one command."""

    SCHEMA: ClassVar[str]
    WRITER: ClassVar[str]

    def write(self, file: Path) -> None:
        """Write with sorted keys, so that equal results give equal bytes."""
        write_json(file, self.to_json())

    @classmethod
    def read(cls: type[AnyFile], file: Path) -> AnyFile:
        """Read a file; errors say in one line what is wrong and how to write it again."""
        return read_result(file, cls)


AnyRecord = TypeVar("AnyRecord", bound=Record)
AnyFile = TypeVar("AnyFile", bound=ResultFile)


def read_result(file: Path, *types: type[AnyFile]) -> AnyFile:
    """Read a result file as the one of `types` that its schema names."""
    again = f"write it again with {types[0].WRITER}"
    try:
        content = json.loads(read_plain(file, LARGEST_JSON))
        json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SymmergeError(f"{file} cannot be read as JSON ({reason}): {again}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    for kind in types:
        if schema == kind.SCHEMA:
            return kind.from_json(content, str(file), again)
    known = " or ".join(kind.SCHEMA for kind in types)
    raise SymmergeError(
        f"{file} has schema {_shown(schema)}, this version reads {known}:"
        f" {again}, or update symmerge"
    )


@dataclass(frozen=True)
class FieldType:
    """One field of a record, as it is stored and documented."""

    name: str
    hint: object
    about: str
    flags: frozenset[Flag]
    required: bool


@cache
def field_types(record: type[Record]) -> tuple[FieldType, ...]:
    """The fields of a record, in order."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(
        _field_type(
            one.name,
            hints[one.name],
            required=one.default is MISSING and one.default_factory is MISSING,
        )
        for one in fields(record)  # type: ignore[arg-type]
    )


def _field_type(name: str, hint: object, *, required: bool) -> FieldType:
    bare, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    flags = frozenset(note for note in notes if isinstance(note, Flag))
    about = " ".join(note for note in notes if isinstance(note, str))
    return FieldType(name, bare, about, flags, required)


def _items(record: Record) -> Iterator[tuple[str, object]]:
    if isinstance(record, ResultFile):
        yield "schema", record.SCHEMA
    for one in field_types(type(record)):
        value = getattr(record, one.name)
        if INLINE in one.flags:
            yield from _plain_items(value)
        elif OMIT not in one.flags or value not in (None, ()):
            yield one.name, to_plain(value)


def _plain_items(value: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    return ((str(key), to_plain(item)) for key, item in value.items())


def to_plain(value: object) -> object:
    """Convert to JSON types: records to dicts, tuples to lists, infinity and NaN to null."""
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, Mapping):
        return dict(_plain_items(value))
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


class _Malformed(Exception):
    """What is wrong with the content, and where."""


def _parse_record(record: type[AnyRecord], content: object, at: str) -> AnyRecord:
    if not isinstance(content, Mapping):
        raise _Malformed(f"holds {_shown(content)} where {at or 'it'} should be an object")
    values = {str(key): value for key, value in content.items()}
    if issubclass(record, ResultFile) and values.pop("schema", None) != record.SCHEMA:
        raise _Malformed(f"has another schema than {record.SCHEMA} in {at or 'it'}")
    arguments = dict(_take_fields(record, values, at))
    if values:
        unknown = listing(f"'{_inside(at, key[:40])}'" for key in values)
        raise _Malformed(f"has {unknown}, which this version does not know")
    try:
        return record(**arguments)
    except ValueError as error:  # raised by __post_init__
        raise _Malformed(f"is not of the form it claims ({error})") from None


def _take_fields(
    record: type[Record], values: dict[str, object], at: str
) -> Iterator[tuple[str, object]]:
    """Remove every field from `values` and parse it; the inline one takes what is left."""
    for one in sorted(field_types(record), key=lambda one: INLINE in one.flags):
        if INLINE in one.flags:
            yield one.name, _parse(one.hint, values, at)
            values.clear()
        elif one.name in values:
            yield one.name, _parse(one.hint, values.pop(one.name), _inside(at, one.name))
        elif one.required:
            raise _Malformed(f"has no '{_inside(at, one.name)}'")


def _parse(hint: object, value: object, at: str) -> object:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is object:
        return value
    if origin in (Union, UnionType):  # X | None
        return None if value is None else _parse(arguments[0], value, at)
    if origin is Literal:
        return _checked(value, value in arguments, " or ".join(map(repr, arguments)), at)
    if origin is tuple:
        return _parse_tuple(arguments, value, at)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _parse_mapping(arguments[0], arguments[1], value, at)
    if isinstance(hint, type) and issubclass(hint, Record):
        return _parse_record(hint, value, at)
    return SCALARS[hint](value, at)


def _parse_tuple(hints: Sequence[object], value: object, at: str) -> tuple[object, ...]:
    _checked(value, isinstance(value, Sequence) and not isinstance(value, str), "a list", at)
    assert isinstance(value, Sequence)
    if hints[-1] is Ellipsis:
        hints = [hints[0]] * len(value)
    _checked(value, len(value) == len(hints), f"{len(hints)} values", at)
    return tuple(
        _parse(hint, item, f"{at}[{number}]")
        for number, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _parse_mapping(key: object, hint: object, value: object, at: str) -> dict[object, object]:
    _checked(value, isinstance(value, Mapping), "an object", at)
    assert isinstance(value, Mapping)
    return {
        _parse_key(key, name, at): _parse(hint, item, _inside(at, str(name)))
        for name, item in value.items()
    }


def _parse_key(hint: object, name: object, at: str) -> object:
    if hint is not int:
        return _parse_text(name, at)
    return int(str(_checked(name, str(name).lstrip("-").isdigit(), "a number", _inside(at, "key"))))


def _parse_float(value: object, at: str) -> float:
    """Read null as NaN: JSON has no infinity, so a measure that overflowed is stored as null."""
    if value is None:
        return nan
    _checked(value, isinstance(value, int | float) and not isinstance(value, bool), "a number", at)
    assert isinstance(value, int | float)
    _checked(value, abs(value) <= LARGEST_FLOAT, "a number within 1e300", at)
    return float(value)


def _parse_int(value: object, at: str) -> int:
    _checked(value, type(value) is int, "a whole number", at)
    assert isinstance(value, int)
    _checked(value, abs(value) < 1 << 63, "a whole number of 64 bits", at)
    return value


def _parse_text(value: object, at: str) -> str:
    _checked(value, isinstance(value, str), "text", at)
    assert isinstance(value, str)
    expected = f"text of at most {LARGEST_STRING:,} characters"
    _checked(value, len(value) <= LARGEST_STRING, expected, at)
    return value


SCALARS: Mapping[object, Callable[[object, str], object]] = {
    float: _parse_float,
    int: lambda value, at: _parse_int(value, at),
    str: lambda value, at: _parse_text(value, at),
    bool: lambda value, at: _checked(value, isinstance(value, bool), "true or false", at),
}


def _checked(value: object, condition: bool, expected: str, at: str) -> object:
    if not condition:
        raise _Malformed(f"holds {_shown(value)} where '{at}' should be {expected}")
    return value


def _inside(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > LARGEST_FLOAT:
        return "a huge number"  # Python refuses to print thousands of digits
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
