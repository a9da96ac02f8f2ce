"""Texts: running text, or rows with labels.

From plain files (also .xz), TSV, CSV and JSONL files, embedded text, or the hub.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symmerge.checkpoints.limits import (
    LARGEST_ROW,
    LARGEST_TABLE,
    LARGEST_TEXT,
    open_plain,
    read_plain,
    unpack_xz,
)
from symmerge.errors import DataError
from symmerge.evaluation.data.embedded import python_code, python_docs, python_topics
from symmerge.evaluation.data.hub import is_hub, read_hub

TABLES = (".tsv", ".csv", ".jsonl")
# The test split for evaluation; the training split for calibration.
PYTHON_TEXTS = {"python-docs": python_docs, "python-code": python_code}
PYTHON_TOPICS = {"python-topics": "test", "python-topics:train": "train"}
LABELS = ("label", "labels")
# Columns with the text of a sample: the first group whose columns all exist.
TEXTS = (
    ("text", "text2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text",),
    ("sentence",),
    ("content",),
)
COLUMNS = {*LABELS, *(name for columns in TEXTS for name in columns)}


@dataclass(frozen=True)
class TextRows:
    """One or two texts per row, and the labels of the rows, if any."""

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[Any, ...] | None


def read_text(data: str) -> str:
    """Running text: a file, the rows of a table one after the other, or embedded text."""
    name, part, split = data.partition(":")
    if name in PYTHON_TEXTS and part + split in ("", ":train"):
        return PYTHON_TEXTS[name](split or "test")
    if is_hub(data) or data in PYTHON_TOPICS or _suffix(data) in TABLES:
        return "\n".join(" ".join(texts) for texts in read_rows(data, labelled=False).texts)
    return _read_file(data)


def read_rows(data: str, *, labelled: bool = True) -> TextRows:
    """Rows of a TSV, CSV or JSONL file, of a Hugging Face data set, or embedded ones."""
    if data in PYTHON_TOPICS:
        labels, texts = zip(*python_topics(PYTHON_TOPICS[data]), strict=True)
        return TextRows(tuple((text,) for text in texts), labels if labelled else None)
    if is_hub(data):
        rows = read_hub(data)
        return _select(data, list(rows.column_names), rows, labelled)
    suffix = _suffix(data)
    if suffix not in TABLES:
        raise DataError(
            f"{data} has no rows with labels: give a TSV, CSV or JSONL file"
            " with the columns label and text, or a Hugging Face data set"
        )
    if suffix == ".jsonl":
        return _read_jsonl(data, labelled)
    return _read_separated(data, "\t" if suffix == ".tsv" else ",", labelled)


def _suffix(data: str) -> str:
    return Path(data.removesuffix(".xz")).suffix.lower()


def _read_file(data: str) -> str:
    """The whole text, without a byte order mark."""
    try:
        return _content(data).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(
            f"{data} does not exist: give self, digits, python-docs, python-code, python-topics,"
            " hf:NAME, or a file or folder that exists"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{data} is not text in UTF-8 ({error.reason} at byte {error.start}): convert it first"
        ) from error
    except (OSError, EOFError, lzma.LZMAError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{data} cannot be read ({reason}): is it complete and a text file? Give a part of it"
            " where it is too large"
        ) from error


def _content(data: str) -> bytes:
    if not data.endswith(".xz"):
        return read_plain(data, LARGEST_TEXT)
    with open_plain(data, LARGEST_TEXT) as file:
        return unpack_xz(file)


def _read_jsonl(data: str, labelled: bool) -> TextRows:
    rows, names = [], set()
    for number, line in enumerate(io.StringIO(_read_file(data), newline="\n"), 1):
        _check_size(data, number, len(line))
        try:
            if line.strip():
                row = dict(json.loads(line))
                names |= row.keys()
                rows.append({name: row[name] for name in row.keys() & COLUMNS})
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"{data}, line {number} is not a JSON object:"
                " write one per line, with the keys label and text"
            ) from error
    return _select(data, sorted(names), rows, labelled)


def _check_size(data: str, number: int, characters: int = 0) -> None:
    """Refuse a row too many, or one that is too long, before it takes memory."""
    if number > LARGEST_TABLE:
        raise DataError(f"{data} has more than {LARGEST_TABLE:,} rows: give some of them")
    if characters > LARGEST_ROW:
        raise DataError(
            f"{data}, line {number} has {characters:,} characters, {LARGEST_ROW:,} at most:"
            " shorten or remove it"
        )


def _read_separated(data: str, separator: str, labelled: bool) -> TextRows:
    # Quotes are ordinary characters in tab-separated text.
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    file = io.StringIO(_read_file(data))
    lines = []
    try:
        for line in csv.reader(file, delimiter=separator, quoting=quoting):
            _check_size(data, len(lines) + 1)
            if line:
                lines.append(line)
    except csv.Error as error:
        raise DataError(
            f"{data} is not a table ({error}): fix it, or write the rows as JSONL"
        ) from error
    names, body = _column_names(lines)
    for number, line in enumerate(body, 1 + len(lines) - len(body)):
        if len(line) != len(names):
            raise DataError(
                f"{data}, line {number} has {len(line)} columns, not {len(names)}"
                f" ({_some(names)}): fix it, or name the columns in the first line"
            )
    return _select(data, names, [dict(zip(names, line, strict=True)) for line in body], labelled)


def _some(names: Sequence[str]) -> str:
    """Names of columns for a message; a damaged table can have thousands, or long ones."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(name[:40] for name in names[:8]) + more


def _column_names(lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and data lines; a first line that has a label is data, not a header."""
    if not lines:
        return [], []
    try:
        float(lines[0][0])
    except ValueError:
        return lines[0], lines[1:]
    return ["label", "text", "text2"][: len(lines[0])], lines


def _select(data: str, names: Sequence[str], rows: Any, labelled: bool) -> TextRows:
    """The columns that hold texts and labels."""
    if not len(rows):
        raise DataError(f"{data} is empty: give a file with rows")
    texts = next((columns for columns in TEXTS if set(columns) <= set(names)), ())
    label = next((name for name in LABELS if name in names), None) if labelled else None
    missing = ["text"] * (not texts) + ["label"] * (labelled and not label)
    if missing:
        raise DataError(
            f"{data} has no column {' and no column '.join(missing)};"
            f" it has: {_some(names)}. Rename those you mean"
        )
    columns = [*([label] if label else []), *texts]
    table = [tuple(row.get(name) for name in columns) for row in rows]
    for number, cells in enumerate(table, 1):
        if not all(isinstance(cell, str | int | float) for cell in cells):
            raise DataError(
                f"{data}, row {number} lacks one of {', '.join(columns)}, or has a list there:"
                " complete or remove that row"
            )
    strings = tuple(tuple(str(cell) for cell in cells[-len(texts) :]) for cells in table)
    return TextRows(strings, tuple(cells[0] for cells in table) if label else None)
